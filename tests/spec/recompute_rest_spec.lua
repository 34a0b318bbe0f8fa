-- ms.recompute_rest, and recompute = "matmul" of models: the same numbers as without, less memory
-- than without and more than with recompute, and no product made twice.
local ms = require "moonshard"
local core = require "moonshard.core"

-- Gradients and the loss of f(x), as numbers.
local function results(f, leaves, x)
  for _, t in ipairs(leaves) do t:set_grad(nil) end
  local y = f(x)
  local loss = y:square():sum()
  loss:backward()
  local list = { loss:detach():clone() }
  for _, t in ipairs(leaves) do list[#list + 1] = t:grad():clone() end
  return list
end
local function same(one, other, what)
  assert.equal(#one, #other)
  for i, t in ipairs(one) do
    assert.is_true(t:eq(other[i]):all():item(), ("%s: result %d differs"):format(what, i))
  end
end
local function leaf(shape, seed)
  shape.seed = seed
  return ms.randn(shape):requires_grad_()
end

describe("ms.recompute_rest", function()
  it("gives the numbers of the function itself", function()
    local w, b, k = leaf({ 6, 4 }, 1), leaf({ 6 }, 2), leaf({ 4, 4 }, 3)
    local image = leaf({ 2, 3, 3, 3 }, 6)
    local functions = {
      linear = function(x) return x:linear(w, b):tanh():linear(w:t(), nil) end,
      gelu = function(x) return x:linear(w, b, "gelu"):matmul(w):sigmoid() end,
      mlp = function(x) return x:mlp(w, w:t():contiguous(), b) end,
      attention = function(x)
        local q = x:view(1, 2, 4, 4)
        return q:attention(q:matmul(k), q):exp()
      end,
      lse = function(x)
        local q = x:view(1, 2, 4, 4)
        local y, lse = q:attention(q, q, { lse = true })
        return y + lse:unsqueeze(4)
      end,
      written = function(x) return x:linear(w, b):mul_(2):add_(1):tanh() end,
      dropout = function(x) return x:matmul(k):dropout(0.5):matmul(k) end,
      nested = function(x)
        local inner = ms.recompute(function(t) return t:matmul(k):tanh() end, x)
        return ms.recompute_rest(function(t) return t:matmul(k):exp() end, inner)
      end,
      conv = function(x) return x:view(1, 2, 4, 4):conv2d(image:narrow(2, 1, 2)):relu() end,
    }
    local x = ms.randn { 8, 4, seed = 4 }
    for name, f in ms.sorted_pairs(functions) do
      for _, dtype in ipairs { "f32", "bf16" } do
        local leaves = name == "conv" and { image } or { k }
        if name ~= "attention" and name ~= "dropout" and name ~= "nested" and name ~= "conv"
          and name ~= "lse" then leaves = { w } end
        if name == "lse" then leaves = { x:detach():clone():requires_grad_() } end
        local input = name == "lse" and leaves[1] or x
        local function run(g)
          ms.seed(7)
          local function call() return results(g, leaves, input) end
          return dtype == "f32" and call() or ms.autocast(dtype, call)
        end
        local plain = run(f)
        same(plain, run(function(t) return ms.recompute_rest(f, t) end), name .. " " .. dtype)
        same(plain, run(function(t) return ms.recompute(f, t) end), name .. " " .. dtype)
      end
    end
  end)

  it("makes each product once more in backward only for gradients", function()
    local w, x = leaf({ 64, 64 }, 1), ms.randn { 32, 64, seed = 2 }
    local function flops(g)
      w:set_grad(nil)
      ms.synchronize()
      local before = core.flops()
      g(x):sum():backward()
      ms.synchronize()
      return core.flops() - before
    end
    local function f(t) return t:linear(w):tanh():linear(w) end
    local product = 2 * 32 * 64 * 64
    local plain = flops(f)
    local rest = flops(function(t) return ms.recompute_rest(f, t) end)
    local all = flops(function(t) return ms.recompute(f, t) end)
    assert.is_true(all - plain >= 2 * product)
    assert.is_true(rest - plain < product)
  end)

  it("makes a result again that was written to between the runs, and goes back twice", function()
    local w = leaf({ 4, 4 }, 1)
    local function f(t) return t:matmul(w) end
    local function twice(how)
      w:set_grad(nil)
      local y = how(ms.ones { 2, 4 })
      local z = y:square():sum()
      z:backward { retain_graph = true }
      z:backward()
      return { w:grad():clone() }
    end
    same(twice(f), twice(function(t) return ms.recompute_rest(f, t) end), "twice")
    -- The result is overwritten where nothing records it: the next run cannot use it.
    w:set_grad(nil)
    local y = ms.recompute_rest(function(t) return f(t):tanh():matmul(w) end, ms.ones { 2, 4 })
    local sum = y:sum()
    ms.no_grad(function() y:detach():zero_() end)
    sum:backward()
    local own = w:grad():clone()
    w:set_grad(nil)
    f(ms.ones { 2, 4 }):tanh():matmul(w):sum():backward()
    same({ w:grad() }, { own }, "written")
  end)

  it("refuses a function that makes other products the second time", function()
    local w, first = leaf({ 4, 4 }, 1), true
    local y = ms.recompute_rest(function(t)
      local wide = first and t or ms.cat({ t, t }, 1)
      first = false
      return wide:matmul(w):sum()
    end, ms.ones { 2, 4 })
    assert.error_matches(function() y:backward() end, "makes another product now than at first")
  end)
end)

describe("a model's option recompute", function()
  local function model(way)
    ms.seed(3)
    return ms.nn.gpt2 {
      vocab = 32, context = 64, layers = 4, width = 64, heads = 4, recompute = way,
    }
  end
  local ids = ms.randint { 4, 64, low = 0, high = 32, seed = 1 }
  local function trained(way)
    local net = model(way)
    core.collect()
    ms.synchronize()
    ms.reset_peak()
    local before = ms.memory().live
    local loss = net(ids):cross_entropy(ids)
    local held = ms.memory().live - before
    loss:backward()
    local list = { loss:detach():clone() }
    for _, p in ipairs(net:parameters()) do list[#list + 1] = p:grad():clone() end
    return list, held
  end

  it("has the same numbers and less memory in each way", function()
    local plain, most = trained(nil)
    local all, least = trained(true)
    local some, between = trained("matmul")
    local number = 0
    local half, half_held = trained(function(block)
      number = number + 1
      return block.ln_1 and number % 2 == 0
    end)
    same(plain, all, "true")
    same(plain, some, "matmul")
    same(plain, half, "a function")
    assert.is_true(least < between and between < most, ("%d %d %d"):format(least, between, most))
    assert.is_true(least < half_held and half_held < most)
  end)

  it("refuses other values", function()
    assert.error_matches(function() model("matmuls") end, "recompute is true, false, \"matmul\"")
    local net = model(function() return 5 end)
    assert.error_matches(function() net(ids) end, "the function gave 5 for a block")
  end)
end)
