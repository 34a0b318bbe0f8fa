-- Overlapped optimizers and statistics of sharded models, as processes and as threads:
-- fsdp_overlap.lua has the expectations of each rank.
local command = require "command"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

local ways = {
  ["1 rank"] = "-n 1", ["2 processes"] = "-n 2", ["4 threads"] = "-n 4 --thread-ranks",
}

describe("overlap with fsdp", function()
  for name, way in pairs(ways) do
    it("gives the weights of the plain loop on " .. name, function()
      local out = command.succeed(folder,
        ("run '%s/tests/dist/fsdp_overlap.lua' %s"):format(command.source, way))
      assert.truthy(out:find("rank 0 is done", 1, true), out)
    end)
  end
end)
