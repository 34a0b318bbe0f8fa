#!/usr/bin/env python3
"""Compares adapters (LoRA) that we write with what peft makes of them.

By hand, not by ctest: it needs peft, transformers and torch (PyPI). For each model of adapt.lua, transformers reads the base and
peft the adapters; the logits must be ours. Then transformers reads the folder into which the adapters were merged. Neither may
report a weight that is missing or unexpected. The other direction, adapters that peft wrote, is tests/golden/peft.

    MOONSHARD_BIN=build/release/bin/moonshard python3 tests/peers/compare_peft.py
"""
import os
import subprocess
import sys
import tempfile
import warnings

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-5        # f32 sums in another order, of logits up to 3; adapters change logits by more than 0.1

here = os.path.dirname(os.path.abspath(__file__))
warnings.simplefilter("error")          # peft warns of adapters with keys that it misses
warnings.simplefilter("ignore", FutureWarning)
warnings.filterwarnings("ignore", "fan_in_fan_out is set to True")      # a head beside Conv1D layers: peft corrects it by itself


def read(folder):
    model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32, attn_implementation="eager")
    assert not any(told.values()), (folder, told)
    return model.eval()


def logits(model, tokens):
    with torch.no_grad():
        return model(tokens).logits


with tempfile.TemporaryDirectory() as folder:
    program = os.environ.get("MOONSHARD_BIN", "moonshard")
    names = subprocess.run([program, "run", os.path.join(here, "adapt.lua"), "folder=" + folder], check=True, capture_output=True,
                           text=True).stdout.split()
    wrong = 0
    for name in names:
        place = os.path.join(folder, name)
        results = load_file(os.path.join(place, "results.safetensors"))
        base = read(os.path.join(place, "base"))
        before = logits(base, results["tokens"])
        adapted = PeftModel.from_pretrained(base, os.path.join(place, "adapter")).eval()
        own = load_file(os.path.join(place, "adapter", "adapter_model.safetensors"))
        count = sum("lora_" in key for key, _ in adapted.named_parameters())
        assert count == len(own), (name, count, len(own))
        after = logits(adapted, results["tokens"])
        merged = logits(read(os.path.join(place, "merged")), results["tokens"])
        changed, differs, folded = ((x - y).abs().max().item() for x, y in
                                    ((before, after), (after, results["logits"]), (merged, results["logits"])))
        good = changed > 0.1 and differs <= TOLERANCE and folded <= TOLERANCE
        wrong += not good
        print(f"{'ok   ' if good else 'WRONG'} {name}: adapters change {changed:.2g}; peft differs by {differs:.2g}, merged {folded:.2g}")
sys.exit(1 if wrong or not names else 0)
