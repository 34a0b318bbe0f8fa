#!/usr/bin/env python3
"""Makes the files of this folder: small vocabularies, trained on this project's documents by the peers' libraries,
and the ids that these libraries give for some texts.

    pip install tokenizers tiktoken sentencepiece protobuf
    tests/golden/tokenizers/make.py

It overwrites what is there.
"""
import base64, io, json, os, tempfile

import sentencepiece, tiktoken, tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = f"{HERE}/../../.."
DOCUMENTS = [f"{ROOT}/{name}" for name in ("README.md", "engine/README.md", "tests/README.md")]
SPECIAL = ["<|endoftext|>", "<|turn|>"]
CL100K = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
          r"|\s+(?!\S)|\s")
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
TEXTS = [
    "", " ", "\n", "a", "The engine runs tasks on streams.", "  two  spaces ", "it's DON'T we'LL", "x = 3.14159 + 2718281828",
    "caf\u00e9 cafe\u0301 \ufb01ne \u2460\u00bd", "\u60a8\u597d\uff0c\u4e16\u754c", "\u0645\u0631\u062d\u0628\u0627",
    "\U0001f642\U0001f468\u200d\U0001f469\u200d\U0001f467", "a\u3000b\u00a0c\u180ed", "tab\tline\r\nnext\n\n\n  end  ",
    "<s>[INST] hello</s>", "a<|endoftext|>b <|turn|> <|endoftext|><|endoftext|>", "<mask> x<mask>y <word>s <word> <word>",
    "\u2581\u2581x\u2581", "\u0130stanbul", "return ring[i] == NULL ? -1 : (int)i;", "0123456789" * 3, "communicat" * 9,
]


def write(name, data):
    os.makedirs(os.path.dirname(f"{HERE}/{name}"), exist_ok=True)
    with open(f"{HERE}/{name}", "wb") as file:
        file.write(data if isinstance(data, bytes) else data.encode())


def ids_of(tokenizer):
    """What tokenizers gives: with names of special tokens as text and parsed; and all ends."""
    tokenizer.encode_special_tokens = True
    text = [tokenizer.encode(t, add_special_tokens=False).ids for t in TEXTS]
    tokenizer.encode_special_tokens = False
    return dict(text=text, parse=[tokenizer.encode(t, add_special_tokens=False).ids for t in TEXTS],
                ends=[tokenizer.encode(t, add_special_tokens=True).ids for t in TEXTS])


def small(tokenizer):
    """The tokenizer's file without indentation."""
    return json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":")) + "\n"


def byte_level():
    """As GPT-2 and Llama 3: cuts by a pattern, digits, added tokens of all kinds, a template."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(LLAMA3), "isolated"), pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train(DOCUMENTS, trainer)
    tokenizer.add_tokens([tokenizers.AddedToken("<mask>", lstrip=True, normalized=False),
                          tokenizers.AddedToken("<word>", single_word=True, rstrip=True)])
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<|turn|> $A <|endoftext|>", special_tokens=[
            (name, tokenizer.token_to_id(name)) for name in SPECIAL])])
    write("byte_level/tokenizer.json", small(tokenizer))
    write("byte_level/tokenizer_config.json", json.dumps({"bos_token": {"content": "<|turn|>"},
                                                          "eos_token": "<|endoftext|>"}) + "\n")
    return ids_of(tokenizer)


def llama2():
    """As Llama 2: SentencePiece's kind in a tokenizer.json, tokens of bytes where there is no character."""
    model = models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    names = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=names + [f"<0x{i:02X}>" for i in range(256)],
                                  show_progress=False)
    tokenizer.train(DOCUMENTS, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    content["pre_tokenizer"] = None
    content["normalizer"] = {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]}
    content["decoder"] = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"},
        {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    write("llama2/tokenizer.json", small(tokenizer))
    return ids_of(tokenizer)


def gpt2():
    """As GPT-2's own files; tiktoken reads them, too."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train(DOCUMENTS, vocab_size=500, special_tokens=SPECIAL[:1], show_progress=False)
    content = json.loads(tokenizer.to_str())["model"]
    write("gpt2/vocab.json", json.dumps(content["vocab"], ensure_ascii=False) + "\n")
    write("gpt2/merges.txt", "#version: 0.2\n" + "".join(f"{' '.join(m) if isinstance(m, list) else m}\n"
                                                         for m in content["merges"]))
    return dict(text=ids_of(tokenizer._tokenizer)["text"])


def ranks():
    """tiktoken's ranks, with cl100k's cuts. The ranks are those of a byte-level vocabulary in its order."""
    content = json.loads(open(f"{HERE}/gpt2/vocab.json").read())
    table = {c: b for b, c in zip(*byte_alphabet())}
    tokens = sorted((i, bytes(table[c] for c in name)) for name, i in content.items() if name != SPECIAL[0])
    made = {token: rank for rank, (_, token) in enumerate(tokens)}
    write("ranks.tiktoken", "".join(f"{base64.b64encode(t).decode()} {r}\n" for t, r in made.items()))
    special = {name: len(made) + i for i, name in enumerate(SPECIAL)}
    encoding = tiktoken.Encoding("own", pat_str=CL100K, mergeable_ranks=made, special_tokens=special)
    return dict(text=[encoding.encode_ordinary(t) for t in TEXTS],
                parse=[encoding.encode(t, allowed_special="all") for t in TEXTS])


def byte_alphabet():
    """Bytes, and the characters that byte-level vocabularies have for them."""
    own = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
    rest = [b for b in range(256) if b not in own]
    return own + rest, [chr(b) for b in own] + [chr(0x100 + i) for i in range(len(rest))]


def sentence(name, **options):
    """SentencePiece's own file of type BPE."""
    model = io.BytesIO()
    lines = [line.strip() for path in DOCUMENTS for line in open(path) if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, model_type="bpe", num_threads=1, minloglevel=2,
        max_sentence_length=100000, **options)
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model.getvalue())
    proto.trainer_spec.ClearField("input")
    proto.normalizer_spec.ClearField("normalization_rule_tsv")
    write(name, proto.SerializeToString())
    processor = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    return dict(text=[processor.encode(t) for t in TEXTS], decoded=[processor.decode(processor.encode(t)) for t in TEXTS])


