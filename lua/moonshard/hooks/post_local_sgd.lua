-- The native link post_local_sgd, in Lua: means over all ranks until start_step, then over a smaller group, or none.
-- options.name: of its state; two of one name are an error.
local hooks = require "moonshard.hooks"

return function(options)
  local counts = hooks.state(options.name or "post_local_sgd in Lua")
  return function(bucket)
    local all, buffer = counts:of "all", bucket:buffer()
    local iteration = all.iteration or 0
    if iteration < options.start_step then
      if bucket:is_last() then all.iteration = iteration + 1 end
      return bucket:group():all_reduce(buffer, { premul_sum = 1 / bucket:divisor() })
    end
    if options.reduce_after == false then return bucket:shard(buffer) end
    local group = options.subgroup or bucket:group()
    return group:all_reduce(buffer, { premul_sum = 1 / (options.subgroup and group:size() or bucket:divisor()) })
  end
end
