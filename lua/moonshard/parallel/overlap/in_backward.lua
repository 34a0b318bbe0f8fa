-- Optimizers of single parameters, which step in backward without a call in the loop.
local core = require "moonshard.core"
local argument = require "moonshard.base.options".argument
local owners = require "moonshard.parallel.overlap.step_owners"
local passes = require "moonshard.parallel.overlap.passes"
local module = require "moonshard.nn.module"

local in_backward = {}

---@param make fun(params: ms.Params, options?: ms.OptimizerOptions): ms.Optimizer
---@param params ms.Parameter[]
---@param options? ms.OptimizerOptions and keep_grads
---@return ms.Optimizer[] in the order of params, for saving and for changing hyper-parameters
function in_backward.in_backward(make, params, options)
  if type(make) ~= "function" then
    core.raise("in_backward: a function that makes an optimizer is expected (optim.adamw), not a "
      .. type(make))
  end
  if core.in_hook() then core.raise "in_backward cannot be used inside a hook" end
  if module.is_module(params) then params = params:parameters() end
  if type(params) ~= "table" or #params == 0 then
    core.raise "in_backward: a list of parameters is expected"
  end
  local own_options, keep, made = {}, false, {}
  argument("in_backward", "options", options, "table?")
  for name, value in pairs(options or {}) do
    if name == "keep_grads" then keep = value else own_options[name] = value end
  end
  for i, p in ipairs(params) do
    if not core.is_tensor(p) or not p:requires_grad() then
      core.raise(("in_backward: parameter %d needs no gradient"):format(i))
    end
    if owners.plan_of[p] then
      core.raise(("in_backward: parameter '%s' is stepped by an overlapped optimizer already")
        :format(p:name()))
    end
    local s = owners.wrapped_in[p]
    if s and s.whole and s.overlap.position_of[p] then
      core.raise(("in_backward: parameter '%s' would be stepped before %s")
        :format(p:name(), s.whole))
    end
    local given = {}
    for name, value in pairs(own_options) do given[name] = value end
    made[i] = make({ p }, given)
    if type(made[i]) ~= "table" or not made[i].step_param then
      core.raise("in_backward: make must be a function that returns an optimizer (optim.adamw); \z
        it returned a " .. type(made[i]))
    end
    if made[i].shard then
      core.raise "in_backward: an optimizer of one parameter cannot be sharded: use \z
        optimizer:overlap(model, \"in_backward\")"
    end
  end
  for i, p in ipairs(params) do
    local own = owners.own_of[p]
    if own then
      own.list[#own.list + 1] = made[i]
      own.keep = own.keep or keep
    else
      owners.own_of[p] = { list = { made[i] }, keep = keep }
      if owners.wrapped_in[p] then passes.listen(owners.wrapped_in[p]) end
      p:on_grad_ready(function(ready)
        -- The owner is looked up in owners.own_of in each call, because the hook must not keep its
        -- parameter alive.
        if owners.wrapped_in[ready] or module.is_accumulating() then return end
        owners.stream():run(function() passes.step_own(ready, owners.own_of[ready]) end)
      end)
    end
  end
  return made
end

---@param model ms.Module
---@return { parameter: ms.Parameter, optimizers: ms.Optimizer[] }[]
function in_backward.in_backward_of(model)
  argument("in_backward_of", "model", model, "module")
  local list = {}
  for _, p in ipairs(model:parameters()) do
    if owners.own_of[p] then
      list[#list + 1] = { parameter = p, optimizers = { table.unpack(owners.own_of[p].list) } }
    end
  end
  return list
end

return in_backward
