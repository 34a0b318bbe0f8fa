# Makes the files of this folder: what PyTorch's two sharded models compute where units have precisions of their own.
# Usage: python3 make.py, with torch (2.15) and safetensors. Two processes over gloo, one thread each.
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import torch.nn as nn
from safetensors.torch import save_file

here = os.path.dirname(os.path.abspath(__file__))
RANKS, ROWS, WIDTH, STEPS = 2, 4, 8, 3
SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
LONG = {name: dtype for dtype, name in SHORT.items()}


class Layer(nn.Module):
    """Casts its input to its weight's dtype itself, so every case runs; `seen` is what it got."""

    def __init__(self, inner=False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("shift", torch.zeros(WIDTH))
        if inner:
            self.inner = Layer()

    def forward(self, x):
        self.seen = [SHORT[x.dtype], SHORT[self.weight.dtype], SHORT[self.shift.dtype]]
        h = nn.functional.linear(x.to(self.weight.dtype), self.weight, self.bias) + self.shift.to(self.weight.dtype)
        if self.training:
            self.shift.mul_(0.75)
        h = torch.relu(h)
        return self.inner(h) if hasattr(self, "inner") else h


class Net(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer(), Layer(inner=True)])
        if scale:
            self.scale = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("offset", torch.zeros(WIDTH))

    def forward(self, x):
        self.seen = [SHORT[x.dtype], SHORT[self.scale.dtype] if hasattr(self, "scale") else "", SHORT[self.offset.dtype]]
        for layer in self.layers:
            x = layer(x)
        if hasattr(self, "scale"):
            x = x * self.scale.to(x.dtype)
        return x + self.offset.to(x.dtype)


# Names of units, inner ones first; "" is the root.
UNITS = ["layers.0", "layers.1", "layers.2.inner", "layers.2", ""]


def module_of(net, name):
    return net.get_submodule(name) if name else net


def shard_by_first(net, case):
    """FullyShardedDataParallel: buffers, two switches for inputs, no dtype of outputs."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    for name in UNITS:
        p = case["units"].get(name)
        mixed = p and MixedPrecision(
            param_dtype=LONG.get(p.get("param")), reduce_dtype=LONG.get(p.get("reduce")),
            buffer_dtype=LONG.get(p.get("buffer")), cast_forward_inputs=p.get("cast_inputs", False),
            cast_root_forward_inputs=p.get("cast_root_inputs", False), _module_classes_to_ignore=())
        wrapped = FullyShardedDataParallel(module_of(net, name), mixed_precision=mixed or None, use_orig_params=True,
                                           device_id=torch.device("cpu"))
        if not name:
            return wrapped
        parent, _, key = name.rpartition(".")
        setattr(net.get_submodule(parent), key, wrapped)


def shard_by_second(net, case):
    """fully_shard: a dtype of each unit's outputs, one switch for inputs, no buffers."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for name in UNITS:
        p = case["units"].get(name)
        policy = MixedPrecisionPolicy(
            param_dtype=LONG.get(p.get("param")), reduce_dtype=LONG.get(p.get("reduce")),
            output_dtype=LONG.get(p.get("output")), cast_forward_inputs=p.get("cast_inputs", False)) if p else \
            MixedPrecisionPolicy(cast_forward_inputs=False)
        fully_shard(module_of(net, name), mp_policy=policy)
    return net


def clean(name):
    return name.replace("_fsdp_wrapped_module.", "")


def whole(model, case, tensors):
    """Whole tensors, by clean name."""
    if case["by"] == "fully_shard":
        return {name: t.full_tensor() for name, t in tensors.items()}
    from torch.distributed.fsdp import FullyShardedDataParallel

    result = {}
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        for name, p in model.named_parameters():
            result[clean(name)] = (p.grad if tensors == "grad" else p).detach().clone()
    return result


def seen_by(net):
    return {name: [*getattr(inner_of(module_of_wrapped(net, name)), "seen")] for name in UNITS}


def inner_of(module):
    return getattr(module, "_fsdp_wrapped_module", module)


def module_of_wrapped(net, name):
    module = inner_of(net)
    for part in filter(None, name.split(".")):
        module = inner_of(getattr(module, part))
    return module


