-- The usual layers.
local core = require "moonshard.core"
local conv = require "moonshard.nn.conv"
local module = require "moonshard.nn.module"
local norms = require "moonshard.nn.norms"
local options_of = require "moonshard.base.options"
local ownership = require "moonshard.base.ownership"
local check, argument = options_of.check, options_of.argument
local rope = require "moonshard.nn.rope"

local layers = {}
for name, class in pairs(conv) do layers[name] = class end
layers.GroupNorm, layers.BatchNorm = norms.GroupNorm, norms.BatchNorm

local function check_sizes(what, ...)
  for i = 1, select("#", ...) do
    local size = select(i, ...)
    if math.type(size) ~= "integer" or size < 1 then
      core.raise(("%s: sizes are integers of 1 or more, not %s"):format(what, tostring(size)))
    end
  end
end

-- Uniform in +-1/sqrt(inputs), as is usual for linear layers.
local function uniform(shape, inputs)
  local bound = 1 / math.sqrt(inputs)
  shape.low, shape.high = -bound, bound
  return module.Parameter(core.rand(shape))
end

---@class ms.Linear: ms.Module
local Linear = module.class "Linear"
layers.Linear = Linear
Linear.lora_layout = "rows"                -- nn.lora: the weight is [outputs, inputs]

---@param inputs integer
---@param outputs integer
---@param options? { bias?: boolean }
function Linear:init(inputs, outputs, options)
  check("Linear", options, { bias = "boolean" })
  check_sizes("Linear", inputs, outputs)
  self.weight = uniform({ outputs, inputs }, inputs)
  if not options or options.bias ~= false then self.bias = uniform({ outputs }, inputs) end
end

---@param x ms.Tensor [..., inputs]
---@param activation? "gelu" applied after the product
---@return ms.Tensor [..., outputs]
function Linear:forward(x, activation)
  argument("Linear", "x", x, "tensor")
  if self.fp8 ~= false then return x:linear(self.weight, self.bias, activation) end
  return core.without_fp8(function() return x:linear(self.weight, self.bias, activation) end)
end
local linear_forward = Linear.forward

---@class ms.Embedding: ms.Module
local Embedding = module.class "Embedding"
layers.Embedding = Embedding

---@param count integer
---@param width integer
function Embedding:init(count, width)
  check_sizes("Embedding", count, width)
  self.weight = module.Parameter(core.randn { count, width })
end

---@param ids ms.Index
---@return ms.Tensor [..., width]
function Embedding:forward(ids)
  argument("Embedding", "ids", ids, "tensor")
  return ids:embedding(self.weight)
end

local short = { f16 = true, bf16 = true }

--- Whether a norm's weight is f32 and its input has 16 bits: the weight of a sharded model may keep
--- its dtype (precision.keep). Such a norm computes in f32, and returns the input's dtype.
---@param norm ms.LayerNorm|ms.RMSNorm
---@param x ms.Tensor
---@return boolean
function layers._is_kept(norm, x)
  return norm.weight:dtype() == "f32" and short[x:dtype()] == true
end

---@class ms.LayerNorm: ms.Module
local LayerNorm = module.class "LayerNorm"
layers.LayerNorm = LayerNorm

---@param width integer
---@param options? { eps?: number, bias?: boolean }
function LayerNorm:init(width, options)
  check("LayerNorm", options, { eps = "number", bias = "boolean" })
  check_sizes("LayerNorm", width)
  self.eps = options and options.eps or 1e-5
  self.weight = module.Parameter(core.ones { width })
  if not options or options.bias ~= false then
    self.bias = module.Parameter(core.zeros { width })
  end
end

function LayerNorm:forward(x)
  argument("LayerNorm", "x", x, "tensor")
  if layers._is_kept(self, x) then
    return x:to "f32":layer_norm(self.weight, self.bias, self.eps):to(x:dtype())
  end
  return x:layer_norm(self.weight, self.bias, self.eps)
end

---@class ms.RMSNorm: ms.Module
local RMSNorm = module.class "RMSNorm"
layers.RMSNorm = RMSNorm

---@param width integer
---@param options? { eps?: number }
function RMSNorm:init(width, options)
  check("RMSNorm", options, { eps = "number" })
  check_sizes("RMSNorm", width)
  self.eps = options and options.eps or 1e-5
  self.weight = module.Parameter(core.ones { width })
