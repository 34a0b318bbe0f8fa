-- The memory of sharded models is the sum of its parts: fsdp_memory.lua.
local command = require "command"

describe("the memory of a sharded model", function()
  for _, ranks in ipairs { "1", "2", "2 --thread-ranks", "3", "4" } do
    it("is the sum of its parts on " .. ranks, function()
      local folder = command.folder()
      finally(function() command.remove(folder) end)
      local out = command.succeed(folder, ("run '%s/tests/dist/fsdp_memory.lua' -n %s"):format(
        command.source, ranks))
      for rank = 0, tonumber(ranks:match "%d") - 1 do
        assert.truthy(out:find(("rank %d: memory is the sum"):format(rank), 1, true), out)
      end
    end)
  end
end)
