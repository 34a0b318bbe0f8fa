-- Gradients as 8-bit integers with a scale for each block, in two steps: every rank adds up its
-- part of all ranks' gradients in f32, then sends the mean. Half the bytes of a reduction in 16
-- bits, and no sum ever leaves f32. As in Wang, Qin, Jacobs, Holmes, Rajbhandari, Ruwase, Yan,
-- Yang, He: "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023.
-- A link; options: block 256.
local ms = require "moonshard"

return function(options)
  local block = options and options.block or 256
  local int8 = ms.codec("int8", { block = block })

  return function(bucket)
    local flat, group, ranks = bucket:buffer(), bucket:group(), bucket:group():size()
    local padded = flat:pad_to(ranks * block)
    local chunk = padded:numel() // ranks
    local codes = int8:encode(padded:view(ranks, chunk))
    if bucket:wants_sent() then                                      -- for error_feedback before it
      bucket:set_sent(int8:decode(codes, chunk):view(-1):narrow(1, 1, flat:numel()))
    end
    return group:all_to_all(codes):and_then(function(parts)
      local mean = int8:decode_sum(parts, chunk):div_(bucket:divisor())
      return group:all_gather((int8:encode(mean:view(1, chunk))))
    end):and_then(function(all)
      flat:copy_(int8:decode(all, chunk):view(-1):narrow(1, 1, flat:numel()))
      return bucket:shard(flat)
    end)
  end
end
