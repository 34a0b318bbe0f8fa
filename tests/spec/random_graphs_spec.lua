-- Random graphs of smooth operators: the gradient along a random direction equals the central
-- difference along it. 40 graphs, with MOONSHARD_TEST_FULL=1 a thousand; each prints its seed when
-- it fails, and is a function of it.
--
-- Tolerance: in f32 with steps of 0.01 the difference carries about 1e-7 / 0.01 of rounding and
-- 1e-4 of curvature, both relative to values near 1; 1% of the scale is far above both and far
-- below any wrong formula. Where a norm of nearly equal numbers bends more than that, a step of a
-- quarter, whose curvature is a sixteenth, must agree.
local ms = require "moonshard"

local COUNT = os.getenv "MOONSHARD_TEST_FULL" == "1" and 1000 or 40
local STEP = 0.01

-- A generator of its own, so that graphs do not depend on what else draws numbers.
local function generator(seed)
  local state = seed * 2654435761 % 4294967296
  return function(n)
    state = (state * 1664525 + 1013904223) % 4294967296
    return state // 65536 % n + 1
  end
end

-- Each takes the list of tensors so far ([rows, columns], values of about 1) and a generator; its
-- result is such a tensor again.
local function pick(list, draw) return list[draw(#list)] end

local operators = {
  { "tanh", function(a) return a:tanh() end },
  { "sigmoid", function(a) return a:sigmoid() * 2 end },
  { "sin", function(a) return (a * 3):sin() end },
  { "cos", function(a) return (a * 3):cos() end },
  { "gelu", function(a) return a:gelu() end },
  { "gelu_erf", function(a) return a:gelu "erf" end },
  { "silu", function(a) return a:silu() end },
  { "exp", function(a) return a:tanh():exp() end },
  { "log", function(a) return (a:square() + 1):log() end },
  { "sqrt", function(a) return (a:square() + 1):sqrt() end },
  { "rsqrt", function(a) return (a:square() + 1):rsqrt() end },
  { "pow", function(a) return (a:square() + 1):pow(0.7) end },
  { "neg", function(a) return -a end },
  { "scale", function(a) return a * 0.7 + 0.2 end },
  { "softmax", function(a) return a:softmax() * a:size(2) end },
  { "softmax over rows", function(a) return a:softmax(1) * a:size(1) end },
  { "log_softmax", function(a) return a:log_softmax() end },
  { "layer_norm", function(a, b) return a:layer_norm(b:select(1, 1), b:select(1, 2)) end },
  { "rms_norm", function(a, b) return a:rms_norm(b:select(1, 1)) end },
  { "add_layer_norm", function(a, b)
    local sum, normed = a:add_layer_norm(b, b:select(1, 1), a:select(1, 1))
    return sum * 0.5 + normed
  end },
  { "add", function(a, b) return a + b end },
  { "sub", function(a, b) return a:sub(b, 0.5) end },
  { "mul", function(a, b) return a * b end },
  { "div", function(a, b) return a / (b:square() + 1) end },
  { "row", function(a, b) return a * b:narrow(1, 1, 1) end },
  { "column", function(a, b) return a + b:narrow(2, 1, 1) end },
  { "lerp", function(a, b) return a:lerp(b, 0.3) end },
  { "addcmul", function(a, b) return a:addcmul(b, b, 0.2) end },
  { "swiglu", function(a, b) return a:swiglu(b) end },
  { "matmul", function(a, b) return a:matmul(b:t()):matmul(b) / 8 end },
  { "linear", function(a, b) return a:linear(b:t():matmul(b) / 4, b:select(1, 1)) end },
  { "transpose", function(a, b) return (a:t() * b:t()):t() end },
  { "reshape", function(a) return a:reshape(-1):view(a:size(2), a:size(1)):t():contiguous() end },
  { "cat and split", function(a, b)
    local parts = ms.cat({ a, b }, 2):split({ 1, 2 * a:size(2) - 1 }, 2)
    return parts[2]:narrow(2, 1, a:size(2)) + parts[1]
  end },
  { "stack", function(a, b) return ms.stack({ a, b }, 2):mean(2) end },
  {
    "sum and expand",
    function(a) return a:sum(1, true):expand(a:size(1), a:size(2)) / a:size(1) end,
  },
  { "mean of a row", function(a) return a - a:mean(2, true) end },
  { "norm", function(a) return a / (a:norm(2, 2, true) + 1) end },
  { "cumsum", function(a) return a:cumsum(2) / a:size(2) end },
  { "index_select", function(a) return a:index_select(1, ms.tensor { 2, 0, 1, 1 }) end },
  {
    "scatter_add",
    function(a, b)
      return a:scatter_add(1, ms.zeros { a:size(1), a:size(2), dtype = "i64" }, b * 0.3)
    end,
  },
  {
    "where",
    function(a, b)
      return ms.where(ms.arange(0, a:numel() - 1):view(a:size(1), a:size(2)):lt(9), a, b)
    end,
  },
  {
    "masked_fill",
    function(a)
      return a:masked_fill(ms.arange(0, a:numel() - 1):view(a:size(1), a:size(2)):eq(5), 0.5)
    end,
  },
  { "attention", function(a, b)
    local function heads(t) return t:view(1, 1, t:size(1), t:size(2)) end
    return heads(a):attention(heads(b), heads(a)):view(a:size(1), a:size(2))
  end },
  {
    "rotary",
    function(a)
      return a:view(1, 1, a:size(1), a:size(2)):rotary(1, 100):view(a:size(1), a:size(2))
    end,
  },
  {
    "recompute",
    function(a, b) return ms.recompute(function(x, y) return (x * y):tanh() end, a, b) end,
  },
  { "in place", function(a, b)
    local c = a:clone()
    c:mul_(b)
    c:tanh_()
    return c
  end },
}

-- A function of two [4, 6] tensors, made by the seed: a number.
local function graph(seed)
  return function(x, y)
    local draw = generator(seed)
    local list, names = { x, y }, {}
    for _ = 1, 4 + draw(8) do
      local name, f = table.unpack(operators[draw(#operators)])
      local a, b = pick(list, draw), pick(list, draw)
      local made = f(a, b)
      -- Kept near 1, smoothly, so that long chains neither explode nor vanish.
      list[#list + 1] = (made * 0.5):tanh() * 2
      names[#names + 1] = name
    end
    local total = ms.zeros {}
    for i = math.max(1, #list - 2), #list do total = total + (list[i] * list[i]):mean() end
    return total, table.concat(names, ", ")
  end
end

local function check(seed)
  local f = graph(seed)
  local x, y = ms.randn { 4, 6, seed = 2 * seed, requires_grad = true },
    ms.randn { 4, 6, seed = 2 * seed + 1, requires_grad = true }
  local dx, dy = ms.randn { 4, 6, seed = 3 * seed + 7 }, ms.randn { 4, 6, seed = 3 * seed + 8 }
  local value, names = f(x, y)
  value:backward()
  local along = 0
  if x:grad() then along = along + (x:grad() * dx):sum():item() end
  if y:grad() then along = along + (y:grad() * dy):sum():item() end
  local function difference(step)
    return ms.no_grad(function()
      return (f(x + dx * step, y + dy * step):item() - f(x - dx * step, y - dy * step):item())
        / (2 * step)
    end)
  end
  local function agrees(value_there)
    return math.abs(along - value_there)
      <= 0.01 * math.max(1, math.abs(along), math.abs(value_there))
  end
  local found = difference(STEP)
  if not agrees(found) then found = difference(STEP / 4) end
  assert.is_true(agrees(found),
    ("seed %d (%s): gradient %.6g, difference %.6g"):format(seed, names, along, found))
end

-- Both gradients as lists of numbers, by one backward or by two parts; nil where what is recomputed
-- is on the way, or x is not used.
local function gradients(seed, in_parts)
  local x, y = ms.randn { 4, 6, seed = 2 * seed, requires_grad = true },
    ms.randn { 4, 6, seed = 2 * seed + 1, requires_grad = true }
  local value, names = graph(seed)(x, y)
  if in_parts then
    local ok, message = pcall(value.backward, value, { inputs = { x } })
    if not ok then
      assert(message:find("recompute", 1, true) or message:find("does not depend", 1, true),
        message)
      return nil
    end
    assert(not y:grad())
    value:backward { rest = true }
  else value:backward() end
  local found = { names = names }
  for i, t in ipairs { x, y } do
    found[i] = t:grad() and t:grad():reshape(-1):to_table() or "none"
  end
  return found
end

describe("random graphs", function()
  it("have the same gradients to the bit in two parts", function()
    local compared = 0
    for seed = 1, COUNT do
      local two = gradients(seed, true)
      if two then
        assert.same(gradients(seed, false), two, ("seed %d (%s)"):format(seed, two.names))
        compared = compared + 1
      end
    end
    assert.is_true(compared > COUNT / 3)
  end)

  it(("have the gradient of their differences (%d graphs)"):format(COUNT), function()
    for seed = 1, COUNT do check(seed) end
  end)
end)