def numbers(*shape, seed, bits):
    """Multiples of 2^-bits below 1: products and sums of them are exact in f32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**bits) + 1, 2**bits, shape, generator=generator) / 2.0**bits


def run(rank, case, number, address):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=address, FSDP_USE_FULL_PREC_IN_EVAL="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    net = Net(case.get("scale", True))
    tensors = {}
    with torch.no_grad():
        for i, (name, t) in enumerate([*net.named_parameters(), *net.named_buffers()]):
            t.copy_(numbers(*t.shape, seed=100 * number + i, bits=10) * (0.5 if t.dim() == 2 else 1))
            tensors["init." + name] = t.clone()
    x = numbers(STEPS, RANKS * ROWS, WIDTH, seed=7 + number, bits=10)
    y = numbers(STEPS, RANKS * ROWS, WIDTH, seed=8 + number, bits=10)
    tensors["x"], tensors["y"] = x, y
    first = case["by"] == "FullyShardedDataParallel"
    model = (shard_by_first if first else shard_by_second)(net, case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    rows = slice(rank * ROWS, (rank + 1) * ROWS)
    for step in range(STEPS):
        out = model(x[step, rows])
        tensors[f"out.{step}"] = out.detach()
        ((out.float() - y[step, rows]) ** 2).mean().backward()
        if step == 0:
            case["seen"], case["result"] = seen_by(model), SHORT[out.dtype]
            grads = "grad" if first else {name: p.grad for name, p in model.named_parameters()}
            tensors.update({"grad." + name: t.float() for name, t in whole(model, case, grads).items()})
        optimizer.step()
        optimizer.zero_grad()
    # Without a unit's precision the root does not know that it evaluates in full precision, and leaves buffers low.
    if first and case["units"].get("", {}).get("param"):
        model.eval()
        with torch.no_grad():
            tensors["evaluated"] = model(x[0, rows])
        case["seen_in_evaluation"] = seen_by(model)
        model.train()
        with torch.no_grad():
            tensors["trained_again"] = model(x[0, rows]).detach()
    finals = None if first else dict(model.named_parameters())
    tensors.update({"final." + name: t.detach() for name, t in whole(model, case, finals).items()})
    if first:
        # State dicts have buffers in the dtypes that they had before.
        state = model.state_dict()
        tensors.update({"buffer." + clean(name): t for name, t in state.items() if clean(name).endswith(("shift", "offset"))})
    if rank == 0:
        file = case["case"] + ".safetensors"
        os.umask(0o022)
        save_file({name: t.contiguous() for name, t in tensors.items()}, os.path.join(here, file))
        with open(os.path.join(here, case["case"] + ".json"), "w") as f:
            json.dump({**case, "file": file}, f)
    dist.barrier()
    dist.destroy_process_group()


BF16 = {"param": "bf16", "reduce": "bf16", "buffer": "bf16"}
BY_UNIT = {
    "": {"param": "bf16", "reduce": "f32", "cast_root_inputs": True},
    "layers.0": {"param": "f16", "reduce": "f32", "buffer": "bf16", "cast_inputs": True},
    "layers.1": {"param": "f32", "reduce": "bf16", "buffer": "f16", "cast_inputs": True},
    "layers.2": {"param": "bf16", "reduce": "f16", "buffer": "f32", "cast_inputs": False},
    "layers.2.inner": {"param": "f16", "reduce": "f16", "buffer": "bf16", "cast_inputs": True},
}


def of_all(**more):
    return {name: {**BF16, **more} for name in UNITS}


CASES = [
    {"case": "root_inputs", "units": of_all(cast_root_inputs=True, cast_inputs=False)},
    {"case": "unit_inputs", "units": of_all(cast_root_inputs=False, cast_inputs=True), "scale": False},
    {"case": "no_inputs", "units": of_all(cast_root_inputs=False, cast_inputs=False)},
    {"case": "all_inputs", "units": of_all(cast_root_inputs=True, cast_inputs=True)},
    {"case": "by_unit", "units": BY_UNIT},
    {"case": "some_units", "units": {name: BY_UNIT[name] for name in ["layers.0", "layers.2.inner"]}},
    {"case": "buffers", "units": {"": {"buffer": "bf16"}, "layers.1": {"buffer": "f16"}, "layers.2": {"buffer": "f32"}}},
    {"case": "outputs", "by": "fully_shard", "units": {
        "": {"param": "bf16", "reduce": "f32", "output": "f32", "cast_inputs": True},
        "layers.0": {"param": "bf16", "reduce": "bf16", "output": "f16", "cast_inputs": False},
        "layers.1": {"param": "f32", "reduce": "f32", "output": "bf16", "cast_inputs": False},
        "layers.2": {"param": "f16", "reduce": "f32", "output": "bf16", "cast_inputs": True}}},
]

if __name__ == "__main__":
    manifest = []
    for number, case in enumerate(CASES):
        case = {"by": "FullyShardedDataParallel", **case}
        if len(sys.argv) > 1 and case["case"] not in sys.argv[1:]:
            continue
        processes.spawn(run, (case, number, str(29500 + number)), nprocs=RANKS)
        path = os.path.join(here, case["case"] + ".json")
        with open(path) as f:
            manifest.append(json.load(f))
        os.remove(path)
    if len(sys.argv) == 1:
        with open(os.path.join(here, "manifest.json"), "w") as f:
            json.dump({"ranks": RANKS, "rows": ROWS, "width": WIDTH, "steps": STEPS, "cases": manifest}, f, indent=1)
            f.write("\n")
