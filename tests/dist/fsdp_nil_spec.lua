-- A parameter of a sharded model that no rank has used has no gradient.
local command = require "command"

describe("a parameter that no rank has used", function()
  for _, ranks in ipairs(command.some(2, { "2", "1", "4 --thread-ranks" })) do
    it("has no gradient under fsdp, on " .. ranks, function()
      command.on_ranks("fsdp_nil", ranks)
    end)
  end
end)
