# Makes fp8.safetensors: what PyTorch's casts to float8 give, and a linear layer of the numbers that they represent. Usage:
# python3 make.py, with torch and safetensors.
import math
import os

import torch
from safetensors.torch import save_file

here = os.path.dirname(os.path.abspath(__file__))
torch.manual_seed(41)
formats = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}
results = {}


def scale_of(x, greatest):
    """The least power of two by which the largest size can be divided to be `greatest` at most."""
    most = x.abs().max().item()
    if most == 0:
        return 1.0
    exponent = math.ceil(math.log2(most / greatest))
    while most > greatest * 2.0 ** exponent:
        exponent += 1
    while most <= greatest * 2.0 ** (exponent - 1):
        exponent -= 1
    return 2.0 ** exponent


def cast(x, kind):
    dtype, greatest = formats[kind]
    scale = scale_of(x, greatest)
    # Division by a power of two is exact.
    return (x.float() / scale).to(dtype), scale


def add_casts(name, x):
    for suffix, own in ("f32", x), ("bf16", x.bfloat16()):
        results[f"{name}.{suffix}.x"] = own
        results[f"{name}.{suffix}.most"] = own.abs().max().float()
        for kind in formats:
            codes, scale = cast(own, kind)
            results[f"{name}.{suffix}.{kind}"] = codes.view(torch.uint8)
            results[f"{name}.{suffix}.{kind}.scale"] = torch.tensor(scale)


shape = [32, 48]
add_casts("normal", torch.randn(shape))
add_casts("wide", torch.randn(shape) * 2.0 ** torch.randint(-24, 12, shape))
add_casts("tiny", torch.randn(shape) * 1e-24)
add_casts("huge", torch.randn(shape) * 5e36)
add_casts("zeros", torch.zeros(shape).copysign(torch.randn(shape)))
# Numbers between two codes, of which the even one is taken, and their neighbours; the greatest number is there.
codes = torch.arange(256, dtype=torch.uint8)
for kind, (dtype, greatest) in formats.items():
    values = codes.view(dtype).float()
    values = values[values.isfinite() & (values >= 0)].sort().values
    middle = (values[1:] + values[:-1]) / 2
    all_of_them = torch.cat([values, middle, middle.nextafter(torch.tensor(0.0)), middle.nextafter(torch.tensor(1e9))])
    ties = torch.zeros(shape[0] * shape[1])
    ties[:len(all_of_them)] = all_of_them
    ties[len(all_of_them):2 * len(all_of_them)] = -all_of_them
    add_casts("ties_" + kind, ties.view(shape))

# A linear layer: products in f64 of what the codes represent.
x, weight, bias, gradient = torch.randn(32, 48) * 3, torch.randn(64, 48) / 7, torch.randn(64), torch.randn(32, 64) / 50
real = {}
for name, tensor, kind in ("x", x, "e4m3"), ("weight", weight, "e4m3"), ("gradient", gradient.bfloat16(), "e5m2"):
    codes, scale = cast(tensor, kind)
    real[name] = codes.double() * scale
results.update({"linear.x": x, "linear.weight": weight, "linear.bias": bias, "linear.gradient": gradient.bfloat16(),
                "linear.y": (real["x"] @ real["weight"].T + bias.double()).float(),
                "linear.grad.x": (real["gradient"] @ real["weight"]).float(),
                "linear.grad.weight": (real["gradient"].T @ real["x"]).float(),
                "linear.grad.bias": gradient.bfloat16().double().sum(0).float()})
save_file({name: value.clone(memory_format=torch.contiguous_format) for name, value in results.items()},
          os.path.join(here, "fp8.safetensors"))
