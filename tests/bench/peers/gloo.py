# All-reduces of PyTorch over gloo, measured as figures.h says: sums of f32, in place. Rank 0 prints
# the figures; it listens on the address.
#     python3 gloo.py RANK RANKS ADDRESS:PORT INTERFACE [BYTES...]
import json
import os
import sys
import time

import torch
import torch.distributed as dist

SAMPLES = 7


def size_of(text):
    size, _, runs = text.partition("x")
    size = int(size)
    return size, int(runs) if runs else max(3, min(500, (64 << 20) // (size // 4)))


def measure(size, runs):
    values = torch.zeros(size // 4)
    times = []
    for sample in range(SAMPLES + 1):
        start = time.monotonic()
        for _ in range(runs):
            dist.all_reduce(values)
        times.append((time.monotonic() - start) * 1e6 / runs)
    return sorted(times[1:])


def main():
    rank, ranks, address, interface = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5]
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    dist.init_process_group("gloo", init_method="tcp://" + address, rank=rank, world_size=ranks)
    usual = ["4096", "65536", "1048576", "16777216", "67108864"]
    for size, runs in map(size_of, sys.argv[5:] or usual):
        times = measure(size, runs)
        if rank == 0:
            print(json.dumps({"peer": "gloo", "bytes": size, "us_med": round(times[SAMPLES // 2], 1),
                              "us_min": round(times[0], 1), "moved": size * runs * (SAMPLES + 1)}),
                  flush=True)
    dist.destroy_process_group()


main()