def mapped():
    """With a map of characters, of our own, and SentencePiece's rules for spaces; without tokens of bytes."""
    rules = {"a0": "20", "3000": "20", "9": "20", "a": "20", "d": "20", "2460": "31", "fb01": "66 69", "65 301": "e9",
             "200d": "", "130": "49", "4e 55 4c 4c": "30"}
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as file:
        file.writelines(f"{a.upper()}\t{b.upper()}\n" for a, b in rules.items())
        file.flush()
        return sentence("mapped.model", vocab_size=350, normalization_rule_tsv=file.name, character_coverage=0.98)


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
BEHAVIORS = ("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
COMPONENT_TEXTS = [
    "  It's 12 345,  ok!? (no)\t\n ", " one  two", "caf\u00e9 e\u0301 \ufb01 \u0130\u00c9 x\u00b2", "...a..b.", "",
    "\u4e16\u754c, \u00a0\U0001f642 7\u0663\u00bd", "<mask> a <word> <|turn|> b", "\u2581 a\u2581",
    "\uc1c4\u11a7\u1100\u1161\u11a8 a\u0323\u0307\u11a7\u0301",
]


def split(pattern, behavior, invert=False):
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}


def variants():
    """base, and the members of its tokenizer.json that are replaced; False: removed, since Lua has no null."""
    def cuts(*items):
        return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": list(items)}}
    for behavior in BEHAVIORS:
        for invert in (False, True):
            yield "byte_level", cuts(split({"Regex": r"\s|[.]"}, behavior, invert), BYTES)
    yield "byte_level", {"pre_tokenizer": {**BYTES, "add_prefix_space": True, "use_regex": True}}
    yield "byte_level", cuts({"type": "Punctuation", "behavior": "Contiguous"}, {**BYTES, "use_regex": True},
                             {"type": "Digits", "individual_digits": False}, split({"Regex": "[0-9][0-9]"}, "Isolated"))
    yield "byte_level", cuts({"type": "Punctuation", "behavior": "Isolated"}, {"type": "Whitespace"}, BYTES)
    yield "byte_level", cuts({"type": "WhitespaceSplit"}, {**BYTES, "add_prefix_space": True})
    yield "byte_level", cuts({"type": "CharDelimiterSplit", "delimiter": "o"}, BYTES)
    yield "byte_level", cuts({"type": "Digits", "individual_digits": False}, split({"String": "  "}, "MergedWithNext"), BYTES)
    for normalizer in (
            {"type": "NFD"}, {"type": "NFKC"}, {"type": "NFKD"}, {"type": "Lowercase"}, {"type": "Prepend", "prepend": "x "},
            {"type": "Strip", "strip_left": True, "strip_right": True},
            {"type": "Strip", "strip_left": False, "strip_right": True},
            {"type": "Replace", "pattern": {"Regex": r"\s+|\p{P}"}, "content": "_"},
            {"type": "Replace", "pattern": {"String": "o"}, "content": ""},
            {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}, {"type": "Lowercase"}]}, False):
        yield "byte_level", {"normalizer": normalizer}
    for scheme in ("always", "first", "never"):
        for cut in (False, True):
            yield "llama2", {"normalizer": False, "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581",
                                                                   "prepend_scheme": scheme, "split": cut}}
    for fuse in (False, True):
        yield "llama2", {"model": {"byte_fallback": False, "fuse_unk": fuse}}
    yield "llama2", {"model": {"byte_fallback": False, "ignore_merges": True}}


def components():
    """Each kind of component, in a file that is otherwise one of the above."""
    out = []
    for base, parts in variants():
        content = json.loads(open(f"{HERE}/{base}/tokenizer.json").read())
        for key, value in parts.items():
            content[key] = {**content[key], **value} if key == "model" else value or None
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
        tokenizer.encode_special_tokens = True
        ids = [tokenizer.encode(t, add_special_tokens=False).ids for t in COMPONENT_TEXTS]
        out.append(dict(base=base, parts=parts, ids=ids))
    return dict(texts=COMPONENT_TEXTS, files=out)


def main():
    golden = {
        "byte_level": byte_level(), "llama2": llama2(), "gpt2": gpt2(), "ranks": ranks(),
        "sentencepiece": sentence("sentencepiece/tokenizer.model", vocab_size=700, byte_fallback=True,
                                  normalization_rule_name="identity", remove_extra_whitespaces=False,
                                  user_defined_symbols=["<word>", "[INST]"], character_coverage=0.99),
        "mapped": mapped(),
    }
    for name, content in ("golden.json", {"texts": TEXTS, "ids": golden}), ("components.json", components()):
        write(name, json.dumps(content, separators=(",", ":"), ensure_ascii=True) + "\n")


main()
