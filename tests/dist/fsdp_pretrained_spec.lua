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
      local out = command.succeed(folder,
        ("run '%s/tests/dist/fsdp_pretrained.lua' -n %d%s folder='%s/%s'"):format(command.source,
          ranks, way == "threads" and " --thread-ranks" or "", folder, way))
      local _, count = out:gsub("is done", "")
      assert.equal(ranks, count)
    end)
  end
end)
