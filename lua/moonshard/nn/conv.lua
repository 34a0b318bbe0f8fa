-- Layers for planes, [images, channels, rows, columns]: convolution and pooling.
local core = require "moonshard.core"
local module = require "moonshard.nn.module"
local options_of = require "moonshard.base.options"
local check, argument = options_of.check, options_of.argument

local planes = {}

-- A number for rows and columns, or { rows, columns }; returns { rows, columns }.
local function pair(what, name, value, least)
  local list = type(value) == "table" and value or { value, value }
  local function right(n) return math.type(n) == "integer" and n >= least end
  if #list ~= 2 or not (right(list[1]) and right(list[2])) then
    core.raise(("%s: %s is an integer of %d or more, or { rows, columns } of such"):format(what,
      name, least))
  end
  return { list[1], list[2] }
end

-- The options of a window, as the operators take them.
local function window(what, options, dilated)
  options = options or {}
  local given = { padding = pair(what, "padding", options.padding or 0, 0) }
  if options.stride then given.stride = pair(what, "stride", options.stride, 1) end
  if dilated then given.dilation = pair(what, "dilation", options.dilation or 1, 1) end
  return given
end

local function count(what, name, value)
  if math.type(value) ~= "integer" or value < 1 then
    core.raise(("%s: %s is an integer of 1 or more, not %s"):format(what, name, tostring(value)))
  end
  return value
end

---@class ms.Conv2d: ms.Module
local Conv2d = module.class "Conv2d"
planes.Conv2d = Conv2d

---@param inputs integer channels
---@param outputs integer channels
---@param kernel integer|integer[]
---@param options? ms.Conv2dLayerOptions
function Conv2d:init(inputs, outputs, kernel, options)
  check("Conv2d", options, {
    stride = "any", padding = "any", dilation = "any", groups = "any", bias = "boolean",
  })
  count("Conv2d", "the number of input channels", inputs)
  count("Conv2d", "the number of output channels", outputs)
  local size, groups = pair("Conv2d", "the kernel", kernel, 1),
    count("Conv2d", "groups", options and options.groups or 1)
  if inputs % groups ~= 0 or outputs % groups ~= 0 then
    core.raise(("Conv2d: %d input and %d output channels do not divide by %d groups"):format(inputs,
      outputs, groups))
  end
  self.options = window("Conv2d", options, true)
  self.options.groups = groups
  -- Uniform in +-1/sqrt(inputs of an output): PyTorch's kaiming_uniform_ with a = sqrt(5).
  local bound = 1 / math.sqrt(inputs // groups * size[1] * size[2])
  local function uniform(shape)
    shape.low, shape.high = -bound, bound
    return module.Parameter(core.rand(shape))
  end
  self.weight = uniform { outputs, inputs // groups, size[1], size[2] }
  if not options or options.bias ~= false then self.bias = uniform { outputs } end
end

---@param x ms.Tensor [images, inputs, rows, columns]
---@return ms.Tensor [images, outputs, ...]
function Conv2d:forward(x)
  argument("Conv2d", "x", x, "tensor")
  return x:conv2d(self.weight, self.bias, self.options)
end

---@class ms.MaxPool2d: ms.Module
local MaxPool2d = module.class "MaxPool2d"
planes.MaxPool2d = MaxPool2d

---@param kernel integer|integer[]
---@param options? ms.MaxPool2dOptions
function MaxPool2d:init(kernel, options)
  check("MaxPool2d", options, { stride = "any", padding = "any" })
  self.kernel = pair("MaxPool2d", "the kernel", kernel, 1)
  self.options = window("MaxPool2d", options)
end

function MaxPool2d:forward(x)
  argument("MaxPool2d", "x", x, "tensor")
  return x:max_pool2d(self.kernel, self.options)
end

---@class ms.AvgPool2d: ms.Module
local AvgPool2d = module.class "AvgPool2d"
planes.AvgPool2d = AvgPool2d

---@param kernel integer|integer[]
---@param options? ms.AvgPool2dOptions
function AvgPool2d:init(kernel, options)
  check("AvgPool2d", options, { stride = "any", padding = "any", count_include_pad = "boolean" })
  self.kernel = pair("AvgPool2d", "the kernel", kernel, 1)
  self.options = window("AvgPool2d", options)
  self.options.count_include_pad = options and options.count_include_pad
end

function AvgPool2d:forward(x)
  argument("AvgPool2d", "x", x, "tensor")
  return x:avg_pool2d(self.kernel, self.options)
end

---@class ms.Flatten: ms.Module
local Flatten = module.class "Flatten"
planes.Flatten = Flatten

---@param first? integer dimension; 2 unless given
---@param last? integer dimension; -1 unless given
function Flatten:init(first, last)
  argument("Flatten", "first", first, "integer?")
  argument("Flatten", "last", last, "integer?")
  self.first, self.last = first or 2, last or -1
end

function Flatten:forward(x)
  argument("Flatten", "x", x, "tensor")
  return x:flatten(self.first, self.last)
end

return planes
