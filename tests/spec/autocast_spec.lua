-- Dtypes of results and gradients under autocast: those of PyTorch's table for CUDA
-- (tests/golden/autocast), and the values of the same operator in f32.
local ms = require "moonshard"

local here <const> = os.getenv "MOONSHARD_SOURCE" .. "/tests/golden/autocast/table.tsv"

-- What the engine gives instead, by operator, and why.
local function last_is_16(dtypes)
  dtypes[#dtypes] = "16"
  return dtypes
end
local DEVIATIONS <const> = {
  -- Products read what norms give: PyTorch casts it in a pass of its own.
  layer_norm = last_is_16, rms_norm = last_is_16, add_layer_norm = last_is_16,
  add_rms_norm = last_is_16,
  -- PyTorch refuses operands of two dtypes here, but takes them in other elementwise operators.
  lerp = function(_, operands) return { operands:find "32" and "32" or "16" } end,
  scatter = function(_, operands) return { operands:find "32" and "32" or "16" } end,
}
-- Operands that are refused. The kernels of norms read weight and bias with one dtype.
local function two_scales(operands)
  local weight, bias = operands:match "(%d+) (%d+)$"
  return weight ~= bias
end
local REFUSED <const> = { layer_norm = two_scales, add_layer_norm = two_scales }

local function rows() return ms.tensor({ 0, 1, 2, 0 }, "i64") end
local function positions() return ms.zeros { 4, 8, dtype = "i64" } + rows():view(4, 1) end
local function mask() return ms.tensor({ 1., 0, 1, 0, 1, 1, 0, 0 }):ne(0) end

-- Shapes of the float operands, and the operator.
local ONE <const>, TWO <const>, THREE <const> = { { 4, 8 } }, { { 4, 8 }, { 4, 8 } },
  { { 4, 8 }, { 4, 8 }, { 4, 8 } }
local IMAGE <const>, HEADS <const> = { { 1, 2, 4, 4 } }, { 2, 2, 4, 8 }
local CASES <const> = {
  neg = { ONE, function(a) return -a end },
  gelu_erf = { ONE, function(a) return a:gelu "erf" end },
  pow = { ONE, function(a) return a ^ 3 end },
  clamp = { ONE, function(a) return a:clamp(-0.5, 1) end },
  add_scalar = { ONE, function(a) return a + 2 end },
  mul_scalar = { ONE, function(a) return a * 2 end },
  div_scalar = { ONE, function(a) return a / 2 end },
  rsub_scalar = { ONE, function(a) return 2 - a end },
  rdiv_scalar = { ONE, function(a) return 2 / a end },
  maximum_scalar = { ONE, function(a) return a:maximum(0.5) end },
  minimum_scalar = { ONE, function(a) return a:minimum(0.5) end },
  gt_scalar = { ONE, function(a) return a:gt(0.5) end },
  add = { TWO, function(a, b) return a + b end },
  sub = { TWO, function(a, b) return a - b end },
  mul = { TWO, function(a, b) return a * b end },
  div = { TWO, function(a, b) return a / b end },
  maximum = { TWO, function(a, b) return a:maximum(b) end },
  minimum = { TWO, function(a, b) return a:minimum(b) end },
  swiglu = { TWO, function(a, b) return a:swiglu(b) end },
  lt = { TWO, function(a, b) return a:lt(b) end },
  lerp = { THREE, function(a, b, c) return a:lerp(b, c) end },
  addcmul = { THREE, function(a, b, c) return a:addcmul(b, c) end },
  addcdiv = { THREE, function(a, b, c) return a:addcdiv(b, c) end },
  where = { TWO, function(a, b) return ms.where(mask(), a, b) end },
  masked_fill = { ONE, function(a) return a:masked_fill(mask(), 2) end },
  add_ = { TWO, function(a, b) return a:clone():add_(b) end },
  exp_ = { ONE, function(a) return a:clone():exp_() end },
  copy_ = { TWO, function(a, b) return a:clone():copy_(b) end },
  cat = { TWO, function(a, b) return ms.cat { a, b } end },
  stack = { TWO, function(a, b) return ms.stack { a, b } end },
  view = { ONE, function(a) return a:view(8, 4) end },
  sum = { ONE, function(a) return a:sum(2) end },
  mean = { ONE, function(a) return a:mean(2) end },
  max = { ONE, function(a) return a:max(2) end },
  argmax = { ONE, function(a) return a:argmax(2) end },
  cumsum = { ONE, function(a) return a:cumsum(2) end },
  dot = { { { 8 }, { 8 } }, function(a, b) return a:dot(b) end },
  topk = { ONE, function(a) return (a:topk(2)) end },
  gather = { ONE, function(a) return a:gather(1, positions()) end },
  index_select = { ONE, function(a) return a:index_select(1, rows()) end },
  scatter = { TWO, function(a, b)
    return a:scatter(1, ms.tensor({ 3, 1, 0, 2 }, "i64"):view(4, 1):expand(4, 8), b)
  end },
  scatter_add = { TWO, function(a, b) return a:scatter_add(1, positions(), b) end },
  matmul = { { { 4, 8 }, { 8, 4 } }, function(a, b) return a:matmul(b) end },
  linear = { { { 4, 8 }, { 4, 8 }, { 4 } }, function(x, w, b) return x:linear(w, b) end },
  linear_t = { { { 4, 8 }, { 8, 4 }, { 4 } }, function(x, w, b) return x:linear_t(w, b) end },
  conv2d = { { { 1, 2, 5, 5 }, { 3, 2, 3, 3 }, { 3 } },
    function(x, w, b) return x:conv2d(w, b) end },
  max_pool2d = { IMAGE, function(a) return a:max_pool2d(2) end },
  avg_pool2d = { IMAGE, function(a) return a:avg_pool2d(2) end },
  layer_norm = { { { 4, 8 }, { 8 }, { 8 } }, function(x, w, b) return x:layer_norm(w, b) end },
  rms_norm = { { { 4, 8 }, { 8 } }, function(x, w) return x:rms_norm(w) end },
  add_layer_norm = { { { 4, 8 }, { 4, 8 }, { 8 }, { 8 } },
    function(x, r, w, b) return x:add_layer_norm(r, w, b) end },
  add_rms_norm = { { { 4, 8 }, { 4, 8 }, { 8 } },
    function(x, r, w) return x:add_rms_norm(r, w) end },
  softmax = { ONE, function(a) return a:softmax() end },
  cross_entropy = { ONE, function(a) return a:cross_entropy(rows()) end },
  mse_loss = { TWO, function(a, b) return a:mse_loss(b) end },
  attention = { { HEADS, HEADS, HEADS }, function(q, k, v) return q:attention(k, v) end },
  rotary = { { HEADS }, function(x) return x:rotary() end },
  embedding = { ONE, function(w) return rows():embedding(w) end },
  dropout = { ONE, function(a) return a:dropout(0) end },
}
-- The others take one tensor and have the name of a method.
local function case_of(name)
  return CASES[name] or { ONE, function(a) return a[name](a) end }
end

-- Operands by their dtypes; positive, so that each operator has values. In f32 they have the values
-- of 16 bits, so that results can be compared.
local function operands_of(shapes, dtypes, low, widened)
  local list, seed = {}, 0
  for word in dtypes:gmatch "%d+" do
    seed = seed + 1
    local shape = { table.unpack(shapes[seed]) }
    shape.seed = seed
    local values = (ms.rand(shape) + 0.25):to(low)
    if word == "32" or widened then values = values:to "f32" end
    list[seed] = values:requires_grad_()
  end
  return list
end

local function words(text)
  local list = {}
  for word in text:gmatch "%S+" do list[#list + 1] = word end
  return list
end

-- Results of an operator, the float ones, and gradients of a sum of them weighted at random.
local function run(case, list, autocast)
  local results
  local function forward() results = { case[2](table.unpack(list)) } end
  if autocast then ms.autocast(autocast, forward) else forward() end
  local loss
  for i, result in ipairs(results) do
    if result:requires_grad() then
      local shape = result:shape()
      shape.seed = 100 + i
      local part = (result:to "f32" * ms.randn(shape)):sum()
      loss = loss and loss + part or part
    end
  end
  if loss then loss:backward() end
  return results
end

local function near(what, expected, got, bound)
  local scale = math.max(1, expected:to "f32":abs():max():item())
  local error = (expected:to "f32" - got:to "f32"):abs():max():item()
  assert.is_true(error <= bound * scale, ("%s: off by %g"):format(what, error / scale))
end

local DTYPE <const> = { f32 = "32", bf16 = "16", f16 = "16" }

describe("under autocast", function()
  for line in io.lines(here) do
    local name, dtypes, told = line:match "^(%S+)\t([%d ]+)\t(.*)$"
    it(("%s of %s gives the peer's dtypes"):format(name, dtypes), function()
      local case = case_of(name)
      -- bf16 has 8 bits, f16 11; operands, sums and results are rounded.
      for low, bound in pairs { bf16 = 3e-2, f16 = 4e-3 } do
        local list = operands_of(case[1], dtypes, low)
        if REFUSED[name] and REFUSED[name](dtypes) then
          assert.has_error(function() run(case, list, low) end)
          goto next
        end
        local results = run(case, list, low)
        local expected = words(told)
        if DEVIATIONS[name] then expected = DEVIATIONS[name](expected, dtypes) end
        local exact = operands_of(case[1], dtypes, low, true)
        local plain = run(case, exact)
        for i, result in ipairs(results) do
          assert.equal(expected[i], DTYPE[result:dtype()] or "-")
          if DTYPE[result:dtype()] then near(name, plain[i], result, bound) end
        end
        for i, operand in ipairs(list) do
          assert.equal(DTYPE[operand:dtype()], words(dtypes)[i])
          if operand:grad() then
            assert.equal(operand:dtype(), operand:grad():dtype())
            near(name .. ", gradient " .. i, exact[i]:grad(), operand:grad(), bound)
          else
            assert.is_nil(exact[i]:grad())
          end
        end
        ::next::
      end
    end)
  end

  local function refused(f, ...)
    local ok, message = pcall(f)
    assert.is_false(ok)
    for _, part in ipairs { ... } do assert.is_truthy(message:find(part, 1, true), message) end
  end
  local MIXED <const> = {
    add = function(a, b) return a + b end,
    cat = function(a, b) return ms.cat { a, b } end,
    where = function(a, b) return ms.where(mask(), a, b) end,
    matmul = function(a, b) return a:matmul(b:t()) end,
    linear = function(a, b) return a:linear(b) end,
    mlp = function(a, b) return a:mlp(b, b:t()) end,
    attention = function(a, b)
      return a:view(1, 1, 4, 8):attention(b:view(1, 1, 4, 8), a:view(1, 1, 4, 8))
    end,
    add_rms_norm = function(a, b) return a:add_rms_norm(b) end,
    mse_loss = function(a, b) return a:mse_loss(b) end,
  }
  local function pair(first, second)
    return ms.randn { 4, 8, seed = 1 }:to(first), ms.randn { 4, 8, seed = 2 }:to(second)
  end

  for name, f in pairs(MIXED) do
    it(("refuses bf16 with f16: %s"):format(name), function()
      local a, b = pair("bf16", "f16")
      for _, dtype in ipairs { "bf16", "f16" } do
        refused(function() ms.autocast(dtype, function() f(a, b) end) end, "bf16", "f16")
      end
    end)

    it(("refuses two dtypes outside of it, as before: %s"):format(name), function()
      local a, b = pair("f32", "bf16")
      refused(function() f(a, b) end, "f32", "bf16")
      ms.autocast("bf16", function() f(a, b) end)
      refused(function() ms.autocast("f32", function() f(a, b) end) end, "f32", "bf16")
    end)
  end

  -- An f32 operand goes with each of the two.
  it("refuses bf16 with f16 in any order, beside f32", function()
    local a, b = pair("bf16", "f16")
    local c = ms.randn { 4, 8, seed = 3 }
    local calls = {
      function(x, y, z) ms.cat { x, y, z } end,
      function(x, y, z) ms.stack { x, y, z } end,
      function(x, y, z) x:addcmul(y, z) end,
      function(x, y, z) x:add_rms_norm(y, z:select(1, 1)) end,
    }
    for _, call in ipairs(calls) do
      for _, order in ipairs { { a, b, c }, { a, c, b }, { b, a, c }, { b, c, a }, { c, a, b },
        { c, b, a } } do
        refused(function() ms.autocast("bf16", function() call(table.unpack(order)) end) end,
          "bf16", "f16")
      end
    end
    -- A copy has the dtype of its target.
    ms.autocast("bf16", function() a:clone():copy_(b) end)
  end)

  it("names x:to where operands do not go together", function()
    local a, b = pair("f32", "bf16")
    refused(function() return a + b end, "x:to")
    refused(function() a:matmul(b:t()) end, "x:to")
    refused(function() ms.autocast("bf16", function() a:to("f16"):linear(b) end) end, "x:to")
  end)

  -- What forward sees decides, wherever backward runs.
  it("gives one result, with backward inside and outside, and when it is recomputed", function()
    local function gradients(how)
      local net = ms.nn.Sequential(ms.nn.Linear(8, 16), ms.nn.LayerNorm(16), ms.nn.MLP(16, 32))
      for i, t in ipairs(net:parameters()) do
        local shape = t:shape()
        shape.seed = i
        ms.no_grad(function() t:copy_(ms.randn(shape)) end)
      end
      how(net, ms.randn { 4, 8, seed = 9 })
      local list = {}
      for _, t in ipairs(net:parameters()) do
        assert.equal("f32", t:grad():dtype())
        list[#list + 1] = t:grad():to_table()
      end
      return list
    end
    local function loss_of(y) return (y:softmax() * ms.randn { 4, 16, seed = 3 }):sum() end
    local outside = gradients(function(net, x)
      ms.autocast("bf16", function() return loss_of(net(x)) end):backward()
    end)
    assert.same(outside, gradients(function(net, x)
      ms.autocast("bf16", function() loss_of(net(x)):backward() end)
    end))
    assert.same(outside, gradients(function(net, x)
      ms.autocast("bf16", function() return loss_of(ms.recompute(net, x)) end):backward()
    end))
    assert.not_same(outside, gradients(function(net, x) loss_of(net(x)):backward() end))
  end)

  it("is off in a backward outside of it, hooks included", function()
    local w = ms.ones { 4, 8, requires_grad = true }
    local seen
    w:on_grad(function(g) seen = g:matmul(ms.ones { 8, 4 }):dtype() end)
    ms.autocast("bf16", function() return ms.ones({ 2, 8 }):linear(w):sum() end):backward()
    assert.equal("f32", seen)
  end)
end)
