-- Weights of other tools straight into shards: fsdp_pretrained.lua holds what each rank expects.
local command = require "command"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

describe("fsdp of pretrained models", function()
  for ranks, way in pairs { "processes", "threads", "processes", "processes" } do
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
