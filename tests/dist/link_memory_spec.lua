-- The memory of links and futures: the value of a future ends with the step in which value(), a
-- callback or the engine takes it, whatever Lua's collector does. So live memory is the same after
-- each step, a prediction does not depend on the number of steps, and a job runs in the memory that
-- it needs; a job that needs more ends with code 8, wherever it asks for it.
local command = require "command"
local core = require "moonshard.core"

local RECIPE = [[
local ms = require "moonshard"
local cfg = ms.config { steps = 10, waste = 0, keep = 0 }
local kept = {}
local model = ms.ddp(ms.nn.Linear(64, 64), { comm_hook = function(bucket)
  for _ = 1, cfg.waste do ms.zeros { 100000 } end
  for _ = 1, cfg.keep do kept[#kept + 1] = ms.zeros({ 100000 }):keep() end
  local full = bucket:buffer()
  return bucket:group():all_gather(full):and_then(function(all)
    return bucket:group():all_reduce(all:reshape(-1):narrow(1, 1, full:numel()) * 0.5)
  end)
end })
local optimizer = ms.optim.sgd(model, { lr = 0.1 })
local x = ms.randn { 8, 64, seed = 1 }
for _ in ms.steps(cfg.steps) do
  model(x):sum():backward()
  optimizer:step()
end
print("peak", ms.rank(), ms.memory().peak)
]]

-- Futures whose values no call takes, and tensors that the script drops outside of steps.
local FORGOTTEN = [[
local ms = require "moonshard"
local sum = ms.zeros { 1000 }
for _ in ms.steps(200) do ms.world():all_reduce(ms.ones { 1000 }) end
for _ = 1, 200 do sum:add_(ms.ones { 1000 }) end
assert(sum:max():item() == 200)
]]

describe("the memory of links and futures", function()
  local folder
  before_each(function()
    folder = command.folder()
    command.write(folder .. "/r.lua", RECIPE)
  end)
  after_each(function() command.remove(folder) end)

  it("does not grow with any link", function()
    for _, ranks in ipairs { 2, 3 } do
      local out = command.succeed(folder, ("run '%s/tests/dist/link_memory.lua' -n %d source='%s'")
        :format(command.source, ranks, command.source))
      local count = 0
      for name, growth in out:gmatch "([^\t\n]+)\t(%-?%d+)\n" do
        count = count + 1
        assert.equal("0", growth, ("%s on %d ranks"):format(name, ranks))
      end
      -- Own links, methods of recipes/hooks, native links and their twins.
      assert.is_true(count >= 45, count)
    end
  end)

  it("is predicted alike for 10 and for 1000 steps", function()
    local function predicted(steps)
      local out = command.succeed(folder, "check r.lua -n 2 --json steps=" .. steps)
      return core.json_decode(out).peak_bytes
    end
    local peaks = predicted(10)
    assert.same(peaks, predicted(1000))
    local out = command.succeed(folder, "run r.lua -n 2 steps=300")
    for rank = 0, 1 do
      assert.equal(peaks[rank + 1], math.tointeger(tonumber(out:match("peak%s+" .. rank
        .. "%s+(%d+)"))))
    end
  end)

  it("is collected before a job ends for the lack of it", function()
    command.succeed(folder, "run r.lua -n 2 --memory 1000000 steps=100 waste=1")
    command.write(folder .. "/forgotten.lua", FORGOTTEN)
    command.succeed(folder, "run forgotten.lua --memory 200000")
    command.succeed(folder, "run forgotten.lua -n 2 --memory 200000")
  end)

  it("ends with code 8 where a hook, a callback or a script asks for too much", function()
    local scripts = {
      hook = "local x = ms.ones { 1, requires_grad = true } \z
        x:on_grad(function() ms.zeros { 1000000 } end) x:sum():backward()",
      callback = "ms.world():all_reduce(ms.ones { 1 }):and_then(function() \z
        ms.zeros { 1000000 } end)",
      nested = "local x = ms.ones { 1, requires_grad = true } ms.recompute(function(t) \z
        local y = t * 2 \z
        if y:requires_grad() then y:on_grad(function() ms.zeros { 1000000 } end) end \z
        return y end, x):sum():backward()",
      script = "ms.zeros { 1000000 }",
    }
    for name, text in pairs(scripts) do
      command.write(folder .. "/full.lua", "local ms = require 'moonshard' " .. text)
      local code, _, errors = command.run(folder, "run full.lua --memory 1000000")
      assert.equal(8, code, name)
      assert.matches("no memory for 4000000 bytes", errors, 1, true)
    end
    local code, _, errors = command.run(folder, "run r.lua -n 2 --memory 1000000 keep=1")
    assert.equal(8, code)
    assert.matches("no memory for 400000 bytes: .*largest owners: %d+ KiB made at r.lua:6", errors)
  end)
end)
