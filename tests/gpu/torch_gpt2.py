# A training step of a GPT-2 in PyTorch, as `moonshard bench step` measures ours: bf16 products, f32 weights,
# AdamW in one kernel for all parameters. run.sh starts it beside ours; what torch.compile has made is kept on
# disk (TORCHINDUCTOR_CACHE_DIR), so that it compiles once for each model.
#     python3 torch_gpt2.py micro|gpt2-124m|gpt2-350m|gpt2-1558m compiled|eager BATCH LENGTH STEPS
import json
import os
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

CONFIGS = {  # layers, width, heads, vocabulary
    "micro": (2, 32, 2, 64),
    "gpt2-124m": (12, 768, 12, 50304),
    "gpt2-350m": (24, 1024, 16, 50304),
    "gpt2-1558m": (48, 1600, 25, 50304),
}
WARM = 4


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = (
            part.view(b, t, self.heads, w // self.heads).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).split(w, 2)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(a.transpose(1, 2).reshape(b, t, w))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, layers, width, heads, vocab, length):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids, targets):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


# When steps end. On a GPU the host goes on meanwhile: events note the times.
class Watch:
    def __init__(self, device):
        self.on_gpu, self.marks = device == "cuda", []

    def mark(self):
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def times(self):  # ms of each step after the first mark
        pairs = zip(self.marks, self.marks[1:])
        if not self.on_gpu:
            return [1e3 * (b - a) for a, b in pairs]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairs]


# The memory of the GPU that this process has, as nvidia-smi tells it; None if it does not.
def process_mib():
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        rows = [line.split(",") for line in subprocess.check_output(query, text=True).splitlines()]
        found = {int(pid): float(mib) for pid, mib in rows}
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None
    return found.get(os.getpid(), next(iter(found.values())) if len(found) == 1 else None)


def main(config, way, batch, length, steps):
    layers, width, heads, vocab = CONFIGS[config]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and config != "micro":
        sys.exit("torch_gpt2.py: PyTorch sees no GPU here")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = GPT2(layers, width, heads, vocab, length).to(device)
    options = {"lr": 1e-4, "weight_decay": 0.1}
    if device == "cuda":
        options["fused"] = True
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    forward = torch.compile(model) if way == "compiled" else model
    ids = torch.randint(0, vocab, (batch, length), device=device)
    targets = torch.randint(0, vocab, (batch, length), device=device)
    watch = Watch(device)
    for step in range(WARM + steps):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = forward(ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step >= WARM - 1:
            watch.mark()
    times = sorted(watch.times())
    median = (times[(len(times) - 1) // 2] + times[len(times) // 2]) / 2
    peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else None
    print(json.dumps({
        "config": config, "way": way, "device": device, "batch": batch, "length": length,
        "torch": torch.__version__, "ms_step_med": median, "ms_step_min": times[0],
        "tok_s": batch * length / median * 1e3, "peak_mib": peak, "process_mib": process_mib(),
        "loss": loss.item(), "steps": steps,
    }, separators=(",", ":")))


if __name__ == "__main__":
    if len(sys.argv) != 6 or sys.argv[1] not in CONFIGS or sys.argv[2] not in ("compiled", "eager"):
        sys.exit(f"usage: torch_gpt2.py {'|'.join(CONFIGS)} compiled|eager BATCH LENGTH STEPS")
    main(sys.argv[1], sys.argv[2], *(int(number) for number in sys.argv[3:]))
