-- Eager DiLoCo: DiLoCo whose communication lasts a whole period. A rank's own change counts at
-- once; the changes of the others count one period late. Kale, Douillard, Donchev: "Eager Updates
-- For Overlapped Communication and Computation in DiLoCo", 2025. For a model that is not wrapped;
-- call the result's after_step(step) once in each step, after the inner optimizer, and save it with
-- the checkpoint. Options: model, period 100, lr 0.7, momentum 0.9, group.
local ms, optim = require "moonshard", require "moonshard.optim"

return function(options)
  assert(options and options.model, "eager_diloco: model is missing")
  local period = options.period or 100
  assert(math.type(period) == "integer" and period > 0,
    "eager_diloco: period must be a positive integer")
  ms.nn.alone(options.model, { merge = "mean" })                    -- each rank trains its own
  local group, weights = options.group or ms.world(), ms.flat(options.model:parameters())
  local anchor = weights:clone():keep()                              -- its weights after a round
  local before = weights:zeros_like():keep()                         -- its change in that round
  local momentum = options.momentum or 0.9
  local outer = optim.sgd({ anchor }, {
    lr = options.lr or 0.7, momentum = momentum, nesterov = momentum > 0,
  })
  local eager, pending = {}, nil                                     -- the mean of that change

  function eager.after_step(step)
    if (step + 1) % period ~= 0 then return end
    ms.no_grad(function()
      local change = anchor - weights
      -- The late mean, with this rank's part of it replaced by the new one.
      local mean = (change - before) / group:size()
      if pending then mean:add_(pending:value()) end
      before:copy_(change)
      outer:step_param(anchor, mean)
      weights:copy_(anchor)
      pending = group:all_reduce(change, "avg")                      -- runs during the next period
    end)
  end

  function eager:state()
    return {
      anchor = anchor, before = before, outer = outer:state(),
      pending = pending and pending:value():keep(),                  -- it counts in the next round
    }
  end

  function eager:load_state(saved)
    ms.no_grad(function()
      anchor:copy_(saved.anchor)
      before:copy_(saved.before)
    end)
    outer:load_state(saved.outer)
    pending = saved.pending
      and ms.all { saved.pending }:and_then(function(values) return values[1] end)
  end

  return eager
end
