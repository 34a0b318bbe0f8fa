-- Plans for optimizers on several ranks, as processes and as threads: overlap.lua holds what each rank expects.
local command = require "command"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

describe("plans", function()
  for name, way in pairs { processes = "-n 2", threads = "-n 3 --thread-ranks" } do
    it("give the weights of the plain loop on ranks that are " .. name, function()
      local out = command.succeed(folder, ("run '%s/tests/dist/overlap.lua' %s"):format(command.source, way))
      assert.truthy(out:find("rank 1 is done", 1, true), out)
    end)
  end

  it("that differ between ranks are refused with both sides", function()
    local code, _, err = command.run(folder, ("run '%s/tests/dist/overlap.lua' -n 2 how=differ"):format(command.source))
    assert.equal(1, code, err)
    assert.matches("overlap plan by_rank %([^\n]*overlap.lua:%d+%): ranks planned differently: bucket 2 is to step after_backward on rank 0 and on_reduced on rank 1", err)
  end)
end)
