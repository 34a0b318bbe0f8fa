-- Exponential moving averages of weights. An average has the place of an optimizer's state, which
-- nothing steps: it is saved, sharded, compared over ranks and loaded as such states are.
local core = require "moonshard.core"
local module = require "moonshard.nn.module"
local options_of = require "moonshard.base.options"
local optimizers = require "moonshard.optim.optimizer"
local overlap = require "moonshard.parallel.overlap"
local ownership = require "moonshard.base.ownership"

---@class ms.EMA
local EMA = {}
-- For checkpoints, and for all that looks at states, it is an optimizer.
local meta = { __name = "ms.Optimizer", __newindex = optimizers.class.__newindex }
function meta.__index(self, name)
  local value = EMA[name]
  if value ~= nil then return value end
  return optimizers.class.__index(self, name)
end

local kind = {
  name = "ema", elementwise = true, observes = true,
  all_defaults = { decay = 0.999, warmup = true },
}

-- An average has digits that 16 bits lack. The first average of a parameter is its value. (A clone
-- of a piece of a sharded parameter would be a piece of the parameter, which a state is not.)
local function begin(p)
  return core.no_grad(function() return p:zeros_like("f32"):copy_(p):keep() end)
end

-- The part of the old average that stays. An average must not stay near the weights with which it
-- began: (1 + n) / (10 + n), of TensorFlow's ExponentialMovingAverage, is 0.1 in the first step and
-- 0.9 in the 80th.
local function share_kept(group, steps)
  local decay = group.decay
  if type(decay) ~= "number" or not (decay >= 0 and decay < 1) then
    core.raise(("ema: decay must be 0 or more and below 1, not %s"):format(tostring(decay)))
  end
  return group.warmup and math.min(decay, (1 + steps) / (10 + steps)) or decay
end

-- Where steps of the policy deferred are under way: the averages follow on their stream.
local function stream_of_steps(self)
  for _, p in ipairs(self.order) do
    local by = ownership.stepped[p]
    local slot = by and by.slots[p]
    if slot and slot.late then return overlap.stream() end
  end
end

local function follow(self)
  core.no_grad(function()
    for _, group in ipairs(self.list) do
      local part = 1 - share_kept(group, self.steps)
      for _, p in ipairs(group.params) do
        local state = self.slots[p].state
        state.average = state.average or begin(p)
        state.average:lerp_(p:detach():to "f32", part)
      end
    end
  end)
end

local function refuse_swapped(self, what)
  if self.swapped then
    core.raise(("ema:%s: the weights are averages now, inside averaged()"):format(what))
  end
end

function EMA:step()
  if core.in_hook() then core.raise "ema:step cannot be used inside a hook" end
  refuse_swapped(self, "step")
  local stream = stream_of_steps(self)
  if stream then stream:run(function() follow(self) end) else follow(self) end
  self.steps = self.steps + 1
end

-- The averages begin again, with the weights as they are.
function EMA:_begin()
  for _, p in ipairs(self.order) do self.slots[p].state.average = begin(p) end
  self.steps = 0
end

-- The averages become the weights for good.
function EMA:_take()
  refuse_swapped(self, "averaged")
  core.no_grad(function()
    for _, p in ipairs(self.order) do p:copy_(self.slots[p].state.average) end
  end)
end

-- Exchanges weights and averages. kept: averages of 16-bit weights, which these cannot hold.
local function exchange(self, kept)
  core.no_grad(function()
    for _, p in ipairs(self.order) do
      local state, before = self.slots[p].state, p:detach():clone()
      state.average = state.average or begin(p)
      if kept[p] then
        p:copy_(state.average)
        state.average:copy_(kept[p])
      else
        if before:dtype() ~= "f32" then kept[p] = state.average:clone():keep() end
        p:copy_(state.average)
        state.average:copy_(before)
      end
    end
  end)
end

function EMA:averaged(f, ...)
  options_of.argument("ema:averaged", "f", f, "function")
  refuse_swapped(self, "averaged")
  local kept = {}
  exchange(self, kept)
  self.swapped = true
  local result = table.pack(pcall(f, ...))
  exchange(self, kept)
  self.swapped = false
  if not result[1] then error(result[2], 0) end
  return table.unpack(result, 2, result.n)
end

for _, name in ipairs { "state", "load_state" } do
  EMA[name] = function(self, ...)
    refuse_swapped(self, name)
    return optimizers.class[name](self, ...)
  end
end

for _, name in ipairs { "step_param", "zero_grad", "lr", "overlap" } do
  EMA[name] = function()
    core.raise(("ema:%s: an ema steps no weights: call that of their optimizer"):format(name))
  end
end

options_of.methods(EMA, "an ema", function(value) return getmetatable(value) == meta end)

---@param params ms.Params
---@param options? ms.EMAOptions
---@return ms.EMA
return function(params, options)
  options_of.check("ema", options, { decay = "number", warmup = "boolean" })
  if module.is_module(params) then
    params = params:parameters(function(p) return p:requires_grad() end)
    if #params == 0 then core.raise "ema: the module has no parameter that is trained" end
  end
  local self = optimizers.new(kind, params, options, meta)
  for _, group in ipairs(self.list) do share_kept(group, 0) end
  self:_begin()
  return self
end
