-- Two linear layers with gelu between them are one operator where nothing stands between; the bits
-- are those of two layers.
local core = require "moonshard.core"
local ms = require "moonshard"

local function leaf(shape, seed, dtype)
  shape.seed = seed
  return ms.randn(shape):to(dtype):requires_grad_()
end

local function bits(t) return t:to "f32":to_table() end

-- Results and gradients of a function of x and of two layers' weights and biases.
local function run(f, layout, dtype, autocast)
  local turned = layout == "mlp_t"
  local x, first, second = leaf({ 3, 5, 16 }, 1, dtype),
    leaf(turned and { 16, 40 } or { 40, 16 }, 2, dtype),
    leaf(turned and { 40, 24 } or { 24, 40 }, 3, dtype)
  local b, d = leaf({ 40 }, 4, dtype), leaf({ 24 }, 5, dtype)
  local y
  local function forward() y = f(x, first, second, b, d) end
  if autocast then ms.autocast(autocast, forward) else forward() end
  (y:to "f32" * ms.randn { 3, 5, 24, seed = 6 }):sum():backward()
  local found = { bits(y) }
  for _, t in ipairs { x, first, second, b, d } do found[#found + 1] = bits(t:grad()) end
  return found
end

describe("an mlp", function()
  for layout, linear in pairs { mlp = "linear", mlp_t = "linear_t" } do
    it(("has the bits of two calls of %s"):format(linear), function()
      for _, how in ipairs { { "f32" }, { "bf16" }, { "f16" }, { "f32", "bf16" },
        { "f32", "f16" } } do
        local one = run(function(x, w, v, b, d) return x[layout](x, w, v, b, d) end, layout,
          table.unpack(how))
        local two = run(function(x, w, v, b, d)
          return x[linear](x[linear](x, w, b, "gelu"), v, d)
        end, layout, table.unpack(how))
        assert.same(two, one)
      end
    end)
  end

  it("keeps less for backward", function()
    local x, w, v = leaf({ 256, 64 }, 1, "f32"), leaf({ 256, 64 }, 2, "f32"),
      leaf({ 64, 256 }, 3, "f32")
    local function live(f)
      local before = ms.memory().live
      local y = f()
      return ms.memory().live - before, y
    end
    local one = live(function() return x:mlp(w, v) end)
    local two = live(function() return x:linear(w, nil, "gelu"):linear(v) end)
    assert.equal(4 * 256 * 256, two - one)
  end)

  -- Tasks of one pass of a module, by name.
  local function tasks_of(net, x)
    core.trace_start()
    local y = net(x)
    local count = {}
    for _, record in ipairs(core.trace_stop()) do
      count[record.name] = (count[record.name] or 0) + 1
    end
    return count, y
  end

  local models = {
    MLP = function() return ms.nn.MLP(8, 32), "up", "down" end,
    ["GPT-2's"] = function()
      return ms.nn.gpt2 { vocab = 8, context = 4, layers = 1, width = 8, heads = 1 }.h[1].mlp,
        "c_fc", "c_proj"
    end,
    ["a decoder's"] = function()
      return ms.nn.decoder { vocab = 8, context = 4, layers = 1, width = 8, heads = 1, hidden = 32,
        mlp = "gelu" }.model.layers[1].mlp, "up_proj", "down_proj"
    end,
  }
  for name, make in pairs(models) do
    it(("is two layers where something stands between them: %s"):format(name), function()
      local net, up, down = make()
      local x = ms.randn { 3, 8, seed = 1, requires_grad = true }
      local function gradient()
        x:set_grad(nil)
        local y = net(x)
        y:sum():backward()
        return { bits(y), bits(x:grad()) }
      end
      local function saved() return ms.memory().live end
      local alone = gradient()
      local before = saved()
      local y = net(x)
      assert.is_true(y:requires_grad())
      local fused = saved() - before
      -- A hook sees what comes out of the first layer.
      local seen
      net[up]:hook("forward", function(_, _, outputs) seen = outputs[1]:shape() end)
      assert.same(alone, gradient())
      assert.same({ 3, 32 }, seen)
      before = saved()
      y = net(x)
      assert.is_true(y:requires_grad() and saved() - before > fused)
      -- A module of another class in the place of the second.
      local other, _, place = make()
      local inner, called = other[place], 0
      local Wrapped = ms.nn.class "Wrapped"
      function Wrapped:init() self.inner = inner end
      function Wrapped:forward(t) called = called + 1 return self.inner(t) end
      other[place] = Wrapped()
      other(x)
      assert.equal(1, called)
      assert.is_not_nil(net[down])
    end)
  end

  it("is two layers where the class has another forward", function()
    local net, calls = ms.nn.MLP(8, 32), 0
    local own = ms.nn.Linear.forward
    function ms.nn.Linear:forward(...)
      calls = calls + 1
      return own(self, ...)
    end
    local ok, message = pcall(net, ms.randn { 3, 8, seed = 1 })
    ms.nn.Linear.forward = own
    assert.is_true(ok, message)
    assert.equal(2, calls)
  end)

  it("computes as many products as two layers", function()
    local net = ms.nn.MLP(8, 32)
    assert.equal(2, (tasks_of(net, ms.randn { 3, 8, seed = 1 })).matmul)
  end)
end)
