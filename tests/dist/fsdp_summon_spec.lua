-- summon { offload = "cpu" } on several ranks: fsdp_summon.lua holds what each rank expects.
local command = require "command"

describe("offloaded values in summon", function()
  for _, ranks in ipairs { "1", "2", "3 --thread-ranks", "4 --thread-ranks" } do
    it("are in the second pool on " .. ranks, function()
      local folder = command.folder()
      finally(function() command.remove(folder) end)
      local out = command.succeed(folder, ("run '%s/tests/dist/fsdp_summon.lua' -n %s"):format(
        command.source, ranks))
      for rank = 0, tonumber(ranks:match "%d") - 1 do
        assert.truthy(out:find(("rank %d is done"):format(rank), 1, true), out)
      end
    end)
  end
end)
