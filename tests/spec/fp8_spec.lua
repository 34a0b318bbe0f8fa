-- ms.autocast "fp8", and training in it; tests/unit/ops/fp8.c has the numbers.
local ms = require "moonshard"
local nn = ms.nn

-- x w^T of what the codes represent: of small whole numbers, which E4M3 has.
local function whole(rows, columns, seed)
  return ms.randint({ rows, columns, low = -8, high = 8, seed = seed }):to "f32"
end
local function same(a, b) return a:to "f32":eq(b:to "f32"):all():item() end
local function fp8(f, options) return ms.autocast("fp8", f, options) end

describe("autocast to fp8", function()
  it("rounds what linear layers multiply to 8 bits", function()
    local x, w = whole(16, 32, 1), whole(48, 32, 2)
    local y = fp8(function() return x:linear(w) end)
    assert.equal("bf16", y:dtype())
    assert.is_true(same(y, x:matmul(w:t()):to "bf16"))
    -- 17 lies between 16 and 18; 8 bits with a scale of 1/16 hold 3 bits after the first.
    x:select(1, 1):select(1, 1):fill_(17)
    assert.is_false(same(fp8(function() return x:linear(w) end), x:matmul(w:t()):to "bf16"))
  end)

  it("changes nothing but linear, linear_t and mlp", function()
    local a, b = ms.randn { 16, 16, seed = 1 }, ms.randn { 16, 16, seed = 2 }
    local targets = ms.zeros { 16, dtype = "i64" }
    local calls = {
      function() return a:matmul(b) end,
      function() return a:linear_cross_entropy(b, targets) end,
      function()
        local q = a:view(1, 1, 16, 16)
        return q:attention(q, q)
      end,
      function() return a:add(b:to "bf16") end,
      function() return a:rms_norm(b:select(1, 1)) end,
      function() return ms.autocast("bf16", function() return a:linear(b) end) end,
      function() return ms.autocast("f32", function() return a:linear(b) end) end,
    }
    for i, call in ipairs(calls) do
      local expected, got = ms.autocast("bf16", call), fp8(call)
      assert.equal(expected:dtype(), got:dtype())
      assert.is_true(same(expected, got), "call " .. i)
    end
    for _, call in ipairs {
      function() return a:linear(b) end, function() return a:linear_t(b) end,
      function() return a:mlp(b, b) end, function() return a:mlp_t(b, b) end,
    } do
      assert.is_false(same(ms.autocast("bf16", call), fp8(call)))
      -- On a CPU it is emulated always.
      assert.is_true(same(fp8(call, { emulate = true }), fp8(call)))
    end
  end)

  it("leaves out a layer with fp8 = false, alone and in an MLP", function()
    local x = ms.randn { 16, 32, seed = 3 }
    local layer, mlp = nn.Linear(32, 16), nn.MLP(32, 48)
    for _, model in ipairs { layer, mlp } do
      local function call() return model(x) end
      local wide = ms.autocast("bf16", call)
      assert.is_false(same(wide, fp8(call)))
      for _, part in ipairs { model.up or model, model.down } do
        assert.is_false(same(wide, fp8(call)))
        part.fp8 = false
      end
      assert.is_true(same(wide, fp8(call)))
    end
  end)

  it("gives gradients that are near those of bf16, f32 for weights of f32", function()
    local function gradients(dtype)
      local layer = nn.Linear(32, 48)
      ms.no_grad(function()
        layer.weight:copy_(ms.randn { 48, 32, seed = 1 })
        layer.bias:copy_(ms.randn { 48, seed = 2 })
      end)
      local x = ms.randn { 64, 32, seed = 4, requires_grad = true }
      ms.autocast(dtype, function() return layer(x, "gelu"):square():mean() end):backward()
      return { x:grad(), layer.weight:grad(), layer.bias:grad() }
    end
    local narrow, wide = gradients "fp8", gradients "bf16"
    for i, gradient in ipairs(wide) do
      assert.equal("f32", narrow[i]:dtype())
      local far = (narrow[i] - gradient):norm():item() / gradient:norm():item()
      assert.is_true(far > 0 and far < 0.08, far)
    end
  end)

  it("is repeated by recompute, also where backward is called outside of it", function()
    local function gradients(recompute)
      local model = nn.MLP(32, 64)
      ms.no_grad(function()
        for i, p in ipairs(model:parameters()) do
          local shape = p:shape()
          shape.seed = i
          p:copy_(ms.randn(shape))
        end
      end)
      local x = ms.randn { 16, 32, seed = 9 }
      local loss = fp8(function()
        return (recompute and ms.recompute(model, x) or model(x)):square():mean()
      end)
      loss:backward()
      local list = { loss }
      for i, p in ipairs(model:parameters()) do list[i + 1] = p:grad() end
      return list
    end
    local plain, again = gradients(false), gradients(true)
    for i in ipairs(plain) do assert.is_true(same(plain[i], again[i])) end
  end)

  it("says what no product takes, and what to do", function()
    local function refused(rows, inputs, outputs, dtype, ...)
      local ok, message = pcall(fp8, function()
        return ms.zeros { rows, inputs, dtype = dtype }:linear(
          ms.zeros { outputs, inputs, dtype = dtype })
      end)
      assert.is_false(ok)
      for _, part in ipairs { ... } do assert.is_truthy(message:find(part, 1, true), message) end
    end
    refused(8, 16, 16, "f32", "the input has 8 rows", "multiples of 16", "fp8 = false")
    refused(16, 24, 16, "f32", "last dimension is 24")
    refused(16, 16, 40, "f32", "40 outputs")
    refused(16, 16, 16, "f16", 'x:to("bf16")')
    assert.has_error(function() ms.autocast("fp9", function() end) end)
    assert.has_error(function() ms.autocast("bf16", function() end, { emulate = true }) end)
    assert.has_error(function() ms.autocast("fp8", function() end, { emulated = true }) end)
    -- After an error all is as before.
    local x = ms.randn { 3, 5 }
    assert.equal("f32", x:linear(ms.randn { 2, 5 }):dtype())
  end)

  it("gives shapes on \"meta\"", function()
    local shape = ms.device("meta", function()
      local w = ms.ones { 48, 32, requires_grad = true }
      local y = fp8(function() return ms.ones { 2, 8, 32 }:linear(w) end)
      y:sum():backward()
      assert.same({ 48, 32 }, w:grad():shape())
      return y:shape()
    end)
    assert.same({ 2, 8, 48 }, shape)
  end)

  it("keeps the head and the first product of a model in 16 bits", function()
    for _, make in ipairs { nn.gpt2, nn.llama, nn.decoder } do
      for _, tie in ipairs { true, false } do
        local model = make {
          vocab = 40, context = 16, layers = 2, width = 32, heads = 2, hidden = 64, tie = tie,
        }
        local left_out = {}
        for name, part in model:modules() do
          if part.fp8 == false then left_out[#left_out + 1] = name:gsub("^.*%.", "") end
        end
        table.sort(left_out)
        local expected = make == nn.gpt2 and { "c_attn" } or { "k_proj", "q_proj", "v_proj" }
        if not tie then expected[#expected + 1] = "lm_head" end
        table.sort(expected)
        assert.same(expected, left_out)
        -- 40 logits: the head is not in fp8, or it would raise.
        local tokens = ms.randint { 2, 8, low = 0, high = 40, seed = 1 }
        local logits = fp8(function() return model(tokens) end)
        assert.same({ 2, 8, 40 }, logits:shape())
        assert.is_false(same(logits, ms.autocast("bf16", function() return model(tokens) end)))
      end
    end
  end)

  it("leaves out the adapters of nn.lora", function()
    local model = nn.gpt2 { vocab = 40, context = 16, layers = 2, width = 32, heads = 2 }
    nn.lora(model, { rank = 4 })
    local tokens = ms.randint { 2, 8, low = 0, high = 40, seed = 1 }
    fp8(function() return model(tokens):square():mean() end):backward()
  end)
end)

describe("training in fp8", function()
  local function losses(options)
    ms.seed(5)
    local model = nn.gpt2 { vocab = 64, context = 16, layers = 2, width = 32, heads = 2 }
    local list, step = {}, 0
    options.model, options.steps, options.run = model, 12, false
    options.optimizer = ms.optim.adamw(model, { lr = 1e-2 })
    options.quiet = true
    function options.data()
      step = step + 1
      local x = ms.randint { 2, 16, low = 0, high = 8, seed = step }
      return x, x:add(1)
    end
    function options.loss(net, x, y)
      local loss = net(x):cross_entropy(y)
      list[#list + 1] = loss:detach():clone():keep()
      return loss
    end
    ms.train(options)
    for i, loss in ipairs(list) do list[i] = loss:item() end
    return list
  end

  it("learns as bf16 does", function()
    local narrow, wide = losses { dtype = "fp8" }, losses { dtype = "bf16" }
    local far = 0
    for i = 1, 4 do far = math.max(far, math.abs(narrow[i] / wide[i] - 1)) end
    assert.is_true(far > 0 and far < 3e-3, far)
    assert.is_true(narrow[12] < 1.05 * wide[12] and narrow[12] < narrow[1] / 1.5)
  end)

  it("takes emulate with it, and with nothing else", function()
    assert.same(losses { dtype = "fp8" }, losses { dtype = "fp8", emulate = true })
    local ok, message = pcall(losses, { dtype = "bf16", emulate = true })
    assert.is_false(ok)
    assert.is_truthy(message:find("emulate belongs to dtype fp8", 1, true))
  end)
end)
