# The loss curve of curves.lua once more, by PyTorch: from the same weights, on the same bytes. Ends with
# code 1 if the losses of a step differ by more than MOST of PyTorch's.
#     python3 torch_curves.py WEIGHTS TEXT LOSSES MOST
# WEIGHTS is the folder that curves.lua saved before its first step, LOSSES the file that it wrote.
import json
import math
import struct
import sys

import torch

from torch_gpt2 import GPT2

# The modules of torch_gpt2.py by their names in the file.
NAMES = {"attn.c_attn": "c_attn", "attn.c_proj": "c_proj", "mlp.c_fc": "c_fc", "mlp.c_proj": "c_out"}


# The tensors of a safetensors file, which are all f32: the length of a header, the header, the bytes.
def read_weights(path):
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        data = bytearray(file.read())
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["dtype"] == "F32", name
            first, end = entry["data_offsets"]
            tensors[name] = torch.frombuffer(data, dtype=torch.float32, offset=first,
                                             count=(end - first) // 4).view(entry["shape"])
    return tensors


# A linear layer of the file has its weight as [inputs, outputs]; PyTorch's is [outputs, inputs].
def fill(model, tensors):
    state = {}
    for name, tensor in tensors.items():
        for theirs, own in NAMES.items():
            if theirs in name:
                name = name.replace(theirs, own)
                tensor = tensor.t() if tensor.dim() == 2 else tensor
                break
        state[name] = tensor.contiguous()
    model.load_state_dict(state)  # raises if a name is missing, or there is one more


def batch_of(text, step, batch, length, device):
    rows = []
    for row in range(batch):
        first = (step * batch + row) * length % (len(text) - length)
        rows.append(text[first : first + length + 1])
    rows = torch.stack(rows).to(device)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def main(weights, text, losses, most):
    with open(losses) as file:
        ours = json.load(file)
    with open(f"{weights}/config.json") as file:
        config = json.load(file)
    with open(text, "rb") as file:
        text = torch.tensor(list(file.read()))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPT2(config["n_layer"], config["n_embd"], config["n_head"], config["vocab_size"], ours["length"])
    fill(model, read_weights(f"{weights}/model.safetensors"))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=ours["lr"], betas=(0.9, 0.999), eps=1e-8,
                                  weight_decay=ours["decay"])
    theirs = []
    for step in range(len(ours["losses"])):
        ids, targets = batch_of(text, step, ours["batch"], ours["length"], device)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        theirs.append(loss.item())
        print(f"step {step}: ours {ours['losses'][step]:.5f}, PyTorch {theirs[-1]:.5f}")
    shares = [abs(a - b) / b for a, b in zip(ours["losses"], theirs)]
    shares = [share if math.isfinite(share) else math.inf for share in shares]
    worst = max(range(len(shares)), key=lambda step: shares[step])
    text = (f"{len(theirs)} losses differ by at most {shares[worst]:.5f} of PyTorch's (step {worst}; allowed: {most}); "
            f"the last: {ours['losses'][-1]:.4f}, PyTorch {theirs[-1]:.4f}")
    if not theirs or shares[worst] > most:
        sys.exit("error: " + text)
    print(text)


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit("usage: torch_curves.py WEIGHTS TEXT LOSSES MOST")
    main(*sys.argv[1:4], float(sys.argv[4]))
