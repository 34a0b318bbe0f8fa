# Makes norms.safetensors: what PyTorch's GroupNorm and BatchNorm compute. Usage: python3 make_norms.py, with torch and
# safetensors.
import os

import torch
from safetensors.torch import save_file

here = os.path.dirname(os.path.abspath(__file__))
torch.manual_seed(8)
torch.set_num_threads(1)
results = {}
for case, (groups, shape) in enumerate([(1, [2, 6, 3, 5]), (3, [2, 6, 3, 5]), (6, [3, 6, 4]), (2, [5, 12])]):
    x, gradient = (torch.randn(shape) * 2 + 1).requires_grad_(), torch.randn(shape)
    layer = torch.nn.GroupNorm(groups, shape[1], eps=1e-4)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(shape[1]))
        layer.bias.copy_(torch.randn(shape[1]))
    y = layer(x)
    y.backward(gradient)
    results.update({f"group{case}.x": x.detach(), f"group{case}.y": y.detach(), f"group{case}.gradient": gradient,
                    f"group{case}.grad.x": x.grad, f"group{case}.grad.weight": layer.weight.grad,
                    f"group{case}.grad.bias": layer.bias.grad, f"group{case}.groups": torch.tensor(groups)})
    results.update({f"group{case}.before.{key}": value.clone() for key, value in layer.state_dict().items()})

# Layers that normalize batches: three steps of training, the last with gradients, and one of evaluation.
for name, layer, shape in [("1d", torch.nn.BatchNorm1d(4, momentum=0.3), [6, 4]), ("2d", torch.nn.BatchNorm2d(4), [6, 4, 3, 2])]:
    with torch.no_grad():
        layer.weight.copy_(torch.randn(4))
        layer.bias.copy_(torch.randn(4))
    results.update({f"{name}.before.{key}": value.clone() for key, value in layer.state_dict().items()})
    for step in range(3):
        x = (torch.randn(shape) * (step + 1) + step).requires_grad_()
        y = layer(x)
        results[f"{name}.x.{step}"], results[f"{name}.y.{step}"] = x.detach(), y.detach()
    gradient = torch.randn(shape)
    y.backward(gradient)
    results.update({f"{name}.gradient": gradient, f"{name}.grad.x": x.grad, f"{name}.grad.weight": layer.weight.grad.clone(),
                    f"{name}.grad.bias": layer.bias.grad.clone()})
    results.update({f"{name}.after.{key}": value.clone() for key, value in layer.state_dict().items()})
    layer.eval()
    x = torch.randn(shape).requires_grad_()
    y = layer(x)
    y.backward(gradient)
    results.update({f"{name}.eval.x": x.detach(), f"{name}.eval.y": y.detach(), f"{name}.eval.grad": x.grad})
save_file({name: value.clone(memory_format=torch.contiguous_format) for name, value in results.items()}, os.path.join(here, "norms.safetensors"))
