-- A backward in two parts: y:backward { inputs = ... }, then y:backward { rest = true }. Of all
-- modules the gradients have the bits of one backward, and no product runs twice; and errors.
local core = require "moonshard.core"
local ms = require "moonshard"
local support = require "support"
local fails = support.fails
local nn = ms.nn

local function bits(t) return t and t:to "f32":reshape(-1):to_table() or "none" end

-- Tasks that multiply matrices, by a part of their names.
local PRODUCTS = { "matmul", "fp8", "conv2d", "attention", "gemm" }
local function is_product(name)
  for _, part in ipairs(PRODUCTS) do if name:find(part, 1, true) then return true end end
  return false
end

-- How often tasks of each name run in f that multiply, and the FLOPs of all tasks.
local function cost(f)
  local before = core.flops()
  core.trace_start()
  f()
  local records, count = core.trace_stop(), {}
  for _, record in ipairs(records) do
    if record.kind ~= "alloc" and is_product(record.name) then
      count[record.name] = (count[record.name] or 0) + 1
    end
  end
  return { products = count, flops = core.flops() - before }
end

-- make() returns parameters, inputs and a function that gives a loss. The sum of an input's
-- gradients and of all parameters', by one backward or by two parts.
local function run(make, in_parts)
  ms.seed(5)
  local parameters, inputs, loss_of = make()
  for _, x in ipairs(inputs) do x:requires_grad_() end
  local loss, is_input, first, rest, whole = loss_of(), {}, nil, nil, nil
  for _, x in ipairs(inputs) do is_input[x] = true end
  if in_parts then
    first = cost(function() loss:backward { inputs = inputs } end)
    local early = {}
    for i, x in ipairs(inputs) do early[i] = bits(x:grad()) end
    for _, p in ipairs(parameters) do
      assert.is_true(is_input[p] or p:grad() == nil, "a parameter's gradient came early")
    end
    rest = cost(function() loss:backward { rest = true } end)
    for i, x in ipairs(inputs) do assert.same(early[i], bits(x:grad())) end
  else whole = cost(function() loss:backward() end) end
  local found = {}
  for _, x in ipairs(inputs) do found[#found + 1] = bits(x:grad()) end
  for _, p in ipairs(parameters) do found[#found + 1] = bits(p:grad()) end
  return found, whole, first, rest
end

-- repeats: how many FLOPs of elementwise work may be repeated, of the whole; some few of one number
-- unless given.
local function agrees(make, repeats)
  local one, whole = run(make, false)
  local two, _, first, rest = run(make, true)
  assert.same(one, two)
  for name, count in pairs(rest.products) do
    first.products[name] = (first.products[name] or 0) + count
  end
  assert.same(whole.products, first.products)
  local most = whole.flops * (1 + (repeats or 1e-5))
  assert.is_true(first.flops + rest.flops <= most, ("%g FLOPs, %g in one backward")
    :format(first.flops + rest.flops, whole.flops))
end

local function square(y) return y:to "f32":square():mean() end

-- A module on a tensor of this shape; around(f): what is around its forward.
local function of(net, shape, around)
  return function()
    local model = net()
    local x = ms.randn(shape)
    return model:parameters(), { x }, function()
      local y
      local function forward() y = model(x) end
      if around then around(forward) else forward() end
      return square(y)
    end
  end
end

local function bf16(f) ms.autocast("bf16", f) end
local function f16(f) ms.autocast("f16", f) end
local function fp8(f) ms.autocast("fp8", f, { emulate = true }) end

local SMALL <const> = { vocab = 32, context = 8, layers = 2, width = 16, heads = 2 }
local function small(more)
  local o = {}
  for key, value in pairs(SMALL) do o[key] = value end
  for key, value in pairs(more or {}) do o[key] = value end
  return o
end

local function blocks_of(list)
  local parameters = {}
  for _, block in ipairs(list) do
    table.move(block:parameters(), 1, #block:parameters(), #parameters + 1, parameters)
  end
  return parameters
end

local modules = {
  Linear = of(function() return nn.Linear(16, 32) end, { 6, 16 }),
  ["Linear without bias"] = of(function()
    return nn.Linear(16, 32, { bias = false })
  end, { 6, 16 }),
  MLP = of(function() return nn.MLP(16, 32) end, { 6, 16 }),
  LayerNorm = of(function() return nn.LayerNorm(16) end, { 6, 16 }),
  RMSNorm = of(function() return nn.RMSNorm(16) end, { 6, 16 }),
  GroupNorm = of(function() return nn.GroupNorm(2, 4) end, { 2, 4, 6, 6 }),
  BatchNorm = of(function() return nn.BatchNorm(4) end, { 2, 4, 6, 6 }),
  Attention = of(function() return nn.Attention { width = 16, heads = 2 } end, { 2, 4, 16 }),
  ["a stack"] = of(function()
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16),
      nn.ReLU(), nn.Linear(16, 16), nn.SiLU())
  end, { 6, 16 }),
  ["convolutions"] = of(function()
    return nn.Sequential(nn.Conv2d(3, 4, 3, { padding = 1 }), nn.ReLU(), nn.MaxPool2d(2),
      nn.Conv2d(4, 4, 3), nn.GELU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4, 5))
  end, { 2, 3, 8, 8 }),
  ["bf16"] = of(function()
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.MLP(32, 64))
  end, { 6, 16 }, bf16),
  ["f16"] = of(function() return nn.Sequential(nn.Linear(16, 32), nn.MLP(32, 64)) end, { 6, 16 },
    f16),
}

