-- What every rank of fsdp_decoders_spec.lua runs: the folders of tests/golden/decoders go straight
-- into shards, compute there what transformers computes, train as one rank does, and are written
-- again as they were.
local ms = require "moonshard"
local core = require "moonshard.core"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local cfg = ms.config { folder = "", golden = "" }
local nn, rank = ms.nn, ms.rank()
local golden = assert(ms.safetensors.load(cfg.golden .. "/results.safetensors"))
local tokens = golden.tokens

local function open(name)
  return ms.device("meta", function() return assert(nn.pretrained(cfg.golden .. "/" .. name)) end)
end

local function loss_of(model)
  return model(tokens):view(24, 48):cross_entropy(tokens:view(24))
end

-- Losses of three steps, which differ from those of one rank by the order of sums.
local function train(model)
  local optimizer, losses = ms.optim.adamw(model, { lr = 1e-3 }), {}
  for i = 1, 3 do
    local loss = loss_of(model)
    loss:backward()
    optimizer:step()
    optimizer:zero_grad()
    losses[i] = loss:item()
  end
  return losses
end

for i, name in ipairs {
  "qwen2", "qwen3", "mistral", "smollm2", "smollm3", "olmo2", "llama_bias",
} do
  local path = cfg.golden .. "/" .. name
  local model = ms.fsdp(open(name), { strategy = i % 2 == 0 and "shard_grad_op" or "full_shard" })
  expect.same(expect.whole(model), assert(nn.pretrained(path)):state(), name)
  assert(#model:units() == 1 + model.module.options.layers, name .. ": each block is a unit")
  local logits = ms.no_grad(function() return model(tokens) end)
  assert((logits - golden["logits." .. name]):abs():max():item() < 1e-5, name)
  local again = ("%s/%s"):format(cfg.folder, name)
  assert(model:save(again))
  if rank == 0 then
    local before = assert(ms.safetensors.load(path .. "/model.safetensors"))
    for weight, t in pairs(assert(ms.safetensors.load(again .. "/model.safetensors"))) do
      assert(core.bytes(before[weight]) == core.bytes(t), weight)
    end
  end
  local losses, alone = train(model), train(assert(nn.pretrained(path)))
  for k = 1, 3 do
    assert(math.abs(losses[k] - alone[k]) < 1e-5, ("%s: loss %d is %g, and %g on one rank")
      :format(name, k, losses[k], alone[k]))
  end
  assert(losses[3] < losses[1], name)
  -- Adapters are sharded with the model.
  local adapted = ms.fsdp(nn.lora(open(name), { rank = 2 }))
  local steps = train(adapted)
  assert(steps[3] < steps[1], name .. ", adapters")
end
print(("rank %d is done"):format(rank))
