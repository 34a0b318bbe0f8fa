-- SPARTA: each rank trains alone. In each step a random part of the weights, the same on all ranks,
-- is averaged. Beton, Reed, Howes, Cheema, Baioumy: "Improving the Efficiency of Distributed
-- Training using Sparse Parameter Averaging", 2025. For a model that is not wrapped; call the
-- result's after_step(step) once in each step, after the inner optimizer. Options: model, fraction
-- 0.05 of the weights (the paper goes down to 0.0005), seed 0, group.
local ms = require "moonshard"

return function(options)
  assert(options and options.model, "sparta: model is missing")
  local fraction, seed = options.fraction or 0.05, options.seed or 0
  assert(type(fraction) == "number" and fraction > 0 and fraction <= 1,
    "sparta: fraction must be above 0, and 1 or less")
  assert(math.type(seed) == "integer", "sparta: seed must be an integer")
  ms.nn.alone(options.model, { merge = "mean" })                    -- each rank trains its own
  local group, weights = options.group or ms.world(), ms.flat(options.model:parameters())
  local n = weights:numel()
  -- Without the second term rounding would make 0.07 of 100 weights 8, not 7.
  local count = math.min(n, math.max(1, math.ceil(n * fraction - n * 0x1p-52)))
  local width = n // count

  -- Different positions, the same on all ranks, for the cost of `count` draws: one in each of
  -- `count` pieces of equal width, which begin at a random place and go on at the front.
  local function draw(step)
    local number = (seed * 1000003 + step) * 2
    local inside = ms.randint { count, high = width, seed = number }
    local first = ms.randint { 1, high = n, seed = number + 1 }
    local at = ms.arange(0, count - 1) * width + inside + first
    return ms.where(at:ge(n), at - n, at)
  end

  local sparta = {}

  function sparta.after_step(step)
    ms.no_grad(function()
      local positions = draw(step)
      local mean = group:all_reduce(weights:gather(1, positions), "avg"):value()
      weights:scatter_(1, positions, mean)
    end)
  end

  return sparta
end
