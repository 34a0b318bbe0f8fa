-- SDP4Bit: gathers send the change of the weights since the last gather, in 4 bits; gradients are
-- smoothed by a Hadamard transform of 32 numbers each and sent in 4 bits, with 8 bits inside of
-- hosts. Jia, Xie, Lu, Wang, Feng, Zhang, Sun, Lin, Zhang, Liu, Tao: "SDP4Bit: Toward 4-bit
-- Communication Quantization in Sharded Data Parallelism for LLM Training", 2024. For shard=. Every
-- rank keeps what it knows of all weights, in f32, so memory is that of shard=shard_grad_op. The
-- first gather of a run sends whole weights. Options: ranks, the number of a host (unless given,
-- ranks exchange directly, in 4 bits); block 128 numbers of gradients, weights 32 numbers of
-- weights that share a scale.
local ms, hooks = require "moonshard", require "moonshard.hooks"

local SMOOTH <const>, rows = 32, {}
for i = 1, SMOOTH do
  rows[i] = {}
  for j = 1, SMOOTH do
    local both, sign = (i - 1) & (j - 1), 1
    while both > 0 do both, sign = both & (both - 1), -sign end
    rows[i][j] = sign / math.sqrt(SMOOTH)
  end
end

return function(options)
  options = options or {}
  local ranks, block, pieces = options.ranks, options.block or 128, {}
  local int4, int8 = ms.codec("int4", { block = block }), ms.codec("int8", { block = block })
  local change = ms.codec("int4", { block = options.weights or 32 })
  local hadamard, host, hosts = ms.tensor(rows, "f32"):keep(), nil, nil
  if ranks then
    assert(ranks > 1 and ranks < ms.world_size() and ms.world_size() % ranks == 0,
      "sdp4bit: ranks must divide the number of all ranks, and be neither 1 nor all")
    host, hosts = ms.world():levels(ranks)
  end
  local function smooth(t) return t:reshape(-1, SMOOTH):matmul(hadamard) end  -- its own inverse

  -- The future of the sum of the ranks' parts. parts: smoothed, a row for each rank.
  local function reduce(parts, group)
    local n = parts:size(2)
    local function last(t, among)
      local codes = among:all_to_all(int4:encode(t))
      return codes:and_then(function(all) return int4:decode_sum(all, n) end)
    end
    if not host then return last(parts, group) end
    assert(group:size() == ms.world_size(), "sdp4bit: ranks= is for gradients of all ranks")
    local h, a = host:size(), hosts:size()
    local mine = parts:view(a, h, n):transpose(1, 2):reshape(h, a * n)
    return host:all_to_all(int8:encode(mine)):and_then(function(all)
      return last(int8:decode_sum(all, a * n):view(a, n), hosts)
    end)
  end

  function pieces.link(bucket)
    assert(bucket:kind() ~= "all_reduce", "sdp4bit: it is for sharded models: shard=full_shard")
    local parts, group = hooks.parts(bucket, bucket:buffer():to "f32")
    local count, n = parts:size(1), parts:size(2)
    local padded = n + -n % SMOOTH
    if padded > n then parts = ms.cat({ parts, ms.zeros { count, padded - n } }, 2) end
    local smoothed = smooth(parts):view(count, padded)
    if bucket:wants_sent() then                                      -- the first codes of this rank
      local first = host and int8 or int4
      local back = smooth(first:decode(first:encode(smoothed), padded)):view(count, padded)
      bucket:set_sent(hooks.joined(bucket, back:narrow(2, 1, n):contiguous()))
    end
    return reduce(smoothed, group):and_then(function(sum)
      local mean = smooth(sum):view(-1):narrow(1, 1, n):div(bucket:divisor())
      if bucket:kind() == "hybrid" then return bucket:group "replicate":all_reduce(mean) end
      return mean
    end):and_then(function(mean) return mean:to(bucket:dtype()) end)
  end

  -- Of each part: what this rank knows of all shards, and what all ranks know of this rank's.
  local whole, known = setmetatable({}, { __mode = "k" }), setmetatable({}, { __mode = "k" })

  pieces.gather = {
    before_gather = function(shard, _, part)
      if known[part] and not part.fresh then return ms.zeros { 1, dtype = "u8" } end
      -- In checkpoints: `known` again, and the shard that was sent last.
      local saved, of = part.state:flat "known", part.state:flat "of"
      local now, own = shard:to "f32", known[part]
      local news = now - (own or saved)
      if not own then
        -- The first gather. A resumed run goes on from what was saved, and nothing is new if that
        -- is of the same weights. A new run begins with the weights themselves.
        local is_new, has_changed = saved:abs():max():eq(0), (now - of):abs():max():ne(0)
        own = (saved + news * is_new:to "f32"):keep()
        news = (now - own) * has_changed:to "f32"
      end
      local codes = change:encode(news)
      own:add_(change:decode(codes, part.length))
      saved:copy_(own)
      of:copy_(now)
      if known[part] then return codes end
      known[part] = own
      return own:clone()
    end,
    after_gather = function(gathered, _, part)
      if not whole[part] then whole[part] = gathered:clone():keep()
      elseif part.fresh then
        local bytes = change:bytes(part.length)
        whole[part]:add_(change:decode(gathered:view(-1, bytes), part.length):flatten())
      end
      return whole[part]
    end,
  }
  pieces.shard = { reshard_after_forward = false }
  return pieces
end
