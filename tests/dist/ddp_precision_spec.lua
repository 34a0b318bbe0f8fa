-- ddp's option precision on several ranks: ddp_precision.lua has the expectations of each rank.
local command = require "command"

local ways = { processes = "", threads = " --thread-ranks" }

-- Each number of ranks in one of the ways, or in long ranges in both.
for ranks = 1, 3 do
  local chosen = ranks == 3 and "threads" or "processes"
  for name, way in pairs(command.full and ways or { [chosen] = ways[chosen] }) do
    it(("low precision gives the bits of casts by hand on %d ranks as %s")
      :format(ranks, name), function()
      command.on_ranks("ddp_precision", ranks .. way)
    end)
  end
end
