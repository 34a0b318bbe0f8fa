-- Golden optimizers: trajectories of one parameter under given gradients.
local ms = require "moonshard"
local report = require "moonshard.cli.golden.report"

local optimizers = { tolerance = 1e-5 }

-- Also used for the golden models. A kind's constructor refuses options that it does not have.
optimizers.kinds = {
  sgd = true, adam = true, adamw = true, adagrad = true, adadelta = true, rmsprop = true,
  rprop = true, adamax = true,
}
local hyperparameters = {
  lr = true, betas = true, eps = true, weight_decay = true, momentum = true, dampening = true,
  nesterov = true, maximize = true, amsgrad = true,
  lr_decay = true, initial_accumulator_value = true, rho = true, alpha = true, centered = true,
  etas = true, step_sizes = true,
}

--- An optimizer as the manifest describes it.
---@param kind string
---@param given table
---@param params ms.Params
---@return ms.Optimizer
function optimizers.make(kind, given, params)
  if not optimizers.kinds[kind] then error(("unknown optimizer '%s'"):format(tostring(kind)), 0) end
  report.known_keys("hyper-parameter", given, hyperparameters)
  local options = {}
  for name, value in pairs(given) do options[name] = value end
  return ms.optim[kind](params, options)
end

---@param case table
---@return string
function optimizers.name(case)
  return ("%s (%s)"):format(tostring(case.case), tostring(case.optimizer))
end

--- Runs a case of the manifest on its own results.
---@param case table
---@param tensors table<string, ms.Tensor>
---@param found ms.GoldenReport
function optimizers.run(case, tensors, found)
  report.known_keys("entry", case, { case = 1, optimizer = 1, hyperparameters = 1, steps = 1 })
  local function tensor(name)
    return tensors[name] or error(("the file has no tensor '%s'"):format(name), 0)
  end
  if math.type(case.steps) ~= "integer" or case.steps < 1 then
    error("steps must be 1 or more", 0)
  end
  local prefix = ("%d."):format(case.case)
  local parameter = ms.nn.Parameter(tensor(prefix .. "param.0"):clone())
  local optimizer = optimizers.make(case.optimizer, case.hyperparameters, { parameter })
  for step = 0, case.steps - 1 do
    parameter:set_grad(tensor(("%sgrad.%d"):format(prefix, step)):clone())
    optimizer:step()
    local name = ("param.%d"):format(step + 1)
    found:relative(name, parameter:detach(), tensors[prefix .. name], optimizers.tolerance)
  end
end

return optimizers
