"""For `moonshard bench tokenize`: the library that a tokenizer's file is written for, on one thread.

    python3 tests/bench/peers/tokenize_peer.py TOKENIZER TEXT PATTERN ROUNDS

Prints its name, how many ids the text has, and the medians of encoding and decoding in milliseconds.
"""
import os, statistics, sys, time

os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


def of_tiktoken(path, pattern):
    import tiktoken
    import tiktoken_ext.openai_public as public
    from tiktoken.load import load_tiktoken_bpe
    # Its definitions load their ranks from the network; only their patterns are wanted.
    public.load_tiktoken_bpe = lambda *arguments, **names: {}
    if pattern in ("cl100k", "o200k"):
        pattern = getattr(public, f"{pattern}_base")()["pat_str"]
    elif pattern == "gpt2":
        pattern = public.r50k_pat_str
    elif pattern == "llama3":
        pattern = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                   r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    encoding = tiktoken.Encoding("peer", pat_str=pattern, mergeable_ranks=load_tiktoken_bpe(path), special_tokens={})
    return "tiktoken", encoding.encode_ordinary, encoding.decode


def of_gpt2(path):
    import tiktoken
    import tiktoken_ext.openai_public as public
    folder, name = os.path.split(path)
    merges = os.path.join(folder, {"vocab.json": "merges.txt", "encoder.json": "vocab.bpe"}[name])
    ranks = public.data_gym_to_mergeable_bpe_ranks(vocab_bpe_file=merges, encoder_json_file=path)
    encoding = tiktoken.Encoding("peer", pat_str=public.r50k_pat_str, mergeable_ranks=ranks, special_tokens={})
    return "tiktoken", encoding.encode_ordinary, encoding.decode


def of_tokenizers(path):
    import tokenizers
    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.encode_special_tokens = True
    return ("tokenizers", lambda text: tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.decode)


def of_sentencepiece(path):
    import sentencepiece
    processor = sentencepiece.SentencePieceProcessor(model_file=path)
    return "sentencepiece", processor.encode, processor.decode


def peer_of(path, pattern):
    if os.path.isdir(path):
        names = ("tokenizer.json", "tokenizer.model", "vocab.json", "encoder.json")
        path = next(p for p in (os.path.join(path, name) for name in names) if os.path.exists(p))
    start = open(path, "rb").read(4096)
    if os.path.basename(path) in ("vocab.json", "encoder.json"):
        return of_gpt2(path)
    if start.lstrip()[:1] == b"{":
        return of_tokenizers(path)
    return of_sentencepiece(path) if start[:1] == b"\n" else of_tiktoken(path, pattern)


def median_ms(rounds, run):
    times = []
    run()
    for _ in range(rounds):
        before = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - before))
    return statistics.median(times)


path, text_path, pattern, rounds = sys.argv[1:5]
text = open(text_path, "rb").read().decode("utf-8", errors="replace")
name, encode, decode = peer_of(path, pattern)
ids = encode(text)
print(name, len(ids), median_ms(int(rounds), lambda: encode(text)), median_ms(int(rounds), lambda: decode(ids)))
