-- Sharded models that were made on "meta": fsdp_meta.lua holds what each rank expects.
local command = require "command"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

describe("fsdp of models on meta", function()
  for ranks = 1, command.full and 4 or 3 do
    local way = ranks == 2 and " --thread-ranks" or ""
    it(("makes the bits that they have without it, on %d ranks%s"):format(ranks, way), function()
      command.on_ranks("fsdp_meta", ranks .. way)
    end)
  end

  it("predicts the memory of a model that no rank could hold", function()
    local script = folder .. "/large.lua"
    command.write(script, [[
      local ms = require "moonshard"
      local model = ms.device("meta", function()
        local list = {}
        for i = 1, 8 do list[i] = ms.nn.Linear(256, 256) end
        return ms.nn.Sequential(table.unpack(list))
      end)
      ms.fsdp(model, { wrap = { class = "Linear" } })
      local unit = (256 * 256 + 256) * 4
      assert(ms.memory().peak <= 8 * unit // ms.world_size() + unit + 8 * 4)
    ]])
    command.succeed(folder, ("check '%s' -n 4"):format(script))
  end)
end)
