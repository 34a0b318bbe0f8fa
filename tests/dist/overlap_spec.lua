-- Plans for optimizers on several ranks, as processes and as threads: overlap.lua has the
-- expectations of each rank.
local command = require "command"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

describe("plans", function()
  for name, way in pairs { processes = "2", threads = "3 --thread-ranks" } do
    it("give the weights of the plain loop on ranks that are " .. name, function()
      command.on_ranks("overlap", way)
    end)
  end

  it("take the memory that check says", function()
    command.write(folder .. "/r.lua", [[
      local ms = require "moonshard"
      local o = ms.config { policy = "classic", steps = 5 }
      local model = ms.nn.gpt2 { vocab = 64, context = 16, layers = 2, width = 32, heads = 2 }
      local net, opt = ms.ddp(model, { bucket_bytes = 8192 }), ms.optim.adamw(model, { lr = 1e-3 })
      opt:overlap(net, o.policy)
      for step in ms.steps(o.steps) do
        local t = ms.randint { 4, 16, low = 0, high = 64, seed = step }
        net(t):view(-1, 64):cross_entropy(t:view(-1)):backward()
        opt:step()
      end
      io.stdout:write(("peak %d\n"):format(ms.memory().peak))]])
    for _, policy in ipairs { "classic", "in_backward", "deferred", "early_where_hidden" } do
      local run = command.succeed(folder, "run r.lua -n 2 policy=" .. policy):match "peak (%d+)"
      assert.equal(run, command.succeed(folder, "check r.lua -n 2 policy=" .. policy)
        :match "peak memory [^(]*%((%d+) bytes%)", policy)
    end
  end)

  it("that differ between ranks are refused with both sides", function()
    local code, _, err = command.run(folder,
      ("run '%s/tests/dist/overlap.lua' -n 2 how=differ"):format(command.source))
    assert.equal(1, code, err)
    assert.matches("overlap plan by_rank %([^\n]*overlap.lua:%d+%): ranks planned differently: \z
      bucket 2 steps after_backward on rank 0 and on_reduced on rank 1", err)
  end)

  it("that step a sharded parameter early which backward still reads are refused by \z
    name", function()
    local code, _, err = command.run(folder,
      ("run '%s/tests/dist/overlap.lua' -n 2 how=sharded"):format(command.source))
    assert.equal(1, code, err)
    assert.matches("overlap.lua:%d+: overlap: policy in_backward steps parameter \z
      'second.weight' of a sharded optimizer in backward", err)
    assert.matches('use "classic" or "deferred"', err, 1, true)
  end)
end)
