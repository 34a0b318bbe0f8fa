-- Local SGD with hierarchical averaging: ranks train alone, and average their weights often with
-- neighbouring ranks and less often with all ranks. Lin, Stich, Patel, Jaggi: "Don't Use Large
-- Mini-Batches, Use Local SGD", 2020. For a model that is not wrapped; call the result's
-- after_step(step) once in each step. Options: model, periods { { period, ranks }, ... } ascending
-- (the largest period that divides the step is used), or period 8, at which all ranks meet; group.
local ms = require "moonshard"

return function(options)
  assert(options and options.model, "local_sgd: model is missing")
  ms.nn.alone(options.model, { merge = "mean" })                    -- each rank trains its own
  local world = options.group or ms.world()
  local weights, levels = ms.flat(options.model:parameters()), {}
  for i, pair in ipairs(options.periods or { { options.period or 8, world:size() } }) do
    levels[i] = {
      period = pair[1], group = pair[2] == world:size() and world or (world:levels(pair[2])),
    }
  end
  local local_sgd = {}

  function local_sgd.after_step(step)
    for i = #levels, 1, -1 do
      if (step + 1) % levels[i].period == 0 then
        levels[i].group:all_reduce(weights, "avg"):value()
        return
      end
    end
  end

  return local_sgd
end
