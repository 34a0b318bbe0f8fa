-- Convolution and pooling as scripts see them: options, errors, dtypes, layers and their files.
-- (Values against the definition: unit.convolution, unit.pool; against PyTorch: golden.planes.)
local ms = require "moonshard"
local support = require "support"
local near, fails = support.near, support.fails
local nn = ms.nn

describe("convolution", function()
  local x = ms.randn { 2, 4, 7, 6, seed = 1 }
  local w, b = ms.randn { 6, 4, 3, 2, seed = 2 }, ms.randn { 6, seed = 3 }

  it("takes a number for rows and columns, or one for each", function()
    assert.same({ 2, 6, 5, 5 }, x:conv2d(w):shape())
    assert.same({ 2, 6, 3, 3 }, x:conv2d(w, b, { stride = 2 }):shape())
    assert.same({ 2, 6, 3, 7 }, x:conv2d(w, b, { stride = { 2, 1 }, padding = { 0, 1 } }):shape())
    assert.same({ 2, 6, 1, 4 }, x:conv2d(w, nil, { dilation = { 3, 2 } }):shape())
    near(x:conv2d(w, b, { padding = { 2, 2 } }):to_table(), x:conv2d(w, b, { padding = 2 }), 0)
  end)

  it("by groups is the convolutions of the groups", function()
    local v = ms.randn { 6, 2, 3, 2, seed = 4 }
    local first = x:narrow(2, 1, 2):conv2d(v:narrow(1, 1, 3), b:narrow(1, 1, 3))
    local second = x:narrow(2, 3, 2):conv2d(v:narrow(1, 4, 3), b:narrow(1, 4, 3))
    near(ms.cat({ first, second }, 2):to_table(), x:conv2d(v, b, { groups = 2 }), 1e-6)
  end)

  it("names what does not fit", function()
    fails(function() x:conv2d(w, b, { strid = 2 }) end, "'strid'", "'stride'")
    fails(function() x:conv2d(w, b, { stride = 0 }) end, "stride is 0")
    fails(function() x:conv2d(w, b, { padding = { 1, 2, 3 } }) end, "padding has 3 numbers")
    fails(function() x:conv2d(w, b, { padding = -1 }) end, "padding is -1")
    fails(function() x:conv2d(w, b, { dilation = "2" }) end, "dilation must be an integer")
    fails(function() x:conv2d(w, b, { groups = 4 }) end, "conv2d: [2, 4, 7, 6] f32 and",
      "6 output channels do not divide by 4 groups")
    fails(function() x:conv2d(ms.zeros { 6, 3, 3, 3 }) end, "[6, 3, 3, 3]",
      "takes 3 channels, the input has 4")
    fails(function() x:conv2d(ms.zeros { 6, 4, 8, 2 }) end, "8 x 2, more than the padded input's 7")
    fails(function() x:conv2d(w:to "bf16") end, "same float dtype")
    fails(function() x:conv2d(w, ms.zeros { 5 }) end, "bias must have shape [6]")
  end)

  it("multiplies in bf16 under autocast, and gives it", function()
    local exact = x:conv2d(w, b)
    local y = ms.autocast("bf16", function() return x:conv2d(w, b) end)
    assert.equal("bf16", y:dtype())
    y = y:to "f32"
    near(exact:to_table(), y, 0.1)
    assert.is_true((exact - y):abs():max():item() > 1e-4)
  end)

  it("has the same gradients when it is recomputed", function()
    local function gradients(f)
      local v = w:clone():requires_grad_()
      f(function(t) return t:conv2d(v, b, { padding = 1 }):relu():max_pool2d(2) end):sum()
        :backward()
      return v:grad():to_table()
    end
    assert.same(gradients(function(net) return net(x) end),
      gradients(function(net) return ms.recompute(net, x) end))
  end)

  -- The matrix of windows would be 9 times the input.
  it("holds the result and no windows", function()
    local large = ms.zeros { 4, 16, 64, 64 }
    local weight = ms.zeros({ 16, 16, 3, 3 }):requires_grad_()
    local before = ms.memory().live
    local y = large:conv2d(weight, nil, { padding = 1 })
    assert.equal(y:numel() * 4, ms.memory().live - before)
  end)
end)

