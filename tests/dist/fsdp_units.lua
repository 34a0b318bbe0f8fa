-- Run by every rank of fsdp_units_spec.lua: units with precisions of their own, drawn at random,
-- against the same casts written by hand, bit for bit, under what else a sharded model does; what
-- units weigh and what travels; states and evaluation; errors.
local ms = require "moonshard"
local core = require "moonshard.core"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local fails, mean, whole, models = expect.fails, expect.models.mean, expect.parameters,
  expect.models
local options = ms.config { folder = "" }
local rank, size = ms.rank(), ms.world_size()

local WIDTH = 6
local UNITS = { "", "first", "outer", "outer.inner", "one+two" }

-- Casts its input, its bias and its buffer to its weight's dtype itself.
local Layer = ms.nn.class "UnitsLayer"
function Layer:init(inner)
  self.weight = ms.nn.Parameter(ms.randn { WIDTH, WIDTH } * 0.4)
  self.bias = ms.nn.Parameter(ms.randn { WIDTH })
  self:add_buffer("shift", ms.randn { WIDTH })
  if inner then self.inner = Layer() end
end
function Layer:forward(x)
  self.seen = { x:dtype(), self.weight:dtype(), self.bias:dtype(), self.shift:dtype() }
  local dtype = self.weight:dtype()
  local h = x:to(dtype):linear(self.weight) + self.bias:to(dtype) + self.shift:to(dtype)
  return self.inner and self.inner(h:tanh()) or h:tanh()
end

local Net = ms.nn.class "UnitsNet"
function Net:init(recompute)
  ms.seed(6)
  self.first = Layer()
  self.outer = Layer(true)
  self.one = Layer()
  self.two = Layer()
  self.scale = ms.nn.Parameter(ms.randn { WIDTH })
  self:add_buffer("offset", ms.randn { WIDTH })
  self.recompute = recompute
end
function Net:forward(x)
  self.seen = { x:dtype(), self.scale:dtype(), self.offset:dtype() }
  for _, layer in ipairs { self.first, self.outer, self.one, self.two } do
    if self.recompute then x = ms.recompute(layer, x) else x = layer(x) end
  end
  return x * self.scale:to(x:dtype()) + self.offset:to(x:dtype())
end

local function input(step, r) return models.input(3, WIDTH, 500 + 10 * step + r) end

local function unit_of(name)
  local module = name:match "^(.*)%.[^.]+$" or ""
  return (module == "one" or module == "two") and "one+two" or module
end

-------------------------------------------------------------------------------------------- by hand

local function is_kept(units, name)
  local keep = (units[unit_of(name)] or {}).keep
  return keep ~= nil and name:match("^" .. keep[1] .. "$") ~= nil
end

local function casts_inputs(units, name)
  local o = units[name]
  if not (o and o.param) then return false end
  local cast = o.cast_inputs ~= false
  if name ~= "" then return cast end
  if o.cast_root_inputs ~= nil then return o.cast_root_inputs end
  return cast
end

-- The model's result, without fsdp. low: its parameters as leaves in the dtypes of computing. seen:
-- gets the dtypes that each module saw.
local function forward_by_hand(net, units, low, x, seen)
  local function buffer(module, t)
    local o = units[unit_of(module .. ".x")]
    return t:to(o and o.buffer or "f32")
  end
  local function layer(name, module, value)
    local unit = unit_of(name .. ".x")
    local o = units[unit] or {}
    if casts_inputs(units, unit) then value = value:to(o.param) end
    local weight, bias, shift = low[name .. ".weight"], low[name .. ".bias"],
      buffer(name, module.shift)
    seen[name] = { value:dtype(), weight:dtype(), bias:dtype(), shift:dtype() }
    local dtype = weight:dtype()
    local h = value:to(dtype):linear(weight) + bias:to(dtype) + shift:to(dtype)
    h = h:tanh()
    if module.inner then h = layer(name .. ".inner", module.inner, h) end
    return o.output and h:to(o.output) or h
  end
  local root = units[""] or {}
  if casts_inputs(units, "") then x = x:to(root.param) end
  local offset = net.offset:to(root.buffer or "f32")
  seen[""] = { x:dtype(), low.scale:dtype(), offset:dtype() }
  for _, name in ipairs { "first", "outer", "one", "two" } do x = layer(name, net[name], x) end
  local y = x * low.scale:to(x:dtype()) + offset:to(x:dtype())
  return root.output and y:to(root.output) or y
end

local function dtypes_of(units, name)
  local o = units[unit_of(name)] or {}
  local kept = is_kept(units, name)
  local computes = not kept and o.param or "f32"
  return computes, not kept and (o.reduce or "f32") or "f32"
