-- Steps a bucket in backward if its step ends before backward does, counting the steps of the
-- buckets before it: the optimizer's stream runs one step after another. Buckets whose steps do not
-- fit wait for the end of backward. An overlap policy; options: room 1.0, the share of backward
-- that steps may fill, every 20.
local ms = require "moonshard"

return function(options)
  local room, every = options.room or 1.0, options.every or 20

  return ms.overlap { name = "early_with_room", every = every, plan = function(view)
    local plan, free_at = {}, 0
    for i, bucket in ipairs(view.buckets) do                 -- in the order in which they are ready
      local begins = math.max(free_at, bucket.ready_ms + bucket.reduce_ms)
      local ends = begins + bucket.step_ms
      local fits = not view.needs_global_norm and ends <= room * view.backward_ms
      if fits then free_at = ends end
      plan[i] = { bucket = bucket.index, step = fits and "on_reduced" or "after_backward" }
    end
    return plan
  end }
end
