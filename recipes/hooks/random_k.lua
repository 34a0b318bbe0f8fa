-- Random-k: all ranks send the same randomly chosen entries, so that a plain reduction of few
-- numbers is enough; error feedback keeps the others. Stich, Cordonnier, Jaggi: "Sparsified SGD
-- with Memory", 2018. A link; options: fraction 0.05, seed 0.
local ms, hooks = require "moonshard", require "moonshard.hooks"

return function(options)
  options = options or {}
  local fraction, seed = options.fraction or 0.05, options.seed or 0
  local state = hooks.state "random_k"

  return function(bucket)
    if bucket:wants_sent() then bucket:set_sent(bucket:buffer()) end  -- unsent numbers are kept
    local flat, residual = bucket:buffer():to "f32", state:flat(bucket, "residual")
    local n = flat:numel()
    -- Without the second term rounding would make 0.07 of 100 entries 8, not 7.
    local count = math.min(n, math.max(1, math.ceil(n * fraction - n * 0x1p-52)))
    residual:add_(flat)

    -- The seed depends on step and bucket only, so all ranks draw the same entries.
    local draws = ms.rand {
      flat:numel(), seed = (seed * 1000003 + ms.step()) * 1009 + bucket:index(),
    }
    local _, positions = draws:topk(count)
    local values = residual:gather(1, positions)
    residual:scatter_(1, positions, 0)

    return bucket:group():all_reduce(values):and_then(function(sum)
      return bucket:shard(flat:zero_():scatter_(1, positions, sum:div(bucket:divisor())))
        :to(bucket:dtype())
    end)
  end
end
