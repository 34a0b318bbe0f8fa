-- Collectives of several ranks, as processes and as threads: collectives.lua holds what each rank expects.
local command = require "command"

describe("collectives", function()
  local recipe = command.source .. "/tests/dist/collectives.lua"
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  for _, how in ipairs { "", " --thread-ranks" } do
    for ranks = 1, 4 do
      it(("give what they should on %d ranks as %s"):format(ranks, how == "" and "processes" or "threads"), function()
        local out = command.succeed(folder, ("run %s -n %d%s"):format(recipe, ranks, how))
        for rank = 0, ranks - 1 do assert.truthy(out:find(("rank %d of %d is done"):format(rank, ranks), 1, true), out) end
      end)
    end
  end
end)
