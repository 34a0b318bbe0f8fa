-- What every rank of fp8_spec.lua runs: gathers with dtype = "fp8": what travels, what arrives, and
-- mistakes.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local fails = expect.fails
local rank, size = ms.rank(), ms.world_size()

local Linear = ms.nn.Linear

-- Weights of two units are coded: 16 x 16 with another one, of which some ranks have no piece, and
-- 64 x 48. The last layer's is not, as its sizes are no multiples of 16.
local function new_model()
  ms.seed(5)
  local last = Linear(64, 10)
  last.fp8 = false
  return ms.nn.Sequential(
    ms.nn.Sequential(Linear(16, 16), ms.nn.GELU(), Linear(16, 48)), Linear(48, 64), last)
end
local WEIGHTS = { ["0.0.weight"] = true, ["0.2.weight"] = true, ["1.weight"] = true }
local WRAP = { names = { "0", "1", "2" } }

local function sharded(options, model)
  options = options or {}
  options.wrap = options.wrap or WRAP
  options.dtype = "fp8"
  return ms.fsdp(model or new_model(), options)
end

local function input(step) return expect.models.input(16, 16, 900 + 10 * step + rank) end

-- The numbers of a weight's codes, by definition: three digits after the first one, steps of 2^-9
-- at least, with the least power of two as scale at which nothing is above 448.
local function rounded(w)
  local most = w:abs():max():item()
  if most == 0 then return w:clone() end
  local scale = 2.0 ^ math.ceil(math.log(most / 448, 2))
  local flat = w:flatten():to_table()
  for i, x in ipairs(flat) do
    local scaled = math.abs(x) / scale
    local step = scaled < 2.0 ^ -6 and 2.0 ^ -9 or 2.0 ^ (math.floor(math.log(scaled, 2)) - 3)
    local whole = scaled / step
    local low = math.floor(whole)
    local up = whole - low > 0.5 or (whole - low == 0.5 and low % 2 == 1)
    flat[i] = (x < 0 and -1 or 1) * (up and low + 1 or low) * step * scale
  end
  return ms.tensor(flat):view(table.unpack(w:shape()))
end

-- Outside of autocast the model computes with these.
local function check_values(options)
  local model, hand = sharded(options), new_model()
  ms.no_grad(function()
    for _, item in ipairs(hand:named_parameters()) do
      if WEIGHTS[item.name] and size > 1 then item.parameter:copy_(rounded(item.parameter)) end
    end
  end)
  expect.same(expect.whole(model), new_model():state(), "summon is exact")
  local y, expected = model(input(1)), hand(input(1))
  expect.same({ y:detach() }, { expected:detach() }, "what is computed")
  y:sum():backward()
  expect.same(expect.whole(model), new_model():state(), "summon is exact after a pass")
  return model
end
check_values()
check_values { layout = "rows" }
check_values { strategy = "shard_grad_op" }
check_values { wrap = { min_elements = 1 << 30, names = { "1" } }, offload = "cpu" }

-- More weights in a unit than one task takes.
for _, layout in ipairs { "flat", "rows" } do
  local function many()
    ms.seed(6)
    local layers = {}
    for i = 1, 40 do layers[i] = ms.nn.Linear(16, i < 40 and 16 or 32) end
    return ms.nn.Sequential(table.unpack(layers))
  end
  local model, hand = ms.fsdp(many(), { dtype = "fp8", layout = layout }), many()
  ms.no_grad(function()
    for _, item in ipairs(hand:named_parameters()) do
      local p = item.parameter
      if p:dim() == 2 and size > 1 then p:copy_(rounded(p)) end
    end
  end)
  expect.same({ model(input(1)):detach() }, { hand(input(1)):detach() }, "many weights")
end

-- Full precision in evaluation.
do
  local model = sharded { precision = { param = "f32" }, full_precision_eval = true }
  model:eval()
  expect.same({ model(input(1)):detach() }, { new_model()(input(1)):detach() }, "evaluation")
  assert(model:stats().options.dtype == "fp8")
