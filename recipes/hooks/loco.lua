-- LoCo: gradients in 4 bits with error feedback. Each rank keeps a moving average of what the codes
-- lose, which is added to its next gradients and set to zero every T steps. Xie, Lin, Toh, Zhou:
-- "LoCo: Low-Bit Communication Adaptor for Large-scale Model Training", 2024. A link for ms.ddp,
-- where the mean is then gathered in 8 bits, and for ms.fsdp. The paper keeps the average in 8
-- bits, this file in f32. Options: beta 0.5, the part of the last error in the average (1: plain
-- error feedback); reset 512 steps (0: never); block 256; kind "int4".
local ms, hooks = require "moonshard", require "moonshard.hooks"

return function(options)
  options = options or {}
  local beta, reset, block = options.beta or 0.5, options.reset or 512, options.block or 256
  local codec, int8 = ms.codec(options.kind or "int4", { block = block }),
    ms.codec("int8", { block = block })
  local state = hooks.state "loco"

  return function(bucket)
    local flat, average = bucket:buffer(), state:flat(bucket, "average")
    local wanted = flat:to "f32" + average
    local parts, group = hooks.parts(bucket, wanted)
    local n = parts:size(2)
    local codes, lost = codec:encode(parts, { error = true })
    lost = hooks.joined(bucket, lost)
    if reset > 0 and (ms.step() + 1) % reset == 0 then average:zero_()
    else average:lerp_(lost, beta) end
    if bucket:wants_sent() then bucket:set_sent(flat) end            -- it keeps the rest itself

    return group:all_to_all(codes):and_then(function(rows)
      local mean = codec:decode_sum(rows, n):div_(bucket:divisor())
      if bucket:kind() == "all_reduce" then
        return group:all_gather((int8:encode(mean:view(1, n))))
      end
      if bucket:kind() == "hybrid" then return bucket:group "replicate":all_reduce(mean) end
      return mean
    end):and_then(function(result)
      if bucket:kind() ~= "all_reduce" then return result:to(bucket:dtype()) end
      return flat:copy_(hooks.joined(bucket, int8:decode(result, n)))
    end)
  end
end