describe("a backward in two parts", function()
  for name, make in pairs(modules) do
    it("has the bits and the products of one: " .. name, function() agrees(make) end)
  end

  it("does so with an activation that the layer makes", function()
    for _, how in ipairs { false, bf16, fp8 } do
      for _, layout in ipairs { "linear", "linear_t" } do
        agrees(function()
          local w = ms.randn(layout == "linear" and { 32, 16 } or { 16, 32 }):requires_grad_()
          local b, x = ms.randn({ 32 }):requires_grad_(), ms.randn { 16, 16 }
          return { w, b }, { x }, function()
            local y
            local function forward() y = x[layout](x, w, b, "gelu") end
            if how then how(forward) else forward() end
            return square(y)
          end
        end)
      end
    end
  end)

  it("does so in 8 bits", function()
    agrees(of(function() return nn.MLP(16, 32) end, { 16, 16 }, fp8))
    agrees(of(function() return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.MLP(32, 64))
    end, { 16, 16 }, fp8))
    agrees(of(function() return nn.gpt2(small()).h[1] end, { 2, 8, 16 }, fp8))
  end)

  it("does so for blocks of language models", function()
    for _, around in ipairs { false, bf16, fp8 } do
      agrees(function()
        local model, x = nn.gpt2(small()), ms.randn { 2, 8, 16 }
        return blocks_of(model.h), { x }, function()
          local y = x
          local function forward() for _, block in ipairs(model.h) do y = block(y) end end
          if around then around(forward) else forward() end
          return square(y)
        end
      end)
    end
  end)

  -- Inputs are the embedding, so the graph has all of the model. It is tied to the head.
  local function language(make, around)
    return function()
      local model = make()
      local x = ms.randint { 2, 8, low = 0, high = 32, seed = 1 }
      local y = ms.randint { 2, 8, low = 0, high = 32, seed = 2 }
      local embedding = model:parameters()[1]
      return model:parameters(), { embedding }, function()
        local loss
        local function forward() loss = model:loss(x, y) end
        if around then around(forward) else forward() end
        return loss
      end
    end
  end

  for name, make in pairs {
    gpt2 = function() return nn.gpt2(small()) end,
    llama = function() return nn.llama(small { kv_heads = 1 }) end,
    ["a decoder"] = function() return nn.decoder(small { mlp = "gelu", hidden = 32 }) end,
    ["gpt2 with adapters"] = function()
      return nn.lora(nn.gpt2(small()), { rank = 2, names = { "c_attn" } })
    end,
  } do
    it("does so for whole models: " .. name, function()
      agrees(language(make))
      agrees(language(make, bf16))
    end)
  end

  it("does so with adapters", function()
    agrees(function()
      local model, x = nn.lora(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)),
        { rank = 2, names = { "0", "2" } }), ms.randn { 6, 16 }
      local trained = {}
      for _, p in ipairs(model:parameters()) do
        if p:requires_grad() then trained[#trained + 1] = p end
      end
      -- What adapters begin with is a product of zeros.
      for _, p in ipairs(trained) do ms.no_grad(function() p:add_(0.1) end) end
      return trained, { x }, function() return square(model(x)) end
    end)
  end)

  it("does so with tied weights and with a parameter that is used twice on one path", function()
    agrees(function()
      local w, x = ms.randn({ 16, 16 }):requires_grad_(), ms.randn { 6, 16 }
      return { w }, { x }, function()
        return square(x:linear(w):tanh():linear(w) + x:matmul(w:t() * w))
      end
    end)
    agrees(function()
      local up, down = nn.Linear(16, 16), nn.Linear(16, 16)
      down.weight = up.weight
      local x = ms.randn { 6, 16 }
      return { up.weight, up.bias, down.bias }, { x }, function()
        return square(down(up(x):gelu()))
      end
    end)
  end)

  it("does so where keys and values do not depend on the inputs", function()
    agrees(function()
      local k, v = ms.randn({ 1, 2, 5, 8 }):requires_grad_(), ms.randn({ 1, 2, 5, 8 })
        :requires_grad_()
      local q = ms.randn { 1, 2, 4, 8 }
      return { k, v }, { q }, function() return square((q * 2):attention(k * 1, v * 1)) end
    end)
  end)

  it("calls a function with a gradient of its own once", function()
    local calls = 0
    local own = ms.custom {
      forward = function(a, w) return a * w, { a = a, w = w } end,
      backward = function(d, saved)
        calls = calls + 1
        return d * saved.w, d * saved.a
      end,
    }
    agrees(function()
      local w, x = ms.randn({ 6, 16 }):requires_grad_(), ms.randn { 6, 16 }
      return { w }, { x }, function() return square(own(x * 2, w * 3)) end
    end)
    assert.equal(2, calls)
  end)

  it("takes parameters as inputs, and several", function()
    for _, names in ipairs { { "weight" }, { "bias" }, { "weight", "bias" } } do
      agrees(function()
        local layer, x = nn.Linear(16, 32), ms.randn({ 6, 16 }):requires_grad_()
        local inputs = {}
        for i, name in ipairs(names) do inputs[i] = layer[name] end
        return { layer.weight, layer.bias, x }, inputs, function()
          return square(x:linear(layer.weight, layer.bias, "gelu"))
        end
      end, 1)
    end
  end)

  it("goes on from a gradient, and adds up over graphs", function()
    local w = ms.randn({ 4, 4, seed = 1 }):requires_grad_()
    local function stage(seed)
      local x = ms.randn({ 2, 4, seed = seed }):requires_grad_()
      return x, x:linear(w)
    end
    local g = ms.randn { 2, 4, seed = 9 }
    for _, s in ipairs { 2, 3 } do select(2, stage(s)):backward { gradient = g } end
    local whole = bits(w:grad())
    w:set_grad(nil)
    local xs, ys = {}, {}
    for i, s in ipairs { 2, 3 } do
      xs[i], ys[i] = stage(s)
      ys[i]:backward { gradient = g, inputs = { xs[i] } }
    end
    for i = 1, 2 do ys[i]:backward { rest = true } end
    assert.same(whole, bits(w:grad()))
  end)

  it("counts once, with its rest", function()
    local x, w = ms.ones { 2, requires_grad = true }, ms.ones { 2, requires_grad = true }
    local y, before = (x * w):sum(), core.backwards()
    y:backward { inputs = { x } }
    assert.equal(before, core.backwards())
    y:backward { rest = true }
    assert.equal(before + 1, core.backwards())
  end)

  it("frees what is kept with its graph", function()
    local x, w = ms.ones { 64, 64, requires_grad = true }, ms.ones { 64, 64, requires_grad = true }
    collectgarbage()
    core.collect()
    local before = ms.memory().live
    do
      local y = x:linear(w, nil, "gelu"):sum()
      y:backward { inputs = { x } }
      assert.is_true(ms.memory().live > before + x:numel() * 4)
      y = nil -- luacheck: ignore
    end
    core.collect()
    assert.equal(before + x:numel() * 4, ms.memory().live)
    core.check_rest("a step", { w })
  end)
