-- Which parameters share memory, and how it is cut. fsdp_layout.lua holds what each rank expects.
local command = require "command"

describe("fsdp's layout", function()
  for _, ranks in ipairs { "1", "2 --thread-ranks", "3", "4" } do
    it("is right on " .. ranks, function() command.on_ranks("fsdp_layout", ranks) end)
  end
end)
