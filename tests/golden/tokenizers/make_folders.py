#!/usr/bin/env python3
"""Makes folders.json: folders with files that add tokens, and the ids and sizes that transformers gives.

    pip install transformers sentencepiece protobuf
    HF_HUB_OFFLINE=1 tests/golden/tokenizers/make_folders.py

It overwrites what is there. Made by transformers 5.24 and tokenizers 0.23.
"""
import json, os, shutil, tempfile

from transformers import AutoTokenizer

HERE = os.path.dirname(os.path.abspath(__file__))
BASES = {"gpt2": ["vocab.json", "merges.txt"], "sentencepiece": ["tokenizer.model"], "byte_level": ["tokenizer.json"],
         "llama2": ["tokenizer.json"]}
SIZES = {"gpt2": 500, "sentencepiece": 700, "byte_level": 602, "llama2": 600}
TEXTS = [
    "", "a<|im_start|>b", "x <extra> y<extra>", "<extra>b", "<extra> b  <extra>", "the word2 moon, moonlight honeymoon moon",
    "one  <left> b <right>  c", "<|endoftext|>the</s>x<s> hello", "<word> a<word>b", " \ufb01ne<\ufb01ne>", "FINE <fine><FINE>",
    "<|im_start|><|im_start|>sea <extra><extra>", "<unk>the <pad> end", "\u2581<extra>\u2581the", "a<word> b <word> </s>c </s> d <left>e",
]


def token(content, **flags):
    return dict(dict(content=content, lstrip=False, rstrip=False, normalized=False, single_word=False, special=True), **flags)


def of_all_kinds(first):
    """added_tokens_decoder with all flags, from an id on."""
    tokens = [token("<|im_start|>"), token("<left>", lstrip=True, special=False), token("<right>", rstrip=True, normalized=True, special=False),
              token("moon", single_word=True, normalized=True, special=False), token("<extra>", lstrip=True, rstrip=True)]
    return {str(first + i): t for i, t in enumerate(tokens)}


def names(size):
    return {"<extra>": size, "<|im_start|>": size + 1}


def cases():
    """base, files, classes: transformers needs one where no other file says what to read."""
    gpt2 = {"tokenizer_class": "GPT2Tokenizer"}
    fast = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for base, config in (("gpt2", gpt2), ("byte_level", fast), ("llama2", fast), ("sentencepiece", fast)):
        size = SIZES[base]
        if base == "sentencepiece":
            config = dict(config, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
        yield base, {"tokenizer_config.json": config, "added_tokens.json": names(size)}
        yield base, {"tokenizer_config.json": dict(config, eos_token="<|im_start|>"), "added_tokens.json": names(size)}
        yield base, {"tokenizer_config.json": config, "added_tokens.json": names(size),
                     "special_tokens_map.json": {"eos_token": {"content": "<|im_start|>", "lstrip": False},
                                                 "additional_special_tokens": ["<extra>"]}}
        # The decoder goes first, and the other file is not read.
        yield base, {"tokenizer_config.json": dict(config, eos_token="<|im_start|>", added_tokens_decoder=of_all_kinds(size)),
                     "added_tokens.json": {"<other>": size + 9}}
        yield base, {"tokenizer_config.json": dict(config, added_tokens_decoder={}), "added_tokens.json": names(size)}
        # Of a token's flags some may be missing.
        yield base, {"tokenizer_config.json": dict(config, eos_token="<extra>", added_tokens_decoder={
            str(size + 1): {"content": "<|im_start|>"}, str(size): {"content": "<extra>", "special": True}})}
    # What tokenizer.json says is changed by the decoder, but a special token stays special.
    yield "byte_level", {"tokenizer_config.json": dict(fast, added_tokens_decoder={
        "0": token("<|endoftext|>", special=False, normalized=True, lstrip=True), "600": token("<mask>", normalized=True, special=False),
        "601": token("<word>", normalized=True, special=False), "602": token("<\ufb01ne>", normalized=True)})}
    yield "byte_level", {"tokenizer_config.json": dict(fast, added_tokens_decoder={"601": token("<word>", rstrip=True)})}
    # Tokens of the vocabulary that are special by name.
    yield "gpt2", {"tokenizer_config.json": dict(gpt2, eos_token="or", pad_token=dict(token("in", lstrip=True), __type="AddedToken"))}
    yield "llama2", {"tokenizer_config.json": dict(fast, eos_token="on", mask_token="in")}
    # A special token that becomes another one, and one that is special by name, without "normalized".
    yield "llama2", {"tokenizer_config.json": dict(fast, eos_token="<extra>", additional_special_tokens=["<left>"], added_tokens_decoder={
        "0": token("<unk>", special=False, normalized=True), "2": token("</s>", normalized=True, single_word=True),
        "600": {"content": "<extra>", "rstrip": True}, "601": {"content": "<left>"}})}
    # SentencePiece's user-defined pieces by name, and with other rules.
    ends = dict(fast, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    yield "sentencepiece", {"tokenizer_config.json": dict(ends, pad_token="<word>")}
    yield "sentencepiece", {"tokenizer_config.json": dict(ends, added_tokens_decoder={
        "3": token("<word>", single_word=True, rstrip=True, special=False)})}
    # Where SentencePiece's space stands.
    size = SIZES["sentencepiece"]
    for legacy in (True, False):
        yield "sentencepiece", {"tokenizer_config.json": dict(fast, unk_token="<unk>", legacy=legacy), "added_tokens.json": names(size)}
    yield "sentencepiece", {"tokenizer_config.json": dict(fast, bos_token="<s>", eos_token="</s>", unk_token="<unk>", legacy=False,
        added_tokens_decoder=dict({str(i): token(t) for i, t in enumerate(["<unk>", "<s>", "</s>"])}, **of_all_kinds(size)))}


def main():
    out = []
    for base, files in cases():
        with tempfile.TemporaryDirectory() as folder:
            for name in BASES[base]:
                shutil.copy(f"{HERE}/{base}/{name}", folder)
            for name, content in files.items():
                with open(f"{folder}/{name}", "w") as file:
                    json.dump(content, file)
            peer = AutoTokenizer.from_pretrained(folder)
        ids = [peer.encode(t, add_special_tokens=False) for t in TEXTS]
        # The name of a normalized token is not the one that transformers leaves out of a text there.
        kept = base == "llama2" and any(t.normalized and i < 3 for i, t in peer.added_tokens_decoder.items())
        special = None if kept else [
            i for i in range(len(peer)) if peer.decode([i], skip_special_tokens=True) == "" != peer.decode([i])]
        out.append(dict(base=base, files=files, ids=ids, size=len(peer), eos=peer.eos_token_id, special=special,
                        shown=[peer.decode(i) for i in ids]))
    with open(f"{HERE}/folders.json", "w") as file:
        json.dump(dict(texts=TEXTS, folders=out), file, separators=(",", ":"))
        file.write("\n")


main()
