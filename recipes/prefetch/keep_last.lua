-- Keeps the units that forward uses last until their backward, as many as fit into so many MiB:
-- they come first in backward, and are not gathered again. All others are gathered one ahead. A
-- prefetch strategy; options: mib (64), of whole parameters that stay; every (100).
local ms = require "moonshard"

return function(options)
  local room, every = (options.mib or 64) * 2 ^ 20, options.every or 100

  return ms.prefetch { name = "keep_last", every = every, plan = function(view)
    local plan, kept, left = {}, {}, room
    for i = #view.visits, 1, -1 do                   -- from the last use on
      local visit = view.visits[i]
      plan[i] = { unit = visit.unit }
      if visit.phase == "forward" and not visit.stays and not kept[visit.unit] then
        kept[visit.unit] = visit.bytes <= left
        if kept[visit.unit] then left = left - visit.bytes end
      end
    end
    for i, visit in ipairs(view.visits) do
      local ahead = view.visits[i + 1]
      if visit.phase == "forward" and kept[visit.unit] then plan[i].keep = true end
      if ahead and ahead.phase == visit.phase then plan[i].gather = { ahead.unit } end
    end
    return plan
  end }
end
