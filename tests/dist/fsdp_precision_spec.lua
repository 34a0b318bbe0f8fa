-- fsdp's option precision on several ranks. fsdp_precision.lua and fsdp_precision_pairs.lua hold
-- what each rank expects.
local command = require "command"

describe("fsdp's precision", function()
  for _, ranks in ipairs { "1", "3 --thread-ranks", "4", command.full and "2" or nil } do
    it("gives the bits of casts by hand on " .. ranks, function()
      command.on_ranks("fsdp_precision", ranks)
    end)
    it("works with all that a sharded model does on " .. ranks, function()
      command.on_ranks("fsdp_precision_pairs", ranks)
    end)
  end
end)
