-- Golden operators: results and gradients.
local report = require "moonshard.cli.golden.report"
local einsum = require "moonshard.composed".einsum

local operators = { tolerance = 1e-5 }

-- Dimensions count from 0 in the manifest, from 1 here; -1 is the last in both.
local function dimension(d)
  if math.type(d) ~= "integer" then error("the attribute dim must be an integer", 0) end
  return d < 0 and d or d + 1
end

local function unary(f) return { inputs = { "x" }, run = f } end
local function pool(method, attributes)
  attributes.kernel = true
  local function run(t, given)
    local options = {}
    for name, value in pairs(given) do if name ~= "kernel" then options[name] = value end end
    return t.x[method](t.x, given.kernel, options)
  end
  return { inputs = { "x" }, attributes = attributes, run = run }
end
local function along(attributes, f)
  attributes.dim = true
  return {
    inputs = { "x" }, attributes = attributes,
    run = function(t, given) return f(t, given.dim and dimension(given.dim), given) end,
  }
end
local function matmul(t) return t.a:matmul(t.b) end
-- Attributes that are descriptions only: name = true.
local attention = {
  inputs = { "q", "k", "v" },
  attributes = { layout = true },
  run = function(t) return t.q:attention(t.k, t.v) end,
}

-- op = { inputs = names of float inputs, integers = names of inputs that the manifest does not
-- list, attributes = names, run = f(inputs, attributes) }
operators.known = {
  matmul = { inputs = { "a", "b" }, run = matmul },
  matmul_batched = { inputs = { "a", "b" }, run = matmul },
  linear = {
    inputs = { "x", "weight", "bias" },
    run = function(t) return t.x:linear(t.weight, t.bias) end,
  },
  add_broadcast = { inputs = { "a", "b" }, run = function(t) return t.a + t.b end },
  mul_broadcast = { inputs = { "a", "b" }, run = function(t) return t.a * t.b end },
  gelu_tanh = unary(function(t) return t.x:gelu "tanh" end),
  gelu_erf = unary(function(t) return t.x:gelu "erf" end),
  relu = unary(function(t) return t.x:relu() end),
  silu = unary(function(t) return t.x:silu() end),
  tanh = unary(function(t) return t.x:tanh() end),
  sigmoid = unary(function(t) return t.x:sigmoid() end),
  softmax = unary(function(t) return t.x:softmax(-1) end),
  log_softmax = unary(function(t) return t.x:log_softmax(-1) end),
  layer_norm = {
    inputs = { "x", "weight", "bias" }, attributes = { eps = true },
    run = function(t, given) return t.x:layer_norm(t.weight, t.bias, given.eps) end,
  },
  rms_norm = {
    inputs = { "x", "weight" },
    attributes = { eps = true },
    run = function(t, given) return t.x:rms_norm(t.weight, given.eps) end,
  },
  embedding = {
    inputs = { "weight" },
    integers = { "ids" },
    run = function(t) return t.ids:embedding(t.weight) end,
  },
  cross_entropy = {
    inputs = { "logits" }, integers = { "target" }, attributes = { ignore_index = true },
    run = function(t, given)
      return t.logits:cross_entropy(t.target, { ignore_index = given.ignore_index })
    end,
  },
  attention_causal = attention,
  attention_causal_gqa = attention,
  rope = {
    inputs = { "x" }, attributes = { theta = true, convention = true },
    run = function(t, given) return t.x:rotary(0, given.theta) end,
  },
  mse_loss = { inputs = { "x", "y" }, run = function(t) return t.x:mse_loss(t.y) end },
  sin = unary(function(t) return t.x:sin() end),
  cos = unary(function(t) return t.x:cos() end),
  conv2d = {
    inputs = { "x", "weight", "bias" },
    attributes = { stride = true, padding = true, dilation = true, groups = true },
    run = function(t, given) return t.x:conv2d(t.weight, t.bias, given) end,
  },
  max_pool2d = pool("max_pool2d", { stride = true, padding = true }),
  avg_pool2d = pool("avg_pool2d", { stride = true, padding = true, count_include_pad = true }),
  floor = unary(function(t) return t.x:floor() end),
  ceil = unary(function(t) return t.x:ceil() end),
  round = unary(function(t) return t.x:round() end),
  var = along({ keep = true, correction = true }, function(t, dim, given)
    return t.x:var(dim, given.keep, given.correction)
  end),
  prod = along({ keep = true }, function(t, dim, given) return t.x:prod(dim, given.keep) end),
  sort = along({ descending = true }, function(t, dim, given)
    return (t.x:sort(dim, given.descending))
  end),
  tril = {
    inputs = { "x" }, attributes = { diagonal = true },
    run = function(t, given) return t.x:tril(given.diagonal) end,
  },
  triu = {
    inputs = { "x" }, attributes = { diagonal = true },
    run = function(t, given) return t.x:triu(given.diagonal) end,
  },
  einsum = {
    inputs = { "a", "b" }, attributes = { equation = true },
    run = function(t, given) return einsum(given.equation, t.a, t.b) end,
  },
  sum = unary(function(t) return t.x:sum() end),
  mean_dim = {
    inputs = { "x" },
    attributes = { dim = true },
    run = function(t, given) return t.x:mean(dimension(given.dim)) end,
  },
}

---@param case table
---@return string
function operators.name(case) return ("%s (%s)"):format(tostring(case.case), tostring(case.op)) end

-- The inputs of a case by name; those that the manifest lists require a gradient.
local function read_inputs(case, known, tensor)
  local inputs, names = {}, {}
  for _, name in ipairs(known.inputs) do names[name] = true end
  for _, name in ipairs(case.inputs) do
    if not names[name] then error(("unknown input '%s'"):format(tostring(name)), 0) end
    inputs[name] = tensor("in." .. name):clone():requires_grad_()
  end
  for _, name in ipairs(known.integers or {}) do inputs[name] = tensor("in." .. name) end
  return inputs
end

--- Runs a case of the manifest.
---@param case table
---@param tensors table<string, ms.Tensor>
---@param found ms.GoldenReport
function operators.run(case, tensors, found)
  report.known_keys("entry", case, { case = 1, op = 1, inputs = 1, attributes = 1 })
  local known = operators.known[case.op]
    or error(("unknown operator '%s'"):format(tostring(case.op)), 0)
  local attributes = case.attributes or {}
  report.known_keys("attribute", attributes, known.attributes or {})
  local prefix = ("%d."):format(case.case)
  local function tensor(name)
    return tensors[prefix .. name]
      or error(("the file has no tensor '%s'"):format(prefix .. name), 0)
  end
  local inputs = read_inputs(case, known, tensor)
  local out = known.run(inputs, attributes)
  found:relative("out", out:detach(), tensors[prefix .. "out"], operators.tolerance)
  out:backward { gradient = tensor "grad_out" }
  for _, name in ipairs(case.inputs) do
    found:relative("grad." .. name, inputs[name]:grad(), tensors[prefix .. "grad." .. name],
      operators.tolerance)
  end
end

return operators
