-- Edge cases that programs reach by accident: tensors without elements, shapes whose number of
-- elements overflows, operators without a gradient, and the names of dimensions in messages.
local ms = require "moonshard"
local support = require "support"
local fails = support.fails

-- Every way to use a tensor of some shape without elements; each gives a tensor to go backward
-- from.
local function uses_of(x)
  local dims, uses = x:dim(), {}
  local function use(name, f) uses[#uses + 1] = { name, f } end
  for _, name in ipairs {
    "exp", "log", "neg", "relu", "tanh", "sin", "cos", "square", "gelu", "silu", "clone",
    "contiguous",
  } do
    use(name, function() return x[name](x) end)
  end
  for _, name in ipairs { "add", "sub", "mul", "div", "maximum", "minimum" } do
    use(name, function() return x[name](x, x * 2) end)
    use(name .. " of one", function()
      local one = ms.ones { 1, requires_grad = true }
      return x[name](x, one) + one:sum() * 0
    end)
  end
  for d = 1, dims do
    use("sum " .. d, function() return x:sum(d, true) * 2 end)
    use("sum and back " .. d, function() return x:sum(d, true) + x end)
    use("mean " .. d, function() return x:mean(d) end)
    use("softmax " .. d, function() return x:softmax(d) end)
    use("cumsum " .. d, function() return x:cumsum(d) end)
    use("cat " .. d, function() return ms.cat({ x, x }, d) end)
    use("narrow " .. d, function() return x:narrow(d, 1, 0) end)
    use("index_select " .. d, function()
      return x:index_select(d, ms.zeros { 0, dtype = "i64" })
    end)
    use("transpose " .. d, function() return x:transpose(1, d) end)
  end
  use("sum", function() return x:sum() end)
  use("norm", function() return x:norm() end)
  use("pack", function() return (ms.pack { x, x }) end)
  use("where", function() return ms.where(x:gt(0), x, x * 2) end)
  use("linear", function()
    local width = x:size(-1)
    return x:linear(ms.ones { 3, width, requires_grad = true },
      ms.zeros { 3, requires_grad = true })
  end)
  use("cast", function() return x:to("bf16"):to("f32") end)
  use("recompute", function() return ms.recompute(function(t) return t * 2 end, x) end)
  use("in place", function()
    local y = x * 1
    y:mul_(3)
    return y
  end)
  use("the sum of two ways", function()
    return (x * ms.ones(x:shape())):sum() + (x:sum(1, true) * 2):sum()
  end)
  return uses
end

describe("tensors without elements", function()
  for _, shape in ipairs { { 4, 0 }, { 0, 4 }, { 0 }, { 2, 0, 3 } } do
    local said = table.concat(shape, ", ")
    it(("of shape [%s] go backward through every operator"):format(said), function()
      local x = ms.zeros { requires_grad = true, table.unpack(shape) }
      for _, use in ipairs(uses_of(x)) do
        x:set_grad(nil)
        local ok, message = pcall(function() use[2]():sum():backward() end)
        assert.is_true(ok, ("%s: %s"):format(use[1], message))
        assert.equal(said, table.concat(x:grad():shape(), ", "), use[1])
      end
    end)
  end

  it("give zeros to parameters", function()
    local layer = ms.nn.Linear(3, 4)
    layer(ms.zeros { 0, 3 }):sum():backward()
    assert.same({ 0, 0, 0, 0 }, layer.bias:grad():to_table())
    assert.equal(0, layer.weight:grad():abs():sum():item())
  end)
end)

describe("shapes that cannot be counted", function()
  it("are refused, also where strides of 0 need no memory for them", function()
    local one = ms.ones { 1, 1 }
    fails(function() one:expand(1 << 32, 1 << 32) end, "more bytes than 63 bits can count")
    -- The number of elements fits, the number of bytes does not.
    fails(function() one:expand(1 << 31, 1 << 31) end, "more bytes than 63 bits can count")
    assert.equal(1 << 40, one:expand(1 << 20, 1 << 20):numel())
  end)
end)

describe("operators without a gradient", function()
  it("refuse to lose one", function()
    local x = ms.tensor({ 3, 1, 2 }, "f32"):requires_grad_()
    local codec = ms.codec("int8", { block = 8 })
    for name, f in pairs {
      quantile = function(t) return t:quantile(0.5) end,
      above = function(t) return t:above(1.5, 3) end,
      codec_encode = function(t) return codec:encode(t) end,
    } do
      fails(function() f(x * 1) end, name, "has no gradient", "detach the input", "no_grad")
      assert.is_truthy(f((x * 1):detach()))
      assert.is_truthy(ms.no_grad(function() return f(x * 1) end))
    end
    assert.equal(2, x:detach():quantile(0.5):item())
  end)

  it("pack has one, for the whole and for each part", function()
    local a, b = ms.tensor({ { 1, 2 } }, "f32"):requires_grad_(),
      ms.tensor({ 3 }, "f32"):requires_grad_()
    local whole = ms.pack { a, b, a }
    whole:mul(ms.tensor({ 1, 2, 3, 4, 5 }, "f32")):sum():backward()
    assert.same({ { 5, 7 } }, a:grad():to_table())
    assert.same({ 3 }, b:grad():to_table())
    local _, parts = ms.pack { a, b }
    a:set_grad(nil)
    b:set_grad(nil)
    parts[1]:mul(10):add(parts[2]):sum():backward()
    assert.same({ { 10, 10 } }, a:grad():to_table())
    assert.same({ 2 }, b:grad():to_table())
    assert.is_true(whole:requires_grad())
    assert.is_false(ms.no_grad(function() return (ms.pack { a }) end):requires_grad())
  end)
end)

describe("messages", function()
  it("count dimensions from 1", function()
    local x = ms.ones { 2, 3 }
    local index = ms.zeros { 3, 3, dtype = "i64" }
    fails(function() x:gather(2, index) end, "gather", "all dimensions but 2")
    fails(function() x:scatter_add(1, ms.zeros { 3, 2, dtype = "i64" }, ms.ones { 3, 2 }) end,
      "scatter_add", "all dimensions but 1")
    fails(function() x:expand(4, 3) end, "expand", "dimension 1 of size 2 cannot become 4")
    fails(function() x:squeeze(2) end, "squeeze", "dimension 2 has size 3")
    fails(function() x:split({ 1, 1 }, 2) end, "split", "dimension 2 has 3")
    fails(function() x:topk(4, 2) end, "4", "3")
  end)
end)
