-- The calls that `moonshard bench kernels` measures: each kernel of the tables, on tensors of a
-- GPT-2's training step. A case is made when its turn comes, so that only its tensors take memory.
local core = require "moonshard.core"

local cases = {}

---@class ms.BenchSizes
---@field batch integer
---@field length integer       tokens of a row
---@field width integer        of the model
---@field heads integer
---@field vocab integer
---@field parameters integer   elements that an optimizer steps, at least
---@field dtype string         of tensors and products

---@class ms.BenchCase
---@field run fun(prepared: any)      what is measured
---@field prepare? fun(): any         before each measurement
---@field bytes? integer              read and written, each tensor once
---@field flops? number               of products: then these count and not the bytes
---@field is_long? boolean            the host enqueues many tasks

local BYTES = require "moonshard.base.dtype_bytes"

-- The bytes of tensors.
local function bytes(...)
  local sum = 0
  for _, t in ipairs { ... } do sum = sum + BYTES[t:dtype()] * t:numel() end
  return sum
end

-- Adds the list of cases of a family to `list`: name, function that makes the case.
local function adder(list, family)
  return function(name, make) list[#list + 1] = { family = family, name = name, make = make } end
end

-- A case of results alone: nothing is recorded for backward.
local function forward(moved, run)
  return { bytes = moved, run = function() core.no_grad(run) end }
end

-- The gradient of the tensor that f returns, for leaves that require one: forward is recorded again
-- before each measurement.
local function backward(moved, leaves, f, gradient)
  for _, leaf in ipairs(leaves) do leaf:keep():requires_grad_() end
  return {
    bytes = moved,
    prepare = function()
      for _, leaf in ipairs(leaves) do leaf:set_grad(nil) end
      return f()
    end,
    run = function(out) out:backward { gradient = gradient } end,
  }
end

-- Makers of tensors for these sizes.
local function makers(s)
  local m = {}
  function m.normal(...)
    return core.randn { seed = 1, dtype = s.dtype, ... }
  end
  -- Above 0: for logarithms and roots.
  function m.positive(...)
    return core.rand { low = 0.5, high = 2, seed = 2, dtype = s.dtype, ... }
  end
  function m.ids(high, ...) return core.randint { low = 0, high = high, seed = 3, ... } end
  return m
end

------------------------------------------------------------------------------------------- memory

local function copies(list, s, m)
  local add = adder(list, "copies")
  local rows, width = s.batch * s.length, 4 * s.width
  add("copy", function()
    local a, b = m.normal(rows, width), m.normal(rows, width)
    return forward(bytes(a, b), function() a:copy_(b) end)
  end)
  add("fill", function()
    local a = m.normal(rows, width)
    return forward(bytes(a), function() a:fill_(1) end)
  end)
  add("transposed copy", function()
    local a = m.normal(rows, width)
    return forward(2 * bytes(a), function() a:t():contiguous() end)
  end)
  add("copy of heads", function()
    local a = m.normal(s.batch, s.length, s.heads, s.width // s.heads)
    return forward(2 * bytes(a), function() a:transpose(2, 3):contiguous() end)
  end)
  for _, pair in ipairs { { "f32", "bf16" }, { "bf16", "f32" }, { "f32", "f16" } } do
    add(("cast %s to %s"):format(pair[1], pair[2]), function()
      local a = core.randn { rows, width, seed = 1 }:to(pair[1])
      return forward(bytes(a, a:to(pair[2])), function() a:to(pair[2]) end)
    end)
  end
end

-- Name, method, arguments, what its gradient reads and writes (in tensors of its size; nil: it has
-- no kernel of its own, or no gradient).
local unary = {
  { "neg", "neg" }, { "exp", "exp", nil, 3 }, { "log", "log", nil, 3 },
  { "sqrt", "sqrt", nil, 3 }, { "rsqrt", "rsqrt", nil, 3 }, { "square", "square", nil, 3 },
  { "abs", "abs", nil, 3 }, { "sign", "sign" }, { "relu", "relu", nil, 3 },
  { "gelu", "gelu", nil, 3 }, { "gelu_erf", "gelu", "erf", 3 }, { "silu", "silu", nil, 3 },
  { "tanh", "tanh", nil, 3 }, { "sigmoid", "sigmoid", nil, 3 }, { "sin", "sin", nil, 3 },
  { "cos", "cos", nil, 3 }, { "floor", "floor" }, { "ceil", "ceil" },
  { "round", "round" }, { "pow", "pow", 1.5, 3 }, { "clamp", "clamp", 1, 3 },
}
-- The gradients of a and of b have a kernel each.
local binary = {
  { "add", "add" }, { "sub", "sub" }, { "mul", "mul", nil, 6 }, { "div", "div", nil, 7 },
  { "maximum", "maximum", nil, 8 }, { "minimum", "minimum", nil, 8 },
  { "swiglu", "swiglu", nil, 7 },
}

local function elementwise(list, s, m)
  local add = adder(list, "elementwise")
  local rows, width = s.batch * s.length, 4 * s.width
  local function number() return m.positive(rows, width) end
  for _, row in ipairs(unary) do
    local name, method, argument, moved = table.unpack(row, 1, 4)
    add(name, function()
      local a = number()
      return forward(2 * bytes(a), function() a[method](a, argument) end)
    end)
    if moved then
      add(name .. " gradient", function()
        local a, g = number(), m.normal(rows, width)
        return backward(moved * bytes(g), { a }, function() return a[method](a, argument) end, g)
      end)
    end
  end
  for _, row in ipairs(binary) do
    local name, method, argument, moved = table.unpack(row, 1, 4)
    add(name, function()
      local a, b = number(), m.normal(rows, width)
      return forward(3 * bytes(a), function() a[method](a, b, argument) end)
    end)
    if moved then
      add(name .. " gradient", function()
        local a, b, g = number(), number(), m.normal(rows, width)
        return backward(moved * bytes(g), { a, b },
          function() return a[method](a, b, argument) end, g)
      end)
    end
  end
  for _, name in ipairs { "eq", "ne", "lt", "le", "gt", "ge" } do
    add(name, function()
      local a, b = number(), number()
      return forward(bytes(a, b, a[name](a, b)), function() a[name](a, b) end)
    end)
  end
  add("is_finite", function()
    local a = number()
    return forward(bytes(a, a:is_finite()), function() a:is_finite() end)
  end)
  add("lerp", function()
    local a, b, c = number(), number(), number()
    return forward(4 * bytes(a), function() a:lerp(b, c) end)
  end)
  add("lerp gradient", function()
    local a, b, c, g = number(), number(), number(), m.normal(rows, width)
    return backward(10 * bytes(g), { a, b, c }, function() return a:lerp(b, c) end, g)
  end)
  for _, name in ipairs { "addcmul", "addcdiv" } do
    add(name, function()
      local a, b, c = number(), number(), number()
      return forward(4 * bytes(a), function() a[name](a, b, c) end)
    end)
    add(name .. " gradient", function()
      local a, b, c, g = number(), number(), number(), m.normal(rows, width)
      return backward((name == "addcmul" and 6 or 7) * bytes(g), { b, c },
        function() return a[name](a, b, c) end, g)
    end)
  end
  add("where", function()
    local a, b = number(), number()
    local c = a:gt(b)
    return forward(3 * bytes(a) + bytes(c), function() core.where(c, a, b) end)
  end)
  -- Operands that repeat: a bias, a factor of each token, positions for each row of the batch.
  add("add, bias of a row", function()
    local a, b = number(), m.normal(width)
    return forward(2 * bytes(a) + bytes(b), function() a:add(b) end)
  end)
  add("mul, factor of a row", function()
    local a, b = number(), m.normal(rows, 1)
    return forward(2 * bytes(a) + bytes(b), function() a:mul(b) end)
  end)
  add("add, positions of a batch", function()
    local a, b = m.normal(s.batch, s.length, width), m.normal(1, s.length, width)
    return forward(2 * bytes(a) + bytes(b), function() a:add(b) end)
  end)
  -- A product with a number: what a scaled gradient takes.
  add("mul by a number", function()
    local a = number()
    return forward(2 * bytes(a), function() a:mul_(1) end)
  end)
end

local function random(list, s, m)
  local add = adder(list, "random")
  local rows, width = s.batch * s.length, s.width
  add("dropout", function()
    local a = m.normal(rows, width)
    return forward(2 * bytes(a), function() a:dropout(0.1) end)
  end)
  add("dropout gradient", function()
    local a, g = m.normal(rows, width), m.normal(rows, width)
    return backward(2 * bytes(g), { a }, function() return a:dropout(0.1) end, g)
  end)
  for _, name in ipairs { "rand", "randn" } do
    add(name, function()
      return forward(bytes(m.normal(rows, width)),
        function() core[name] { rows, width, dtype = s.dtype } end)
    end)
  end
end

local function reductions(list, s, m)
  local add = adder(list, "reductions")
  local rows, width = s.batch * s.length, 4 * s.width
  for _, row in ipairs {
    { "sum", "sum" }, { "sum of columns", "sum", 1 }, { "sum of rows", "sum", 2 },
    { "max of rows", "max", 2 }, { "argmax of rows", "argmax", 2 }, { "cumsum", "cumsum", 2 },
  } do
    local name, method, dim = table.unpack(row, 1, 3)
    add(name, function()
      local a = m.normal(rows, width)
      return forward(bytes(a, a[method](a, dim)), function() a[method](a, dim) end)
    end)
  end
  add("norm", function()
    local a = m.normal(rows, width)
    return forward(bytes(a), function() a:norm() end)
  end)
  add("norm of p 3, gradient", function()
    local a = m.positive(rows, width)
    return backward(2 * bytes(a), { a }, function() return a:norm(3) end)
  end)
  add("histogram", function()
    local a = m.normal(rows, width)
    return forward(bytes(a), function() a:histogram(256, -4, 4) end)
  end)
  add("quantile", function()
    local a = m.normal(rows, width)
    return forward(bytes(a), function() a:quantile(0.5) end)
  end)
  add("mse_loss", function()
    local a, b = m.normal(rows, width), m.positive(rows, width)
    return forward(bytes(a, b), function() a:mse_loss(b) end)
  end)
  add("mse_loss gradient", function()
    local a, b = m.normal(rows, width), m.positive(rows, width)
    return backward(4 * bytes(a), { a, b }, function() return a:mse_loss(b) end)
  end)
end

local function norms(list, s, m)
  local add = adder(list, "norms")
  local rows, width = s.batch * s.length, s.width
  local function parts() return m.normal(rows, width), m.positive(width), m.normal(width) end
  for _, name in ipairs { "layer_norm", "rms_norm" } do
    local function apply(x, w, b)
      if name == "rms_norm" then return x:rms_norm(w) end
      return x:layer_norm(w, b)
    end
    add(name, function()
      local x, w, b = parts()
      return forward(2 * bytes(x), function() apply(x, w, b) end)
    end)
    add(name .. " gradient", function()
      local x, w, b = parts()
      local g = m.normal(rows, width)
      return backward(3 * bytes(x), { x, w, b }, function() return apply(x, w, b) end, g)
    end)
  end
  add("add_layer_norm", function()
    local x, w, b = parts()
    local residual = m.normal(rows, width)
    return forward(4 * bytes(x), function() x:add_layer_norm(residual, w, b) end)
  end)
  add("add_layer_norm gradient", function()
    local x, w, b = parts()
    local residual, g = m.normal(rows, width), m.normal(rows, width)
    return backward(3 * bytes(x), { x, w, b },
      function() return select(2, x:add_layer_norm(residual, w, b)) end, g)
  end)
end

local function softmaxes(list, s, m)
  local add = adder(list, "softmax")
  local rows, width = s.batch * s.length, s.length
  for _, name in ipairs { "softmax", "log_softmax" } do
    add(name, function()
      local x = m.normal(rows, width)
      return forward(2 * bytes(x), function() x[name](x) end)
    end)
    add(name .. " gradient", function()
      local x, g = m.normal(rows, width), m.normal(rows, width)
      return backward(3 * bytes(x), { x }, function() return x[name](x) end, g)
    end)
  end
  -- The classifier of a step: logits are read once for the loss, and once more for their gradient.
  add("cross_entropy", function()
    local x, y = m.normal(rows, s.vocab), m.ids(s.vocab, rows)
    return forward(bytes(x), function() x:cross_entropy(y) end)
  end)
  add("cross_entropy gradient", function()
    local x, y = m.normal(rows, s.vocab), m.ids(s.vocab, rows)
    return backward(2 * bytes(x), { x }, function() return x:cross_entropy(y) end)
  end)
  -- Its forward makes the gradients, with three products in all.
  add("linear_cross_entropy", function()
    local x, w, y = m.normal(rows, s.width), m.normal(s.vocab, s.width), m.ids(s.vocab, rows)
    for _, leaf in ipairs { x, w } do leaf:keep():requires_grad_() end
    return {
      flops = 6 * rows * s.width * s.vocab, run = function() x:linear_cross_entropy(w, y) end,
    }
  end)
end

local function embeddings(list, s, m)
  local add = adder(list, "embedding")
  local rows, width = s.batch * s.length, s.width
  -- The weight is f32, as parameters are. Rows that are not used are not read.
  add("embedding", function()
    local ids, w = m.ids(s.vocab, rows), core.randn { s.vocab, width, seed = 1 }
    return forward(bytes(ids) + 2 * 4 * rows * width, function() ids:embedding(w) end)
  end)
  add("embedding gradient", function()
    local ids, w = m.ids(s.vocab, rows), core.randn { s.vocab, width, seed = 1 }
    local g = core.randn { rows, width, seed = 4 }
    return backward(bytes(ids, g, w), { w }, function() return ids:embedding(w) end, g)
  end)
  -- Heads that are side by side in a row, as a linear layer makes them.
  local function heads() return m.normal(s.batch, s.length, s.heads, s.width // s.heads) end
  add("rotary", function()
    local x = heads():transpose(2, 3)
    return forward(2 * bytes(x), function() x:rotary() end)
  end)
  add("rotary gradient", function()
    local x, g = heads(), heads():transpose(2, 3)
    return backward(2 * bytes(x), { x }, function() return x:transpose(2, 3):rotary() end, g)
  end)
end

local function selection(list, s, m)
  local add = adder(list, "selection")
  local rows, width = s.batch * s.length, s.width
  add("topk", function()
    local x = m.normal(s.batch, s.vocab)
    return forward(bytes(x), function() x:topk(math.min(50, s.vocab)) end)
  end)
  add("above", function()
    local x = m.normal(rows * width)
    local most = math.max(1, rows * width // 20)
    return forward(bytes(x) + most * (BYTES[x:dtype()] + 8), function() x:above(2, most) end)
  end)
  add("gather", function()
    local x, index = m.normal(rows, width), m.ids(width, rows, width)
    return forward(2 * bytes(x) + bytes(index), function() x:gather(2, index) end)
  end)
  add("index_select", function()
    local x, index = m.normal(rows, width), m.ids(rows, rows)
    return forward(2 * bytes(x) + bytes(index), function() x:index_select(1, index) end)
  end)
  for _, name in ipairs { "scatter", "scatter_add" } do
    add(name, function()
      local x, values, index = m.normal(rows, width), m.positive(rows, width),
        m.ids(width, rows, width)
      return forward(3 * bytes(x) + bytes(index), function() x[name](x, 2, index, values) end)
    end)
  end
end

local function codecs(list, s, m)
  local add = adder(list, "codecs")
  local rows, width = s.batch * s.length, s.width
  for _, kind in ipairs { "int8", "int4", "int2", "fp8", "fp4", "sign" } do
    add(kind .. " encode", function()
      local codec, x = core.codec(kind), m.normal(rows * width)
      return forward(bytes(x) + codec:bytes(rows * width), function() codec:encode(x) end)
    end)
    add(kind .. " decode", function()
      local codec, x = core.codec(kind), m.normal(rows * width)
      local payload = codec:encode(x)
      return forward(bytes(payload) + 4 * rows * width,
        function() codec:decode(payload, rows * width) end)
    end)
  end
  -- The greatest size, codes and numbers again, as in gathers of weights: the numbers are read
  -- twice and written once, codes are written and read.
  for _, dtype in ipairs { "f32", "bf16" } do
    add("weight as fp8 and back, " .. dtype, function()
      local x = core.randn { rows * width, seed = 1, dtype = dtype }
      return forward(3 * bytes(x) + 2 * rows * width, function() core.fp8_round(x) end)
    end)
  end
end

------------------------------------------------------------------------------------------ training

-- The shapes of a GPT-2's parameters, as many blocks as have `s.parameters` elements.
local function parameters(s, dtype)
  local c, list, count = s.width, {}, 0
  local function add(...)
    local t = core.zeros { dtype = dtype, ... }
    list[#list + 1], count = t:keep(), count + t:numel()
  end
  add(s.vocab, c)
  repeat
    for _, shape in ipairs {
      { c }, { c }, { c, 3 * c }, { 3 * c }, { c, c }, { c }, { c }, { c }, { c, 4 * c }, { 4 * c },
      { 4 * c, c }, { c },
    } do add(table.unpack(shape)) end
  until count >= s.parameters
  return list
end

local function gradients_of(list)
  local made = {}
  for i, p in ipairs(list) do made[i] = p:ones_like():mul_(1e-3):keep() end
  return made
end

-- Steps of all parameters. Parameter, gradient and states: what is updated is read and written.
local function stepping(kind, s, dtype, options)
  local ms = require "moonshard"
  local list = parameters(s, dtype)
  local gradients = gradients_of(list)
  local optimizer = ms.optim[kind](list, options or {})
  local function step()
    for i, p in ipairs(list) do p:set_grad(gradients[i]) end
    optimizer:step { keep_grads = true }
  end
  step()
  local moved = 0
  for i, p in ipairs(list) do
    moved = moved + 2 * bytes(p) + bytes(gradients[i])
    for _, t in pairs(optimizer.slots[p].state) do
      if core.is_tensor(t) and t:numel() == p:numel() then moved = moved + 2 * bytes(t) end
    end
    -- A parameter of 16 bits that has a master is written only.
    if optimizer.slots[p].state.master then moved = moved - bytes(p) end
  end
  return { bytes = moved, run = step, is_long = true }
end

local function optimizers(list, s)
  local add = adder(list, "optimizers")
  for _, kind in ipairs {
    "adamw", "adam", "sgd", "adagrad", "adadelta", "rmsprop", "rprop", "adamax",
  } do
    add(kind, function() return stepping(kind, s, "f32") end)
  end
  add("adamw, bf16 with a master", function() return stepping("adamw", s, "bf16") end)
  add("adamw, bf16 rounded at random", function()
    return stepping("adamw", s, "bf16", { master = "none" })
  end)
  local function gradients()
    local made, moved = gradients_of(parameters(s, "f32")), 0
    for _, g in ipairs(made) do moved = moved + bytes(g) end
    return made, moved
  end
  add("norm of all gradients", function()
    local list_of, moved = gradients()
    return forward(moved, function() core.clip_norm(list_of, math.huge) end)
  end)
  add("clipping that scales", function()
    local list_of, moved = gradients()
    return forward(3 * moved, function() core.clip_norm(list_of, 1e-30) end)
  end)
  add("unscaling", function()
    local list_of, moved = gradients()
    local factor = core.zeros({}):add_(0.5)
    return forward(2 * moved, function() core.unscale(list_of, factor) end)
  end)
end

------------------------------------------------------------------------------------------ products

-- Two for each multiplication with its addition.
local function product(flops, case)
  case.flops, case.bytes = flops, nil
  return case
end

local function products(list, s, m)
  local add = adder(list, "products")
  local rows, c = s.batch * s.length, s.width
  for _, shape in ipairs {
    { c, 3 * c, "bias" }, { c, c, "bias" }, { c, 4 * c, "gelu" }, { 4 * c, c, "bias" },
    { c, s.vocab },
  } do
    local inputs, outputs, what = table.unpack(shape, 1, 3)
    local name = ("%d x %d -> %d%s"):format(rows, inputs, outputs, what and ", " .. what or "")
    local flops = 2.0 * rows * inputs * outputs
    local function parts()
      -- The classifier's weight is [out, in].
      if not what then return m.normal(rows, inputs), m.normal(outputs, inputs) end
      return m.normal(rows, inputs), m.normal(inputs, outputs), m.normal(outputs)
    end
    local function apply(x, w, b)
      if not what then return x:linear(w) end
      return x:linear_t(w, b, what == "gelu" and "gelu" or nil)
    end
    add(name, function()
      local x, w, b = parts()
      return product(flops, forward(nil, function() apply(x, w, b) end))
    end)
    add(name .. ", gradient", function()
      local x, w, b = parts()
      local g = m.normal(rows, outputs)
      return product(2 * flops, backward(nil, { x, w, b }, function() return apply(x, w, b) end, g))
    end)
  end
  -- In 8 bits, whose sizes are multiples of 16: each call encodes x, and the first one w.
  local eights = (rows + 15) // 16 * 16
  for _, how in ipairs { "fp8", "fp8, emulated" } do
    add(("%d x %d -> %d, %s"):format(eights, c, 4 * c, how), function()
      local x = core.randn { eights, c, seed = 1, dtype = "bf16" }
      local w = core.randn { 4 * c, c, seed = 2, dtype = "bf16" }
      local function apply() x:linear(w) end
      return product(2.0 * eights * c * 4 * c, forward(nil, function()
        core.autocast("fp8", apply, { emulate = how ~= "fp8" })
      end))
    end)
  end
  add("convolution", function()
    local images = math.max(1, s.batch * s.length // 256)
    local x, w = m.normal(images, 64, 16, 16), m.normal(64, 64, 3, 3)
    return product(2.0 * images * 64 * 64 * 9 * 14 * 14, forward(nil, function() x:conv2d(w) end))
  end)
  add("convolution gradient", function()
    local images = math.max(1, s.batch * s.length // 256)
    local x, w = m.normal(images, 64, 16, 16), m.normal(64, 64, 3, 3)
    return product(4.0 * images * 64 * 64 * 9 * 14 * 14,
      backward(nil, { x, w }, function() return x:conv2d(w) end, m.normal(images, 64, 14, 14)))
  end)
  for _, name in ipairs { "max_pool2d", "avg_pool2d" } do
    local images = math.max(1, s.batch * s.length // 64)
    local function image() return m.normal(images, 64, 16, 16) end
    add(name, function()
      local x = image()
      return forward(bytes(x) * 5 // 4, function() x[name](x, 2) end)
    end)
    add(name .. " gradient", function()
      local x, g = image(), m.normal(images, 64, 8, 8)
      local reads = name == "max_pool2d" and bytes(x) or 0
      return backward(reads + bytes(x, g), { x }, function() return x[name](x, 2) end, g)
    end)
  end
  add("orthonormalize", function()
    local rank = math.min(4, s.width)
    local x = core.randn { s.width, rank, seed = 1 }
    return product(2.0 * s.width * rank * rank, forward(nil, function() x:orthonormalize_() end))
  end)
end

-- Only what a causal mask leaves counts.
local function attention(list, s, m)
  local add = adder(list, "attention")
  local width = s.width // s.heads
  local flops = 4.0 * s.batch * s.heads * width * (s.length * (s.length + 1) / 2)
  -- Queries, keys and values are parts of one matrix, as a model makes them.
  local function parts()
    local joined = core.randn { s.batch, s.length, 3 * s.width, seed = 1, dtype = s.dtype }
    return joined, function()
      local list_of = joined:split(s.width, 3)
      for i = 1, 3 do
        list_of[i] = list_of[i]:view(s.batch, s.length, s.heads, width):transpose(2, 3)
      end
      return list_of[1]:attention(list_of[2], list_of[3])
    end
  end
  add("attention", function()
    local _, f = parts()
    return product(flops, forward(nil, f))
  end)
  local function gradient(how)
    local joined, f = parts()
    local g = core.randn { s.batch, s.length, s.heads, width, seed = 2, dtype = s.dtype }
    return product(2.5 * flops, backward(nil, { joined },
      function() return core.attention(how, f) end, g:transpose(2, 3)))
  end
  add("attention, gradient", function() return gradient "deterministic" end)
  add("attention, fast gradient", function() return gradient "fast" end)
end

--- All cases, in the order in which they are printed.
---@param s ms.BenchSizes
---@return { family: string, name: string, make: fun(): ms.BenchCase }[]
function cases.all(s)
  local list, m = {}, makers(s)
  for _, family in ipairs {
    copies, elementwise, random, reductions, norms, softmaxes, embeddings, selection, codecs,
    optimizers, products, attention,
  } do family(list, s, m) end
  return list
end

return cases
