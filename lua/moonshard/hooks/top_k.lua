-- The native link top_k, in Lua: the numbers with the greatest magnitude are sent, with their
-- positions; the others are added to the next iteration's numbers. options.name: the name of its
-- state; a second state of the same name is an error.
local ms = require "moonshard"
local hooks = require "moonshard.hooks"

return function(options)
  local state, momentum = hooks.state(options.name or "top_k in Lua"), options.momentum or 0
  return function(bucket)
    local group, buffer, left = bucket:group(), bucket:buffer(), state:flat(bucket, "left")
    local dtype, n, fast = buffer:dtype(), buffer:numel(), nil
    if bucket:wants_sent() then bucket:set_sent(buffer) end  -- the residual keeps the rest
    if momentum > 0 then
      fast = state:flat(bucket, "momentum"):mul_(momentum):add_(buffer:to "f32")
      left:add_(fast)
    else left:add_(buffer:to "f32") end
    -- A decimal fraction may be stored a little too high, and the product is rounded: 0.07 of 100
    -- would be 8.
    local count = math.min(n, math.max(1, math.ceil(options.fraction * n - n * 0x1p-52)))
    local _, places = left:abs():topk(count)
    places = places:to "i32"
    local values = left:index_select(1, places):to(dtype)
    left:scatter_add_(1, places, -values:to "f32")
    if fast then fast:scatter_(1, places, 0) end
    -- Otherwise inf or nan would stay in the memory for all later steps.
    for _, memory in ipairs { left, fast } do memory:masked_fill_(memory:is_finite():eq(0), 0) end
    local all, all_places = group:all_gather(values):value(), group:all_gather(places):value()
    return bucket:shard(buffer:copy_(ms.zeros({ n }):scatter_add_(1, all_places, all:to "f32")
      :mul_(1 / bucket:divisor())))
  end
end
