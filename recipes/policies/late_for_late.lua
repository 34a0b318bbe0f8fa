-- Steps parameters that the next forward uses late during that forward, and the others at the end
-- of backward: the first layers are up to date when forward begins, and the others are stepped
-- while it runs. No step comes before all gradients are complete, so clipping by hand and loss
-- scalers work. An overlap policy; options: spare 1.0, how many times the time of the steps before
-- it a bucket must leave, every 20.
local ms = require "moonshard"

return function(options)
  local spare, every = options.spare or 1.0, options.every or 20

  return ms.overlap { name = "late_for_late", every = every, plan = function(view)
    local by_use = { table.unpack(view.buckets) }
    table.sort(by_use, function(a, b)                         -- equal on all ranks: ties by index
      if a.first_use_ms ~= b.first_use_ms then return a.first_use_ms < b.first_use_ms end
      return a.index < b.index
    end)
    local plan, before = {}, 0
    for i, bucket in ipairs(by_use) do
      local waits = bucket.first_use_ms >= spare * (before + bucket.step_ms)
      if waits then before = before + bucket.step_ms end
      plan[i] = { bucket = bucket.index, step = waits and "before_next_use" or "after_backward" }
    end
    return plan
  end }
end