end

function RMSNorm:forward(x)
  argument("RMSNorm", "x", x, "tensor")
  if layers._is_kept(self, x) then
    return x:to "f32":rms_norm(self.weight, self.eps):to(x:dtype())
  end
  return x:rms_norm(self.weight, self.eps)
end

-- Forwards whose norm of a sum is one pass over memory with the sum.
local of_sum = {
  [LayerNorm.forward] = function(norm, stream, change)
    return change:add_layer_norm(stream, norm.weight, norm.bias, norm.eps)
  end,
  [RMSNorm.forward] = function(norm, stream, change)
    return change:add_rms_norm(stream, norm.weight, norm.eps)
  end,
}

--- The sum of a stream and a change of it, and its norm. A norm with hooks or a forward of its own
--- is called.
---@param norm ms.Module
---@param stream ms.Tensor
---@param change? ms.Tensor
---@return ms.Tensor stream
---@return ms.Tensor normed
function layers._norm_of_sum(norm, stream, change)
  if not change then return stream, norm(stream) end
  local fused = of_sum[module.plain_forward(norm)]
  if fused and not layers._is_kept(norm, stream) then return fused(norm, stream, change) end
  stream = stream + change
  return stream, norm(stream)
end

---@class ms.Dropout: ms.Module
local Dropout = module.class "Dropout"
layers.Dropout = Dropout

---@param p number probability of zero, 0 or more and below 1
---@param options? { group?: ms.Group }
function Dropout:init(p, options)
  if type(p) ~= "number" or not (p >= 0 and p < 1) then
    core.raise("Dropout: p must be a number of 0 or more and below 1, not " .. tostring(p))
  end
  local group = check("Dropout", options, { group = "group" }).group
  self.p, self.options = p, group and { group = group } or nil
end

function Dropout:forward(x)
  argument("Dropout", "x", x, "tensor")
  if self.p == 0 or not self:is_training() then return x end
  return x:dropout(self.p, self.options)
end

local function activation(name, f)
  local class = module.class(name)
  class.init = function(self, form)
    argument(name, "form", form, "string?")
    self.form = form
  end
  class.forward = function(self, x)
    argument(name, "x", x, "tensor")
    return f(self, x)
  end
  layers[name] = class
end

activation("ReLU", function(_, x) return x:relu() end)
activation("GELU", function(self, x) return x:gelu(self.form) end)
activation("SiLU", function(_, x) return x:silu() end)

---@class ms.List: ms.Module
local List = module.class "List"
layers.List = List
ownership.functions.list = List

---@param modules ms.Module[]
function List:init(modules)
  options_of.items("List", "modules", modules, "module")
  for i, item in ipairs(modules) do self[i] = item end
end

---@class ms.Sequential: ms.Module
local Sequential = module.class "Sequential"
layers.Sequential = Sequential

function Sequential:init(...)
  for i, item in ipairs { ... } do self[i] = item end
end

function Sequential:forward(x)
  for i = 1, #self do x = self[i](x) end
  return x
end

---@class ms.MLP: ms.Module
local MLP = module.class "MLP"
layers.MLP = MLP

---@param width integer
---@param hidden integer
---@param options? ms.MLPOptions
function MLP:init(width, hidden, options)
  check_sizes("MLP", width, hidden)
  options = check("MLP", options, { activation = "string", bias = "boolean" })
  local kind = options.activation or "gelu"
  if kind ~= "gelu" and kind ~= "relu" and kind ~= "swiglu" then
    core.raise(("MLP: unknown activation '%s': known are gelu, relu, swiglu")
      :format(tostring(kind)))
  end
  self.activation = kind
  if kind == "swiglu" then self.gate = Linear(width, hidden, { bias = options.bias }) end
  self.up = Linear(width, hidden, { bias = options.bias })
  self.down = Linear(hidden, width, { bias = options.bias })
end

function MLP:forward(x)
  argument("MLP", "x", x, "tensor")
  if self.activation == "swiglu" then return self.down(self.up(x):swiglu(self.gate(x))) end
  if self.activation == "gelu" then
    return module.through_gelu(self.up, self.down, linear_forward, "mlp", x)
  end
  return self.down(self.up(x):relu())
end

