# Makes the files of this folder: adapters (LoRA) that peft writes for the models of ../peer, and what the adapted models
# compute. Usage: python3 make.py, with peft, transformers and torch. README.md says what the files are.
import os

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

here = os.path.dirname(os.path.abspath(__file__))
peer = os.path.join(here, "..", "peer")
KINDS = {
    "gpt2": dict(r=4, lora_alpha=6, lora_dropout=0.1, fan_in_fan_out=True),
    "llama_sharded": dict(r=2, lora_alpha=5),
    # Not the default's modules, and not all of a name.
    "gpt2_some": dict(r=3, lora_alpha=3, target_modules=["attn.c_proj", "h.1.mlp.c_fc"], fan_in_fan_out=True),
}
results = {"tokens": torch.arange(32).mul(11).add(5).remainder(48).view(1, 32)}
targets = torch.arange(32).mul(7).add(1).remainder(48).view(-1)

for name, options in KINDS.items():
    torch.manual_seed(11)
    base = os.path.join(peer, name.removesuffix("_some"))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options)).eval()
    # B is zero when training begins; adapters that change nothing would test nothing.
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "lora_B" in key: p.copy_(torch.randn_like(p) * 0.3)
    logits = model(results["tokens"]).logits
    torch.nn.functional.cross_entropy(logits.view(-1, 48), targets).backward()
    results["logits." + name] = logits.detach()
    for key, p in model.named_parameters():
        if p.requires_grad: results[f"gradient.{name}.{key.replace('.default', '')}"] = p.grad
    # The path on the machine that made the files says nothing elsewhere.
    model.peft_config["default"].base_model_name_or_path = "../peer/" + os.path.basename(base)
    model.save_pretrained(os.path.join(here, name))
    os.remove(os.path.join(here, name, "README.md"))

save_file({name: t.contiguous() for name, t in results.items()}, os.path.join(here, "results.safetensors"))
