-- Ranks that share some parameters with few others, and models that differ between ranks.
-- fsdp_experts.lua holds what each rank expects.
local command = require "command"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

local function on_ranks(ranks, arguments)
  local out = command.succeed(folder, ("run '%s/tests/dist/fsdp_experts.lua' -n %d %s"):format(
    command.source, ranks, arguments or ""))
  for rank = 0, ranks - 1 do
    assert.truthy(out:find(("rank %d is done"):format(rank), 1, true), out)
  end
end

describe("fsdp's groups of ranks", function()
  for _, ranks in ipairs { 1, 2, 4 } do
    it(("hold parameters of their own on %d ranks"):format(ranks), function() on_ranks(ranks) end)
  end
  it("hold parameters of their own on threads", function() on_ranks(4, "--thread-ranks") end)
end)
