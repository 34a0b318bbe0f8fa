-- Sharded parameters outside of their units.
local command = require "command"

describe("a piece of a sharded parameter", function()
  for _, ranks in ipairs { "2", "3 --thread-ranks" } do
    it("is not taken for the whole, on " .. ranks, function()
      command.on_ranks("fsdp_parts", ranks)
    end)
  end
end)
