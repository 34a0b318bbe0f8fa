-- Which parameters share memory, and how it is cut. fsdp_layout.lua holds what each rank expects.
local command = require "command"

describe("fsdp's layout", function()
  local few, all = { "1", "3 --thread-ranks", "4" }, { "1", "2 --thread-ranks", "3", "4" }
  for _, ranks in ipairs(command.full and all or few) do
    it("is right on " .. ranks, function() command.on_ranks("fsdp_layout", ranks) end)
  end
end)