end

-------------------------------------------------------------------------------------- what travels

-- Calls of an operation with a dtype on the channel of gathers, and the bytes that this rank brings
-- to them.
local function traffic(records, op, dtype)
  local count, bytes = 0, 0
  for _, one in ipairs(records) do
    if one.op == op and one.dtype == dtype and one.channel == 2 then
      count, bytes = count + 1, bytes + one.payload_bytes
    end
  end
  return { count, bytes }
end

local function each(numbers) return (numbers + size - 1) // size end
local FIRST, SECOND <const> = 16 * 16 + 16 * 48, 48 * 64

-- gathers: how often a unit is gathered in a pass. What forward finds serves backward.
local function check_traffic(options, gathers)
  local model = sharded(options)
  local optimizer = ms.optim.sgd(model, { lr = 0.1 })
  local function step() model(input(2)):sum():backward() end
  local function check(records, what)
    local codes = traffic(records, "all_gather", "u8")
    local most = traffic(records, "all_reduce", "i32")
    assert(codes[1] == 2 * gathers and codes[2] == gathers * (each(FIRST) + each(SECOND)),
      ("%s: %d gathers of codes, %d bytes"):format(what, codes[1], codes[2]))
    assert(most[1] == 2 and most[2] == 4 * 2 + 4,
      ("%s: %d reductions, %d bytes"):format(what, most[1], most[2]))
  end
  check(expect.records(step), "first pass")
  local _, before = ms.world():_traffic()
  local records = expect.records(step)
  local _, after = ms.world():_traffic()
  local bytes = 0
  for _, one in ipairs(records) do bytes = bytes + one.payload_bytes end
  check(records, "without a step")
  assert(after - before == bytes, "the traffic of reports has the same bytes")
  optimizer:step()
  optimizer:zero_grad()
  check(expect.records(step), "after a step")
end
if size > 1 then
  check_traffic({ prefetch = "none" }, 2)
  check_traffic({ prefetch = "both" }, 2)
  check_traffic({ strategy = "shard_grad_op" }, 1)
  check_traffic({ offload = "cpu" }, 2)
end

------------------------------------------------------------------------- ranks that do other things

-- A function that takes `count` steps, and one that gives the whole parameters.
local function trained(model, f, count)
  local optimizer = ms.optim.sgd(model, { lr = 0.1 })
  local function steps()
    for step = 1, count do
      ms.autocast("fp8", function() return f(input(step)):square():mean() end):backward()
      optimizer:step()
      optimizer:zero_grad()
    end
  end
  return steps, function() return expect.whole(model) end
end

-- In a join ranks agree on each gather.
local function joined(dtype)
  local model = ms.fsdp(new_model(), { wrap = WRAP, dtype = dtype })
  local steps, whole = trained(model, model, 2 + rank)
  model:join({}, steps)
  return whole()
end
expect.same(joined "fp8", joined(), "join")

