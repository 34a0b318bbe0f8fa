-- fsdp's option precision on several ranks. fsdp_precision.lua and fsdp_precision_pairs.lua hold
-- what each rank expects.
local command = require "command"

local function on_ranks(file, ranks)
  local folder = command.folder()
  finally(function() command.remove(folder) end)
  local out = command.succeed(folder,
    ("run '%s/tests/dist/%s' -n %s"):format(command.source, file, ranks))
  for rank = 0, tonumber(ranks:match "%d") - 1 do
    assert.truthy(out:find(("rank %d is done"):format(rank), 1, true), out)
  end
end

describe("fsdp's precision", function()
  for _, ranks in ipairs { "1", "2", "3", "4", "3 --thread-ranks" } do
    it("gives the bits of casts by hand on " .. ranks, function()
      on_ranks("fsdp_precision.lua", ranks)
    end)
    it("works with all that a sharded model does on " .. ranks, function()
      on_ranks("fsdp_precision_pairs.lua", ranks)
    end)
  end
end)
