-- Gathers ahead of sharded models: fsdp_prefetch.lua holds what each rank expects.
local command = require "command"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

local full = os.getenv "MOONSHARD_TEST_FULL" == "1"

describe("fsdp's prefetches", function()
  for ranks = 1, full and 4 or 3 do
    local way = ranks == 2 and " --thread-ranks" or ""
    local plans = full and 200 or ranks == 2 and 6 or 2
    it(("have the default's bits, on %d ranks%s"):format(ranks, way), function()
      command.on_ranks("fsdp_prefetch", ranks .. way, "plans=" .. plans)
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

  describe("of a training recipe", function()
    local recipe = ("run '%s/recipes/gpt_bytes.lua' -n 2 data=text steps=5 dtype=bf16 \z
      length=16 batch=2 model.layers=2 model.width=32 model.heads=2 every.sample=0 every.save=0 \z
      run=out "):format(command.source)
    before_each(function()
      command.write(folder .. "/text", command.read(command.source .. "/README.md"):sub(1, 2000))
    end)

    it("give one loss", function()
      local losses = {}
      for _, prefetch in ipairs {
        "backward_pre", "both", "by_budget", ("'%s/recipes/prefetch/keep_last.lua' prefetch.mib=1")
          :format(command.source),
        ("'%s/recipes/prefetch/deep.lua' prefetch.depth=2"):format(command.source),
      } do
        local out = command.succeed(folder, recipe .. "shard=full_shard prefetch=" .. prefetch)
        losses[assert(out:match "validation loss ([%d.]+)", out)] = true
        command.succeed(folder, "check " .. recipe:gsub("^run", "") .. "shard=full_shard prefetch="
          .. prefetch)
        os.execute(("rm -rf '%s/out'"):format(folder))
      end
      assert.is_nil(next(losses, (next(losses))))
    end)

    it("are refused with code 2", function()
      local function refused(options, ...)
        local code, _, err = command.run(folder, recipe .. options)
        assert.equal(2, code, err)
        for _, part in ipairs { ... } do assert.truthy(err:find(part, 1, true), err) end
      end
      refused("prefetch=both", "only a sharded model gathers")
      refused("shard=full_shard prefetch=bothe", "did you mean 'both'")
      refused("shard=full_shard prefetch=both shard.prefetch=none", "one option")
      refused("shard=full_shard prefetch=both prefetch.depth=2", "ready-made")
      refused("shard=full_shard shard.prefetch=bothe", "did you mean 'both'")
    end)
  end)
end)
