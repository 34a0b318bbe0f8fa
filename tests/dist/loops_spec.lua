-- Training loops drawn at random: for every way in which optimizers step, the weights are bitwise
-- equal to those of the plain loop. Each rank runs loops.lua.
local command = require "command"
local full = os.getenv "MOONSHARD_TEST_FULL" == "1"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

describe("loops drawn at random give the same weights however optimizers step,", function()
  for way, first in pairs {
    ["-n 2 --thread-ranks"] = 1, ["-n 3 --thread-ranks"] = 1001, ["-n 2"] = 2001,
  } do
    it("on " .. way, function()
      local out = command.succeed(folder,
        ("run '%s/tests/dist/loops.lua' %s first=%d count=%d folder=saved")
          :format(command.source, way, first, full and 300 or 6))
      assert.truthy(out:find("rank 1 is done", 1, true), out)
    end)
  end
end)
