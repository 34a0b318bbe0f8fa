-- Which parameters share memory, and how it is cut. fsdp_layout.lua holds what each rank expects.
local command = require "command"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

local function on_ranks(ranks, arguments)
  local out = command.succeed(folder,
    ("run '%s/tests/dist/fsdp_layout.lua' -n %d %s"):format(command.source, ranks, arguments or ""))
  for rank = 0, ranks - 1 do
    assert.truthy(out:find(("rank %d is done"):format(rank), 1, true), out)
  end
end

describe("fsdp's layout", function()
  for ranks = 1, 4 do
    it(("is right on %d ranks"):format(ranks), function() on_ranks(ranks) end)
  end
  it("is right on threads", function() on_ranks(2, "--thread-ranks") end)
end)