end

-- One rank's result, and its gradients as backward leaves them.
local function pass_by_hand(net, units, step, r)
  local low, seen, gradients = {}, {}, {}
  for _, item in ipairs(net:named_parameters()) do
    local computes = dtypes_of(units, item.name)
    low[item.name] = item.parameter:detach():to(computes):clone():requires_grad_()
  end
  local y = forward_by_hand(net, units, low, input(step, r), seen)
  y:to "f32":square():sum():backward()
  for name, p in pairs(low) do gradients[name] = p:grad() end
  return y:detach(), gradients, seen
end

-- Gradients after reduced passes of these steps, and this rank's last result.
local function by_hand(net, units, steps)
  local total, y, seen = {}, nil, nil
  for _, step in ipairs(steps) do
    local passes = {}
    for r = 1, size do
      local result, gradients, saw = pass_by_hand(net, units, step, r - 1)
      passes[r] = gradients
      if r == rank + 1 then y, seen = result, saw end
    end
    for _, item in ipairs(net:named_parameters()) do
      local name, of_ranks = item.name, {}
      local _, sent = dtypes_of(units, name)
      for r = 1, size do of_ranks[r] = passes[r][name]:to(sent) end
      local one = mean(of_ranks, sent)
      total[name] = total[name] and total[name] + one or one
    end
  end
  return total, y, seen
end

------------------------------------------------------------------------------------ drawing options

local state = 11
local function draw(count)
  state = (state * 1103515245 + 12345) & 0x7fffffff
  return (state >> 8) % count + 1
