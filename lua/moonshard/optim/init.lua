-- Optimizers: the kinds, and which function overlaps them with backward.
local core = require "moonshard.core"
local options_of = require "moonshard.base.options"
local averager = require "moonshard.optim.averager"
local clip = require "moonshard.optim.clip"
local ema = require "moonshard.optim.ema"
local kinds = require "moonshard.optim.kinds"
local optimizers = require "moonshard.optim.optimizer"
local overlap = require "moonshard.parallel.overlap"
local scaler = require "moonshard.optim.scaler"
local schedules = require "moonshard.optim.schedules"
require "moonshard.optim.step"
require "moonshard.optim.saved_state"

---@class ms.optim
local optim = {}
for name, f in pairs(schedules) do optim[name] = f end
optim.scaler, optim.averager, optim.ema = scaler.new, averager, ema
optim.in_backward, optim.in_backward_of = overlap.in_backward, overlap.in_backward_of
optim.overlap_standard = overlap.attach
optim.clip_grad_norm, optim.clip_grad_value = clip.clip_grad_norm, clip.clip_grad_value
optim._clip = clip.for_loops

---@param kind ms.Kind
---@return fun(params: ms.Params, options?: ms.OptimizerOptions): ms.Optimizer
function optim.define(kind)
  local own = kinds.add(kind)
  return function(params, options) return optimizers.new(own, params, options) end
end

-- The kinds in C: their step is one call.
local function native(name, defaults)
  optim[name] = optim.define {
    name = name, defaults = defaults, native = true,
    step_param = function(p, grad, state, group, _, only_if, salt, count, place)
      core.optim_step(name, p, grad, state, group, only_if, salt, count, place)
    end,
  }
end

native("sgd", { momentum = 0, dampening = 0, nesterov = false })
native("adam", { lr = 1e-3, betas = { 0.9, 0.999 }, eps = 1e-8, amsgrad = false })
native("adamw",
  { lr = 1e-3, betas = { 0.9, 0.999 }, eps = 1e-8, amsgrad = false, weight_decay = 0.01 })
native("adagrad", { lr_decay = 0, initial_accumulator_value = 0, eps = 1e-10 })
native("adadelta", { lr = 1, rho = 0.9, eps = 1e-6 })
native("rmsprop", { alpha = 0.99, eps = 1e-8, momentum = 0, centered = false })
native("rprop", { etas = { 0.5, 1.2 }, step_sizes = { 1e-6, 50 } })
native("adamax", { lr = 1e-3, betas = { 0.9, 0.999 }, eps = 1e-8 })

---@class ms.Optimizer
local Optimizer = optimizers.class
local overlapped = {}  -- kind's name -> the function of register_overlapped

---@param model ms.DDP|ms.FSDP
---@param policy string|ms.Overlap
function Optimizer:overlap(model, policy)
  local kind, seen = self.kind, {}
  while kind do
    if overlapped[kind.name] then return overlapped[kind.name](self, model, policy) end
    seen[kind.name] = true
    local base = kind.base
    kind = base and kinds.by_name[base]
    if base and not kind then
      core.raise(("overlap: kind '%s' is based on '%s', which does not exist")
        :format(self.kind.name, base))
    end
    if kind and seen[kind.name] then
      core.raise(("overlap: kind '%s' is based on itself"):format(kind.name))
    end
  end
  overlap.attach(self, model, policy)
end

---@param kind string
---@param make fun(optimizer: ms.Optimizer, model: ms.Module, policy: string|ms.Overlap)
function optim.register_overlapped(kind, make)
  if type(kind) ~= "string" or not kinds.by_name[kind] then
    local names = {}
    for name in pairs(kinds.by_name) do names[#names + 1] = name end
    table.sort(names)
    core.raise(("register_overlapped: there is no kind of optimizer '%s'; there are %s")
      :format(tostring(kind), table.concat(names, ", ")))
  end
  if type(make) ~= "function" then
    core.raise("register_overlapped: a function is expected, not a " .. type(make))
  end
  if overlapped[kind] then
    core.raise(("register_overlapped: '%s' is registered already"):format(kind))
  end
  overlapped[kind] = make
end

options_of.methods(Optimizer, "an optimizer", function(value)
  local meta = type(value) == "table" and getmetatable(value)
  return type(meta) == "table" and meta.__name == Optimizer.__name
end)

return options_of.closed(optim, "ms.optim")
