"""For `moonshard bench generate`: a GPT-2 in PyTorch that keeps keys and values, greedy, f32.

    python3 tests/bench/peers/generate_peer.py LAYERS WIDTH HEADS VOCAB CONTEXT PROMPT COUNT ROUNDS THREADS

Prints its name, and the medians in milliseconds of the prompt's forward and of one more token.
"""
import statistics, sys, time

import torch
import torch.nn.functional as F

LAYERS, WIDTH, HEADS, VOCAB, CONTEXT, PROMPT, COUNT, ROUNDS, THREADS = map(int, sys.argv[1:])
HEAD = WIDTH // HEADS
torch.set_num_threads(THREADS)
torch.manual_seed(1)


def weight(*shape): return torch.randn(*shape) * 0.02


wte, wpe = weight(VOCAB, WIDTH), weight(CONTEXT, WIDTH)
ones, zeros = torch.ones(WIDTH), torch.zeros(WIDTH)
blocks = [dict(qkv=weight(3 * WIDTH, WIDTH), out=weight(WIDTH, WIDTH), up=weight(4 * WIDTH, WIDTH), down=weight(WIDTH, 4 * WIDTH),
               b_qkv=torch.zeros(3 * WIDTH), b_up=torch.zeros(4 * WIDTH)) for _ in range(LAYERS)]


def norm(x): return F.layer_norm(x, (WIDTH,), ones, zeros)


def forward(ids, first, cache):
    """The id that follows, and keys and values of all positions in the cache."""
    time_ = ids.shape[0]
    x = wte[ids] + wpe[first:first + time_]
    for block, (keys, values) in zip(blocks, cache):
        q, k, v = F.linear(norm(x), block["qkv"], block["b_qkv"]).view(time_, 3, HEADS, HEAD).permute(1, 2, 0, 3)
        keys[:, first:first + time_], values[:, first:first + time_] = k, v
        seen = first + time_
        y = F.scaled_dot_product_attention(q[None], keys[None, :, :seen], values[None, :, :seen], is_causal=time_ > 1)[0]
        x = x + F.linear(y.transpose(0, 1).reshape(time_, WIDTH), block["out"], zeros)
        x = x + F.linear(F.gelu(F.linear(norm(x), block["up"], block["b_up"]), approximate="tanh"), block["down"], zeros)
    return F.linear(norm(x[-1]), wte).argmax().view(1)


def run(count):
    """Seconds of the prompt's forward, and of `count` ids after it."""
    ids = torch.arange(PROMPT) * 7 % VOCAB
    cache = [(torch.empty(HEADS, PROMPT + count + 1, HEAD), torch.empty(HEADS, PROMPT + count + 1, HEAD)) for _ in blocks]
    begin = time.perf_counter()
    last = forward(ids, 0, cache)
    middle = time.perf_counter()
    for i in range(count): last = forward(last, PROMPT + i, cache)
    return middle - begin, time.perf_counter() - middle


with torch.inference_mode():
    run(2)
    times = [run(COUNT) for _ in range(ROUNDS)]
prefill, decode = (statistics.median(t[i] for t in times) * 1000 for i in (0, 1))
print(f"PyTorch-{torch.__version__.split('+')[0]} {prefill:.3f} {decode / COUNT:.4f}")
