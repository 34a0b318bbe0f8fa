-- Breadth first (Lamy-Poirier 2023): chunk c is on rank c % ranks, and all microbatches go through
-- a chunk before any goes through the next chunk of its rank. A rank uses the parameters of a chunk
-- once forward and once backward, as sharded models like it, and holds all microbatches. A schedule
-- without options.
local ms = require "moonshard"

return ms.schedule { name = "breadth_first", plan = function(view)
  local placement, actions, each = {}, {}, view.chunks // view.ranks
  for r = 1, view.ranks do
    placement[r], actions[r] = {}, {}
    for v = 1, each do placement[r][v] = (v - 1) * view.ranks + r - 1 end
    local function all_of(kind, v)
      for i = 0, view.microbatches - 1 do
        table.insert(actions[r], ("%d%s%d"):format(placement[r][v], kind, i))
      end
    end
    for v = 1, each do all_of("F", v) end
    for v = each, 1, -1 do all_of("B", v) end
  end
  return { placement = placement, actions = actions }
end }
