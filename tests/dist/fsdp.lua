-- What every rank of fsdp_spec.lua runs: sharded training against ddp's, counts of collectives,
-- what handles are, and the errors of misuse. Ends with a hash of weights.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local fails, models = expect.fails, expect.models
local world, rank, size = ms.world(), ms.rank(), ms.world_size()
-- hash_only: only what the last lines print, the hash of trained weights.
local cfg = ms.config { hash_only = false }

local function new_model(options) return models.gpt2(models.merged({ layers = 3 }, options)) end
local function batch(step) return models.batch(step, rank) end

-- Trains a model, and gives its losses and weights. how: model, wrap (options of fsdp, or "ddp"),
-- micro, clip, freeze, dtype of autocast
local function train(how)
  local inner = models.gpt2(models.merged({ layers = expect.full and 3 or 2 }, how.model))
  if how.freeze then
    for _, item in ipairs(inner:named_parameters()) do
      if item.name:find(how.freeze) then item.parameter:requires_grad_(false) end
    end
  end
  local model = how.wrap == "ddp" and ms.ddp(inner) or ms.fsdp(inner, how.wrap)
  -- Two groups, chosen by shapes: the same ones under every strategy.
  -- adamw would blow up the rounding of gradients that are zero in mathematics (biases of keys).
  local optimizer = ms.optim[how.kind or "adamw"]({
    { params = model:parameters(function(p) return p:requires_grad() and p:dim() >= 2 end) },
    { params = model:parameters(function(p) return p:requires_grad() and p:dim() < 2 end),
      weight_decay = 0 },
  }, { lr = 1e-2 })
  local losses, norms, micro = {}, {}, how.micro or 1
  for step in ms.steps(expect.full and 3 or 2) do
    local total = 0
    model:accumulate(micro, function(i)
      local x, y = batch(step * 10 + i)
      local function forward() return model(x):cross_entropy(y) / micro end
      local loss = how.dtype and ms.autocast(how.dtype, forward) or forward()
      loss:backward()
      total = total + loss:detach()
    end)
    norms[step + 1] = how.clip and model:clip_grad_norm(how.clip):item() or 0
    optimizer:step()
    optimizer:zero_grad()
    losses[step + 1] = world:all_reduce(total, "avg"):value():item()
  end
  return { losses = losses, norms = norms, weights = expect.whole(model), model = model }
end

-- The hash is the same on all ranks, however many these are and whether they are threads.
local function print_hash()
  local last = train { wrap = { strategy = "full_shard" } }
  io.write(("rank %d is done, weights %x\n"):format(rank, expect.hash(last.weights)))
end
if cfg.hash_only then return print_hash() end

local function difference(a, b)
  local most = expect.difference(a.weights, b.weights)
  for i = 1, #a.losses do most = math.max(most, math.abs(a.losses[i] / b.losses[i] - 1)) end
  return most
end

