-- summon { offload = "cpu" } on several ranks: fsdp_summon.lua holds what each rank expects.
local command = require "command"

describe("offloaded values in summon", function()
  for _, ranks in ipairs(command.some(2, { "2", "1", "3 --thread-ranks", "4 --thread-ranks" })) do
    it("are in the second pool on " .. ranks, function() command.on_ranks("fsdp_summon", ranks) end)
  end
end)
