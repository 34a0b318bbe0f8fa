-- Collectives of several ranks, as processes and as threads: collectives.lua holds what each rank
-- expects.
local command = require "command"

describe("collectives", function()
  local recipe = command.source .. "/tests/dist/collectives.lua"
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  for _, how in ipairs { "", " --thread-ranks" } do
    for ranks = 1, 4 do
      it(("give what they should on %d ranks as %s")
        :format(ranks, how == "" and "processes" or "threads"), function()
        local out = command.succeed(folder, ("run %s -n %d%s"):format(recipe, ranks, how))
        for rank = 0, ranks - 1 do
          assert.truthy(out:find(("rank %d of %d is done"):format(rank, ranks), 1, true), out)
        end
      end)
    end
  end

  it("of random numbers show which belong to everyone and which to a rank", function()
    command.write(folder .. "/r.lua", [[
      local ms = require "moonshard"
      local function alike(t)
        local all = ms.world():all_gather(t:view(1, -1)):value()
        return all[1]:eq(all[2]):all():item()
      end
      local function say(name, ...)
        local list = {}
        for i, t in ipairs { ... } do list[i] = tostring(alike(t)) end
        if ms.rank() == 0 then print(name, table.concat(list, " ")) end
      end
      local rounding = ms.codec("int4", { rounding = "stochastic" })
      say("same", ms.rand { 99 }, ms.randn { 99, seed = 4 },
        ms.randint { 99, low = 0, high = 9, per_rank = false })
      say("own", ms.rand { 99, per_rank = true }, ms.randn { 99, seed = 4, per_rank = true },
        ms.ones { 99 }:dropout(0.5), (rounding:encode(ms.rand { 99, seed = 1 })))
      say("then", ms.rand { 99 })]])
    local out = command.succeed(folder, "run r.lua -n 2")
    assert.matches("same\ttrue true true\n", out)
    assert.matches("own\tfalse false false false\n", out)
    assert.matches("then\ttrue\n", out)
    assert.equal(out, (command.succeed(folder, "run r.lua -n 2 --thread-ranks")))
  end)
end)
