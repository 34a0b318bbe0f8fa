-- fsdp's option precision on several ranks: fsdp_precision.lua has the expectations of each rank.
local command = require "command"

describe("fsdp's precision", function()
  for _, ranks in ipairs { "1", "2", "3", "4", "3 --thread-ranks" } do
    it("gives the bits of casts by hand on " .. ranks, function()
      local folder = command.folder()
      finally(function() command.remove(folder) end)
      local out = command.succeed(folder, ("run '%s/tests/dist/fsdp_precision.lua' -n %s"):format(
        command.source, ranks))
      for rank = 0, tonumber(ranks:match "%d") - 1 do
        assert.truthy(out:find(("rank %d is done"):format(rank), 1, true), out)
      end
    end)
  end
end)
