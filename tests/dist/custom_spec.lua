-- ms.custom on several ranks: custom.lua has the expectations of each rank.
local command = require "command"

describe("functions with a gradient of their own", function()
  for _, ranks in ipairs(command.some(2, { "2", "4", "3 --thread-ranks" })) do
    it("cut an MLP over the ranks, on " .. ranks, function() command.on_ranks("custom", ranks) end)
  end

  it("run in a check", function()
    local folder = command.folder()
    command.write(folder .. "/r.lua", [[
      local ms = require "moonshard"
      local group = ms.world()
      local copy_to = ms.custom {
        forward = function(x) return x end,
        backward = function(d) return group:all_reduce(d):value() end,
      }
      local model = ms.ddp(ms.nn.Linear(64, 64))
      local optimizer = ms.optim.sgd(model, { lr = 0.1 })
      for _ in ms.steps(2) do
        copy_to(model(ms.ones { 8, 64 })):square():sum():backward()
        optimizer:step()
        optimizer:zero_grad()
      end]])
    for _, switches in ipairs { "-n 2", "-n 2 --device cuda" } do
      local out = command.succeed(folder, "check r.lua " .. switches)
      assert.truthy(out:find "peak", out)
    end
    command.remove(folder)
  end)

  it("end the job where one raises in backward", function()
    local folder = command.folder()
    command.write(folder .. "/r.lua", [[
      local ms = require "moonshard"
      local f = ms.custom {
        forward = function(x) return x * 1 end,
        backward = function(d)
          return ms.rank() == 1 and d:view(1, 2) or ms.world():all_reduce(d):value()
        end,
      }
      f(ms.ones { 2, requires_grad = true }):sum():backward()]])
    local code, _, err = command.run(folder, "run r.lua -n 2")
    assert.equal(1, code, err)
    assert.truthy(err:find("custom (at r.lua:8): backward gave [1, 2] f32 as the gradient of \z
      input 1, which is [2] f32", 1, true), err)
    command.remove(folder)
  end)
end)
