-- ZeRO++: gradients in 4 bits, each part sent to the rank that adds it up (qgZ); weights in 8 bits
-- when they are gathered (qwZ); a second copy of the weights on each host, from which backward
-- gathers (hpZ). Wang, Qin, Jacobs, Holmes, Rajbhandari, Ruwase, Yan, Yang, He: "ZeRO++: Extremely
-- Efficient Collective Communication for Giant Model Training", 2023. For shard=full_shard; the
-- link is for ms.ddp as well, where the mean is then gathered in 8 bits. Options: ranks, the number
-- of a host: gradients are added up inside of hosts first, and there is a second copy (unless
-- given, all ranks exchange directly, without a second copy); inside "int8" and across "int4", the
-- codes of gradients; block 256.
local ms, hooks = require "moonshard", require "moonshard.hooks"

return function(options)
  options = options or {}
  local block, ranks = options.block or 256, options.ranks
  local function codec_of(kind) return ms.codec(kind, { block = block }) end
  local int8, inner, outer = codec_of "int8", codec_of(options.inside or "int8"),
    codec_of(options.across or "int4")
  local host, hosts
  if ranks then
    assert(ranks > 1 and ranks < ms.world_size() and ms.world_size() % ranks == 0,
      "zeropp: ranks must divide the number of all ranks, and be neither 1 nor all")
    host, hosts = ms.world():levels(ranks)
  end

  -- The future of this rank's part of the sum. parts: a row for each rank.
  local function reduce(bucket, parts, group)
    local n = parts:size(2)
    local function sent(codec, codes, length, back)
      if bucket:wants_sent() then
        bucket:set_sent(hooks.joined(bucket, back(codec:decode(codes, length))))
      end
    end
    if not host then
      local codes = outer:encode(parts)
      sent(outer, codes, n, function(rows) return rows end)
      return group:all_to_all(codes):and_then(function(rows) return outer:decode_sum(rows, n) end)
    end
    assert(group:size() == ms.world_size(), "zeropp: ranks= is for gradients of all ranks")
    local h, a = host:size(), hosts:size()
    -- Row by row for the ranks of a host: what each of them adds up for the same rank of all hosts.
    local codes = inner:encode(parts:view(a, h, n):transpose(1, 2):reshape(h, a * n))
    sent(inner, codes, a * n, function(rows)
      return rows:view(h, a, n):transpose(1, 2):reshape(h * a, n)
    end)
    return host:all_to_all(codes):and_then(function(rows)
      return hosts:all_to_all(outer:encode(inner:decode_sum(rows, a * n):view(a, n)))
    end):and_then(function(rows) return outer:decode_sum(rows, n) end)
  end

  local pieces = { shard = ranks and { reshard_after_forward = ranks } or nil }

  function pieces.link(bucket)
    local flat = bucket:buffer()
    local parts, group = hooks.parts(bucket, flat)
    return reduce(bucket, parts, group):and_then(function(sum)
      local mean = sum:div_(bucket:divisor())
      if bucket:kind() == "all_reduce" then
        return group:all_gather((int8:encode(mean:view(1, -1))))
      end
      if bucket:kind() == "hybrid" then return bucket:group "replicate":all_reduce(mean) end
      return mean
    end):and_then(function(result)
      if bucket:kind() ~= "all_reduce" then return result:to(bucket:dtype()) end
      return flat:copy_(hooks.joined(bucket, int8:decode(result, parts:size(2))))
    end)
  end

  pieces.gather = {
    before_gather = function(shard) return int8:encode(shard) end,
    after_gather = function(gathered, _, part)
      return int8:decode(gathered:view(-1, int8:bytes(part.length)), part.length):flatten()
    end,
  }

  return pieces
end
