-- Run by every rank of fsdp_units_spec.lua, on two ranks: units with precisions of their own, as
-- PyTorch's sharded models computed them (tests/golden/units): dtypes that each unit saw, results,
-- gradients, weights and buffers.
local ms = require "moonshard"
local core = require "moonshard.core"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local whole = expect.parameters
local options = ms.config { folder = "" }
local rank = ms.rank()

local file = assert(io.open(options.folder .. "/manifest.json"))
local manifest = core.json_decode(file:read "a")
file:close()
assert(manifest.ranks == ms.world_size())

-- As in make.py: a layer casts its input to its weight's dtype itself.
local Layer = ms.nn.class "UnitsLayer"
function Layer:init(inner)
  local width = manifest.width
  self.weight = ms.nn.Parameter(ms.zeros { width, width })
  self.bias = ms.nn.Parameter(ms.zeros { width })
  self:add_buffer("shift", ms.zeros { width })
  if inner then self.inner = Layer() end
end
function Layer:forward(x)
  self.seen = { x:dtype(), self.weight:dtype(), self.shift:dtype() }
  local dtype = self.weight:dtype()
  local h = x:to(dtype):linear(self.weight, self.bias) + self.shift:to(dtype)
  if self:is_training() then core.no_grad(function() self.shift:mul_(0.75) end) end
  h = h:relu()
  return self.inner and self.inner(h) or h
end

local Net = ms.nn.class "UnitsNet"
function Net:init(scale)
  self.layers = ms.nn.List { Layer(), Layer(), Layer(true) }
  if scale then self.scale = ms.nn.Parameter(ms.zeros { manifest.width }) end
  self:add_buffer("offset", ms.zeros { manifest.width })
end
function Net:forward(x)
  self.seen = { x:dtype(), self.scale and self.scale:dtype() or "", self.offset:dtype() }
  for i = 1, #self.layers do x = self.layers[i](x) end
  if self.scale then x = x * self.scale:to(x:dtype()) end
  return x + self.offset:to(x:dtype())
end

local UNITS = { "", "layers.0", "layers.1", "layers.2", "layers.2.inner" }

-- PyTorch's switches are off unless the case names them, ours are on.
local function options_of(p)
  if not p then return nil end
  local o = { param = p.param, reduce = p.reduce, buffer = p.buffer, output = p.output }
  if p.param then
    o.cast_inputs, o.cast_root_inputs = p.cast_inputs or false, p.cast_root_inputs
  end
  return o
end

-- The ways of giving a case's options.
local forms = {
  function(units) return function(_, name) return options_of(units[name]) end end,
  function(units)
    local by_name = {}
    for _, name in ipairs(UNITS) do by_name[name] = options_of(units[name]) or false end
    return { units = by_name }
  end,
  function(units)
    -- The root's are those of all units that no name has others for.
    local o = options_of(units[""]) or {}
    if o.output then return nil end
    o.units = {}
    for i = 2, #UNITS do o.units[UNITS[i]] = options_of(units[UNITS[i]]) or false end
    return o
  end,
  function(units)
    -- One table for all, where they are equal.
    for i = 2, #UNITS do
      for _, name in ipairs { "param", "reduce", "buffer", "cast_inputs", "cast_root_inputs" } do
        if (units[UNITS[i]] or {})[name] ~= (units[""] or {})[name] then return nil end
      end
    end
    return options_of(units[""])
  end,
}

local ways = {
  {}, { strategy = "shard_grad_op", layout = "rows" }, { strategy = "no_shard" },
  { layout = "rows", prefetch = "both" }, { find_unused = true }, { offload = "cpu" },
}

-- Both have the same bits but for sums in another order, of 1e-7. Where such a sum is rounded to 16
-- bits, that can move one number by 1/256, and by it a row of results, and gradients a little. So
-- half of the rows may differ by more than `close`, and all together by `MOST`; a wrong cast moves
-- nearly every number by more than `close`, which a gradient shows by the dtype that holds it.
local MOST, close = 5e-4, 1e-6
local largest = {}
local function near(case, what, ours, golden, rows)
  assert(ours:dtype() == golden:dtype(), ("%s, %s: %s, PyTorch has %s"):format(case.case, what,
    ours:dtype(), golden:dtype()))
  local a, b = ours:detach():to "f32":reshape(-1), golden:to "f32":reshape(-1)
  local d, size = a - b, b:dot(b):item()
  local relative = math.sqrt(d:dot(d):item() / (size > 0 and size or 1))
  local kind = what:match "^%a+"
  largest[kind] = math.max(largest[kind] or 0, relative)
  local off = d:abs():gt(close * b:abs():max():item()):to "f32":mean():item()
  if not (relative <= MOST) or rows and off > 0.5 then
    error(("rank %d, %s, %s: %g from PyTorch's, and %d%% of the numbers are others"):format(rank,
      case.case, what, relative, 100 * off))
  end
