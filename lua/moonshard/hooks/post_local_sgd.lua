-- The native link post_local_sgd, in Lua: means over all ranks until start_step, then over a
-- smaller group, or no means. options.name: the name of its state; a second state of the same name
-- is an error.
local hooks = require "moonshard.hooks"
local mean_over = require "moonshard.hooks.reduce"
local stay_local = require "moonshard.hooks.noop" ()

return function(options)
  local counts = hooks.state(options.name or "post_local_sgd in Lua")
  local mean, mean_within = mean_over(), mean_over { group = options.subgroup }
  local function link(bucket)
    local all = counts:of "all"
    local iteration = all.iteration or 0
    if iteration < options.start_step then
      if bucket:is_last() then all.iteration = iteration + 1 end
      return mean(bucket)
    end
    if options.reduce_after == false then return stay_local(bucket) end
    return mean_within(bucket)
  end
  return hooks._limit(link, { "all_reduce", "between" }, "from start_step on each rank needs a \z
    copy of the parameters of its own, and the ranks of a shard group share one")
end
