-- Gathers ahead of sharded models: fsdp_prefetch.lua holds what each rank expects.
local command = require "command"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

local full = os.getenv "MOONSHARD_TEST_FULL" == "1"

describe("fsdp's prefetches", function()
  for ranks = 1, 4 do
    local way = ranks == 2 and " --thread-ranks" or ""
    local plans = full and 200 or ranks == 2 and 20 or 4
    it(("have the default's bits, on %d ranks%s"):format(ranks, way), function()
      local out = command.succeed(folder, ("run '%s/tests/dist/fsdp_prefetch.lua' -n %d%s plans=%d")
        :format(command.source, ranks, way, plans))
      assert.is_truthy(out:find "done")
    end)
  end

  it("end the job if a planner fails on one rank", function()
    local script = folder .. "/one.lua"
    command.write(script, [[
      local ms = require "moonshard"
      local model = ms.fsdp(ms.nn.Sequential(ms.nn.Linear(4, 4), ms.nn.Linear(4, 4)), {
        wrap = { class = "Linear" },
        prefetch = ms.prefetch { name = "one", plan = function()
          if ms.rank() == 1 then error "not here" end
          return {}
        end },
      })
      for _ = 1, 5 do model(ms.ones { 2, 4 }):sum():backward() end
    ]])
    local code, out, err = command.run(folder, ("run '%s' -n 2"):format(script))
    assert.is_true(code ~= 0)
    assert.is_truthy((out .. err):find("prefetch plan one (" , 1, true), out .. err)
    assert.is_truthy((out .. err):find("one.lua:4", 1, true), out .. err)
    assert.is_truthy((out .. err):find("not here", 1, true))
  end)
end)
