-- Sharded optimizers and averagers on several ranks: optim.lua has the expectations of each rank.
local command = require "command"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

describe("sharded optimizers and averagers", function()
  local ways = { "4 --thread-ranks" }
  if command.full then table.insert(ways, "3 --thread-ranks") end
  -- The thread sanitizer sees nothing of what processes share.
  if os.getenv "MOONSHARD_SANITIZE" ~= "thread" then
    table.move({ "1", "3", command.full and "2" or nil }, 1, 3, #ways + 1, ways)
  end
  for _, way in ipairs(ways) do
    it("hold on -n " .. way, function() command.on_ranks("optim", way) end)
  end

  it("of which one that is sharded over other ranks than a join's is refused inside it", function()
    local code, _, err = command.run(folder,
      ("run '%s/tests/dist/optim.lua' -n 3 --thread-ranks how=other_group"):format(command.source))
    assert.equal(1, code)
    assert.matches("inside join an optimizer can be sharded over the model's own group only", err)
    code, _, err = command.run(folder,
      ("run '%s/tests/dist/optim.lua' -n 2 how=more_here"):format(command.source))
    assert.equal(1, code)
    assert.matches(
      "join: rank 1 steps sgd of 2 parameters in 2 groups, which is sgd of 1 in 1 on this rank",
      err)
  end)

  it("are saved with all their state and go on with another number of ranks", function()
    command.write(folder .. "/r.lua", [[
      local ms = require "moonshard"
      local o = ms.config { steps = 3, from = "", save = "" }
      ms.seed(1)
      local model = ms.nn.Sequential(ms.nn.Linear(8, 16), ms.nn.GELU(), ms.nn.Linear(16, 4))
      local opt = ms.optim.adamw(model, { lr = 0.05, shard = ms.world() })
      local things = { model = model, opt = opt }
      if o.from ~= "" then assert(ms.checkpoint.load(ms.checkpoint.latest(o.from), things)) end
      local net = ms.ddp(model)
      for step in ms.steps(o.steps) do
        net(ms.randn { 4, 8, seed = step }):square():mean():backward()
        opt:step()
      end
      if o.save ~= "" then
        assert(ms.checkpoint.save(o.save, things))
        assert(ms.checkpoint.wait())
      end
      local sum = 0
      for _, p in ipairs(model:parameters()) do sum = sum + p:sum():item() * 1000 end
      if ms.rank() == 0 then print(("sum %.17g"):format(sum)) end]])
    local function sum(options)
      return command.succeed(folder, "run r.lua " .. options):match "sum (%S+)"
    end
    -- All ranks see the same inputs and numbers of ranks are powers of two, so the means are exact
    -- and the bits the same.
    sum "-n 4 --thread-ranks save=saved"
    local want = sum "-n 1 from=saved"
    assert.truthy(want)
    assert.equal(want, sum "-n 2 from=saved")
    assert.equal(want, sum "-n 4 --thread-ranks from=saved")
  end)
end)
