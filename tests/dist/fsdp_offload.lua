-- Run by every rank of fsdp_offload_spec.lua: offloaded shards, gradients and states. Every way of
-- training has the bits that it has without offload, and memory is the sum of its parts.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local fails, same, models = expect.fails, expect.same, expect.models
local rank, size = ms.rank(), ms.world_size()
local hooks = ms.hooks

local function new_model() return models.gpt2 { vocab = 17 } end

-- Some steps. how: see models.train.
local function train(options, how, offload)
  how.steps = expect.full and 3 or 2
  local model, norms = models.train(how, { offload = offload }, options)
  local found = expect.whole(model)
  local memory = ms.memory()
  assert(offload and memory.offload_live > 0 or not offload and memory.offload_live == 0)
  model:unwrap()
  return found, norms
end

local strategies = {
  { strategy = "full_shard" }, { strategy = "full_shard", layout = "rows" },
  { strategy = "shard_grad_op" }, { strategy = "no_shard" },
  { strategy = "full_shard", find_unused = true },
}
if size == 4 then
  strategies[#strategies + 1] = { strategy = "hybrid_shard" }
  strategies[#strategies + 1] = { reshard_after_forward = 2 }
end
local low = { param = "bf16", reduce = "bf16", keep = { ".*ln.*" } }
local ways = {
  { "plainly", {}, {} }, { "gathered ahead", { prefetch = "both" }, {} },
  { "clipped", {}, { clip = 0.1 } },
  { "recomputed", { precision = { param = "bf16" } }, { recompute = true } },
  { "low gradients", { precision = low, keep_low_precision_grads = true }, { clip = 0.1 } },
  { "scaled", { precision = { param = "f16" } }, { scale = 16 } },
  { "stepping early", {}, { policy = "in_backward" } },
  { "stepping late", { precision = low }, { policy = "deferred" } },
  { "clipped in the chain", { comm_hook = hooks.clip { max_norm = 0.1, scope = "global" } }, {} },
  { "joined", {}, { run = function(model, pass) model:join({ divisor = "live" }, pass) end } },
  { "added up by hand", {}, { run = function(model, pass)
    model:no_sync(function() pass(1) end)
    pass(2)
  end } },
  { "looked at", { precision = { param = "bf16" }, full_precision_eval = true }, {
    run = function(model, pass)
      local x = models.tokens(0)
      local loss = model(x):to "f32":cross_entropy(x)
      model:summon({ writeback = false }, function(list)
        for _, p in ipairs(list) do assert(p:dtype() == "f32") end
      end)
      model:eval()
      assert(ms.no_grad(function() return model(x) end):dtype() == "f32")
      model:train()
      loss:backward()
      pass(3)
    end,
  } },
}
-- Passes outside of no_sync add up as reduced shards.
for _, accumulate in ipairs { "local", "shard", "all" } do
  for _, precision in ipairs { { param = "bf16" }, false } do
    table.insert(ways, { "accumulate = " .. accumulate, {
      accumulate = accumulate, precision = precision or nil,
    }, { run = function(model, pass) model:accumulate(3, pass) end } })
  end
end
local function compare(strategy, way)
  local options = models.merged(strategy, way[2])
  local what = ("%s, %s"):format(strategy.strategy or "near", way[1])
  local expected, norms = train(options, way[3], nil)
  local found, offloaded = train(options, way[3], "cpu")
  same(found, expected, what)
  for step, norm in pairs(norms) do assert(norm == offloaded[step], what) end
end
-- 5 i + k: 3 and 4 ranks together have each of the ways, and each of the strategies.
for i, strategy in ipairs(strategies) do
  for k, way in ipairs(ways) do if expect.takes(5 * i + k, 12) then compare(strategy, way) end end
end

-- Between steps: shards with one element more for empty pieces, gradients, and two numbers of AdamW
-- for each, are offloaded. The device has counters of steps at most.
local function two_layers() return ms.nn.Sequential(ms.nn.Linear(6, 7), ms.nn.Linear(7, 5)) end
local function check_memory(strategy, precision)
  local before = expect.memory()
  local options = { offload = "cpu", precision = precision, wrap = { class = "Linear" } }
  local model = models.fsdp(two_layers(), options, strategy)
  local optimizer = ms.optim.adamw(model, { lr = 1e-2 })
  for _ in ms.steps(2) do
    model(ms.ones { 2, 6 }):to "f32":sum():backward()
    optimizer:step()
  end
  local shard_bytes, flats = 0, 0
  for _, unit in ipairs(model:units()) do
    shard_bytes = shard_bytes + unit.shard_bytes
    if #unit.parameters > 0 then flats = flats + 1 end
  end
  local device, offloaded = expect.memory()
  assert(offloaded == 4 * shard_bytes + 4 * flats,
    ("%s: %d, not %d"):format(strategy.strategy, offloaded, 4 * shard_bytes + 4 * flats))
  assert(device - before <= 8 * #model:parameters(),
    ("%s: %d on the device"):format(strategy.strategy, device - before))
  model:unwrap()
end
for _, strategy in ipairs(strategies) do
  for _, precision in ipairs { { param = "bf16" }, false } do
    check_memory(strategy, precision or nil)
    assert(select(2, expect.memory()) == 0, "all is given back")
  end
end

-- States and files, and what is written in summon.
for _, strategy in ipairs(strategies) do
  local model = models.fsdp(new_model(), { offload = "cpu" }, strategy)
  same(expect.whole(model), new_model():state(), "state")
  model:summon({ grads = true }, function(list) for _, p in ipairs(list) do p:mul_(2) end end)
  local doubled = new_model():state()
  for _, t in pairs(doubled) do ms.no_grad(function() t:mul_(2) end) end
  same(expect.whole(model), doubled, "written")
  model:load_state(new_model():state())
  same(expect.whole(model), new_model():state(), "loaded")
  local x = models.tokens(0)
  model(x):cross_entropy(x):backward()
  local inner = model:unwrap()
  same(inner:state(), new_model():state(), "unwrapped")
end
-- Made on "meta".
do
  local function make() return ms.device("meta", new_model) end
  for _, strategy in ipairs(strategies) do
    local model = models.fsdp(make(), { offload = "cpu" }, strategy)
    same(expect.whole(model), new_model():state(), "meta")
    model:unwrap()
  end
end

fails(function() ms.fsdp(new_model(), { offload = "disk" }) end, "offload = 'disk'", "cpu")
fails(function() ms.fsdp(new_model(), { pin = true }) end, "pin", "offload")
if size > 1 then
  fails(function() ms.fsdp(new_model(), { offload = rank == 0 and "cpu" or nil }) end,
    "ranks have different models", "offload = cpu", "offload = nil")
end

print(("rank %d is done"):format(rank))
