-- States of sharded models and of their optimizers. fsdp_state.lua and fsdp_optimizer_state.lua
-- hold what each rank expects.
local command = require "command"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

local function on_ranks(ranks, script, arguments)
  local out = command.succeed(folder, ("run '%s/tests/dist/%s.lua' -n %d %s")
    :format(command.source, script, ranks, arguments or ""))
  for rank = 0, ranks - 1 do
    assert.truthy(out:find(("rank %d is done"):format(rank), 1, true), out)
  end
end

describe("fsdp's states", function()
  local function in_folder() return ("folder='%s'"):format(folder) end
  for ranks = 1, 4 do
    it(("are right on %d ranks"):format(ranks), function()
      on_ranks(ranks, "fsdp_state", in_folder())
    end)
    it(("of optimizers are right on %d ranks"):format(ranks), function()
      on_ranks(ranks, "fsdp_optimizer_state")
    end)
  end
  it("are right on threads", function()
    on_ranks(3, "fsdp_state", in_folder() .. " --thread-ranks")
    on_ranks(2, "fsdp_optimizer_state", "--thread-ranks")
  end)
end)
