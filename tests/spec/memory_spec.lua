-- The memory that training operators need in a script: forward and backward, with values that Lua
-- still holds.
local ms = require "moonshard"
local core = require "moonshard.core"

-- The peak of f, in bytes above the memory that is live now.
local function peak_of(f)
  core.collect()
  ms.reset_peak()
  local before = ms.memory().live
  f()
  ms.synchronize()
  return ms.memory().peak - before
end

describe("memory", function()
  it("of attention over 4096 positions holds no scores", function()
    local heads, time, width = 2, 4096, 32
    local function make() return ms.randn { 1, heads, time, width, requires_grad = true } end
    local q, k, v = make(), make(), make()
    local one = heads * time * width * 4
    local peak = peak_of(function() q:attention(k, v):sum():backward() end)
    -- The result, its gradient, three gradients, and a number a row; the scores would be 128 times
    -- one of them.
    assert.is_true(peak <= 5.1 * one, ("%.2f tensors"):format(peak / one))
  end)

  it("of cross entropy holds the logits once: their gradient takes their place", function()
    local rows, classes = 2048, 8192
    local x, w = ms.randn { rows, 16 }, ms.randn { classes, 16, requires_grad = true }
    local targets = ms.randint { rows, high = classes }
    local logits = rows * classes * 4
    local peak = peak_of(function()
      local loss = x:linear(w):cross_entropy(targets)
      loss:backward()
    end)
    assert.is_true(peak <= 1.05 * logits, ("%.2f times the logits"):format(peak / logits))
  end)

  it("of logits that a script still uses stays theirs", function()
    local x, w = ms.randn { 512, 16 }, ms.randn { 16384, 16, requires_grad = true }
    local targets = ms.randint { 512, high = 16384 }
    local logits = x:linear(w)
    local before = logits:sum():item()
    logits:cross_entropy(targets):backward()
    assert.equal(before, logits:sum():item())
  end)

  it("comes back in one collection, also what a function held that the graph had kept", function()
    local function live()
      core.collect()
      return ms.memory().live
    end
    local before = live()
    do
      local x = ms.ones { 1024, requires_grad = true }
      for _ = 1, 3 do  -- each function refers to the result of the one before
        local inner = x
        x = ms.recompute(function(t) return t * inner end, ms.ones { 1024, requires_grad = true })
      end
    end
    assert.equal(before, live())
  end)

  it("is the same in every step", function()
    local model = ms.nn.gpt2 { vocab = 64, context = 32, layers = 2, width = 64, heads = 4 }
    local optimizer = ms.optim.adamw(model)
    local seen = {}
    for step in ms.steps(12) do
      local x = ms.randint { 4, 32, high = 64 }
      model(x):cross_entropy(x):backward()
      optimizer:step()
      seen[step] = ms.memory().live
    end
    for step = 3, 11 do assert.equal(seen[2], seen[step]) end
  end)
end)
