-- Run by every rank of fsdp_summon_spec.lua: summon { offload = "cpu" }. Gathered values are in the
-- second pool, and the first pool has one unit at the most while they go there.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local fails, same, memory, models = expect.fails, expect.same, expect.memory, expect.models
local rank, size = ms.rank(), ms.world_size()
local shards = models.pairs_of_ranks()

local cases = {
  {}, { layout = "rows" }, { offload = "cpu" }, { offload = "cpu", layout = "rows" },
  { offload = "cpu", strategy = "no_shard" }, { strategy = "shard_grad_op" },
  { precision = { param = "bf16" } }, { find_unused = true, layout = "rows" },
}
if size == 4 then
  cases = {
    { strategy = "hybrid_shard" },
    { reshard_after_forward = 2, layout = "rows" },
    -- Parameters of one rank alone beside others, so that a unit has both.
    { group_of = function(_, name) if name == "2.bias" then return shards:split { { 0 }, { 1 } } end
    end },
  }
end

-- Three units with parameters; those of the second are the most.
local function new_model(options)
  ms.seed(1)
  local net = ms.nn.Sequential(ms.nn.Linear(6, 7), ms.nn.Linear(7, 65), ms.nn.Linear(65, 3))
  return models.fsdp(net, { wrap = { class = "Linear" } }, options)
end

local function loss_of(model)
  return model(models.input(4, 6, 50 + rank)):to "f32":square():mean()
end
local function backward(model) loss_of(model):backward() end

local function equal(what, value, expected)
  if value ~= expected then
    error(("rank %d: %s: %s, not %s"):format(rank, what, value, expected), 2)
  end
end

local function elements(shape)
  local count = 1
  for _, n in ipairs(shape) do count = count * n end
  return count
end