-- Strategies that add what ddp adds, in its order: the same bits. With clipping by the norm, whose
-- parts are added in another order, and where shards are added up pass by pass, or first by the
-- ranks of each host: within rounding. Under autocast a weight that differs by one bit may become
-- the next number of bf16, 2^-8 away, which changes a gradient of about 1 by as much: over 3 steps
-- of lr 1e-2, a weight differs by 1.2e-4. Whether that happens depends on the processor's kernels.
local strategies = { "full_shard", "shard_grad_op", "no_shard", "hybrid_shard" }
local of_a_host = world:levels():size()
for number, case in ipairs {
  {}, { micro = 3 }, { clip = 0.5 }, { model = { recompute = true } }, { freeze = "wte" },
  { micro = 2, clip = 0.5, model = { recompute = true } },
  { dtype = "bf16" }, { dtype = "bf16", model = { recompute = true } },
} do
  local function run(wrap, kind)
    return train {
      wrap = wrap, kind = kind, model = case.model, micro = case.micro, clip = case.clip,
      freeze = case.freeze, dtype = case.dtype,
    }
  end
  local expected = {}
  for place, strategy in ipairs(strategies) do
    local ways = { "local", case.micro and "shard" or nil }
    for _, accumulate in ipairs(expect.takes(number + place, 5) and ways or {}) do
      local by_hosts = strategy == "hybrid_shard" and of_a_host < size
      local exact = not case.clip and accumulate == "local" and not by_hosts
      local kind = exact and "adamw" or "sgd"
      expected[kind] = expected[kind] or run("ddp", kind)
      local own = run({ strategy = strategy, accumulate = accumulate }, kind)
      local d = difference(own, expected[kind])
      local rounding = case.dtype == "bf16" and 1.2e-4 or 1e-6
      assert(d <= (exact and 0 or rounding), ("%s, %s, micro %s, clip %s: %g"):format(strategy,
        accumulate, case.micro, case.clip, d))
      -- 1e-6: three additions of squares in another order.
      for i, norm in ipairs(own.norms) do
        assert(math.abs(norm - expected[kind].norms[i]) <= 1e-6 * norm, "norm")
      end
    end
  end
end

-- Collectives of one pass, by operation and unit.
local function count(model, f)
  local found = {}
  for _, record in ipairs(expect.records(f)) do
    local key = record.op .. " " .. record.channel
    found[key] = (found[key] or 0) + 1
    found[record.op .. " " .. record.label] = (found[record.op .. " " .. record.label] or 0) + 1
  end
  return found, model
end

-- V12: gathers of a unit in an iteration, and reductions.
if size > 1 then
  local gathers = { full_shard = 2, shard_grad_op = 1 }
  for strategy, each in ms.sorted_pairs(gathers) do
    local model = ms.fsdp(new_model(), { strategy = strategy })
    local function pass()
      local x, y = batch(1)
      model(x):cross_entropy(y):backward()
    end
    pass()
    -- As an optimizer's step between passes: what is gathered is old.
    ms.no_grad(function() for _, p in ipairs(model:parameters()) do p:mul_(1) end end)
    local found = count(model, pass)
    for i = 0, 2 do
      assert(found["all_gather h." .. i] == each, strategy)
    end
    assert(found["all_gather root"] == 1)
    assert(found["all_gather 2"] == 3 * each + 1 and not found["all_gather 1"])
    assert(found["reduce_scatter 1"] == 4)
    ms.no_grad(function() for _, p in ipairs(model:parameters()) do p:mul_(1) end end)
    local silent = count(model, function() model:no_sync(pass) end)
    assert(not silent["reduce_scatter 1"])
    if strategy == "shard_grad_op" then
      -- Shards stay whole in no_sync: the next forward finds them.
      local again = count(model, function() model:no_sync(pass) end)
      assert(not again["all_gather 2"], tostring(again["all_gather 2"]))
    end
  end
end

