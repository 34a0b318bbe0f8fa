-- Every kind of parallelism, alone and in pairs, against plain modules on one rank: kinds.lua holds
-- what each rank expects. Pairs also go on from a checkpoint with the same bits. A failure names
-- the case, its seed and the line that runs it again.
local command = require "command"

local KINDS <const> = { "tensor", "context", "pipeline", "experts", "ddp", "fsdp" }
-- Experts go with ddp or fsdp, and so on; ddp and fsdp each reduce the gradients.
local PAIRS <const> = {}
for i, one in ipairs(KINDS) do
  for k = i + 1, #KINDS do
    if one ~= "ddp" then PAIRS[#PAIRS + 1] = one .. "+" .. KINDS[k] end
  end
end
-- For the pairs this seed draws each schedule, all ways of attention, activations that tensor ranks
-- cut over times and others, each strategy of fsdp, and sums by hand, by wrappers and by nn.shared.
local SHORT <const> = "seed=22048"

describe("each kind of parallelism", function()
  local function job(ranks, cases, seeds)
    return command.on_ranks("kinds", ranks, ("cases=%s %s"):format(table.concat(cases, ","), seeds))
  end

  it("trains as plain modules do on one rank", function()
    job("2", KINDS, SHORT)
    job("3 --thread-ranks", KINDS, SHORT)
    if not command.full then return end
    for _, ranks in ipairs { 1, 2, 3, 4 } do
      job(ranks .. " --thread-ranks", KINDS, "seed=1 seeds=5")
    end
  end)

  it("goes with each other one", function()
    assert.equal(14, #PAIRS)
    local folder = command.folder()
    finally(function() command.remove(folder) end)
    local resumes <const> = (" folder='%s'"):format(folder)
    job("4 --thread-ranks", PAIRS, SHORT .. resumes)
    if not command.full then return end
    job("4 --thread-ranks", PAIRS, "seed=1 seeds=5")
    job("6 --thread-ranks", PAIRS, "seed=6 seeds=2")
    local three = {}
    for i, pair in ipairs(PAIRS) do
      for k = i + 1, #PAIRS do
        local first, last = pair:match "^(.*)%+(.*)$"
        if PAIRS[k]:find("^" .. last .. "%+") then three[#three + 1] = first .. "+" .. PAIRS[k] end
      end
    end
    assert.equal(16, #three)
    job("8 --thread-ranks", three, "seed=1" .. resumes)
  end)

  it("names the seed that fails, and how to run it again", function()
    local folder = command.folder()
    local code, _, err = command.run(folder, ("run '%s/tests/dist/kinds.lua' -n 2 \z
      --thread-ranks cases=tensor seed=3 off=true"):format(command.source))
    command.remove(folder)
    assert.equal(1, code)
    for _, part in ipairs {
      "tensor fails with seed 3 on 2 ranks", "step 0: the gradient of ", "is off by",
      "moonshard run tests/dist/kinds.lua -n 2 --thread-ranks cases=tensor seed=3",
    } do
      assert.truthy(err:find(part, 1, true), err)
    end
  end)

  it("is refused where two of them do the same", function()
    command.on_ranks("kinds", "2", "what=refused")
    local folder = command.folder()
    local code, _, err = command.run(folder, ("run '%s/tests/dist/kinds.lua' -n 2 \z
      what=recompute"):format(command.source))
    command.remove(folder)
    assert.equal(1, code)
    assert.truthy(err:find("and what it recomputes serves one backward", 1, true), err)
  end)
end)
