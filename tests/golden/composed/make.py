# Makes the files of this folder: what PyTorch computes for whole numbers, variances, products, triangles, sorting and einsum,
# in the format of ../data. Usage: python3 make.py, with torch and safetensors.
import json
import os

import torch
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


torch.manual_seed(7)
torch.set_num_threads(1)
halves = torch.arange(-6, 6).reshape(3, 4) / 2
for op in ["floor", "ceil", "round"]:
    add(op, getattr(torch, op), x=torch.randn(6, 7) * 4)
    add(op, getattr(torch, op), x=halves)

x = torch.randn(3, 4, 5)
add("var", lambda x: x.var(), x=x)
add("var", lambda x: x.var(correction=0), {"correction": 0}, x=x + 100)
for dim in range(3):
    add("var", lambda x: x.var(dim), {"dim": dim}, x=x)
add("var", lambda x: x.var(-1, keepdim=True, correction=2), {"dim": -1, "keep": True, "correction": 2}, x=x)

one, two = x.clone(), x.clone()
one[1, 2, 3] = 0
two[1, 2, 3] = two[1, 2, 0] = two[0, 0, 1] = 0
for value in [x, one, two]:
    add("prod", lambda x: x.prod(), x=value)
    for dim in range(3):
        add("prod", lambda x: x.prod(dim), {"dim": dim}, x=value)
add("prod", lambda x: x.prod(1, keepdim=True), {"dim": 1, "keep": True}, x=torch.randn(2, 7))

for op in ["tril", "triu"]:
    for diagonal in [-9, -1, 0, 2]:
        add(op, lambda x: getattr(x, op)(diagonal), {"diagonal": diagonal}, x=x)

same = torch.randint(3, (4, 9)).float()
for value, dim in [(x, 0), (x, 1), (x, -1), (same, 1), (same, 0)]:
    for descending in [False, True]:
        add("sort", lambda x: torch.sort(x, dim=dim, descending=descending, stable=True)[0], {"dim": dim, "descending": descending}, x=value)

for equation, a, b in [
    ("bij,jk->bik", [2, 3, 4], [4, 5]), ("bij,bjk->kib", [2, 3, 4], [2, 4, 5]), ("ij,jk", [3, 4], [4, 2]),
    ("ij,kj->", [3, 4], [2, 4]), ("i,j->ji", [3], [4]), ("bhqd,bhkd->bhqk", [2, 3, 4, 5], [2, 3, 6, 5]),
    ("abc,acd->ac", [2, 3, 4], [2, 4, 5]), ("ij,ij->ij", [3, 4], [3, 4]), ("aBc,cB", [2, 3, 4], [4, 3]),
    ("i,i->", [7], [7]),
]:
    add("einsum", lambda a, b: torch.einsum(equation, a, b), {"equation": equation}, a=torch.randn(a), b=torch.randn(b))
for equation in ["ijk->kij", "ijk->j", "ijk->", "kij"]:
    add("einsum", lambda a: torch.einsum(equation, a), {"equation": equation}, a=x)

save_file({name: value.clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}, os.path.join(here, "operators.safetensors"))
manifest = {"peer": "PyTorch " + torch.__version__.split("+")[0], "operators": {"file": "operators.safetensors", "cases": cases}}
with open(os.path.join(here, "manifest.json"), "w") as file:
    json.dump(manifest, file, indent=1)
    file.write("\n")
