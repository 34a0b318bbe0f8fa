# Writes small random models of the families that nn.pretrained reads, and what Hugging Face
# transformers (release 5) computes with them: python3 make.py. README.md lists the files.
import copy, json, os
import torch
from safetensors.torch import save_file
from transformers import (LlamaConfig, MistralConfig, Olmo2Config, Qwen2Config, Qwen3Config, SmolLM3Config,
                          AutoModelForCausalLM)

here = os.path.dirname(os.path.abspath(__file__))
SIZES = dict(vocab_size=48, hidden_size=32, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=64, eos_token_id=None, bos_token_id=None, pad_token_id=None)


def rope(theta):
    return dict(rope_parameters={"rope_type": "default", "rope_theta": theta})


# Positions, epsilon and tying are those of Qwen 2.5 0.5B, Qwen 3 0.6B, Mistral 7B, SmolLM 2 135M, SmolLM 3 3B and
# OLMo 2 1B.
MODELS = {
    "qwen2": Qwen2Config(**SIZES, **rope(1000000.0), num_hidden_layers=3, tie_word_embeddings=True,
                         max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, **rope(1000000.0), num_hidden_layers=2, head_dim=16, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, **rope(10000.0), num_hidden_layers=2, head_dim=12, sliding_window=6,
                             rms_norm_eps=1e-5),
    "smollm2": LlamaConfig(**SIZES, **rope(100000.0), num_hidden_layers=2, tie_word_embeddings=True, rms_norm_eps=1e-5),
    "smollm3": SmolLM3Config(**SIZES, **rope(5000000.0), num_hidden_layers=4),
    "olmo2": Olmo2Config(**SIZES, **rope(500000.0), num_hidden_layers=2, rms_norm_eps=1e-6),
    "llama_bias": LlamaConfig(**SIZES, **rope(500.0), num_hidden_layers=1, attention_bias=True, mlp_bias=True,
                              head_dim=10),
}
# The weights of a model above, with other entries in config.json.
OTHERS = {
    "qwen2_window": ("qwen2", dict(use_sliding_window=True, sliding_window=7, layer_types=None)),
    "qwen3_window": ("qwen3", dict(use_sliding_window=True, sliding_window=5,
                                   layer_types=["sliding_attention", "full_attention"])),
    "mistral_whole": ("mistral", dict(sliding_window=None)),
    "smollm3_window": ("smollm3", dict(use_sliding_window=True, sliding_window=5, layer_types=None,
                                       no_rope_layers=[1, 0, 1, 0])),
}


def perturb(model):
    """Weights that are large enough that attention matters, and exact in bf16."""
    torch.manual_seed(11)
    with torch.no_grad():
        for name, p in model.named_parameters():
            spread = 0.15 if p.dim() > 1 else 0.2
            one = 1 if p.dim() == 1 and name.endswith("norm.weight") else 0
            p.copy_((torch.randn_like(p) * spread + one).bfloat16().float())
    return model.eval()


def made(config):
    return perturb(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


results = {"tokens": torch.arange(24).mul(11).add(5).remainder(48).view(1, 24)}


def compute(name, model):
    logits = model(results["tokens"]).logits
    results["logits." + name] = logits.detach()
    targets = torch.arange(24).mul(7).add(1).remainder(48)
    torch.nn.functional.cross_entropy(logits.view(24, 48), targets).backward()
    for layer in (0, model.config.num_hidden_layers - 1):
        weight = f"model.layers.{layer}.self_attn.k_proj.weight"
        results[f"gradient.{name}.{weight}"] = dict(model.named_parameters())[weight].grad.clone()
    ids = results["tokens"][:, :10]
    with torch.no_grad():
        for _ in range(20): ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), 1)
    results["continued." + name] = ids[0, 10:]


def config_text(folder):
    return json.load(open(os.path.join(folder, "config.json")))


for name, config in MODELS.items():
    model = made(copy.deepcopy(config))
    compute(name, model)
    folder = os.path.join(here, name)
    model.to(torch.bfloat16).save_pretrained(folder)
    if os.path.exists(os.path.join(folder, "generation_config.json")):
        os.remove(os.path.join(folder, "generation_config.json"))

for name, (base, changes) in OTHERS.items():
    entries = {**config_text(os.path.join(here, base)), **changes}
    if entries.get("layer_types", "") is None: del entries["layer_types"]
    os.makedirs(os.path.join(here, name), exist_ok=True)
    with open(os.path.join(here, name, "config.json"), "w") as out: json.dump(entries, out, indent=2)
    kept = {k: v for k, v in entries.items() if k not in ("model_type", "architectures", "transformers_version", "dtype")}
    compute(name, made(type(MODELS[base])(**kept)))

save_file({name: t.contiguous().clone() for name, t in results.items()}, os.path.join(here, "results.safetensors"))
