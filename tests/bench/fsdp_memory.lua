-- The memory of a rank that trains a sharded model of twelve units: the sum of its parts, and the
-- peak. It needs no data, so `check` shows the figures of any number of ranks within a second:
--     ./moonshard check tests/bench/fsdp_memory.lua -n 4
-- tests/dist/fsdp_memory.lua asserts the same sum to the byte, for a smaller model.
local ms = require "moonshard"
local core = require "moonshard.core"

local cfg = ms.config {
  layers = 12, width = 768, heads = 12, vocab = 50304, batch = 4, length = 64,
  prefetch = { "backward_pre", choices = { "none", "backward_pre" } },
}
local ahead = cfg.prefetch == "backward_pre" and ms.world_size() > 1 and 1 or 0

-- Bytes between two steps, and how much more a step takes at the most.
local function measure(options)
  local model = ms.fsdp(ms.nn.gpt2 {
    vocab = cfg.vocab, context = cfg.length, layers = cfg.layers, width = cfg.width,
    heads = cfg.heads,
  }, options)
  local optimizer = ms.optim.adamw(model, { lr = 1e-4 })
  local x = ms.randint { cfg.batch, cfg.length, low = 0, high = cfg.vocab, seed = 1 }:keep()
  local between
  for step in ms.steps(4) do
    core.collect()
    between = ms.memory().live
    if step == 3 then ms.reset_peak() end
    model(x):cross_entropy(x):backward()
    optimizer:step()
  end
  return between, ms.memory().peak - between, model
end

-- A rank alone has parameters and gradients at all times: what a step adds are activations.
local parts = {}
for rank = 0, ms.world_size() - 1 do parts[rank + 1] = { rank } end
local activations, between, more, model
do
  local _, of_one, alone = measure { group = ms.world():split(parts) }
  activations = of_one
  alone:unwrap()
end
core.collect()
local before = ms.memory().live
between, more, model = measure { prefetch = cfg.prefetch }
between = between - before

local units = model:units()
local root, unit = units[1].bytes, units[2].bytes
if ms.world_size() == 1 then root, unit = 0, 0 end
local sum = between + 2 * root + (2 + ahead) * unit + activations
local function mib(bytes) return bytes / 2 ^ 20 end
if ms.rank() == 0 then
  print(("%d ranks, %d units: parameters, gradients, states in shards %.1f, root %.1f, units in \z
    flight %.1f, activations %.1f: together %.1f MiB, peak %.1f MiB"):format(ms.world_size(),
    #units, mib(between), mib(2 * root), mib((2 + ahead) * unit), mib(activations), mib(sum),
    mib(between + more)))
end
