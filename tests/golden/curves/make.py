# Makes the files of this folder: loss curves of three small models in PyTorch, in f32, and in bf16 and f16 under autocast.
# Usage: python3 make.py, with torch and safetensors (README.md).
import contextlib
import json
import os

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

here = os.path.dirname(os.path.abspath(__file__))
STEPS, SEEDS = 200, [1, 2, 3, 4, 5]
MODELS = [
    {"model": "gpt2", "batch": 4, "init": 5, "lr": 2e-3,
     "config": {"vocab": 96, "context": 32, "layers": 2, "heads": 4, "width": 64}},
    {"model": "llama", "batch": 4, "init": 5, "lr": 2e-3,
     "config": {"vocab": 96, "context": 32, "layers": 2, "heads": 4, "kv_heads": 2, "width": 64, "hidden": 160}},
    {"model": "digits", "batch": 64, "init": 2, "lr": 1e-3,
     "config": {"classes": 10, "side": 8, "channels": 8, "hidden": 32}},
]
HYPERPARAMETERS = {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


# --------------------------------------------------------------------------------------------- numbers


def mix(n):
    """The last part of splitmix64: each bit of the result depends on all bits of n."""
    n = (n ^ (n >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    n = (n ^ (n >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return n ^ (n >> np.uint64(31))


def draw(key, count):
    """Numbers 0 .. count - 1 of a stream: 24 bits each. All arithmetic is modulo 2^64."""
    first = mix(np.array([key], dtype=np.uint64))
    return (mix(first + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)).astype(np.int64)


def initial(case, seed, names):
    """Weights by their names: names of all, with shapes. Matrices are uniform within 2^-init, exact in f32."""
    made = {}
    for number, (name, shape) in enumerate(sorted(names.items())):
        if len(shape) == 1:
            made[name] = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
            continue
        key = seed * 1000 + number
        odd = 2 * (draw(key, int(np.prod(shape))) >> 8) - 65535
        made[name] = torch.tensor(odd * 2.0 ** (-16 - case["init"]), dtype=torch.float32).view(shape)
    return made


def texts(case, seed):
    """[steps, batch, context + 1] tokens."""
    vocab, length = case["config"]["vocab"], case["config"]["context"] + 1
    drawn = draw(seed * 1000 + 999, STEPS * case["batch"] * length).reshape(-1, length)
    tokens = drawn // 16 % vocab
    for t in range(1, length):
        kind, before = drawn[:, t] % 16, tokens[:, t - 1].copy()
        tokens[:, t] = np.where(kind < 9, (5 * before + 7) % vocab,
                                np.where((kind < 13) & (t >= 8), tokens[:, t - 8], tokens[:, t]))
    return torch.tensor(tokens.reshape(STEPS, case["batch"], length))


def images(case, seed):
    """[steps, batch, side * side + 1]: pixels in units of 1/32, and the class."""
    classes, pixels = case["config"]["classes"], case["config"]["side"] ** 2
    shapes = (draw(seed * 1000 + 998, classes * pixels) % 2).reshape(classes, pixels)
    drawn = draw(seed * 1000 + 999, STEPS * case["batch"] * (pixels + 1)).reshape(-1, pixels + 1)
    labels = drawn[:, pixels] % classes
    pictures = 32 * shapes[labels] + drawn[:, :pixels] % 64 - 32
    return torch.tensor(np.concatenate([pictures, labels[:, None]], 1).reshape(STEPS, case["batch"], pixels + 1))


# ---------------------------------------------------------------------------------------------- models


class GPT2(nn.Module):
    def __init__(self, case):
        super().__init__()
        c = self.c = case["config"]
        w = c["width"]
        self.wte, self.wpe = nn.Embedding(c["vocab"], w), nn.Embedding(c["context"], w)
        self.h = nn.ModuleList()
        for _ in range(c["layers"]):
            block = nn.Module()
            block.ln_1, block.ln_2, block.attn, block.mlp = nn.LayerNorm(w), nn.LayerNorm(w), nn.Module(), nn.Module()
            block.attn.c_attn, block.attn.c_proj = Conv1D(w, 3 * w), Conv1D(w, w)
            block.mlp.c_fc, block.mlp.c_proj = Conv1D(w, 4 * w), Conv1D(4 * w, w)
            self.h.append(block)
        self.ln_f = nn.LayerNorm(w)

    def forward(self, tokens):
        rows, length = tokens.shape
        x = self.wte(tokens) + self.wpe(torch.arange(length, device=tokens.device))
        for block in self.h:
            q, k, v = (t.view(rows, length, self.c["heads"], -1).transpose(1, 2)
                       for t in block.attn.c_attn(block.ln_1(x)).split(self.c["width"], 2))
            joined = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block.attn.c_proj(joined.transpose(1, 2).reshape(rows, length, -1))
            x = x + block.mlp.c_proj(F.gelu(block.mlp.c_fc(block.ln_2(x)), approximate="tanh"))
        return F.linear(self.ln_f(x), self.wte.weight)


class Conv1D(nn.Module):
    """As in transformers: weight [in, out]."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(inputs, outputs)), nn.Parameter(torch.empty(outputs))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class Llama(nn.Module):
    def __init__(self, case):
        super().__init__()
        c = self.c = case["config"]
        w, inner = c["width"], c["kv_heads"] * c["width"] // c["heads"]
        self.model = nn.Module()
        self.model.embed_tokens, self.model.layers = nn.Embedding(c["vocab"], w), nn.ModuleList()
        for _ in range(c["layers"]):
            block = nn.Module()
            block.input_layernorm, block.post_attention_layernorm = nn.RMSNorm(w, 1e-5), nn.RMSNorm(w, 1e-5)
            block.self_attn, block.mlp = nn.Module(), nn.Module()
            for name, size in ("q_proj", w), ("k_proj", inner), ("v_proj", inner), ("o_proj", w):
                setattr(block.self_attn, name, nn.Linear(w, size, bias=False))
            block.mlp.gate_proj, block.mlp.up_proj = (nn.Linear(w, c["hidden"], bias=False) for _ in range(2))
            block.mlp.down_proj = nn.Linear(c["hidden"], w, bias=False)
            self.model.layers.append(block)
        self.model.norm = nn.RMSNorm(w, 1e-5)
        self.lm_head = nn.Linear(w, c["vocab"], bias=False)

    def rotated(self, x):
        # cos and sin are f32, so under autocast queries and keys are f32 from here to attention, as in transformers.
        half = x.size(-1) // 2
        angles = torch.arange(x.size(2), device=x.device)[:, None] * 10000.0 ** (
            -torch.arange(half, device=x.device, dtype=torch.float32) / half)
        a, b = x.split(half, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def forward(self, tokens):
        rows, length = tokens.shape
        x = self.model.embed_tokens(tokens)
        for block in self.model.layers:
            y, attention = block.input_layernorm(x), block.self_attn
            q, k, v = (p(y).view(rows, length, -1, self.c["width"] // self.c["heads"]).transpose(1, 2)
                       for p in (attention.q_proj, attention.k_proj, attention.v_proj))
            k, v = (t.repeat_interleave(self.c["heads"] // self.c["kv_heads"], 1) for t in (self.rotated(k), v))
            joined = F.scaled_dot_product_attention(self.rotated(q), k, v, is_causal=True)
            x = x + attention.o_proj(joined.transpose(1, 2).reshape(rows, length, -1))
            y = block.post_attention_layernorm(x)
            x = x + block.mlp.down_proj(F.silu(block.mlp.gate_proj(y)) * block.mlp.up_proj(y))
        return self.lm_head(self.model.norm(x))


class Digits(nn.Module):
    """The net of recipes/mnist.lua for images of side x side, without dropout, and with gelu for relu (README.md)."""

    def __init__(self, case):
        super().__init__()
        c = self.c = case["config"]
        self.first = nn.Conv2d(1, c["channels"], 3, padding=1)
        self.second = nn.Conv2d(c["channels"], 2 * c["channels"], 3, padding=1)
        self.hidden = nn.Linear(2 * c["channels"] * (c["side"] // 4) ** 2, c["hidden"])
        self.out = nn.Linear(c["hidden"], c["classes"])

    def forward(self, pixels):
        x = (pixels.float() / 32).view(-1, 1, self.c["side"], self.c["side"])
        x = F.max_pool2d(F.gelu(self.first(x), approximate="tanh"), 2)
        x = F.max_pool2d(F.gelu(self.second(x), approximate="tanh"), 2)
        return self.out(F.gelu(self.hidden(x.flatten(1)), approximate="tanh"))


CLASSES = {"gpt2": GPT2, "llama": Llama, "digits": Digits}


def loss_of(model, batch):
    """The last column is the target of images; of texts the targets are the next tokens. Logits become f32 before the loss, as
    in transformers: under autocast cross_entropy of 16-bit logits would round each logarithm of a probability to 16 bits."""
    if isinstance(model, Digits):
        return F.cross_entropy(model(batch[:, :-1]).float(), batch[:, -1])
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].reshape(-1))


# --------------------------------------------------------------------------------------- CUDA's autocast


class Autocast(TorchFunctionMode):
    """What torch.autocast("cuda", dtype) does with the functions of these models, on any device. A function that is in no
    list is an error."""

    LOW = {"linear", "addmm", "conv2d", "scaled_dot_product_attention"}
    FULL = {"layer_norm", "rms_norm", "cross_entropy", "cos", "sin", "__rpow__"}
    AS_GIVEN = {"embedding", "gelu", "silu", "max_pool2d", "add", "sub", "mul", "neg", "cat", "split", "view", "reshape",
                "flatten", "transpose", "repeat_interleave", "arange", "float", "size", "__getitem__", "__get__", "div"}

    def __init__(self, low):
        super().__init__()
        self.low = low

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = function.__name__
        to = self.low if name in self.LOW else torch.float32 if name in self.FULL else None
        assert to or name in self.AS_GIVEN, f"autocast: {name} is in no list"
        if to:
            args = [a.to(to) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
        return function(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        outs = out if isinstance(out, (tuple, list)) else (out,)
        if not str(function).startswith("prim."):
            self.calls.append((str(function), tuple(str(o.dtype) for o in outs if isinstance(o, torch.Tensor))))
        return out


def check_autocast(case, low):
    """Forward calls the same operators with the same dtypes of results as under autocast for CUDA, seen with fake tensors.
    Backward is made of these operators."""
    torch.set_autocast_dtype("cuda", low)
    calls = []
    for own in (False, True):
        with FakeTensorMode():
            with torch.device("cuda"):
                model = CLASSES[case["model"]](case)
                width = case["config"].get("context", case["config"].get("side", 0) ** 2) + 1
                batch = torch.zeros(case["batch"], width, dtype=torch.int64)
            torch.set_autocast_enabled("cuda", not own)
            with Recorder() as recorder, Autocast(low) if own else contextlib.nullcontext():
                loss_of(model, batch)
            torch.set_autocast_enabled("cuda", False)
            torch.clear_autocast_cache()
        calls.append(recorder.calls)
    assert any(str(low) in dtypes for _, dtypes in calls[0])
    assert calls[0] == calls[1], [(a, b) for a, b in zip(*calls) if a != b][:8]


def check_products(low):
    """Products of this CPU accumulate in f32 and round once: they are within one unit in the last place of that."""
    torch.manual_seed(1)
    x, w, b = torch.randn(64, 256).to(low), torch.randn(96, 256).to(low), torch.randn(96).to(low)
    image, filters = torch.randn(4, 8, 8, 8).to(low), torch.randn(16, 8, 3, 3).to(low)
    for f, operands in (F.linear, (x, w, b)), (F.conv2d, (image, filters)), (torch.addmm, (b, x, w.t())):
        exact = f(*(t.double() for t in operands))
        error = (f(*operands).double() - exact).abs()
        assert (error <= torch.finfo(low).eps * exact.abs() * 0.5 + 1e-4).all(), (f, low, error.max())


# ------------------------------------------------------------------------------------------------ runs


def run(case, seed, low=None):
    """The losses of all steps."""
    model = CLASSES[case["model"]](case)
    model.load_state_dict(initial(case, seed, {name: tuple(p.shape) for name, p in model.named_parameters()}))
    batches = (images if case["model"] == "digits" else texts)(case, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=case["lr"], foreach=False, **HYPERPARAMETERS)
    scaler = torch.amp.GradScaler("cpu", enabled=low == torch.float16)
    losses = []
    for batch in batches:
        if low:
            with Autocast(low):
                loss = loss_of(model, batch)
        else:
            loss = loss_of(model, batch)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    assert not scaler.is_enabled() or scaler.get_scale() == 65536, "a step was skipped"
    return torch.stack(losses)


def main():
    torch.set_num_threads(1)
    curves, lines = {}, []
    dtypes = {"bf16": torch.bfloat16, "f16": torch.float16}
    for low in dtypes.values():
        check_products(low)
    for case in MODELS:
        for low in dtypes.values():
            check_autocast(case, low)
    for case in MODELS:
        for seed in SEEDS:
            for dtype in (None, *dtypes):
                curves[f"{case['model']}.{seed}.{dtype or 'f32'}"] = run(case, seed, dtypes.get(dtype))
        for dtype in dtypes:
            found = []
            for seed in SEEDS:
                exact = curves[f"{case['model']}.{seed}.f32"]
                change = curves[f"{case['model']}.{seed}.{dtype}"].double() - exact
                found.append(change.abs().mean().item())
                lines.append((case["model"], dtype, str(seed), f"{found[-1]:.6f}", f"{change[-20:].mean():+.6f}",
                              f"{exact[0]:.4f}", f"{exact[-20:].mean():.4f}"))
            mean, error = np.mean(found), np.std(found, ddof=1) / len(found) ** 0.5
            lines.append((case["model"], dtype, "mean", f"{mean:.6f}", "", "", ""))
            lines.append((case["model"], dtype, "error", f"{error:.6f}", "", "", ""))
    save_file(curves, os.path.join(here, "curves.safetensors"))
    with open(os.path.join(here, "table.tsv"), "w") as file:
        file.writelines("\t".join(line) + "\n" for line in lines)
    with open(os.path.join(here, "manifest.json"), "w") as file:
        json.dump({"steps": STEPS, "seeds": SEEDS, "hyperparameters": HYPERPARAMETERS, "models": MODELS}, file, indent=1)
        file.write("\n")


main()
