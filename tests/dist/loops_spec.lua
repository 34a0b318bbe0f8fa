-- Training loops drawn at random: for every way in which optimizers step, the weights are bitwise
-- equal to those of the plain loop. Each rank runs loops.lua.
local command = require "command"
local full = os.getenv "MOONSHARD_TEST_FULL" == "1"

describe("loops drawn at random give the same weights however optimizers step,", function()
  for way, first in pairs {
    ["2 --thread-ranks"] = 1, ["3 --thread-ranks"] = 1001, ["2"] = 2001,
  } do
    it("on -n " .. way, function()
      command.on_ranks("loops", way,
        ("first=%d count=%d folder=saved"):format(first, full and 120 or 6))
    end)
  end
end)
