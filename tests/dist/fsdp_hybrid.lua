-- Hybrid shards on four ranks, two groups of two: what travels in which pass, by the record of
-- collectives, and what comes out, beside ddp.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local difference, models = expect.difference, expect.models
local world, rank, size = ms.world(), ms.rank(), ms.world_size()
assert(size == 4)

local WIDTH, ROWS = 6, 4

local function new_net()
  ms.seed(2)
  return ms.nn.Sequential(ms.nn.Linear(WIDTH, WIDTH), ms.nn.Linear(WIDTH, WIDTH),
    ms.nn.Linear(WIDTH, 3))
end

local hybrid = { strategy = "hybrid_shard", wrap = { class = "Linear" } }
local function shard(how) return models.fsdp(new_net(), hybrid, how) end

local function backward(model, i)
  model(models.input(ROWS, WIDTH, i * 10 + rank)):square():mean():backward()
end

local function count(f)
  local found = setmetatable({}, { __index = function() return 0 end })
  for _, record in ipairs(expect.records(f)) do
    -- Hosts tell each other who has a gradient.
    local hosts = record.label == "which parameters have a gradient"
    if not hosts then found[record.op] = found[record.op] + 1 end
  end
  return found
end

local function check_counts(what, found, expected)
  for _, op in ipairs { "all_gather", "reduce_scatter", "all_reduce" } do
    assert(found[op] == expected[op], ("%s: %d %s"):format(what, found[op], op))
  end
end

-- Three passes of two steps; returns the weights, and what the second step sent. ddp has the sum of
-- the passes' means, as all ways of accumulating.
local function train(model, more)
  local optimizer, found = ms.optim.sgd(model, { lr = 0.1, momentum = 0.9 }), nil
  for step = 1, 2 do
    found = count(function()
      model:accumulate(3, function(i) backward(model, step * 10 + i) end)
    end)
    if more then more(model) end
    optimizer:step()
  end
  return expect.whole(model), found
end

local expected = train(ms.ddp(new_net()))
-- Three units, each gathered for forward and backward in each pass.
local reductions = {
  shard = { reduce_scatter = 9, all_reduce = 3 }, all = { reduce_scatter = 9, all_reduce = 9 },
  ["local"] = { reduce_scatter = 3, all_reduce = 3 },
}
for accumulate, counts in ms.sorted_pairs(reductions) do
  for _, find_unused in ipairs { false, true } do
    local own, found = train(shard {
      accumulate = accumulate, find_unused = find_unused, layout = find_unused and "rows" or nil,
    })
    expect.close(own, expected, 1e-6, accumulate)             -- sums in another order
    counts.all_gather = 18 + (find_unused and found.all_gather - 18 or 0)
    check_counts(accumulate, found, counts)
  end
end

-- A link before the reduction, native: what replicas keep has passed it. 0.02: bf16 rounds to 2^-9,
-- in three passes and two levels.
for _, link in ipairs { ms.hooks.bf16_compress(), ms.hooks.cast { dtype = "f16" } } do
  local own, found = train(shard { comm_hook = link })
  check_counts("cast", found, { all_gather = 18, reduce_scatter = 9, all_reduce = 3 })
  local d = difference(own, expected)
  assert(d > 0 and d <= 0.02, tostring(d))
end

-- Links between the reductions run where replicas exchange, and only there; op "sum".
do
  local chain = { ms.hooks.reduce { between = ms.hooks.cast { dtype = "bf16" } } }
  local own, found = train(shard { comm_hook = ms.hooks.chain(chain) })
  check_counts("between", found, { all_gather = 18, reduce_scatter = 9, all_reduce = 3 })
  expect.close(own, expected, 0.02, "between")
  local function quarter(model)
    for _, p in ipairs(model:parameters()) do p:grad():mul_(1 / size) end
  end
  own = train(shard { comm_hook = ms.hooks.reduce { op = "sum" } }, quarter)
  expect.close(own, expected, 1e-6, "a sum")
end

-- A link in Lua may reduce as it likes, so every pass reduces fully.
do
  local model = shard { comm_hook = function(bucket, next) return next(bucket) end }
  local own, found = train(model)
  expect.close(own, expected, 1e-6, "in Lua")
  check_counts("in Lua", found, { all_gather = 18, reduce_scatter = 9, all_reduce = 9 })
  local ok, message = pcall(model.set_replica_sync, model, false)
  assert(not ok and message:find("native links only", 1, true), message)
end

-- With shards, or copies, of one rank each there is one reduction, and nothing to wait for.
for _, ranks in ipairs { 1, size } do
  local one, other = world:levels(ranks)
  local model, ddp = shard { shard_group = one, replica_group = other }, ms.ddp(new_net())
  for i = 1, 2 do
    model:set_replica_sync(i == 2)
    backward(model, i)
    backward(ddp, i)
  end
  local norms = { model:clip_grad_norm(math.huge):item(), ddp:clip_grad_norm(math.huge):item() }
  assert(math.abs(norms[1] / norms[2] - 1) <= 1e-6)
end

-- By hand: pieces have no gradient until replicas have exchanged; reset drops what was kept.
do
  local model = shard()
  model:set_replica_sync(false)
  check_counts("by hand", count(function() backward(model, 1) end),
    { all_gather = 6, reduce_scatter = 3, all_reduce = 0 })
  for _, p in ipairs(model:parameters()) do assert(p:grad() == nil) end
  model:reset()
  model:set_replica_sync(true)
  backward(model, 2)
  local ddp = ms.ddp(new_net())
  backward(ddp, 2)
  local norms = { model:clip_grad_norm(math.huge):item(), ddp:clip_grad_norm(math.huge):item() }
  assert(math.abs(norms[1] / norms[2] - 1) <= 1e-6)
end

-- A unit that only passes before have used is reduced by the next full pass.
do
  local Net = ms.nn.class "Net"
  function Net:init()
    ms.seed(4)
    self.first, self.second = ms.nn.Linear(WIDTH, WIDTH), ms.nn.Linear(WIDTH, WIDTH)
  end
  function Net:forward(x, both) return both and self.second(self.first(x)) or self.first(x) end
  local function pass(model, i)
    model(ms.full(i, { ROWS, WIDTH }), i == 1):square():mean():backward()
  end
  local whole, model = Net(), models.fsdp(Net(), hybrid)
  local found = count(function() model:accumulate(2, function(i) pass(model, i) end) end)
  check_counts("skipped", found, { all_gather = 6, reduce_scatter = 4, all_reduce = 2 })
  for i = 1, 2 do pass(whole, i) end
  local one, other = model:clip_grad_norm(math.huge):item(), whole:clip_grad_norm(math.huge):item()
  assert(math.abs(one / other - 1) <= 1e-6)
  assert(model.module.second.weight:grad())
end

-- no_sync sends nothing but gathers.
do
  local model = shard()
  local found = count(function() model:no_sync(function() backward(model, 1) end) end)
  check_counts("no_sync", found, { all_gather = 6, reduce_scatter = 0, all_reduce = 0 })
end

-- A job has room for 256 groups: models that are wrapped one after another share theirs. After a
-- model of each kind the room is filled, and the next models need no more.
do
  local held = {}
  local function wrap()
    ms.fsdp(ms.nn.Linear(2, 2), { strategy = "hybrid_shard" })
    ms.fsdp(ms.nn.Linear(2, 2), { reshard_after_forward = 2 })
  end
  wrap()
  expect.fails(function()
    for i = 1, 300 do held[i] = { world:levels(2) } end
  end, "a job may have 256 alive")
  assert(#held > 50, #held)
  wrap()
end

print(("rank %d is done"):format(rank))