-- Pairs of ranks with weights of their own.
local function experts(pair, dtype)
  local model, name = new_model(), "expert" .. rank // 2
  model[name] = Linear(16, 16 + 16 * (rank // 2), { bias = false })
  local expert = model[name]
  local one = ms.fsdp(model, {
    dtype = dtype, wrap = { names = { "0", "expert%d" } }, accumulate = "local",
    group_of = function(of) return of:match "^expert" and pair or nil end,
  })
  local steps, whole = trained(one, function(x) return expert(x):sum() + one(x) end, 3)
  steps()
  return whole()
end
if size == 4 then
  local pair = ms.world():split { { 0, 1 }, { 2, 3 } }
  expect.same(experts(pair, "fp8"), experts(pair), "experts")
end

------------------------------------------------------------------------------- numbers that matter

-- One number of one rank's piece that is not finite is the whole weight, on all ranks.
for _, layout in ipairs { "flat", "rows" } do
  for _, bad in ipairs { math.huge, -math.huge, 0 / 0 } do
    local inner = new_model()
    ms.no_grad(function() inner[1][3].weight:narrow(1, 48, 1):narrow(2, 16, 1):fill_(bad) end)
    local model = sharded({ layout = layout }, inner)
    if size > 1 then
      local y = ms.no_grad(function() return model(input(1)) end):flatten():to_table()
      for _, x in ipairs(y) do assert(x ~= x, "it is not to be seen in the outputs") end
      local loss = ms.no_grad(function()
        return ms.autocast("fp8", function() return model[2](model[1](input(1))):sum() end)
      end):item()
      assert(loss ~= loss)
    end
  end
end

-- A rank may write to its pieces between passes.
do
  local model = sharded()
  model(input(1)):sum():backward()
  local piece = model.module[2].weight
  if rank == 0 then ms.no_grad(function() piece:mul_(4) end) end
  local whole = expect.whole(model)
  local y, hand = ms.no_grad(function() return model(input(2)) end), new_model()
  ms.no_grad(function()
    for _, item in ipairs(hand:named_parameters()) do
      local name, p = item.name, item.parameter
      p:copy_(WEIGHTS[name] and size > 1 and rounded(whole[name]) or whole[name])
    end
    expect.same({ y }, { hand(input(2)) }, "after a write")
  end)
end

-- Zeros.
do
  local inner = new_model()
  ms.no_grad(function() inner[2].weight:zero_() end)
  local bias = inner[2].bias:detach():clone()
  local model = sharded(nil, inner)
  local y = ms.no_grad(function() return model[2](expect.models.input(4, 48, 1)) end)
  expect.same({ y:detach() }, { ms.zeros { 4, 64 } + bias }, "zeros")
end

------------------------------------------------------------------------------------------ mistakes

local function identity(t) return t end
fails(function() ms.fsdp(new_model(), { dtype = "int8" }) end, "dtype = 'int8'", "it is 'fp8'",
  "precision")
fails(function() ms.fsdp(new_model(), { dtype = 8 }) end, "dtype", "string")
fails(function() sharded { before_gather = identity } end, "dtype = 'fp8' and before_gather")
fails(function() sharded { after_gather = identity } end, "dtype = 'fp8' and after_gather")
fails(function() sharded { strategy = "no_shard" } end, "no_shard", "leave dtype out")
fails(function() ms.fsdp(ms.nn.LayerNorm(16), { dtype = "fp8" }) end, "has no linear layer")
fails(function() ms.fsdp(Linear(24, 16), { dtype = "fp8" }) end,
  "no weight of the model can travel in fp8: 'weight': its sizes 16 x 24 are not multiples of 16")
fails(function() ms.fsdp(Linear(16, 16):to "f16", { dtype = "fp8" }) end, "it computes in f16")
fails(function()
  ms.fsdp(Linear(16, 16), { dtype = "fp8", precision = { param = "f16" } })
end, "it computes in f16")
fails(function() ms.fsdp(Linear(16, 16), { dtype = "fp8", ignored = { "weight" } }) end,
  "it is among `ignored`")
fails(function()
  local one, two = Linear(16, 16), Linear(16, 16)
  two.weight = one.weight
  ms.fsdp(ms.nn.Sequential(one, two), { dtype = "fp8" })
end, "another module has it, too", "and 1 more")
fails(function()
  local layer = Linear(16, 16)
  layer.fp8 = false
  ms.fsdp(layer, { dtype = "fp8" })
end, "layer.fp8 = false")
if size > 1 then
  fails(function()
    local model = new_model()
    if rank == 0 then model[2].fp8 = false end
    sharded(nil, model)
  end, "ranks have different models", "'1.weight'", "gathered in fp8")
  fails(function() ms.fsdp(new_model(), { wrap = WRAP, dtype = rank == 0 and "fp8" or nil }) end,
    "option dtype")
end
io.write(("rank %d is done\n"):format(rank))
