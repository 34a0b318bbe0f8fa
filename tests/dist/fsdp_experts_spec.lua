-- Ranks that share some parameters with few others, and models that differ between ranks.
-- fsdp_experts.lua holds what each rank expects.
local command = require "command"

describe("fsdp's groups of ranks", function()
  for _, ranks in ipairs { "1", "2 --thread-ranks", "4" } do
    it("hold parameters of their own on " .. ranks, function()
      command.on_ranks("fsdp_experts", ranks)
    end)
  end
end)
