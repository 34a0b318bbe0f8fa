-- 1F1B in which a rank holds at most so many microbatches: less memory in the first ranks, and more
-- waiting. A schedule; options: most (2).
local ms = require "moonshard"

return function(options)
  local most = options.most or 2

  return ms.schedule { name = "limited", plan = function(view)
    local placement, actions, all = {}, {}, view.microbatches
    for r = 1, view.ranks do
      local list, ahead = {}, math.min(view.ranks - r, most - 1, all)
      for i = 0, ahead - 1 do list[#list + 1] = ("%dF%d"):format(r - 1, i) end
      for i = 0, all - 1 do
        if ahead + i < all then list[#list + 1] = ("%dF%d"):format(r - 1, ahead + i) end
        list[#list + 1] = ("%dB%d"):format(r - 1, i)
      end
      placement[r], actions[r] = { r - 1 }, list
    end
    return { placement = placement, actions = actions }
  end }
end
