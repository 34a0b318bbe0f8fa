-- fsdp's option offload on several ranks: fsdp_offload.lua holds what each rank expects.
local command = require "command"

describe("offloaded shards", function()
  for _, ranks in ipairs { "1", "2", "4", "3 --thread-ranks" } do
    it("train as others do on " .. ranks, function()
      local folder = command.folder()
      finally(function() command.remove(folder) end)
      local out = command.succeed(folder, ("run '%s/tests/dist/fsdp_offload.lua' -n %s"):format(
        command.source, ranks))
      for rank = 0, tonumber(ranks:match "%d") - 1 do
        assert.truthy(out:find(("rank %d is done"):format(rank), 1, true), out)
      end
    end)
  end
end)
