-- SlowMo: local steps, then an average, then a slow momentum over these averages. Wang, Tantia,
-- Ballas, Rabbat: "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum",
-- 2020. For a model that is not wrapped; call the result's after_step(step) once in each step,
--       after the inner optimizer, and save it with the checkpoint. Options: model, period 12,
--       momentum 0.5, lr 1, group.
local ms = require "moonshard"

return function(options)
  assert(options and options.model, "slowmo: model is missing")
  ms.nn.alone(options.model, { merge = "mean" })                    -- each rank trains its own
  local period, beta, lr = options.period or 12, options.momentum or 0.5, options.lr or 1
  local group, weights = options.group or ms.world(), ms.flat(options.model:parameters())
  local anchor, slow = weights:clone():keep(), weights:zeros_like():keep()
  local slowmo = {}

  function slowmo.after_step(step)
    if (step + 1) % period ~= 0 then return end
    ms.no_grad(function()
      local mean = group:all_reduce(weights:clone(), "avg"):value()
      slow:mul_(beta):add_(anchor - mean)  -- minus the change of the mean weights
      anchor:sub_(slow, lr)
      weights:copy_(anchor)
    end)
  end

  function slowmo:state() return { anchor = anchor, slow = slow } end

  function slowmo:load_state(saved)
    ms.no_grad(function()
      anchor:copy_(saved.anchor)
      slow:copy_(saved.slow)
    end)
  end

  return slowmo
end
