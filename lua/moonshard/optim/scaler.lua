-- The loss scaler: multiplies losses so that 16-bit gradients do not underflow, skips steps whose
-- gradients overflowed, and adapts its factor once in each iteration.
local core = require "moonshard.core"
local layouts = require "moonshard.parallel.ddp.layouts"
local module = require "moonshard.nn.module"
local options_of = require "moonshard.base.options"
local sharded_join = require "moonshard.parallel.fsdp.join"
local ownership = require "moonshard.base.ownership"
local parts = require "moonshard.nn.parts"
local check = options_of.check

---@class ms.Scaler
local Scaler = {}
Scaler.__index = Scaler
Scaler.__name = "ms.Scaler"

-- What is written into a scaler would not be read: its factor is on the device.
function Scaler.__newindex(_, name)
  core.raise(("a scaler has no field '%s' to write: its options are given to optim.scaler, and \z
    load_state sets the factor"):format(tostring(name)))
end

-- scaler -> what it knows
local inner = setmetatable({}, { __mode = "k" })

-- Scalers by the order in which they were made, which is the same on all ranks.
local made, count = setmetatable({}, { __mode = "v" }), 0

local MOST <const>, LEAST <const> = 0x1p126, 0x1p-126

local known = {
  init_scale = "number", growth_factor = "number", backoff_factor = "number",
  growth_interval = "integer",
}

local function check_optimizer(name, optimizer)
  options_of.argument("scaler:" .. name, "optimizer", optimizer, "optimizer")
end

---@param options? ms.ScalerOptions
---@return ms.Scaler
local function scaler(options)
  local self = {
    init_scale = 65536, growth_factor = 2, backoff_factor = 0.5, growth_interval = 2000,
  }
  for key, value in pairs(check("optim.scaler", options, known)) do
    if type(value) ~= "number" or not (value > 0 and value < math.huge) then
      core.raise(("optim.scaler: %s must be a finite number above 0"):format(key))
    end
    self[key] = value
  end
  if self.init_scale > MOST or self.init_scale < LEAST then
    core.raise(("optim.scaler: init_scale must be from 2^-126 to 2^126, not %g")
      :format(self.init_scale))
  end
  self.factor = core.full(self.init_scale, {}):keep()
  self.good = core.zeros {}:keep()         -- iterations without overflow since the last change
  -- The reciprocal of the factor by which the losses of this step were scaled.
  self.inverse = core.full(1 / self.init_scale, {}):keep()
  self.finite = {}                         -- optimizer -> flag, between unscale and step
  -- Whether some optimizer has stepped since the last change; 1 while all their flags were true.
  self.stepped, self.ok = false, core.full(1, {}):keep()
  local object = setmetatable({}, Scaler)
  count = count + 1
  self.number, made[count], inner[object] = count, object, self
  return object
end

-- The next factor, by whether all gradients of an iteration were finite. The factor stays in the
-- range in which it and its reciprocal are normal numbers: it could not recover from inf or 0, and
-- gradients are multiplied by the reciprocal, where a denormal number counts as 0.
local function adapted(self, finite)
  local grown, shrunk = self.factor * self.growth_factor, self.factor * self.backoff_factor
  grown = core.where(grown:le(MOST), grown, self.factor)
  shrunk = core.where(shrunk:ge(LEAST), shrunk, self.factor)
  local good = core.where(finite, self.good + 1, 0)
  local due = good:ge(self.growth_interval)
  local factor = core.where(finite, core.where(due, grown, self.factor), shrunk)
  return factor, core.where(due, good:zeros_like(), good)
end

-- Adapts the factor once in each iteration, however many optimizers it steps: when the next
-- iteration begins, or when the state is saved.
local function adapt(self)
  if not self.stepped then return end
  core.no_grad(function()
    local factor, good = adapted(self, self.ok:gt(0))
    self.factor:copy_(factor)
    self.good:copy_(good)
    self.ok:fill_(1)
  end)
  self.stepped = false
end

---@param loss ms.Tensor
---@return ms.Tensor
function Scaler:scale(loss)
  local own = inner[self]
  if not core.is_tensor(loss) then
    core.raise("scaler:scale: a loss is expected, not a " .. type(loss))
  end
  own.finite = {}
  adapt(own)
  core.no_grad(function() own.inverse:copy_(1 / own.factor) end)
  local scaled = loss * own.factor:to(loss:dtype())
  core.mark_gradients(scaled)
  return scaled
end

-- Ranks that have different parts of a gradient, or of a model, must skip the same steps.
local function agreed(finite, params)
  for _, axis in ipairs(parts.axes(params)) do finite = axis:all_reduce(finite, "min"):value() end
  local seen = {}
  for _, p in ipairs(params) do
    local entry = ownership.sharded[p]
    local model = entry and entry.model
    if entry and (entry.own or entry.shards:size() > 1) and not seen[model] then
      seen[model] = true
      finite = model.group:all_reduce(finite, "min"):value()
    end
  end
  return finite
end

---@param optimizer ms.Optimizer
---@return ms.Tensor
function Scaler:unscale(optimizer)
  local own = inner[self]
  check_optimizer("unscale", optimizer)
  if own.finite[optimizer] then
    core.raise("scaler: the gradients of this optimizer are unscaled already; unscale once between "
      .. "scale and step")
  end
  core.check_rest("scaler:unscale", optimizer.order)
  optimizer.scaler = self
  for _, group in ipairs(optimizer:groups()) do parts.settle(group.params) end
  local list, params = {}, {}
  for _, group in ipairs(optimizer:groups()) do
    for _, p in ipairs(group.params) do
      local grad = p:grad()
      if grad then list[#list + 1], params[#params + 1] = grad, p end
    end
  end
  if sharded_join.of("scaler", params) then
    core.raise "scaler: inside the join of a sharded model, ranks without inputs left cannot \z
      follow its factor: train in bf16, which needs no scaler, or give all ranks as many inputs"
  end
  if #list == 0 then core.raise("scaler: no parameter has a gradient") end
  layouts.check_of("scaler:unscale", params)
  own.finite[optimizer] = agreed(core.unscale(list, own.inverse), params)
  for _, p in ipairs(params) do core.unmark(p) end
  return own.finite[optimizer]
end

---@param optimizer ms.Optimizer
---@param finite ms.Tensor
function Scaler:set_finite(optimizer, finite)
  local own = inner[self]
  check_optimizer("set_finite", optimizer)
  options_of.argument("scaler:set_finite", "finite", finite, "tensor")
  own.finite[optimizer] = finite
end

---@param optimizer ms.Optimizer
function Scaler:step(optimizer)
  local own = inner[self]
  check_optimizer("step", optimizer)
  local finite = own.finite[optimizer] or self:unscale(optimizer)
  own.finite[optimizer] = nil
  optimizer:step { only_if = finite }
  core.no_grad(function() own.ok:copy_(core.where(finite, own.ok, 0)) end)
  own.stepped = true
end

---@return { factor: ms.Tensor, good: ms.Tensor }
function Scaler:state()
  local own = inner[self]
  adapt(own)
  return module.copied { factor = own.factor, good = own.good }
end

---@param saved table
function Scaler:load_state(saved)
  local own = inner[self]
  saved = type(saved) == "table" and saved or {}
  if not core.is_tensor(saved.factor) or not core.is_tensor(saved.good) then
    core.raise "load_state: this is no state of a scaler"
  end
  own.stepped, own.finite = false, {}
  core.no_grad(function()
    own.ok:fill_(1)
    own.factor:copy_(saved.factor)
    own.good:copy_(saved.good)
    own.inverse:copy_(1 / own.factor)
  end)
end

options_of.methods(Scaler, "a scaler")

-- The scaler of this number gets the state of the same one of another rank.
local function load(number, saved)
  local self = made[number]
  if not self then
    core.raise "join: another rank steps with a scaler that this rank does not have: make the \z
      same ones on all ranks"
  end
  self:load_state(saved)
end

--- The number of a scaler, by the order in which they were made.
---@param object ms.Scaler
---@return integer
local function number_of(object) return inner[object].number end

return { new = scaler, load = load, number_of = number_of }
