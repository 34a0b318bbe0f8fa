-- Ranks that do not do the same: different numbers of inputs (join), and different units
-- (find_unused). What they compute is compared with one model without shards that has the inputs of
-- all ranks.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local fails, models = expect.fails, expect.models
local world, rank, size = ms.world(), ms.rank(), ms.world_size()
local options = ms.config { case = "" }

local WIDTH, ROWS = 8, 4

-- An encoder that only some inputs pass, experts, and a trunk.
local Net = ms.nn.class "Net"
function Net:init()
  self.encoder = ms.nn.Linear(WIDTH, WIDTH)
  self.experts = ms.nn.List { ms.nn.Linear(WIDTH, WIDTH), ms.nn.Linear(WIDTH, WIDTH),
    ms.nn.Linear(WIDTH, WIDTH) }
  self.trunk = ms.nn.Linear(WIDTH, WIDTH)
end
function Net:forward(x, how)
  how = how or {}
  if how.encode then x = self.encoder(x):tanh() end
  if how.expert then x = self.experts[how.expert](x):tanh() end
  return self.trunk(x)
end

local function new_net()
  ms.seed(5)
  return Net()
end

local function input(step, r) return models.input(ROWS, WIDTH, step * 10 + r) end

-- On four ranks, hybrid shards are over two of them.
local shards, replicas = world:levels(size == 4 and 2 or nil)

local function shard(how)
  local hybrid = how and how.strategy == "hybrid_shard"
  return models.fsdp(new_net(), {
    wrap = { class = "Linear" }, shard_group = hybrid and shards or nil,
    replica_group = hybrid and replicas or nil,
  }, how)
end

-- 1e-6: sums over ranks and parts are added in another order.
local function check(what, a, b) expect.close(a, b, 1e-6, what) end

----------------------------------------------------------------------------------------- errors

-- Each of these ends the job, with the same report on all ranks.
local ends = {
  forwards = function()
    local model = shard { find_unused = true }
    for step = 1, 2 do
      local y = model(input(step, rank))
      if rank == 0 then y:sum():backward() end
    end
  end,
  order = function()
    local model = shard()
    model(input(1, rank), { expert = rank + 1 }):sum():backward()
  end,
  steps = function()
    local model = shard()
    local optimizer = ms.optim.sgd(model, { lr = rank == 0 and 0.1 or 0.2 })
    model:join({}, function()
      for step = 1, 2 - rank // (size - 1) do
        model(input(step, rank)):sum():backward()
        optimizer:step()
      end
    end)
  end,
}
if options.case ~= "" then ends[options.case]() end

---------------------------------------------------------------------------------------------- join

-- Rank r has this many inputs: the last has none.
local function inputs_of(r) return size - 1 - r + (size == 1 and 3 or 0) end
local MOST <const> = inputs_of(0)

local function rate(step) return 0.1 / step end

-- A step as both models take it. The rate is set by the loop, so ranks without inputs left must
-- learn it.
local function finish(model, optimizer, step, clip)
  optimizer:groups()[1].lr = rate(step)
  if clip then model:clip_grad_norm(clip) end
  if step == 2 then return optimizer:zero_grad() end
  optimizer:step(step == 1 and { only_if = ms.tensor({ 1 }):gt(0):view() } or nil)
end

local function expected_of(how)
  local model = new_net()
  local optimizer = ms.optim.adamw(model, { lr = 1 })
  for step = 1, MOST do
    local live = 0
    for r = 0, size - 1 do if inputs_of(r) >= step then live = live + 1 end end
    for r = 0, live - 1 do
      local loss = model(input(step, r), { expert = 1, encode = true }):square():mean()
      loss = loss / (how.divisor == "live" and live or size)
      loss:backward()
    end
    finish(model, optimizer, step, how.clip)
  end
  return expect.whole(model)
end

