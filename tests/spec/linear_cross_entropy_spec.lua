-- x:linear_cross_entropy(w, y): a linear layer and its loss without whole logits.
local core = require "moonshard.core"
local ms = require "moonshard"
local fails = require "support".fails

local ROWS <const>, IN <const>, CLASSES <const> = 24, 16, 40

local function bits(t) return t:to "f32":to_table() end

local function leaf(shape, seed, dtype)
  shape.seed = seed
  return ms.randn(shape):to(dtype or "f32"):requires_grad_()
end

local function inputs(dtype)
  return leaf({ 2, ROWS // 2, IN }, 1, dtype), leaf({ CLASSES, IN }, 2, dtype),
    ms.randint { 2, ROWS // 2, low = 0, high = CLASSES, seed = 3 }
end

-- Loss and gradients of f(x, w, y).
local function run(f, dtype, autocast, seed)
  local x, w, y = inputs(dtype)
  local loss
  local function forward() loss = f(x, w, y) end
  if autocast then ms.autocast(autocast, forward) else forward() end
  loss:backward { gradient = seed and ms.full(seed, {}) }
  return { bits(loss), bits(x:grad()), bits(w:grad()) }
end

local function one(options)
  return function(x, w, y) return x:linear_cross_entropy(w, y, options) end
end
local function two(options)
  return function(x, w, y) return x:linear(w):cross_entropy(y, options) end
end

-- The greatest difference of two nested lists, relative to the greatest number of the second.
local function apart(a, b)
  local most, worst = 1e-30, 0
  local function walk(u, v)
    if type(u) ~= "table" then
      most, worst = math.max(most, math.abs(v)), math.max(worst, math.abs(u - v))
      return
    end
    for i = 1, #v do walk(u[i], v[i]) end
  end
  walk(a, b)
  return worst / most
end

local function assert_close(tolerance, a, b)
  for i = 1, #b do
    local error = apart(a[i], b[i])
    assert.is_true(error <= tolerance, ("result %d differs by %.3g"):format(i, error))
  end
end

describe("linear_cross_entropy", function()
  it("has the bits of two methods with one chunk, outside of f16", function()
    for _, options in ipairs { {}, { reduction = "sum" }, { ignore_index = 7 } } do
      for _, how in ipairs { { "f32" }, { "bf16" }, { "f32", "bf16" } } do
        assert.same(run(two(options), table.unpack(how)), run(one(options), table.unpack(how)))
      end
    end
  end)

  it("adds up the same in chunks", function()
    for _, chunk in ipairs { 1, 5, 8, 23, 1000 } do
      -- f32 sums of 24 rows in another order.
      assert_close(2e-6, run(one { chunk = chunk }, "f32"), run(two(), "f32"))
      -- Slopes are rounded to 2^-9 alike; the weight's gradient is rounded once.
      assert_close(2e-2, run(one { chunk = chunk }, "bf16"), run(two(), "bf16"))
    end
  end)

  it("keeps small gradients in f16, as the loss is scaled later", function()
    -- A slope is 16.4 of the least numbers of f16: rounding it to 16 changes the gradient by 1%.
    local x, y = ms.rand { 512, 4, low = 0.5, high = 1, seed = 1 },
      ms.randint { 512, low = 0, high = 2000, seed = 2 }
    local function gradient(f)
      local w, loss = ms.zeros({ 2000, 4 }):requires_grad_(), nil
      f(function(options) loss = x:linear_cross_entropy(w, y, options) end)
      loss:backward { gradient = ms.full(2 ^ 16, {}) }
      return w:grad()
    end
    local exact = gradient(function(run_on) run_on() end)
    for _, options in ipairs { {}, { chunk = 100 } } do
      local half = gradient(function(run_on)
        ms.autocast("f16", function() run_on(options) end)
      end)
      -- Slopes and gradients are rounded by 2^-11 at most.
      assert.is_true((half - exact):norm():item() <= 1e-3 * exact:norm():item())
    end
  end)

  it("trains in f16 with a loss scaler as two methods do", function()
    local function train(f)
      local x, w, y = inputs()
      local optimizer, scaler = ms.optim.sgd({ w }, { lr = 0.5 }), ms.optim.scaler()
      local losses = {}
      for i = 1, 5 do
        optimizer:zero_grad()
        local loss
        ms.autocast("f16", function() loss = f(x:detach(), w, y) end)
        scaler:scale(loss):backward()
        scaler:unscale(optimizer)
        scaler:step(optimizer)
        losses[i] = loss:item()
      end
      return losses
    end
    assert_close(1e-3, { train(one()) }, { train(two()) })
  end)

  it("goes through a retained graph twice", function()
    local x, w, y = inputs()
    local loss = x:linear_cross_entropy(w, y, { chunk = 5 })
    loss:backward { retain_graph = true }
    local once = { bits(x:grad()), bits(w:grad()) }
    x:set_grad(nil)
    w:set_grad(nil)
    loss:backward()
    assert.same(once, { bits(x:grad()), bits(w:grad()) })
    fails(function() loss:backward() end, "was freed by the backward")
  end)

  it("adds to gradients that are there, and to those of other uses of the weight", function()
    -- Tied to an embedding, and used in two passes.
    local function gradient(f)
      local w = leaf({ CLASSES, IN }, 2)
      local y = ms.randint { 2, 12, low = 0, high = CLASSES, seed = 3 }
      for _ = 1, 2 do f(y:embedding(w), w, y):backward() end
      return { bits(w:grad()) }
    end
    assert.same(gradient(two()), gradient(one()))
    assert_close(2e-6, gradient(one { chunk = 5 }), gradient(two()))
  end)

  it("makes the gradients that are needed", function()
    local function products(f)
      core.trace_start()
      f()
      local count = 0
      for _, record in ipairs(core.trace_stop()) do
        if record.name == "matmul" then count = count + 1 end
      end
      return count
    end
    local x, w, y = inputs()
    local function loss(of, by) return function() of:linear_cross_entropy(by, y) end end
    assert.equal(3, products(loss(x, w)))
    assert.equal(2, products(loss(x:detach(), w)))
    assert.equal(2, products(loss(x, w:detach())))
    assert.equal(1, products(loss(x:detach(), w:detach())))
    assert.equal(1, products(function() ms.no_grad(loss(x, w)) end))
    local frozen = x:linear_cross_entropy(w:detach(), y)
    frozen:backward()
    assert.same(run(one())[2], bits(x:grad()))
    assert.is_nil(w:grad())
  end)

  it("is recomputed", function()
    assert.same(run(one()), run(function(x, w, y)
      return ms.recompute(function(t) return t:linear_cross_entropy(w, y) end, x)
    end))
  end)

  it("has gradients of the values that forward has read", function()
    local x, w, y = inputs()
    local loss = x:linear_cross_entropy(w, y)
    ms.no_grad(function()
      x:zero_()
      w:zero_()
    end)
    loss:backward()
    local expected = run(one())
    assert.same({ expected[2], expected[3] }, { bits(x:grad()), bits(w:grad()) })
  end)

  it("calls the hooks of its loss and of its inputs", function()
    local x, w, y = inputs()
    local loss = x:linear_cross_entropy(w, y)
    local seen
    loss:on_grad(function(g) return g * 2 end)
    x:on_grad(function(g) seen = g:clone() end)
    loss:backward()
    local doubled = run(one(), "f32", nil, 2)
    assert.same({ doubled[2], doubled[3] }, { bits(x:grad()), bits(w:grad()) })
    assert.same(doubled[2], bits(seen))
  end)

  it("never has whole logits", function()
    local x, w = leaf({ 512, 16 }, 1), leaf({ 1000, 16 }, 2)
    local y = ms.randint { 512, low = 0, high = 1000, seed = 3 }
    local function peak(f)
      core.reset_peak()
      local before = ms.memory().live
      f():backward()
      return ms.memory().peak - before
    end
    local logits <const> = 4 * 512 * 1000
    assert.is_true(peak(function() return x:linear(w):cross_entropy(y) end) > logits)
    x:set_grad(nil)
    w:set_grad(nil)
    local gradients <const> = 4 * 16 * (512 + 1000)
    local chunked = peak(function() return x:linear_cross_entropy(w, y, { chunk = 64 }) end)
    assert.is_true(chunked < logits / 8 + gradients + 16384, chunked)
  end)

  it("says what does not fit", function()
    local x, w, y = inputs()
    local function refused(text, ...)
      local arguments = table.pack(...)
      fails(function()
        x:linear_cross_entropy(table.unpack(arguments, 1, arguments.n))
      end, text)
    end
    refused("the input's last dimension is 16", ms.ones { 4, 3 }, y)
    refused("the targets must be i64", w, w)
    refused("the targets must have the shape of the input", w, y:narrow(2, 1, 3))
    refused("the same float dtype", w:to "bf16", y)
    refused("reduction", w, y, { reduction = "none" })
    refused("chunk", w, y, { chunk = 0 })
    refused("unknown option of linear_cross_entropy 'chunks'", w, y, { chunks = 3 })
    local bad = ms.full(CLASSES, { 2, ROWS // 2, dtype = "i64" })
    local loss = x:linear_cross_entropy(w, bad)
    fails(function() loss:item() end, "the target of row 0 is 40, but there are 40 classes")
  end)
end)
