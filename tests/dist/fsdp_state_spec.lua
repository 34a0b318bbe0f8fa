-- States of sharded models. fsdp_state.lua holds what each rank expects.
local command = require "command"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

local function on_ranks(ranks, arguments)
  local out = command.succeed(folder, ("run '%s/tests/dist/fsdp_state.lua' -n %d folder='%s' %s")
    :format(command.source, ranks, folder, arguments or ""))
  for rank = 0, ranks - 1 do
    assert.truthy(out:find(("rank %d is done"):format(rank), 1, true), out)
  end
end

describe("fsdp's states", function()
  for ranks = 1, 4 do
    it(("are right on %d ranks"):format(ranks), function() on_ranks(ranks) end)
  end
  it("are right on threads", function() on_ranks(3, "--thread-ranks") end)
end)