end)

describe("errors of a backward in two parts", function()
  local x, w, y
  before_each(function()
    x, w = ms.ones { 2, requires_grad = true }, ms.ones { 2, requires_grad = true }
    y = (x * w):sum()
  end)

  it("name what cannot be said together", function()
    fails(function() y:backward { inputs = { x }, rest = true } end,
      "inputs and rest are the two parts of one backward")
    fails(function() y:backward { inputs = { x }, retain_graph = true } end,
      "backward: inputs: leave out retain_graph")
    fails(function() y:backward { rest = true, retain_graph = true } end,
      "backward: rest: leave out retain_graph")
    fails(function() y:backward { rest = true, gradient = ms.ones {} } end, "leave out gradient")
    fails(function() y:backward { inputs = {} } end, "not an empty table")
    fails(function() y:backward { inputs = x } end, "a list of one or more tensors, not userdata")
    fails(function() y:backward { inputs = { 1 } } end, "item 1 of the list is number")
    fails(function() y:backward { rest = 1 } end, "rest")
    y:backward()
  end)

  it("name tensors that are no inputs", function()
    fails(function() y:backward { inputs = { x * 1 } } end, "inputs[1]", "is not a leaf")
    fails(function() y:backward { inputs = { x, ms.ones { 2 } } } end, "inputs[2]",
      "does not require a gradient")
    fails(function() y:backward { inputs = { ms.ones { 2, requires_grad = true } } } end,
      "the tensor does not depend on inputs[1]")
    assert.is_nil(x:grad())
    y:backward()
  end)

  it("name the line of the first part", function()
    fails(function() y:backward { rest = true } end, "no backward with inputs came before")
    y:backward { inputs = { x } }
    local line = debug.getinfo(1, "l").currentline - 1
    local here = "two_parts_spec.lua:" .. line
    fails(function() y:backward { inputs = { x } } end, "waits for its rest", here)
    fails(function() y:backward() end, "waits for its rest", here)
    local z = y * 2
    fails(function() z:backward() end, "waits for its rest", here)
    fails(function() z:backward { rest = true } end, "no backward with inputs came before")
    y:backward { rest = true }
    assert.same({ 1, 1 }, w:grad():to_table())
    fails(function() y:backward { rest = true } end, "or its rest has run")
  end)

  it("name what was written between the parts", function()
    local g = ms.ones { 1, 1 }
    local z = x:view(1, 2):matmul(w:view(2, 1))
    z:backward { inputs = { x }, gradient = g }
    g:mul_(2)
    fails(function() z:backward { rest = true } end, "was written since the backward with inputs")
    z = x:view(1, 2):matmul(w:view(2, 1))
    z:backward { inputs = { x }, gradient = g }
    ms.no_grad(function() x:add_(1) end)
    fails(function() z:backward { rest = true } end, "was written in place since, by add")
  end)

  it("do not come where the rest reads nothing of what was written: it has no product", function()
    local g = ms.ones { 2 }
    local z = x * w
    z:backward { inputs = { x }, gradient = g }
    g:mul_(2)
    ms.no_grad(function() x:add_(1) end)
    z:backward { rest = true }
    assert.same({ 1, 1 }, w:grad():to_table())
  end)

  it("refuse what is recomputed, with its line", function()
    local z = ms.recompute(function(a) return a * w end, x):sum()
    local line = debug.getinfo(1, "l").currentline - 1
    fails(function() z:backward { inputs = { x } } end,
      ("recompute (at %s:%d)"):format(debug.getinfo(1, "S").short_src, line))
    z:backward()
    assert.same({ 1, 1 }, w:grad():to_table())
  end)

  it("refuse a step that lacks the rest", function()
    local optimizer = ms.optim.sgd({ w }, { lr = 0.5 })
    local scaler = ms.optim.scaler()
    y:backward { inputs = { x } }
    fails(function() optimizer:step() end, "optimizer:step: rest is missing")
    fails(function() optimizer:step_param(w, ms.ones { 2 }) end, "step_param: rest is missing")
    fails(function() scaler:unscale(optimizer) end, "scaler:unscale: rest is missing")
    fails(function() ms.optim.clip_grad_norm({ w }, 1) end, "clip_grad_norm: rest is missing")
    fails(function() ms.optim.clip_grad_value({ w }, 1) end, "clip_grad_value: rest is missing")
    optimizer:zero_grad()
    y:backward { rest = true }
    optimizer:step()
    assert.same({ 0.5, 0.5 }, w:to_table())
  end)

  it("refuse a step in backward before the rest of another graph", function()
    local v = ms.ones { 2, requires_grad = true }
    ms.optim.in_backward(ms.optim.sgd, { v }, { lr = 0.5 })
    local first, second = (x * v):sum(), (x * v * 2):sum()
    first:backward { inputs = { x } }
    second:backward { inputs = { x } }
    fails(function() first:backward { rest = true } end, "a step in backward: rest is missing")
    second:backward { rest = true }
    assert.not_same({ 1, 1 }, v:to_table())
  end)

  it("wait for no rest that cannot be called any more", function()
    local optimizer, hidden = ms.optim.sgd({ w }, { lr = 0.5 }), x * w
    do
      local z = (hidden * 2):sum()
      z:backward { inputs = { x } }
      fails(function() optimizer:step() end, "rest is missing")
      z = nil -- luacheck: ignore
    end
    w:set_grad(ms.ones { 2 })
    optimizer:step()                               -- `hidden` still has a part of the graph
    assert.same({ 0.5, 0.5 }, w:to_table())
    fails(function() hidden:sum():backward() end, "waits for its rest")
  end)

  it("keep the marks of a loss scaler", function()
    local optimizer, scaler = ms.optim.sgd({ w }, { lr = 0.5 }), ms.optim.scaler()
    local scaled = scaler:scale(y)
    scaled:backward { inputs = { x } }
    optimizer:zero_grad()
    scaled:backward { rest = true }
    fails(function() optimizer:step() end, "scaler")
    scaler:step(optimizer)
    assert.same({ 0.5, 0.5 }, w:to_table())
  end)

  it("do not begin inside of a hook", function()
    y:on_grad(function() y:backward { inputs = { x } } end)
    fails(function() y:backward() end, "backward")
  end)
end)