end

-- The dtypes that hold all of these numbers.
local function holding(t)
  local list = {}
  for _, dtype in ipairs { "bf16", "f16", "f32" } do
    if t:to(dtype):to "f32":eq(t):all():item() then list[#list + 1] = dtype end
  end
  return table.concat(list, " ")
end

local function check_seen(case, model, expected, when)
  for _, name in ipairs(UNITS) do
    local module = model.module
    for part in name:gmatch "[^.]+" do
      module = module[tonumber(part) and tonumber(part) + 1 or part]
    end
    local ours, theirs = table.concat(module.seen, " "), table.concat(expected[name], " ")
    assert(ours == theirs, ("%s, %s: unit '%s' saw %s, PyTorch's saw %s"):format(case.case, when,
      name, ours, theirs))
  end
end

local function run(case, form, way)
  local t = assert(ms.safetensors.load(("%s/%s"):format(options.folder, case.file)))
  local precision = form(case.units)
  if not precision then return false end
  local net, start = Net(case.scale ~= false), {}
  for name, value in pairs(t) do
    local own = name:match "^init%.(.*)$"
    if own then start[own] = value end
  end
  net:load_state(start)
  local model = expect.models.fsdp(net, {
    wrap = { names = { "layers%.%d", "layers%.2%.inner" } }, precision = precision,
    full_precision_eval = true, broadcast_buffers = false,
  }, way)
  local optimizer = ms.optim.sgd(model, { lr = 0.05, momentum = 0.5 })
  local function rows(of, step)
    return of[step + 1]:narrow(1, rank * manifest.rows + 1, manifest.rows)
  end
  for step in ms.steps(manifest.steps) do
    local out = model(rows(t.x, step))
    assert(out:dtype() == case.result)
    if rank == 0 then near(case, "out." .. step, out, t["out." .. step], step == 0) end
    out:to "f32":mse_loss(rows(t.y, step)):backward()
    if step == 0 then
      check_seen(case, model, case.seen, "training")
      for name, g in pairs(whole(model, true)) do
        local golden = t["grad." .. name]
        g = g:to "f32"
        near(case, "grad." .. name, g, golden)
        assert(holding(g) == holding(golden), ("%s: the gradient of %s is in %s, PyTorch's in %s")
          :format(case.case, name, holding(g), holding(golden)))
      end
    end
    optimizer:step()
    optimizer:zero_grad()
  end
  if t.evaluated then
    model:eval()
    local result = ms.no_grad(function() return model(rows(t.x, 0)) end)
    if rank == 0 then near(case, "evaluated", result, t.evaluated) end
    check_seen(case, model, case.seen_in_evaluation, "evaluation")
    model:train()
    result = ms.no_grad(function() return model(rows(t.x, 0)) end)
    if rank == 0 then near(case, "trained", result, t.trained_again) end
  end
  for name, p in pairs(whole(model)) do near(case, "final." .. name, p, t["final." .. name]) end
  -- A root without parameters of its own leaves its buffers low in PyTorch's state dict.
  local state = model:state { kind = "sharded" }
  for name, value in pairs(t) do
    local own = name:match "^buffer%.(.*)$"
    if own then near(case, name, state[own], value:to "f32") end
  end
  model:unwrap()
  return true
end

local count = 0
for c, case in ipairs(manifest.cases) do
  for f, form in ipairs(forms) do
    for w, way in ipairs(ways) do
      if expect.full or (c + f + w) % 6 == 0 or w == 1 and f < 3 then
        count = count + (run(case, form, way) and 1 or 0)
      end
    end
  end
end
if rank == 0 then
  assert(count >= 2 * #manifest.cases)
  print(("%d runs of %d cases"):format(count, #manifest.cases))
  for kind, value in ms.sorted_pairs(largest) do print(("%s: %.2g"):format(kind, value)) end
end
print(("rank %d is done"):format(rank))
