-- Overlapped optimizers and statistics of sharded models, as processes and as threads:
-- fsdp_overlap.lua has the expectations of each rank.
local command = require "command"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

local ways = {
  ["1 rank"] = "1", ["2 processes"] = "2", ["4 threads"] = "4 --thread-ranks",
}

describe("overlap with fsdp", function()
  for name, way in pairs(ways) do
    it("gives the weights of the plain loop on " .. name, function()
      command.on_ranks("fsdp_overlap", way)
    end)
  end

  it("refuses to step gradients under a loss scale in backward", function()
    local code, _, err = command.run(folder,
      ("run '%s/tests/dist/fsdp_overlap.lua' -n 2 how=scaler"):format(command.source))
    assert.equal(1, code, err)
    assert.truthy(err:find("is still multiplied by the loss scale", 1, true), err)
  end)

  it("refuses a chain that clips gradients under a loss scale", function()
    local code, _, err = command.run(folder,
      ("run '%s/tests/dist/fsdp_overlap.lua' -n 2 how=scaler_clip"):format(command.source))
    assert.equal(1, code, err)
    assert.truthy(err:find("is multiplied by a loss scale, and only scaler:unscale divides it", 1,
      true), err)
  end)

  it("takes the memory that check says", function()
    command.write(folder .. "/r.lua", [[
      local ms = require "moonshard"
      local o = ms.config { policy = "classic" }
      local model = ms.nn.gpt2 { vocab = 64, context = 16, layers = 3, width = 32, heads = 2 }
      local net = ms.fsdp(model)
      local opt = ms.optim.adamw(net, { lr = 1e-3 })
      opt:overlap(net, o.policy)
      for step in ms.steps(4) do
        local t = ms.randint { 4, 16, low = 0, high = 64, seed = step }
        net(t):view(-1, 64):cross_entropy(t:view(-1)):backward()
        opt:step()
      end
      io.stdout:write(("peak %d\n"):format(ms.memory().peak))]])
    for _, policy in ipairs { "in_backward", "deferred" } do
      local run = command.succeed(folder, "run r.lua -n 2 policy=" .. policy):match "peak (%d+)"
      assert.equal(run, command.succeed(folder, "check r.lua -n 2 policy=" .. policy)
        :match "peak memory [^(]*%((%d+) bytes%)", policy)
    end
  end)

  it("is reported by train: what the model's stream waited for", function()
    command.write(folder .. "/t.lua", [[
      local ms = require "moonshard"
      local net = ms.fsdp(ms.nn.Sequential(ms.nn.Linear(8, 64), ms.nn.Linear(64, 8)),
        { wrap = { class = "Linear" } })
      local opt = ms.optim.sgd(net, { lr = 1e-3 })
      opt:overlap(net, "in_backward")
      ms.train {
        model = net, optimizer = opt, steps = 5, run = "run",
        data = function() return ms.randn { 4, 8 }, ms.randn { 4, 8 } end,
        loss = function(model, x, y) return (model(x) - y):square():mean() end,
      }]])
    command.succeed(folder, "run t.lua -n 2")
    local lines = 0
    for line in io.lines(folder .. "/run/metrics.jsonl") do
      local total = tonumber(line:match '"exposed_comm_ms":([%d.e+-]+)')
      local gathers = tonumber(line:match '"exposed_gather_ms":([%d.e+-]+)')
      assert.truthy(total and gathers and total >= gathers, line)
      assert.truthy(line:find('"gather_ms":', 1, true), line)
      lines = lines + 1
    end
    assert.equal(5, lines)
  end)
end)
