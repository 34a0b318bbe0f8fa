-- fsdp's option precision on several ranks. fsdp_precision.lua and fsdp_precision_pairs.lua hold
-- what each rank expects.
local command = require "command"

describe("fsdp's precision", function()
  for _, ranks in ipairs(command.some(2, { "2", "1", "3 --thread-ranks", "4" })) do
    it("gives the bits of casts by hand on " .. ranks, function()
      command.on_ranks("fsdp_precision", ranks)
    end)
  end
  -- Each combination of options is with 1 or with 4 ranks.
  local sizes = { "1", "4 --thread-ranks" }
  if command.full then table.move({ "2", "3 --thread-ranks", "4" }, 1, 3, 3, sizes) end
  for _, ranks in ipairs(sizes) do
    it("works with all that a sharded model does on " .. ranks, function()
      command.on_ranks("fsdp_precision_pairs", ranks)
    end)
  end
end)
