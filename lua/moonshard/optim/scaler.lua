-- The loss scaler: multiplies losses so that 16-bit gradients do not vanish, skips steps whose gradients overflowed, adapts.
local core = require "moonshard.core"
local check = require "moonshard.options".check

---@class ms.Scaler
local Scaler = {}
Scaler.__index = Scaler
Scaler.__name = "ms.Scaler"

--- In order: 65536, 2, .5, 2000 unless given. Scale and counter lie on the device: nothing waits.
---@param options? { init_scale?: number, growth_factor?: number, backoff_factor?: number, growth_interval?: integer }
---@return ms.Scaler
local function scaler(options)
  local self = { init_scale = 65536, growth_factor = 2, backoff_factor = 0.5, growth_interval = 2000 }
  for key, value in pairs(check("optim.scaler", options, { "init_scale", "growth_factor", "backoff_factor", "growth_interval" })) do
    if type(value) ~= "number" or value <= 0 then core.raise(("optim.scaler: %s must be a number above 0"):format(key)) end
    self[key] = value
  end
  self.factor = core.full(self.init_scale, {}):keep()
  self.good = core.zeros {}:keep()                         -- steps without overflow since the last change
  self.inverse = core.full(1 / self.init_scale, {}):keep() -- of the factor by which the losses of this step were scaled
  self.finite = {}                                         -- optimizer -> flag, between unscale and step
  return setmetatable(self, Scaler)
end

---@param loss ms.Tensor
---@return ms.Tensor
function Scaler:scale(loss)
  self.finite = {}
  core.no_grad(function() self.inverse:copy_(1 / self.factor) end)
  return loss * self.factor:to(loss:dtype())
end

--- Unscales the gradients of the optimizer's parameters; the device's flag whether all are finite. `step` does it by itself.
---@param optimizer ms.Optimizer
---@return ms.Tensor
function Scaler:unscale(optimizer)
  if self.finite[optimizer] then core.raise("scaler: the gradients of this optimizer are unscaled already; unscale once between scale and step") end
  local list = {}
  for _, group in ipairs(optimizer:groups()) do
    for _, p in ipairs(group.params) do list[#list + 1] = p:grad() end
  end
  if #list == 0 then core.raise("scaler: no parameter has a gradient") end
  self.finite[optimizer] = core.unscale(list, self.inverse)
  return self.finite[optimizer]
end

--- Replaces the flag that `unscale` gave: by what all ranks say.
---@param optimizer ms.Optimizer
---@param finite ms.Tensor
function Scaler:set_finite(optimizer, finite) self.finite[optimizer] = finite end

--- Unscales (unless that was done), steps unless inf or nan was seen, adapts.
---@param optimizer ms.Optimizer
function Scaler:step(optimizer)
  local finite = self.finite[optimizer] or self:unscale(optimizer)
  self.finite[optimizer] = nil
  optimizer:step { only_if = finite }
  core.no_grad(function()
    local good = core.where(finite, self.good + 1, 0)
    local grown = good:ge(self.growth_interval)
    local kept = core.where(grown, self.factor * self.growth_factor, self.factor)
    self.factor:copy_(core.where(finite, kept, self.factor * self.backoff_factor))
    self.good:copy_(core.where(grown, good:zeros_like(), good))
  end)
end

function Scaler:state() return { factor = self.factor, good = self.good } end

function Scaler:load_state(saved)
  if type(saved) ~= "table" or not core.is_tensor(saved.factor) or not core.is_tensor(saved.good) then core.raise "load_state: this is no state of a scaler" end
  core.no_grad(function()
    self.factor:copy_(saved.factor)
    self.good:copy_(saved.good)
    self.inverse:copy_(1 / self.factor)
  end)
end

return scaler