describe("pooling", function()
  local x = ms.arange(1, 24):to "f32":view(1, 1, 4, 6)

  it("takes the greatest element or the average of each window", function()
    near({ { { { 8, 10, 12 }, { 20, 22, 24 } } } }, x:max_pool2d(2))
    near({ { { { 4.5, 6.5, 8.5 }, { 16.5, 18.5, 20.5 } } } }, x:avg_pool2d(2))
    near({ { { { 15, 18 } } } }, x:max_pool2d(3, { stride = 3 }))
    local options = { stride = 3, padding = 1 }
    near({ { { { 18 / 9, 42 / 9 }, { 66 / 9, 114 / 9 } } } },
      x:avg_pool2d(3, { stride = 3, padding = 1 }))
    options.count_include_pad = false
    near({ { { { 18 / 4, 42 / 6 }, { 66 / 4, 114 / 6 } } } }, x:avg_pool2d(3, options))
  end)

  it("names what does not fit", function()
    fails(function() x:max_pool2d() end, "missing")
    fails(function() x:max_pool2d(0) end, "kernel is 0")
    fails(function() x:max_pool2d(5) end, "5 x 5, more than the padded input's 4 x 6")
    fails(function() x:max_pool2d(2, { padding = 2 }) end, "padding 2 is more than half")
    fails(function() x:max_pool2d(2, { count_include_pad = true }) end, "count_include_pad")
    fails(function() x:avg_pool2d(2, { count_include_pad = 1 }) end, "boolean")
    fails(function() x:select(1, 1):avg_pool2d(2) end, "[images, channels, rows, columns]")
    fails(function() x:to("i64"):max_pool2d(2) end, "floats")
  end)
end)

describe("layers for planes", function()
  local function net()
    return nn.Sequential(nn.Conv2d(1, 4, 3, { padding = 1 }), nn.ReLU(), nn.MaxPool2d(2),
      nn.Conv2d(4, 6, { 3, 2 }, { groups = 2, stride = { 1, 2 }, bias = false }),
      nn.AvgPool2d(2, { stride = 1, padding = 1, count_include_pad = false }), nn.Flatten(),
      nn.Linear(6 * 3 * 3, 5))
  end

  it("have PyTorch's shapes and start", function()
    local layer = nn.Conv2d(6, 8, { 5, 4 }, { groups = 2 })
    assert.same({ 8, 3, 5, 4 }, layer.weight:shape())
    assert.same({ 8 }, layer.bias:shape())
    -- kaiming_uniform_ with a = sqrt(5): within 1/sqrt(3 * 5 * 4).
    for _, t in ipairs { layer.weight, layer.bias } do
      local most = t:abs():max():item()
      assert.is_true(most <= 1 / math.sqrt(60) and most > 0.7 / math.sqrt(60))
    end
    assert.is_nil(nn.Conv2d(1, 1, 1, { bias = false }).bias)
    assert.same({ 2, 5 }, net()(ms.randn { 2, 1, 8, 8 }):shape())
    assert.same({ 2, 12, 5 }, nn.Flatten(2, 3)(ms.zeros { 2, 3, 4, 5 }):shape())
    assert.same({ 2, 60 }, nn.Flatten()(ms.zeros { 2, 3, 4, 5 }):shape())
  end)

  -- A file and results of the same net in PyTorch (golden/planes/make.py).
  it("load PyTorch's weights, and compute what it computes", function()
    local folder = os.getenv "MOONSHARD_SOURCE" .. "/tests/golden/planes/"
    local model = net()
    assert(model:load(folder .. "net.safetensors"))
    local results = assert(ms.safetensors.load(folder .. "net_results.safetensors"))
    local y = model(results.x)
    near(results.y:to_table(), y, 1e-5)
    y:cross_entropy(results.labels):backward()
    for _, item in ipairs(model:named_parameters()) do
      near(results["grad." .. item.name]:to_table(), item.parameter:grad(), 1e-5)
    end
    local path = os.tmpname()
    assert(model:save(path .. ".safetensors"))
    local again = assert(ms.safetensors.load(path .. ".safetensors"))
    assert.same(assert(ms.safetensors.load(folder .. "net.safetensors"))["3.weight"]:to_table(),
      again["3.weight"]:to_table())
    os.remove(path)
    os.remove(path .. ".safetensors")
  end)

  it("check their numbers when they are made", function()
    fails(function() nn.Conv2d(4, 6, 3, { groups = 4 }) end, "4 input and 6 output channels",
      "4 groups")
    fails(function() nn.Conv2d(4, 6) end, "Conv2d: the kernel is an integer of 1 or more")
    fails(function() nn.Conv2d(4, 6, { 3, 3, 3 }) end, "Conv2d: the kernel")
    fails(function() nn.Conv2d(0, 6, 3) end, "input channels", "not 0")
    fails(function() nn.Conv2d(4, 6, 3, { stride = 0 }) end, "Conv2d: stride")
    fails(function() nn.Conv2d(4, 6, 3, { padding = -1 }) end, "Conv2d: padding")
    fails(function() nn.MaxPool2d "2" end, "MaxPool2d: the kernel")
    fails(function() nn.AvgPool2d(2, { strid = 1 }) end, "'strid'", "'stride'")
    fails(function() nn.Flatten "2" end, "Flatten: first")
  end)

  it("are made on meta, and get memory with the same values", function()
    local function made(on)
      ms.seed(3)
      return on(function() return nn.Conv2d(2, 3, 3) end)
    end
    local real = made(function(f) return f() end)
    local later = made(function(f) return ms.device("meta", f) end):materialize()
    assert.same(real.weight:to_table(), later.weight:to_table())
    assert.same(real.bias:to_table(), later.bias:to_table())
  end)
end)