-- A unit is gathered before the backward of the one that comes before it, also where blocks are
-- recomputed; without prefetch, when it is needed.
if size > 1 then
  for _, recompute in ipairs { false, true } do
    for _, prefetch in ipairs { "none", "backward_pre" } do
      local model = ms.fsdp(new_model { recompute = recompute },
        { prefetch = prefetch == "none" and "backward_pre" or "none" })
      model:set_prefetch(prefetch)
      local x, y = batch(1)
      local loss = model(x):cross_entropy(y)
      local order = {}
      for _, record in ipairs(expect.records(function() loss:backward() end)) do
        order[#order + 1] = (record.op == "all_gather" and "gather " or "reduce ") .. record.label
      end
      local found = table.concat(order, ", "):gsub("([a-z]+ h%.%d)[%w_.]*", "%1")
      local expected = prefetch == "none"
        and "gather h.2, reduce h.2, gather h.1, reduce h.1, gather h.0, reduce h.0"
        or "gather h.2, gather h.1, reduce h.2, gather h.0, reduce h.1, reduce h.0"
      assert(found:find(expected, 1, true) == 1, found)
    end
  end
end

-- Whole gradients inside summon: those of ddp. What is written to them goes to the pieces; only
-- rank 0 may have them.
for _, options in ipairs {
  {}, { layout = "rows" }, { strategy = "no_shard" },
  { strategy = "shard_grad_op", layout = "rows" },
} do
  local x, y = batch(1)
  local ddp, model = ms.ddp(new_model()), ms.fsdp(new_model(), options)
  ddp(x):cross_entropy(y):backward()
  model(x):cross_entropy(y):backward()
  local norm = ms.optim.clip_grad_norm(model, math.huge):item()
  local expected = {}
  for _, item in ipairs(ddp:named_parameters()) do expected[item.name] = item.parameter:grad() end
  local function compare(parameters)
    for _, p in ipairs(parameters) do
      assert((p:grad() - expected[p:name()]):abs():max():item() <= 1e-6)
      p:grad():mul_(2)
    end
    return #parameters
  end
  local all = #model:parameters()
  assert(model:summon({ grads = true, writeback = false }, compare) == all)
  assert(size == 1 or options.strategy == "no_shard"
    or ms.optim.clip_grad_norm(model, math.huge):item() == norm)
  if size > 1 and options.strategy ~= "no_shard" then
    local mine = model:summon({ grads = true, writeback = false, rank0_only = true }, compare)
    assert(mine == (rank == 0 and all or 0))
    assert(model:summon({ grads = true }, compare) == all)
    assert(math.abs(ms.optim.clip_grad_norm(model, math.huge):item() / norm - 2) <= 1e-6)
    -- Removed in summon, it is gone; without one on a rank, it has zeros there.
    local p = model:parameters()[1]
    model:summon({ grads = true, names = { p:name() } }, function() p:set_grad(nil) end)
    assert(p:grad() == nil)
    if rank == 0 then p:set_grad(ms.ones(p:shape())) end
    local of_rank0 = world:broadcast(ms.tensor { p:numel() + 0.0 }, 0):value():item()
    model:summon({ grads = true }, function()
      assert(p:grad():sum():item() == of_rank0 and p:grad():numel() > of_rank0)
    end)
    assert(p:numel() == 0 or p:grad():max():item() == (rank == 0 and 1 or 0))
  end
  fails(function() model:summon({ rank0_only = true }, print) end, "writeback = false")
end

-- V2: f16 sums leave neither end of its range. PyTorch divides by a part of the ranks before the
-- sum and by the rest after it; here the sum is in f32 and rounded once. divide_factor is any
-- number; NCCL takes its inverse in f16, so there it is one whose inverse is exact.
do
  local other = os.getenv "MOONSHARD_TRANSPORT" == "nccl" and 4 or 2.5
  local Scale = ms.nn.class "Scale"
  function Scale:init() self.p = ms.nn.Parameter(ms.zeros { 10 }) end
  function Scale:forward(by) return (self.p * by):sum() end
  for _, value in ipairs { 40000, 2 ^ -24, 3 } do
    local factors = { full_shard = size, hybrid_shard = size, no_shard = other }
    for strategy, factor in ms.sorted_pairs(factors) do
      local model = ms.fsdp(Scale(), {
        strategy = strategy, comm_hook = ms.hooks.cast { dtype = "f16" },
        divide_factor = factor ~= size and factor or nil,
      })
      model(value):backward()
      local expected = ms.tensor({ value * (size / factor) }):to("f16"):to("f32"):item()
      for _, found in ipairs(model.module.p:grad():reshape(-1):to_table()) do
        assert(found == expected, ("%s: %g"):format(strategy, found))
      end
    end
  end
  fails(function() ms.fsdp(Scale(), { divide_factor = 0 }) end, "above 0, not 0")
end

-- By size, from the inside out: what inner units leave to an outer module counts for that one.
do
  local function names_of(least)
    local list = {}
    for i, unit in ipairs(ms.fsdp(new_model(), { wrap = { min_elements = least } }):units()) do
      list[i] = unit.name
    end
    return table.concat(list, " ")
  end
  -- attn has 1088 numbers, mlp.c_fc 1088, mlp.c_proj 1040, and the norms have 64.
  assert(names_of(3000) == " h.0 h.1 h.2")
  assert(names_of(2000) == " h.0.mlp h.1.mlp h.2.mlp")
  assert(names_of(1050):find("^ h%.0 h%.0%.attn h%.0%.mlp%.c_fc h%.1 "), names_of(1050))
  fails(function() names_of(1000000) end, "matches no module")
end

-- An embedding need not be gathered for its backward. Another unit must be, or backward says so.
if size > 1 then
  local function run(without)
    ms.seed(1)
    local model = ms.fsdp(ms.nn.Sequential(ms.nn.Embedding(16, 4), ms.nn.Linear(4, 4)),
      { wrap = { class = { "Embedding", "Linear" } } })
    local function pass() model((batch(1))):square():sum():backward() end
    if without then model:set_unshard_in_backward(false, { 1 }) end
    local found = count(model, pass)
    assert(found["all_gather 0"] == (without and 1 or 2) and found["all_gather 1"] == 2)
    return model, ms.optim.clip_grad_norm(model, math.huge):item(), pass
  end
  local model, norm, pass = run(true)
  local _, expected = run(false)
  assert(norm == expected)
  fails(function() model:set_unshard_in_backward(false, { 3 }) end, "there is no unit 3")
  local ready = model:unshard(1)
  assert(model:units()[2].gathered and ready:value() == true)
  model:reshard(1)
  assert(not model:units()[2].gathered)
  assert(model and pass)
end

-- Handles are pieces, and whole parameters while their unit is used.
do
  local inner = new_model()
  local seen
  inner.h[2].mlp:hook("forward", function(m) seen = m.c_fc.weight:shape() end)
  local model = ms.fsdp(inner)
  local p = inner.h[2].mlp.c_fc.weight
  local elements = 16 * 64
  assert(p:full_shape()[1] * p:full_shape()[2] == elements)
  if size > 1 then assert(#p:shape() == 1 and p:numel() <= elements) end
  local numbers = world:all_reduce(ms.full(p:numel(), {}), "sum"):value():item()
  assert(numbers == elements)
  local x, y = batch(1)
  model(x):cross_entropy(y):backward()
  assert(#seen == 2 and seen[1] * seen[2] == elements)
  assert(p:grad():numel() == p:numel())
  -- Writes inside summon are kept, on all ranks.
  model:summon({}, function() p:fill_(0.25) end)
  assert(p:numel() == 0 or p:detach():min():item() == 0.25)
  local kept = expect.whole(model)["h.1.mlp.c_fc.weight"]
  assert(kept:min():item() == 0.25 and kept:max():item() == 0.25)
  model:summon({ writeback = false }, function() p:fill_(7) end)
  assert(expect.whole(model)["h.1.mlp.c_fc.weight"]:max():item() == 0.25)
  -- Evaluation between steps, and generation.
  ms.no_grad(function() assert(model(x):shape()[3] == 16) end)
  assert(#model:units() == 4 and model:units()[1].name == "")
  if size > 1 then
    fails(function() inner:state() end, "piece of", "state() of the fsdp model")
    fails(function() p:requires_grad_(false) end, "unwrap()")
    local lamb = ms.optim.define { name = "whole", step_param = function() end }
    fails(function() lamb(model:parameters()) end, "elementwise")
    fails(function() ms.ddp(model) end, "sharded by fsdp")
    fails(function() ms.flat(model:parameters()) end, "parameters of one unit")
    local averager = ms.optim.averager { period = 2 }
    fails(function() averager:step(model) averager:step(model) end, "sharded by fsdp")
  end
  -- Of the loss, and of what one unit gives.
  fails(function() model(x):sum():backward { create_graph = true } end,
    "gradients of gradients are not supported", 'sharded unit "root"')
  fails(function() inner.h[2](ms.ones { 1, 1, 16 }):sum():backward { create_graph = true } end,
    "gradients of gradients are not supported", 'sharded unit "h.1"')
  model:reset()
  fails(function() ms.fsdp(model) end, "wrapped already")
  fails(function() ms.fsdp(inner) end, "part of an fsdp model already")
  -- Ranks may have pieces of different lengths.
  local first = ms.nn.Linear(5, 3)
  local sharded = ms.fsdp(first)
  local second = ms.nn.Linear(5, 3)
  second.weight = first.weight
  fails(function() ms.fsdp(second) end, "'weight' is sharded already")
  sharded:unwrap()
  ms.fsdp(second)
  fails(function() ms.fsdp(new_model(), { wrap = { class = "Blok" } }) end, "matches no module",
    "GPT2Block")
  fails(function() ms.fsdp(new_model(), { strategy = "zero1" }) end, "shard = group")
  fails(function() ms.fsdp(new_model(), { strategy = "full" }) end, "full_shard")
  local other = new_model()
  local early = ms.optim.adamw(other)
  fails(function() ms.fsdp(other) end, "belongs to an optimizer already")
  assert(early)
  -- Unwrapped, it is a model as any other.
  local before = expect.whole(model)
  assert(model:unwrap() == inner)
  expect.same(inner:state(), before, "unwrapped")
  inner(x):cross_entropy(y):backward()
end

-- Chains run on the buckets of units: a link in Lua, and a native one.
do
  local seen = {}
  local function watch(bucket, next)
    assert(bucket:kind() == (size > 1 and "reduce_scatter" or "all_reduce"))
    for i, p in ipairs(bucket:parameters()) do
      seen[p:name()] = true
      assert(bucket:gradients()[i]:numel() == p:full_shape()[1] * (p:full_shape()[2] or 1))
    end
    return next(bucket)
  end
  local plain = train { wrap = {} }
  local watched = train { wrap = { comm_hook = watch } }
  assert(difference(watched, plain) == 0 and seen["wte.weight"] and seen["h.1.ln_1.bias"])
  local half = train { wrap = { comm_hook = ms.hooks.bf16_compress() }, kind = "sgd" }
  local d = difference(half, train { wrap = {}, kind = "sgd" })
  assert(size == 1 or d > 0 and d < 0.05, tostring(d))
end

-- A pass that fails on all ranks and is caught: after reset the next step is as if it had not been.
do
  local function run(failures)
    local inner, armed = new_model(), nil
    for _, moment in ipairs { "forward", "pre_backward" } do
      inner.h[2]:hook(moment, function() if armed == moment then error "planned" end end)
    end
    local model = ms.fsdp(inner)
    local optimizer = ms.optim.sgd(model, { lr = 0.1, momentum = 0.9 })
    for step = 1, 3 do
      local x, y = batch(step)
      local function pass() model(x):cross_entropy(y):backward() end
      for _, moment in ipairs(step == 2 and failures or {}) do
        armed = moment
        fails(pass, "planned")
        armed = nil
        model:reset()
      end
      pass()
      optimizer:step()
      optimizer:zero_grad()
    end
    return expect.whole(model)
  end
  expect.same(run { "pre_backward", "forward", "pre_backward" }, run {}, "after failures")
end

-- A weight that two units share is an error with the remedy.
do
  local tied = new_model { tie = false }
  tied.h[2].mlp.c_fc.weight = tied.h[1].mlp.c_fc.weight
  fails(function() ms.fsdp(tied) end, "are one parameter", "h.0.mlp.c_fc.weight", "h.1")
end

print_hash()
