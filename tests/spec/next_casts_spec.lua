-- Casts of weights that an optimizer's step makes for the next step (autocast): whatever is done
-- with a weight between two steps, products see the weight as it is.
local ms = require "moonshard"
local nn = ms.nn

-- A linear layer in bf16, of which nothing is cast beforehand.
local function product(x, weight)
  return x:to "bf16":matmul(weight:detach():to "bf16":t())
end
local function same(a, b) return a:to "f32":eq(b:to "f32"):all():item() end

describe("the next cast of a weight", function()
  local layer, optimizer, x
  before_each(function()
    layer = nn.Linear(16, 24, { bias = false })
    optimizer = ms.optim.adamw(layer, { lr = 0.1 })
    x = ms.randn { 8, 16, seed = 1 }
  end)

  local function forward() return ms.autocast("bf16", function() return layer(x) end) end
  local function step()
    forward():square():mean():backward()
    optimizer:step()
    optimizer:zero_grad()
  end
  local function check() assert.is_true(same(product(x, layer.weight), forward())) end

  it("is dropped by whatever else changes the weight", function()
    local saved = layer.weight:detach():clone()
    local changes = {
      function() layer.weight:mul_(0.5) end,
      function() layer.weight:copy_(saved) end,
      function() layer.weight:narrow(1, 1, 4):fill_(2) end,
      function() layer.weight:view(-1):narrow(1, 3, 5):zero_() end,
    }
    for _, change in ipairs(changes) do
      step()
      ms.no_grad(change)
      check()
    end
  end)

  it("serves parts of a weight", function()
    step()
    local part = ms.autocast("bf16", function() return x:linear(layer.weight:narrow(1, 3, 8)) end)
    assert.is_true(same(product(x, layer.weight:narrow(1, 3, 8)), part))
    step()
    check()
  end)

  it("is right in loops of other kinds", function()
    -- Two passes a step; two steps of a pass; evaluation between; another dtype, and none.
    for _ = 1, 2 do
      forward():square():mean():backward()
      step()
      check()
      forward():square():mean():backward()
      optimizer:step()
      optimizer:step()
      check()
      optimizer:zero_grad()
      step()
      ms.no_grad(check)
      step()
      assert.is_true(same(x:linear(layer.weight), x:matmul(layer.weight:t())))
      step()
      local halves = ms.autocast("f16", function() return x:linear(layer.weight) end)
      assert.equal("f16", halves:dtype())
    end
  end)

  it("is right where the optimizer steps in backward", function()
    local net = ms.ddp(nn.Linear(16, 24, { bias = false }))
    optimizer = ms.optim.adamw(net, { lr = 0.1 })
    optimizer:overlap(net, "in_backward")
    for _ = 1, 3 do
      ms.autocast("bf16", function() return net(x) end):square():mean():backward()
      optimizer:step()
      local seen = ms.autocast("bf16", function() return net(x) end)
      assert.is_true(same(product(x, net:parameters()[1]), seen))
    end
  end)

  it("follows averages that are swapped in and out", function()
    local average = ms.optim.ema(layer, { decay = 0.5 })
    for _ = 1, 3 do
      step()
      average:step()
      average:averaged(check)
      check()
    end
  end)
end)
