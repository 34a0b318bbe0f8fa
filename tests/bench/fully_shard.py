# A training step of a GPT-2 under PyTorch's fully_shard or DistributedDataParallel, over gloo.
# `moonshard bench fsdp` runs it beside its own: one thread a rank, gradients as views of buckets, the
# fused AdamW. "kept": malloc keeps the pages of freed memory, as our pools do; that is faster, since
# the kernel clears no pages in each step. "returned": malloc's defaults.
#     python3 fully_shard.py fully_shard|ddp kept|returned RANKS LAYERS WIDTH HEADS VOCAB CONTEXT \
#         BATCH WARM STEPS
import json
import os
import sys
import threading
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).view(b, t, 3, self.heads, w // self.heads).unbind(2)
        a = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.c_proj(a.transpose(1, 2).reshape(b, t, w))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, layers, width, heads, vocab, context):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)


def wrap(model, way):
    if way == "ddp":
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.h:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def pss_mib():
    for line in open("/proc/self/smaps_rollup"):
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024


def most_pss_mib(work):
    """The most memory seen while work() runs. It is more than what is there after a step, since
    malloc returns large blocks."""
    done, most = threading.Event(), [0.0]

    def look():
        while not done.is_set():
            most[0] = max(most[0], pss_mib())

    watcher = threading.Thread(target=look)
    watcher.start()
    work()
    done.set()
    watcher.join()
    return most[0]


def rank_main(rank, way, ranks, layers, width, heads, vocab, context, batch, warm, steps, folder):
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % os.cpu_count()]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=ranks)
    torch.manual_seed(1)
    model = wrap(GPT2(layers, width, heads, vocab, context), way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    x = torch.randint(0, vocab, (batch, context))
    times = []

    def step():
        begin = time.perf_counter()
        F.cross_entropy(model(x).view(-1, vocab), x.view(-1)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append((time.perf_counter() - begin) * 1e3)

    for _ in range(warm + steps):
        step()
    times = sorted(times[warm:])
    most = torch.tensor(most_pss_mib(lambda: [step() for _ in range(3)]))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if rank == 0:
        print(json.dumps({
            "ms_step_med": times[len(times) // 2], "ms_step_min": times[0], "pss_mib": most.item(),
        }), flush=True)
    dist.barrier()
    os._exit(0)  # the threads of gloo may abort a process that ends in the usual way


if __name__ == "__main__":
    import tempfile

    way, numbers = sys.argv[1], [int(text) for text in sys.argv[3:12]]
    if sys.argv[2] == "kept":  # malloc reads it when a process begins: each rank is a new one
        os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = str(1 << 33)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (way, *numbers, folder), nprocs=numbers[0])
