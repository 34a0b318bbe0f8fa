-- The native link sign_vote, in Lua: one bit a number; the result is what most ranks say, and 0
-- where they are even.
local ms = require "moonshard"

return function()
  local codec = ms.codec("sign", { scale = false, block = 8 })
  return function(bucket)
    if bucket:wants_sent() then
      error("sign_vote in Lua: error_feedback stands before it, but a vote is no mean", 0)
    end
    local buffer = bucket:buffer()
    local n = buffer:numel()
    local bits = codec:encode(buffer:to "f32")
    local all = bucket:group():all_gather(bits:view(1, -1)):value()
    return buffer:copy_(codec:decode_sum(all, n):sign_())
  end
end
