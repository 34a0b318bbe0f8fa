-- The strategies that the engine has by itself, as planners: one unit is gathered ahead of its use.
-- A prefetch strategy; options: forward (true): when a unit's forward begins, the one that is used
-- next is gathered; backward ("pre"): the same in backward; "post": when a unit's backward has
-- ended; "none". forward=true backward=pre is "both", forward=false backward=post "backward_post".
local ms = require "moonshard"

return function(options)
  local forward, backward = options.forward ~= false, options.backward or "pre"

  return ms.prefetch { name = "ahead", every = 100, plan = function(view)
    local plan = {}
    for i, visit in ipairs(view.visits) do
      local is_forward = visit.phase == "forward"
      -- After a visit comes the first that has not begun when it ends.
      local at = not is_forward and backward == "post" and visit.last + 1 or i + 1
      local ahead = view.visits[at]
      local units = ahead and ahead.phase == visit.phase and { ahead.unit } or {}
      plan[i] = { unit = visit.unit }
      if is_forward and forward or not is_forward and backward == "pre" then
        plan[i].gather = units
      elseif not is_forward and backward == "post" then plan[i].after = units end
    end
    return plan
  end }
end
