-- Gathers several units ahead, in forward and in backward, as long as all that is gathered fits
-- into the budget of bytes. A prefetch strategy; options: depth (3); every (100).
local ms = require "moonshard"

return function(options)
  local depth, every = options.depth or 3, options.every or 100

  return ms.prefetch { name = "deep", every = every, plan = function(view)
    local plan, root = {}, 0
    for _, visit in ipairs(view.visits) do
      if visit.unit == 0 then root = visit.bytes end
    end
    for i, visit in ipairs(view.visits) do
      local list, bytes = {}, root + visit.bytes
      for k = i + 1, math.min(i + depth, #view.visits) do
        local ahead = view.visits[k]
        bytes = bytes + ahead.bytes
        if ahead.phase ~= visit.phase or bytes > view.budget_bytes then break end
        list[#list + 1] = ahead.unit
      end
      plan[i] = { unit = visit.unit, gather = list }
    end
    return plan
  end }
end