---@class ms.Attention: ms.Module
local Attention = module.class "Attention"
layers.Attention = Attention
Attention.first_products = { "q_proj", "k_proj", "v_proj" }  -- of a block: see nn.decoder

-- Checks the options; returns the width of a head and the number of key heads.
local function check_heads(options)
  rope.check("Attention", options.rotary_scaling)
  local width, heads = options.width, options.heads
  local kv_heads, bias = options.kv_heads or heads, options.bias
  check_sizes("Attention", width, heads, kv_heads, options.head_dim or 1, options.window or 1)
  if not options.head_dim and width % heads ~= 0 then
    core.raise(("Attention: width %d does not divide by %d heads"):format(width, heads))
  end
  if options.rotary and options.head_dim and options.head_dim % 2 ~= 0 then
    core.raise(("Attention: head_dim %d is odd, and rotary positions turn pairs of numbers")
      :format(options.head_dim))
  end
  if heads % kv_heads ~= 0 then
    core.raise(("Attention: %d heads do not divide by %d key heads"):format(heads, kv_heads))
  end
  if bias ~= nil and type(bias) ~= "boolean" and bias ~= "qkv" then
    core.raise(('Attention: bias must be true, false or "qkv", not %s'):format(tostring(bias)))
  end
  local norm = options.qk_norm
  if norm and norm ~= "head" and norm ~= "all" then
    core.raise(('Attention: qk_norm must be false, "head" or "all", not %s')
      :format(tostring(norm)))
  end
  return options.head_dim or width // heads, kv_heads
end

---@param options ms.AttentionOptions
function Attention:init(options)
  options = check("Attention", options, {
    width = "any", heads = "any", kv_heads = "any", head_dim = "any", window = "any",
    rotary = "boolean", bias = "any", qk_norm = "any", eps = "number",
    rotary_base = "number", rotary_scaling = "table",
  })
  local head, kv_heads = check_heads(options)
  local width, inner, bias = options.width, options.heads * head, options.bias
  self.head, self.rotary, self.rotary_base, self.rotary_scaling = head, options.rotary,
    options.rotary_base, options.rotary_scaling
  self.window, self.norms = options.window, options.qk_norm or nil
  self.q_proj = Linear(width, inner, { bias = bias ~= false })
  self.k_proj = Linear(width, kv_heads * head, { bias = bias ~= false })
  self.v_proj = Linear(width, kv_heads * head, { bias = bias ~= false })
  self.o_proj = Linear(inner, width, { bias = bias ~= false and bias ~= "qkv" })
  if self.norms then
    local all, how = self.norms == "all", { eps = options.eps }
    self.q_norm = RMSNorm(all and inner or head, how)
    self.k_norm = RMSNorm(all and kv_heads * head or head, how)
  end
end

---@param x ms.Tensor [batch, time, width]
---@param positions? ms.Tensor i64 [batch, time] of packed documents
---@param past? ms.Past keys and values of the positions before these
---@return ms.Tensor [batch, time, width]
function Attention:forward(x, positions, past)
  argument("Attention", "x", x, "tensor")
  local shape = x:shape()
  local batch, time = shape[1], shape[2]
  local function heads(t, norm)
    if norm and self.norms == "all" then t = norm(t) end
    t = t:view(batch, time, -1, self.head)
    if norm and self.norms == "head" then t = norm(t) end
    return t:transpose(2, 3)
  end
  local q, k, v = heads(self.q_proj(x), self.q_norm), heads(self.k_proj(x), self.k_norm),
    heads(self.v_proj(x))
  -- Rotary positions count on through a row of packed documents: a score depends on the distance of
  -- query and key alone, and those that see each other are in one document.
  if self.rotary then
    local first = past and past.first() or 0
    q, k = q:rotary(first, self.rotary_base, self.rotary_scaling),
      k:rotary(first, self.rotary_base, self.rotary_scaling)
  end
  if past then k, v = past.extend(k, v) end
  local joined = q:attention(k, v, { positions = positions, window = self.window }):transpose(2, 3)
  return self.o_proj(joined:reshape(batch, time, -1))
end

for _, class in ipairs { Linear, Embedding, LayerNorm, RMSNorm, Dropout, MLP } do
  module.tidy(class.forward)
end
-- Keys and values go into the cache.
module.tidy(Attention.forward, function(_, _, _, past) return not past end)

return layers
