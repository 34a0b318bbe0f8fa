-- fsdp's option offload on several ranks: fsdp_offload.lua holds what each rank expects.
local command = require "command"

describe("offloaded shards", function()
  for _, ranks in ipairs(command.some(2, { "4", "1", "3 --thread-ranks", "2" })) do
    it("train as others do on " .. ranks, function() command.on_ranks("fsdp_offload", ranks) end)
  end
end)
