-- fsdp's option offload on several ranks: fsdp_offload.lua holds what each rank expects.
local command = require "command"

describe("offloaded shards", function()
  for _, ranks in ipairs { "1", "3 --thread-ranks", "4", command.full and "2" or nil } do
    it("train as others do on " .. ranks, function() command.on_ranks("fsdp_offload", ranks) end)
  end
end)