local function trained(how)
  local model = shard { strategy = how.strategy, accumulate = how.accumulate }
  local optimizer = ms.optim.adamw(model, { lr = 1 })
  local result = model:join({ divisor = how.divisor }, function()
    for step = 1, inputs_of(rank) do
      model:accumulate(how.micro or 1, function(i)
        local parts = how.micro or 1
        local x = input(step, rank):narrow(1, (i - 1) * ROWS // parts + 1, ROWS // parts)
        local loss = model(x, { expert = 1, encode = true }):square():mean() / parts
        loss:backward()
      end)
      finish(model, optimizer, step, how.clip)
      ms.no_grad(function() model(input(step, rank)) end)
    end
    return "done"
  end)
  assert(result == "done")
  return model
end

local function check_join(strategy, how)
  how.strategy = strategy
  local model = trained(how)
  local what = ("%s, divisor %s, clip %s, micro %s"):format(strategy, how.divisor, how.clip,
    how.micro)
  check(what, expect.whole(model), expected_of(how))
  -- Afterwards all ranks train on as before.
  model(input(1, rank)):square():mean():backward()
end
for i, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard", "hybrid_shard" } do
  for k, how in ipairs {
    {}, { divisor = "live" }, { clip = 0.5 }, { micro = 2 }, { micro = 2, accumulate = "local" },
    { divisor = "live", clip = 0.1, micro = 2 },
  } do
    if expect.takes(i + k, 2) then check_join(strategy, how) end
  end
end

-- Validation with unequal numbers of batches finishes, also without a backward.
do
  local model = shard()
  ms.no_grad(function()
    model:join({}, function() for i = 1, rank + 1 do model(input(i, rank)) end end)
  end)
  fails(function() model:join({ divisor = "none" }, print) end, "'all' or 'live'")
  local failed = 0
  model:join({}, function()
    for _, call in ipairs { "state", "summon", "unshard", "reset", "unwrap" } do
      fails(function() model[call](model, {}, print) end, call .. ": inside join")
      failed = failed + 1
    end
  end)
  assert(failed == 5)
end

-- Buffers are each rank's own, or those of the lowest rank with inputs before each forward.
for _, broadcast in ipairs { false, true } do
  local Count = ms.nn.class "Count"
  function Count:init()
    self.layer = ms.nn.Linear(WIDTH, 1)
    self:add_buffer("sum", ms.zeros { 1 })
  end
  function Count:forward(x)
    self.sum:add_(rank + 1)
    return self.layer(x)
  end
  local model = ms.fsdp(Count(), { broadcast_buffers = broadcast })
  model:join({}, function()
    for step = 1, inputs_of(rank) do model(input(step, rank)):sum():backward() end
  end)
  local own = (rank + 1) * inputs_of(rank)
  -- The last forward is rank 0's alone, where all get what it had after the others.
  local shared = rank == 0 and MOST or MOST - 1
  assert(model.module.sum:item() == (broadcast and shared or own))
end

-- stop: all ranks raise before the forward that one cannot run.
if size > 1 then
  local model, forwards = shard(), 0
  fails(function()
    model:join({ stop = true }, function()
      for step = 1, inputs_of(rank) do
        model(input(step, rank)):sum():backward()
        forwards = forwards + 1
      end
    end)
  end, ("rank %d has no inputs left (stop = true)"):format(size - 1))
  assert(forwards == 0)
  model(input(1, rank)):square():mean():backward()
end

--------------------------------------------------------------------------------------- find_unused

-- An encoder that even ranks run, an expert of each rank's own, and one that no rank uses.
local function how_of(r) return { encode = r % 2 == 0, expert = r % 2 + 1 } end

for _, strategy in ipairs { "full_shard", "shard_grad_op", "hybrid_shard" } do
  for _, local_first in ipairs { false, true } do
    local model = shard { strategy = strategy, find_unused = true }
    local optimizer = ms.optim.sgd(model, { lr = 0.1, momentum = 0.9 })
    local whole = new_net()
    local other = ms.optim.sgd(whole, { lr = 0.1, momentum = 0.9 })
    local unused = model.experts[3].weight
    for step = 1, 3 do
      -- Units that only the pass without synchronization uses are reduced by the next one.
      if local_first then
        model:no_sync(function() model(input(step + 10, rank), how_of(rank)):sum():backward() end)
      end
      model(input(step, rank), local_first and {} or how_of(rank)):square():mean():backward()
      assert(unused:grad() == nil)
      local cost = model:stats().agreements
      assert(size == 1 and cost.count == 0 or cost.count > 3 and cost.wait_ms > 0)
      if size > 1 then assert(model.experts[2].weight:grad()) end
      optimizer:step()
      for r = 0, size - 1 do
        if local_first then (whole(input(step + 10, r), how_of(r)):sum() / size):backward() end
        local loss = whole(input(step, r), local_first and {} or how_of(r)):square():mean() / size
        loss:backward()
      end
      other:step()
    end
    check(strategy .. " with own units", expect.whole(model), whole:state())
  end
end

-- A loss scaler: gradients of units that this rank does not use are scaled as well.
do
  local model = shard { find_unused = true }
  local optimizer, scaler = ms.optim.sgd(model, { lr = 0.1 }), ms.optim.scaler { init_scale = 8 }
  local whole = new_net()
  local other = ms.optim.sgd(whole, { lr = 0.1 })
  scaler:scale(model(input(1, rank), how_of(rank)):square():mean()):backward()
  scaler:step(optimizer)
  for r = 0, size - 1 do (whole(input(1, r), how_of(r)):square():mean() / size):backward() end
  other:step()
  check("scaled", expect.whole(model), whole:state())
end

local hash = expect.hash(expect.whole(trained {}))
world:barrier()
print(("rank %d is done, weights %x"):format(rank, hash))
