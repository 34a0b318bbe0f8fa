-- fsdp's units with precisions of their own. fsdp_units.lua has the expectations of each rank,
-- fsdp_units_golden.lua what PyTorch computed.
local command = require "command"

describe("fsdp's precision of a unit", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  for _, ranks in ipairs(command.some(2, { "2", "1", "3 --thread-ranks", "4" })) do
    it("gives the bits of casts by hand on " .. ranks, function()
      command.on_ranks("fsdp_units", ranks, ("folder='%s'"):format(folder))
    end)
  end

  it("gives what PyTorch's sharded models give", function()
    command.on_ranks("fsdp_units_golden", "2",
      ("folder='%s/tests/golden/units'"):format(command.source))
  end)
end)
