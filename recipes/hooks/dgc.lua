-- Deep Gradient Compression: the largest entries of the locally accumulated momentum are sent; the
-- others stay in the accumulator. Lin, Han, Mao, Wang, Dally: "Deep Gradient Compression: Reducing
-- the Communication Bandwidth for Distributed Training", 2018. A link for an optimizer without
-- momentum of its own (SGD); options: fraction 0.01 of the entries, momentum 0.9, warmup 0: steps
-- in which the fraction falls from 1/4.
local ms, hooks = require "moonshard", require "moonshard.hooks"

return function(options)
  options = options or {}
  local fraction, momentum = options.fraction or 0.01, options.momentum or 0.9
  local warmup = options.warmup or 0
  local state = hooks.state "dgc"

  -- How many of n entries are sent in this step. The second term undoes rounding: 0.07 of 100 would
  -- be 8.
  local function kept(n)
    local now = fraction
    if ms.step() < warmup then now = 0.25 * (fraction / 0.25) ^ (ms.step() / warmup) end
    return math.min(n, math.max(1, math.ceil(n * now - n * 0x1p-52)))
  end

  return function(bucket)
    if bucket:wants_sent() then bucket:set_sent(bucket:buffer()) end  -- unsent numbers are kept
    local flat, group = bucket:buffer():to "f32", bucket:group()
    local velocity, waiting = state:flat(bucket, "velocity"), state:flat(bucket, "waiting")
    velocity:mul_(momentum):add_(flat)  -- momentum correction: entries wait with their momentum
    waiting:add_(velocity)

    local _, positions = waiting:abs():topk(kept(flat:numel()))
    local values = waiting:gather(1, positions)
    waiting:scatter_(1, positions, 0)   -- sent entries leave the accumulator
    velocity:scatter_(1, positions, 0)  -- and their momentum is reset (momentum factor masking)

    local sent = { group:all_gather(values), group:all_gather(positions:to "i32") }
    return ms.all(sent):and_then(function(all)
      return bucket:shard(flat:zero_():scatter_add_(1, all[2], all[1]):div_(bucket:divisor()))
        :to(bucket:dtype())
    end)
  end
end
