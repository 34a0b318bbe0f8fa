# Makes the files of this folder: what PyTorch computes for operators on planes, and for sin and cos, in the format of
# ../data. Usage: python3 make.py, with torch and safetensors.
import json
import os

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

here = os.path.dirname(os.path.abspath(__file__))
tensors, cases = {}, []


def add(op, run, attributes=None, **inputs):
    number = len(cases)
    inputs = {name: value.detach().requires_grad_() for name, value in inputs.items()}
    out = run(**inputs)
    gradient = torch.randn_like(out)
    out.backward(gradient)
    tensors[f"{number}.out"], tensors[f"{number}.grad_out"] = out.detach(), gradient
    for name, value in inputs.items():
        tensors[f"{number}.in.{name}"], tensors[f"{number}.grad.{name}"] = value.detach(), value.grad
    case = {"case": number, "op": op, "inputs": list(inputs)}
    if attributes:
        case["attributes"] = attributes
    cases.append(case)


def convolve(x, weight, bias=True, **options):
    inputs = {"x": torch.randn(x), "weight": torch.randn(weight)}
    if bias:
        inputs["bias"] = torch.randn(weight[0])
    add("conv2d", lambda x, weight, bias=None: F.conv2d(x, weight, bias, **options), options, **inputs)


def pool(op, x, kernel, **options):
    run = {"max_pool2d": F.max_pool2d, "avg_pool2d": F.avg_pool2d}[op]
    add(op, lambda x: run(x, kernel, **options), {"kernel": kernel, **options}, x=torch.randn(x))


torch.manual_seed(5)
torch.set_num_threads(1)
add("sin", torch.sin, x=torch.randn(6, 7) * 4)
add("cos", torch.cos, x=torch.randn(6, 7) * 4)
convolve([2, 3, 8, 7], [4, 3, 3, 3])
convolve([2, 1, 9, 9], [3, 1, 5, 5], padding=2)
convolve([2, 4, 7, 8], [6, 2, 3, 2], stride=[2, 1], padding=[1, 0], groups=2)
convolve([1, 3, 9, 10], [2, 3, 2, 3], bias=False, stride=[1, 2], dilation=[3, 2])
convolve([2, 4, 6, 6], [8, 1, 3, 3], padding=1, groups=4)
convolve([3, 5, 4, 4], [6, 5, 1, 1], stride=2)
for op in ["max_pool2d", "avg_pool2d"]:
    pool(op, [2, 3, 6, 8], 2)
    pool(op, [2, 2, 7, 9], [3, 2], stride=[2, 3], padding=[1, 1])
    pool(op, [1, 2, 6, 5], 3, stride=1, padding=1)
pool("avg_pool2d", [2, 2, 7, 6], 3, stride=2, padding=1, count_include_pad=False)

save_file({name: value.contiguous() for name, value in tensors.items()}, os.path.join(here, "operators.safetensors"))
manifest = {"peer": "PyTorch " + torch.__version__.split("+")[0], "operators": {"file": "operators.safetensors", "cases": cases}}
with open(os.path.join(here, "manifest.json"), "w") as file:
    json.dump(manifest, file, indent=1)
    file.write("\n")

# A net with layers of each kind: its weights, and what it computes.
net = torch.nn.Sequential(
    torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
    torch.nn.Conv2d(4, 6, (3, 2), groups=2, stride=(1, 2), bias=False),
    torch.nn.AvgPool2d(2, stride=1, padding=1, count_include_pad=False), torch.nn.Flatten(),
    torch.nn.Linear(6 * 3 * 3, 5),
)
x, labels = torch.randn(2, 1, 8, 8), torch.tensor([3, 1])
y = net(x)
F.cross_entropy(y, labels).backward()
save_file(net.state_dict(), os.path.join(here, "net.safetensors"))
results = {"x": x, "y": y.detach(), "labels": labels}
results.update({f"grad.{name}": p.grad for name, p in net.named_parameters()})
save_file(results, os.path.join(here, "net_results.safetensors"))
