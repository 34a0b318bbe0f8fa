-- DiLoCo: each rank trains alone. Every H steps, the mean over the ranks of the change of the
-- weights is the gradient of an outer optimizer. Douillard, Feng, Rusu, Chhaparia, Donchev,
-- Kuncoro, Ranzato, Szlam, Shen: "DiLoCo: Distributed Low-Communication Training of Language
-- Models", 2023. For a model that is not wrapped; call the result's after_step(step) once in each
-- step, after the inner optimizer, and save it with the checkpoint. Options: model, period 100, lr
-- 0.7, momentum 0.9, group.
local ms, optim = require "moonshard", require "moonshard.optim"

return function(options)
  assert(options and options.model, "diloco: model is missing")
  ms.nn.alone(options.model, { merge = "mean" })                    -- each rank trains its own
  local period, group = options.period or 100, options.group or ms.world()
  local weights = ms.flat(options.model:parameters())
  local anchor = weights:clone():keep()                              -- the last common weights
  local momentum = options.momentum or 0.9
  local outer = optim.sgd({ anchor }, {
    lr = options.lr or 0.7, momentum = momentum, nesterov = momentum > 0,
  })
  local diloco = {}

  function diloco.after_step(step)
    if (step + 1) % period ~= 0 then return end
    ms.no_grad(function()
      outer:step_param(anchor, group:all_reduce(anchor - weights, "avg"):value())
      weights:copy_(anchor)
    end)
  end

  function diloco:state() return { anchor = anchor, outer = outer:state() } end

  function diloco:load_state(saved)
    ms.no_grad(function() anchor:copy_(saved.anchor) end)
    outer:load_state(saved.outer)
  end

  return diloco
end
