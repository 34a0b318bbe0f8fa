-- The native link sign_vote, in Lua: each number is sent as one bit, its sign. The result is the
-- sign that most ranks have, and 0 if both signs are equally frequent.
local ms = require "moonshard"

return function()
  local codec = ms.codec("sign", { scale = false, block = 8 })
  return function(bucket)
    if bucket:wants_sent() then
      error("sign_vote in Lua: error_feedback stands before it, but a vote is not a mean", 0)
    end
    local buffer = bucket:buffer()
    local n, numbers = buffer:numel(), 0
    for _, p in ipairs(bucket:gradients()) do numbers = numbers + p:numel() end
    local bits = codec:encode(buffer:to "f32")
    local all = bucket:group():all_gather(bits:view(1, -1)):value()
    local votes = codec:decode_sum(all, n):sign_()
    -- A zero counts with its sign bit, but padding must stay zero.
    if numbers < n then votes:narrow(1, numbers + 1, n - numbers):zero_() end
    return bucket:shard(buffer:copy_(votes))
  end
end
