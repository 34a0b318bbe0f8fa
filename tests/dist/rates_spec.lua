-- Rates of a run whose steps wait for a slow link: the time that validation and saving wait for
-- earlier steps counts as the steps' time. ctest: waits
local command = require "command"

local RECIPE = [[
local ms = require "moonshard"
local model = ms.ddp(ms.nn.Linear(64, 64))
local function batch() return ms.ones { 32, 64 }, ms.zeros { 32, 64 } end
ms.train {
  model = model,
  optimizer = ms.optim.sgd(model, { lr = 0.01 }),
  data = batch,
  steps = 8,
  run = "out",
  loss = function(m, x, y) local out = m(x) return out:mse_loss(y), out end,
  valid = {
    batches = function()
      local left = 1
      return function() left = left - 1 if left == 0 then return batch() end end
    end,
  },
  eval = { every = 1 }, save = { every = 1, last = 1 },
}
]]

describe("the rates of a run", function()
  it("count the time that steps spend on the link, also where validation and saving wait for \z
    it", function()
    local folder = command.folder()
    finally(function() command.remove(folder) end)
    command.write(folder .. "/r.lua", RECIPE)
    command.succeed(folder, "run r.lua -n 2 --link 40ms")
    local list = command.metrics(folder .. "/out")
    assert.equal(8, #list)
    -- A step sends its gradients and its loss over the link, so it takes at least 40 ms on any
    -- machine.
    for i, entry in ipairs(list) do
      assert.truthy(entry.ms_step >= 40, ("step %d took %.3f ms"):format(i - 1, entry.ms_step))
      assert.truthy(entry.tok_s <= 2 * 32 * 64 / 0.04,
        ("step %d: %.0f tok/s"):format(i - 1, entry.tok_s))
    end
  end)
end)
