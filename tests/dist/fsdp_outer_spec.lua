-- Gradients that reach parameters of a sharded model from outside of their units.
local command = require "command"

describe("a penalty on the weights of a sharded model", function()
  for _, ranks in ipairs(command.some(2, { "2", "1", "4 --thread-ranks" })) do
    it("is trained as under ddp, on " .. ranks, function()
      command.on_ranks("fsdp_outer", ranks)
    end)
  end

  -- What the job says of a penalty that is refused.
  local function refused(body)
    local folder = command.folder()
    command.write(folder .. "/r.lua", [[
      local ms = require "moonshard"
      local net = ms.fsdp(ms.nn.Linear(2, 2))
      local optimizer = ms.optim.sgd(net, { lr = 0.1 })
      local function penalty()
        return net:parameters()[1]:square():sum() + net:parameters()[2]:square():sum()
      end]] .. body)
    local code, _, err = command.run(folder, "run r.lua -n 2")
    command.remove(folder)
    assert.not_equal(0, code)
    assert.truthy(err:find("got a gradient from outside of its unit \"root\"", 1, true), err)
    return err
  end

  it("is refused in a join, where ranks without inputs would lack it", function()
    assert.truthy(refused [[
      net:join({}, function()
        for _ = 0, ms.rank() do
          local loss = net(ms.ones { 1, 2 }):sum()
          loss:add(penalty()):backward()
        end
      end)]]:find("in a join", 1, true))
  end)

  it("is refused where the step of its gradient was taken in backward", function()
    assert.truthy(refused [[
      optimizer:overlap(net, "in_backward")
      for step in ms.steps(2) do            -- the policy begins with the second
        local own = penalty()
        local loss = net(ms.ones { 1, 2 }):sum()
        if step == 1 then loss = loss + own end
        loss:backward()
        optimizer:step()
      end]]
      :find("after it was stepped in backward", 1, true))
  end)
end)