end
local none = {}
local function one_of(list)
  local value = list[draw(#list)]
  if value ~= none then return value end
end

local function draw_options(name)
  if draw(5) == 1 then return nil end
  local o = {
    param = one_of { none, "f32", "bf16", "f16" }, reduce = one_of { none, "f32", "bf16", "f16" },
    buffer = one_of { none, "f32", "bf16", "f16" }, output = one_of { none, none, "f32", "bf16" },
  }
  if o.param then
    o.cast_inputs, o.cast_root_inputs = one_of { none, true, false }, one_of { none, true, false }
    if name ~= "" then o.keep = one_of { none, { ".*%.bias" } } end
  end
  return o
end

-- Ways of saying it: a function; names; names and patterns, with the root's for the rest.
local forms = {
  function(units)
    return function(_, name)
      return units[name]
    end
  end,
  function(units)
    local by_name = {}
    for _, name in ipairs(UNITS) do by_name[name] = units[name] or false end
    return { units = by_name }
  end,
  function(units)
    local o = models.merged(units[""])
    o.units = {
      first = units.first or false, ["one.*"] = units["one+two"] or false,
      ["outer%.i.*"] = units["outer.inner"] or false, outer = units.outer or false,
    }
    return o
  end,
}

local ways = {
  {}, { strategy = "shard_grad_op", layout = "rows" }, { strategy = "no_shard" },
  { layout = "rows", find_unused = true }, { offload = "cpu", prefetch = "both" },
  { recompute = true, prefetch = "by_budget" }, { keep_low_precision_grads = true },
  { reshard_after_forward = size == 4 and 2 or nil, prefetch = "backward_post" },
  { strategy = size == 4 and "hybrid_shard" or nil, prefetch = "tuned" },
}

local function shard(units, form, way, net)
  local o = {
    wrap = { names = { "first", "outer", "outer.inner" }, groups = { { "one", "two" } } },
    precision = form(units),
  }
  o = models.merged(o, way)
  o.recompute = nil
  return models.fsdp(net or Net(way.recompute), o)
end

local function module_at(net, name)
  for part in name:gmatch "[^.]+" do net = net[part] end
  return net
end

local bytes_of = { f32 = 4, bf16 = 2, f16 = 2 }

-- The bytes of each unit: planners and `moonshard check` count with them.
local function check_bytes(model, units, way)
  if way.layout == "rows" or way.strategy == "no_shard" then return end
  local shards, numel = model:shard_group():size(), { weight = WIDTH * WIDTH }
  local expected = {}
  for _, name in ipairs(UNITS) do
    local count = {}
    for _, item in ipairs(model:named_parameters()) do
      if unit_of(item.name) == name then
        local computes = dtypes_of(units, item.name)
        local key = computes .. tostring(is_kept(units, item.name))
        local n = numel[item.name:match "[^.]+$"] or WIDTH
        count[key] = { n = (count[key] or { n = 0 }).n + n, dtype = computes }
      end
    end
    local bytes = 0
    for _, one in pairs(count) do
      bytes = bytes + (one.n + shards - 1) // shards * shards * bytes_of[one.dtype]
    end
    expected[name] = bytes
  end
  for _, unit in ipairs(model:units()) do
    assert(unit.bytes == expected[unit.name], ("unit '%s': %d bytes, expected %d"):format(
      unit.name, unit.bytes, expected[unit.name]))
  end
end

local plain = Net()
local kinds = {}
local function run(units, form, way, what)
  local model = shard(units, form, way)
  check_bytes(model, units, way)
  local hybrid = way.strategy == "hybrid_shard"
  for step in ms.steps(2) do
    plain:load_state(whole(model), { partial = true })
    local expected, result, seen = by_hand(plain, units, { step })
    local y = model(input(step, rank))
    assert(y:dtype() == result:dtype() and y:eq(result):all():item(),
      ("%s: result %s, by hand %s"):format(what, y:dtype(), result:dtype()))
    for name, saw in pairs(seen) do
      local ours = table.concat(module_at(model.module, name).seen, " ")
      local by = table.concat(saw, " ")
      assert(ours == by, ("%s: '%s' saw %s, by hand %s"):format(what, name, ours, by))
    end
    y:to "f32":square():sum():backward()
    for _, item in ipairs(model:named_parameters()) do
      local _, sent = dtypes_of(units, item.name)
      local dtype = item.parameter:grad():dtype()
      assert(dtype == (way.keep_low_precision_grads and sent or "f32"), what)
    end
    for name, g in pairs(whole(model, true)) do
      local _, sent = dtypes_of(units, name)
      local a, b = g:to "f32", expected[name]
      -- Two sums of two, in the dtype of the reduction, are not one of four.
      local off = (a - b):abs():max():item() / b:abs():max():item()
      local most = hybrid and (sent == "f32" and 1e-6 or 2e-2) or 0
      assert(off <= most, ("%s: the gradient of %s is off by %g"):format(what, name, off))
    end
    core.no_grad(function()
      for _, p in ipairs(model:parameters()) do
        p:add_(p:grad():to "f32", -0.01)
        p:set_grad(nil)
      end
    end)
  end
  for _, o in pairs(units) do
    for key, value in pairs(o) do
      kinds[("%s %s"):format(key, type(value) == "table" and "list" or value)] = true
    end
  end
  -- A state has buffers, too, in their dtypes before; it is that of a model without precision.
  local full = model:state { kind = "sharded", live = true }
  for name, t in pairs(plain:buffers()) do
    local o = units[unit_of(name)] or {}
    assert(full[name]:dtype() == "f32" and full[name]:eq(t:to(o.buffer or "f32"):to "f32"):all()
      :item(), what .. ": " .. name)
    assert(module_at(model.module, name):dtype() == (o.buffer or "f32"))
  end
  local inner = model:unwrap()
  for name, t in pairs(inner:buffers()) do assert(t:dtype() == "f32", name) end
end

for number = 1, expect.full and 400 or 40 do
  local units = {}
  for _, name in ipairs(UNITS) do units[name] = draw_options(name) end
  local f, w = draw(#forms), draw(#ways)
  -- Where the root has an output of its own, the third form would say the same.
  run(units, forms[f], ways[w], ("program %d, form %d, way %d"):format(number, f, w))
end
for _, kind in ipairs { "param f32", "param bf16", "param f16", "reduce bf16", "reduce f16",
    "buffer bf16", "output bf16", "cast_inputs false", "cast_root_inputs true", "keep list" } do
  assert(kinds[kind], "no program has " .. kind)
end

------------------------------------------------------------------------------ what else follows

local mixed = {
  [""] = { param = "bf16", buffer = "bf16", output = "f32" }, first = { buffer = "f16" },
  outer = { param = "bf16", reduce = "bf16" },
  ["outer.inner"] = { param = "f32", buffer = "bf16", cast_inputs = true },
  ["one+two"] = { param = "f16", reduce = "f16", keep = { ".*%.bias" } },
}

-- Gathers and reductions send what the units say, each in its dtypes.
if size > 1 then
  local model = shard(mixed, forms[1], {})
  local sent = {}
  local function pass() model(input(0, rank)):sum():backward() end
  for _, record in ipairs(expect.records(pass)) do
    local key = record.op .. " " .. record.dtype
    sent[key] = (sent[key] or 0) + record.payload_bytes
  end
  for _, op in ipairs { "all_gather", "reduce_scatter" } do
    for _, dtype in ipairs { "f32", "bf16", "f16" } do
      assert((sent[op .. " " .. dtype] or 0) > 0, op .. " in " .. dtype)
    end
  end
  model:unwrap()
end

-- The options in force are the table that says the same; ranks may give the one or the other.
do
  local model = shard(mixed, forms[1], {})
  local y, shown = model(input(1, rank)):detach(), model:stats().options.precision
  assert(shown.units["one+two"].reduce == "f16" and shown.units.first.buffer == "f16")
  assert(shown.units[""].cast_inputs and not shown.units.first.cast_inputs)
  model:reset()
  model:unwrap()
  local again = shard(mixed, rank == 0 and forms[1] or function() return shown end, {})
  assert(again(input(1, rank)):eq(y):all():item())
  again:reset()
  again:unwrap()
  local uniform = ms.fsdp(Net(), { precision = { param = "bf16" } })
  assert(uniform:stats().options.precision.param == "bf16")
  uniform:unwrap()
end

-- Evaluation in full precision has the bits of the model without shards, and training those of
-- before. The outputs of units are not cast then; the model's are.
for _, way in ipairs { {}, { strategy = "no_shard" }, { layout = "rows", find_unused = true } } do
  local units = models.merged(mixed)
  units.first = { param = "f16", output = "bf16", buffer = "f16" }
  local model, alone = shard(units, forms[2], { full_precision_eval = true,
    strategy = way.strategy, layout = way.layout, find_unused = way.find_unused }), Net()
  for name, t in pairs(alone:buffers()) do
    local o = units[unit_of(name)] or {}
    t:copy_(t:to(o.buffer or "f32"))
  end
  local function evaluate() return ms.no_grad(function() return model(input(2, 0)) end) end
  local low = evaluate()
  model:eval()
  local full = evaluate()
  assert(full:dtype() == "f32" and full:eq(alone(input(2, 0))):all():item())
  for _, name in ipairs { "", "first", "outer", "outer.inner", "one", "two" } do
    local seen = table.concat(module_at(model.module, name).seen, " ")
    assert(not seen:find "16", name .. ": " .. seen)
  end
  model:train()
  assert(evaluate():eq(low):all():item() and not low:eq(full):all():item())
  model:unwrap()
end

-- Files and checkpoints are those of a model without precision, under other precisions, too.
do
  local path = options.folder .. "/units.safetensors"
  local model = shard(mixed, forms[3], {})
  assert(model:save(path))
  local alone = Net()
  core.no_grad(function() for _, p in ipairs(alone:parameters()) do p:fill_(0) end end)
  assert(alone:load(path))
  for name, t in pairs(Net():state()) do
    local is_buffer = name:match "shift$" or name == "offset"
    local o = is_buffer and mixed[unit_of(name)] or {}
    assert(alone:state()[name]:eq(t:to(o.buffer or "f32"):to "f32"):all():item(), name)
  end
  local optimizer = ms.optim.adamw(model, { lr = 0.1 })
  model(input(3, rank)):sum():backward()
  optimizer:step()
  optimizer:zero_grad()
  local saved = assert(ms.checkpoint.save(options.folder,
    { model = model, optimizer = optimizer, step = 1 }))
  assert(ms.checkpoint.wait())
  local expected = whole(model)
  local other = shard({ outer = { param = "f16", buffer = "f16" } }, forms[1], { layout = "rows" })
  local others = ms.optim.adamw(other, { lr = 0.1 })
  assert(ms.checkpoint.load(saved, { model = other, optimizer = others }))
  expect.same(whole(other), expected, "a checkpoint under other precisions")
  model:check_replicas(optimizer)
  other:check_replicas(others)
  model:unwrap()
  other:unwrap()
end

-- Ranks with unequal inputs, accumulation, and buffers that each forward copies.
do
  local model = shard(mixed, forms[1], { broadcast_buffers = true })
  model:join({}, function()
    for step = 1, rank + 1 do model(input(step, rank)):sum():backward() end
  end)
  expect.clear(model)
  model:accumulate(3, function(i) model(input(i, rank)):to "f32":square():sum():backward() end)
  local fresh = Net()
  for name, g in pairs((by_hand(fresh, mixed, { 1, 2, 3 }))) do
    local own = whole(model, true)[name]
    assert(own:eq(g):all():item(), "accumulated: " .. name)
  end
  model:unwrap()
end

--------------------------------------------------------------------------------------------- errors

local wrap = { names = { "first", "outer", "outer.inner" }, groups = { { "one", "two" } } }
local function wrong(precision, ...)
  local net = Net()
  local before = net:state()
  fails(function() ms.fsdp(net, { wrap = wrap, precision = precision }) end, "fsdp", ...)
  expect.same(net:state(), before, "after an error")
end
wrong(12, "precision is a table", "or a function(module, name), not a number")
wrong({ units = 3 }, "precision.units is a table", "not a number")
wrong({ units = { frist = { param = "bf16" } } },
  "no unit is called 'frist': did you mean 'first'?",
  "the units are \"\" (the root), 'first', 'outer', 'outer.inner', 'one+two'")
wrong({ units = { ["blocks%.%d+"] = {} } }, "no unit is called 'blocks%.%d+'")
wrong({ units = { ["outer.*"] = {}, [".*inner"] = {} } }, "'.*inner' and 'outer.*' match",
  "unit \"outer.inner\"")
wrong({ units = { [1] = {} } }, "its keys are names of units or patterns, not 1 (a number)")
wrong({ units = { ["("] = {} } }, "precision.units", "is no pattern")
wrong({ units = { first = { parm = "bf16" } } }, "precision.units['first']", "'parm'",
  "did you mean 'param'?")
wrong({ units = { first = { param = "i64" } } },
  "precision.units['first'].param must be f32, f16 or bf16, not i64")
wrong({ units = { first = "bf16" } }, "precision.units['first'] is a table", "not a string")
wrong({ units = { first = { units = {} } } }, "precision.units['first']", "'units'")
wrong({ units = { first = { param = "bf16", keep = { "outer.bias" } } } },
  "precision.units['first'].keep[1]: no parameter of the units that it matches is called \z
  'outer.bias'", "did you mean")
wrong({ param = "bf16", keep = { "first.bias" }, units = { first = { param = "f16" } } },
  "precision.keep[1]: no parameter of the units without options of their own is called \z
  'first.bias'")
wrong({ cast_root_inputs = true }, "precision.cast_root_inputs casts to precision.param, which is \z
  not given")
wrong({ param = "bf16", cast_root_inputs = 1 }, "precision.cast_root_inputs must be a boolean")
wrong({ param = "bf16", cast_root_input = true }, "did you mean 'cast_root_inputs'?")
wrong(function() return "bf16" end, "precision(unit \"root\") is a table", "not a string")
wrong(function(_, name) return name == "outer" and { parm = "bf16" } or nil end,
  "precision(unit \"outer\")", "did you mean 'param'?")
wrong(function() return { param = "bf16", keep = { "bais" } } end,
  "precision(unit \"root\").keep[1]", "no parameter is called 'bais'")
wrong(function() return { param = "bf16", keep = "bias" } end, "precision(unit \"root\").keep")

-- A buffer of two units has one dtype.
do
  local net = Net()
  net.two.shift, net.first.shift = net.outer.shift, net.outer.shift
  fails(function()
    ms.fsdp(net, { wrap = wrap, precision = { units = { outer = { buffer = "bf16" } } } })
  end, "fsdp: precision: 'first.shift' (as it is) and 'outer.shift' (bf16) are one buffer")
  local model = ms.fsdp(net, { wrap = wrap, precision = function() return { buffer = "bf16" } end })
  assert(model.module.two.shift == model.module.first.shift)
  assert(model.module.two.shift:dtype() == "bf16")
  model:unwrap()
  model = ms.fsdp(net, { wrap = wrap, ignored = { ".*shift" },
    precision = { units = { outer = { buffer = "bf16" } } } })
  assert(model.module.outer.shift:dtype() == "f32", "ignored")
  model:unwrap()
end

-- Ranks that disagree are told the unit, and both sides.
if size > 1 then
  local function disagree(ours, theirs, ...)
    wrong(rank == 0 and ours or theirs, "ranks have different models", "on rank 0", ...)
  end
  disagree({ units = { first = { param = "bf16" } } }, { units = { first = { param = "f16" } } },
    "unit 1 \"first\": precision param bf16, reduce f32", "unit 1 \"first\": precision param f16")
  local function of_outer(_, name) return name == "outer" and { buffer = "f16" } or nil end
  disagree(function() end, of_outer, "unit 2 \"outer\": precision none",
    "unit 2 \"outer\": precision param nil, reduce nil, buffer f16")
  disagree({ param = "bf16", cast_root_inputs = false }, { param = "bf16" },
    "cast_root_inputs false", "cast_root_inputs true")
  disagree({ param = "bf16" }, { param = "bf16", units = { first = { param = "f16" } } },
    "option precision = param bf16", "option precision = by unit")
  disagree({ units = { first = { param = "bf16", keep = { "first.bias" } } } },
    { units = { first = { param = "bf16" } } }, "keep first.bias", "keep nothing")
end

print(("rank %d is done"):format(rank))
