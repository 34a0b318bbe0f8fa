"""Makes table.tsv: the dtypes of results under PyTorch's autocast for CUDA.

    python make.py > table.tsv        # PyTorch 2.15; fake tensors need no GPU

A line has an operator of the engine, the dtypes of its float operands, and those of its results:
"16" is the dtype of autocast, "32" is f32, "-" a result without a float dtype, "error" that PyTorch
refuses the operands. bf16 and f16 give the same table; the script checks that.
"""
import itertools
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode


def rotated(x):
    a, b = x.chunk(2, -1)
    return torch.cat([a * 0.5 - b * 0.5, b * 0.5 + a * 0.5], -1)


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


M, V, H = (4, 8), (8,), (2, 2, 4, 8)
ONE, TWO, THREE = (M,), (M, M), (M, M, M)
INDEX = lambda: torch.zeros(4, 8, dtype=torch.int64, device="cuda")
IDS = lambda: torch.zeros(4, dtype=torch.int64, device="cuda")
MASK = lambda: torch.zeros(4, 8, dtype=torch.bool, device="cuda")

# name: (shapes of the float operands, what PyTorch computes of them)
CASES = {
    "neg": (ONE, lambda a: -a),
    "exp": (ONE, torch.exp),
    "log": (ONE, torch.log),
    "sqrt": (ONE, torch.sqrt),
    "rsqrt": (ONE, torch.rsqrt),
    "square": (ONE, torch.square),
    "abs": (ONE, torch.abs),
    "sign": (ONE, torch.sign),
    "relu": (ONE, torch.relu),
    "gelu": (ONE, lambda a: F.gelu(a, approximate="tanh")),
    "gelu_erf": (ONE, F.gelu),
    "silu": (ONE, F.silu),
    "tanh": (ONE, torch.tanh),
    "sigmoid": (ONE, torch.sigmoid),
    "sin": (ONE, torch.sin),
    "cos": (ONE, torch.cos),
    "floor": (ONE, torch.floor),
    "ceil": (ONE, torch.ceil),
    "round": (ONE, torch.round),
    "pow": (ONE, lambda a: a ** 3),
    "clamp": (ONE, lambda a: a.clamp(-1, 1)),
    "is_finite": (ONE, torch.isfinite),
    "add_scalar": (ONE, lambda a: a + 2),
    "mul_scalar": (ONE, lambda a: a * 2),
    "div_scalar": (ONE, lambda a: a / 2),
    "rsub_scalar": (ONE, lambda a: 2 - a),
    "rdiv_scalar": (ONE, lambda a: 2 / a),
    "maximum_scalar": (ONE, lambda a: a.clamp(min=2)),
    "minimum_scalar": (ONE, lambda a: a.clamp(max=2)),
    "gt_scalar": (ONE, lambda a: a > 2),
    "add": (TWO, torch.add),
    "sub": (TWO, torch.sub),
    "mul": (TWO, torch.mul),
    "div": (TWO, torch.div),
    "maximum": (TWO, torch.maximum),
    "minimum": (TWO, torch.minimum),
    "swiglu": (TWO, lambda a, b: a * F.silu(b)),
    "lt": (TWO, torch.lt),
    "lerp": (THREE, torch.lerp),
    "addcmul": (THREE, torch.addcmul),
    "addcdiv": (THREE, torch.addcdiv),
    "where": (TWO, lambda a, b: torch.where(MASK(), a, b)),
    "masked_fill": (ONE, lambda a: a.masked_fill(MASK(), 2)),
    "clone": (ONE, torch.clone),
    "add_": (TWO, lambda a, b: a.clone().add_(b)),
    "exp_": (ONE, lambda a: a.clone().exp_()),
    "copy_": (TWO, lambda a, b: a.clone().copy_(b)),
    "cat": (TWO, lambda a, b: torch.cat([a, b])),
    "stack": (TWO, lambda a, b: torch.stack([a, b])),
    "view": (ONE, lambda a: a.view(8, 4)),
    "sum": (ONE, lambda a: a.sum(-1)),
    "mean": (ONE, lambda a: a.mean(-1)),
    "max": (ONE, lambda a: a.amax(-1)),
    "norm": (ONE, lambda a: a.norm()),
    "argmax": (ONE, lambda a: a.argmax(-1)),
    "cumsum": (ONE, lambda a: a.cumsum(-1)),
    "dot": ((V, V), torch.dot),
    "topk": (ONE, lambda a: a.topk(2, -1)[0]),
    "gather": (ONE, lambda a: a.gather(0, INDEX())),
    "index_select": (ONE, lambda a: a.index_select(0, IDS())),
    "scatter": (TWO, lambda a, b: a.scatter(0, INDEX(), b)),
    "scatter_add": (TWO, lambda a, b: a.scatter_add(0, INDEX(), b)),
    "matmul": ((M, (8, 4)), torch.matmul),
    "linear": ((M, (4, 8), (4,)), F.linear),
    "linear_t": ((M, (8, 4), (4,)), lambda x, w, b: F.linear(x, w.t(), b)),
    "conv2d": (((1, 2, 5, 5), (3, 2, 3, 3), (3,)), F.conv2d),
    "max_pool2d": (((1, 2, 4, 4),), lambda a: F.max_pool2d(a, 2)),
    "avg_pool2d": (((1, 2, 4, 4),), lambda a: F.avg_pool2d(a, 2)),
    "layer_norm": ((M, V, V), lambda x, w, b: F.layer_norm(x, (8,), w, b)),
    "rms_norm": ((M, V), lambda x, w: F.rms_norm(x, (8,), w)),
    "add_layer_norm": ((M, M, V, V), lambda x, r, w, b: (x + r, F.layer_norm(x + r, (8,), w, b))),
    "add_rms_norm": ((M, M, V), lambda x, r, w: (x + r, F.rms_norm(x + r, (8,), w))),
    "softmax": (ONE, lambda a: a.softmax(-1)),
    "log_softmax": (ONE, lambda a: a.log_softmax(-1)),
    "cross_entropy": (ONE, lambda a: F.cross_entropy(a, IDS())),
    "mse_loss": (TWO, F.mse_loss),
    "attention": ((H, H, H), attention),
    "rotary": ((H,), rotated),
    "embedding": ((M,), lambda w: F.embedding(IDS(), w)),
    "dropout": (ONE, lambda a: F.dropout(a, 0.5)),
}


def name_of(result, low):
    return {low: "16", torch.float32: "32"}.get(result.dtype, "-")


def lines(low):
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", low)
    for name, (shapes, compute) in CASES.items():
        for dtypes in itertools.product((torch.float32, low), repeat=len(shapes)):
            operands = [torch.empty(s, dtype=d, device="cuda") for s, d in zip(shapes, dtypes)]
            try:
                results = compute(*operands)
                results = results if isinstance(results, tuple) else (results,)
                told = " ".join(name_of(r, low) for r in results)
            except (RuntimeError, TypeError):
                told = "error"
            yield "\t".join((name, " ".join(name_of(o, low) for o in operands), told))


with FakeTensorMode():
    table = list(lines(torch.bfloat16))
    assert table == list(lines(torch.float16))
print("\n".join(table))
