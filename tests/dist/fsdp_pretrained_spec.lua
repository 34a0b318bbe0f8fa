-- Weights of other tools straight into shards: fsdp_pretrained.lua holds what each rank expects.
local command = require "command"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

describe("fsdp of pretrained models", function()
  local ways = { "processes", "threads", command.full and "processes" or nil, [4] = "processes" }
  for ranks, way in pairs(ways) do
    it(("reads and writes them on %d ranks"):format(ranks), function()
      assert(os.execute(("mkdir -p '%s/%s'"):format(folder, way)))
      command.on_ranks("fsdp_pretrained", ranks .. (way == "threads" and " --thread-ranks" or ""),
        ("folder='%s/%s'"):format(folder, way))
    end)
  end
end)