-- The bytes of a parameter, or of several that are together, padded to `ranks` shards.
local function padded(parameters, ranks, rows)
  local numbers = 0
  for _, p in ipairs(parameters) do
    local shape = p:full_shape()
    local part = elements(shape) // shape[1]
    numbers = numbers + (rows and (shape[1] + ranks - 1) // ranks * ranks * part
      or elements(shape))
  end
  return 4 * (rows and numbers or (numbers + ranks - 1) // ranks * ranks)
end

-- What summon adds to the second pool, for all units together and for the largest; and at the most
-- to the first one. Parameters that are not sharded stay where they are, and what they held is
-- copied.
local function sizes_of(model, options)
  local ranks, rows = model:shard_group():size(), options.layout == "rows"
  local all, largest, main = 0, 0, 0
  for _, unit in ipairs(model:units()) do
    if #unit.parameters > 0 then
      local bytes = padded(unit.parameters, ranks, rows and ranks > 1)
      -- Of an offloaded shard, a copy travels.
      local copied = options.offload and bytes // ranks or 0
      all, largest = all + bytes, math.max(largest, bytes)
      if ranks > 1 then main = math.max(main, bytes + copied) end
    end
  end
  return all, largest, main
end

local function check_memory(model, options, what)
  local all, largest, main = sizes_of(model, options)
  local sharded = model:shard_group():size() > 1
  local before, outside = memory()
  ms.reset_peak()
  model:summon({ offload = "cpu", writeback = false }, function()
    local live, offloaded = memory()
    equal(what .. ": first pool inside", live - before, 0)
    equal(what .. ": second pool inside", offloaded - outside, all)
  end)
  equal(what .. ": most in the first pool", ms.memory().peak - before, main)
  equal(what .. ": most in the second pool", ms.memory().offload_peak - outside, all)

  -- Ranks that look at nothing give each unit back at once.
  ms.reset_peak()
  model:summon({ offload = "cpu", writeback = false, rank0_only = true }, function(list)
    equal(what .. ": parameters", #list, rank == 0 and 6 or 0)
    equal(what .. ": on rank 0", select(2, memory()) - outside, rank == 0 and all or 0)
  end)
  equal(what .. ": rank 0, first pool", ms.memory().peak - before, main)
  equal(what .. ": rank 0, second pool", ms.memory().offload_peak - outside,
    rank == 0 and all or sharded and largest or 0)

  ms.reset_peak()
  fails(function()
    model:summon({ offload = "cpu" }, function(list)
      for _, p in ipairs(list) do p:fill_(7) end
      error "it went wrong"
    end)
  end, "it went wrong")
  local live, offloaded = memory()
  equal(what .. ": all is given back", live - before + offloaded - outside, 0)
end

-- Copies of whole gradients.
local function gradients(model, options)
  local found = {}
  options.grads = true
  model:summon(options, function(list)
    for _, p in ipairs(list) do found[p:name()] = p:grad():detach():clone() end
  end)
  return found
end

for number, options in ipairs(cases) do
  local what = "case " .. number
  local model, other = new_model(options), new_model(options)
  local whole = expect.whole(other)
  if not options.group_of then check_memory(model, options, what) end

  local seen = {}
  model:summon({ offload = "cpu", writeback = false }, function(list)
    for _, p in ipairs(list) do
      assert(p:dtype() == "f32")
      seen[p:name()] = p:detach():clone()
      p:mul_(3)
    end
  end)
  same(seen, whole, what .. ", looked at")
  same(expect.whole(model), whole, what .. ", not written")
  for _, one in ipairs { model, other } do
    one:summon({ offload = one == model and "cpu" or nil, names = { "1.weight" } }, function(list)
      equal(what .. ": names", #list, 1)
      list[1]:mul_(2)
    end)
  end
  local written = expect.whole(other)
  assert(not written["1.weight"]:eq(whole["1.weight"]):all():item())
  same(expect.whole(model), written, what .. ", written")

  -- Gradients, and a look between forward and backward.
  backward(other)
  local loss = loss_of(model)
  model:summon({ offload = "cpu", writeback = false }, function(list)
    same({ list[1] }, { written[list[1]:name()] }, what .. ", in a pass")
  end)
  loss:backward()
  local expected = gradients(other, { writeback = false })
  same(gradients(model, { offload = "cpu", writeback = false }), expected, what .. ", gradients")
  for _, one in ipairs { model, other } do
    one:summon({ offload = one == model and "cpu" or nil, grads = true }, function(list)
      for _, p in ipairs(list) do p:grad():mul_(4) end
    end)
  end
  same(gradients(model, {}), gradients(other, {}), what .. ", gradients written")

  -- Training goes on as if nothing had been looked at.
  for _, one in ipairs { model, other } do
    local optimizer = ms.optim.adamw(one, { lr = 1e-2 })
    optimizer:step()
    optimizer:zero_grad()
    backward(one)
    optimizer:step()
  end
  same(expect.whole(model), expect.whole(other), what .. ", trained")
  model:unwrap()
  other:unwrap()
end

-- Whole gradients take as many bytes of the second pool as their numbers.
do
  local model, numbers = new_model {}, 0
  backward(model)
  for _, p in ipairs(model:parameters()) do numbers = numbers + elements(p:full_shape()) end
  local all = sizes_of(model, {})
  local before, outside = memory()
  model:summon({ offload = "cpu", grads = true }, function()
    local live, offloaded = memory()
    equal("first pool with gradients", live, before)
    equal("second pool with gradients", offloaded - outside,
      all + (size > 1 and 4 * numbers or 0))
  end)
  local live, offloaded = memory()
  equal("gradients are given back", live - before + offloaded - outside, 0)
  fails(function() model:summon({ offload = "disk" }, print) end, "offload = 'disk'", "cpu")
  fails(function() model:summon({ offload = "cpu", rank0_only = true }, print) end,
    "writeback = false")
  model:unwrap()
  model = new_model { strategy = "no_shard" }
  fails(function() model:summon({ offload = "cpu" }, print) end, "no_shard", "leave offload out")
end

print(("rank %d is done"):format(rank))
