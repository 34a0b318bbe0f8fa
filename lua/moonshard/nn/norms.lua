-- Norms over the channels of [batch, channels, ...]: GroupNorm and BatchNorm. They compute in f32,
-- and round once to the input's dtype.
local core = require "moonshard.core"
local module = require "moonshard.nn.module"
local options_of = require "moonshard.base.options"
local check, argument = options_of.check, options_of.argument

local norms = {}

local function count(what, name, value)
  if math.type(value) ~= "integer" or value < 1 then
    core.raise(("%s: %s is an integer of 1 or more, not %s"):format(what, name, tostring(value)))
  end
  return value
end

-- Adds weight and bias, of ones and zeros, unless the option affine is false.
local function add_weight(self, channels, options)
  if options.affine == false then return end
  self.weight = module.Parameter(core.ones { channels })
  self.bias = module.Parameter(core.zeros { channels })
end

-- The shape of x, whose second dimension has the channels.
local function shape_of(what, x, channels)
  argument(what, "x", x, "tensor")
  local shape = x:shape()
  if #shape < 2 or channels and shape[2] ~= channels then
    core.raise(("%s: %s: [batch, %s, ...] is expected"):format(what, tostring(x),
      channels or "channels"))
  end
  return shape
end

-- [channels] as [channels, 1, ...], which broadcasts to a tensor of so many dimensions; f32.
local function by_channel(t, dims)
  local shape = { t:size(1) }
  for i = 2, dims - 1 do shape[i] = 1 end
  return t:to "f32":view(shape)
end

-- The numbers of each group of channels of each element with mean 0 and variance 1, then times
-- weight plus bias of their channel.
local function group_norm(x, groups, weight, bias, eps)
  local shape = x:shape()
  local width = shape[2] // groups
  for i = 3, #shape do width = width * shape[i] end
  local y = x:to "f32":reshape(shape[1], groups, width):layer_norm(nil, nil, eps):view(shape)
  if weight then y = by_channel(bias, #shape):addcmul(y, by_channel(weight, #shape)) end
  return y:to(x:dtype())
end

---@class ms.GroupNorm: ms.Module
local GroupNorm = module.class "GroupNorm"
norms.GroupNorm = GroupNorm

---@param groups integer
---@param channels integer
---@param options? { eps?: number, affine?: boolean }
function GroupNorm:init(groups, channels, options)
  options = check("GroupNorm", options, { eps = "number", affine = "boolean" })
  count("GroupNorm", "the number of groups", groups)
  if count("GroupNorm", "the number of channels", channels) % groups ~= 0 then
    core.raise(("GroupNorm: %d channels do not divide by %d groups"):format(channels, groups))
  end
  self.groups, self.channels, self.eps = groups, channels, options.eps or 1e-5
  add_weight(self, channels, options)
end

---@param x ms.Tensor [batch, channels, ...]
---@return ms.Tensor
function GroupNorm:forward(x)
  shape_of("GroupNorm", x, self.channels)
  return core.tidy(group_norm, x, self.groups, self.weight, self.bias, self.eps)
end

---@class ms.BatchNorm: ms.Module
local BatchNorm = module.class "BatchNorm"
norms.BatchNorm = BatchNorm

---@param channels integer
---@param options? ms.BatchNormOptions
function BatchNorm:init(channels, options)
  options = check("BatchNorm", options, {
    eps = "number", momentum = "number", affine = "boolean", group = "any",
  })
  count("BatchNorm", "the number of channels", channels)
  local momentum = options.momentum or 0.1
  if not (momentum >= 0 and momentum <= 1) then
    core.raise(("BatchNorm: momentum is %s; 0 to 1 is allowed"):format(momentum))
  end
  if options.group then argument("BatchNorm", "group", options.group, "group") end
  self.channels, self.eps, self.momentum = channels, options.eps or 1e-5, momentum
  self.group = options.group
  add_weight(self, channels, options)
  self:add_buffer("running_mean", core.zeros { channels })
  self:add_buffer("running_var", core.ones { channels })
  self:add_buffer("num_batches_tracked", core.zeros { dtype = "i64" })
end

-- [batch, channels, size] summed to [channels].
local function channel_sums(t) return t:sum(3):sum(1) end

-- The mean of [batch, channels, size], [channels], and how many numbers it is of: all ranks' if
-- there is a group. The gradient is that of all ranks, too.
local function mean_of(x, group)
  local sums, n = channel_sums(x), core.full(x:size(1) * x:size(3), { 1 })
  if not group then return sums / n, n end
  local channels, total = x:size(2), group:all_reduce(core.cat { sums, n }):value()
  n = total:detach():narrow(1, channels + 1, 1)
  return total:narrow(1, 1, channels) / n, n
end

-- The group whose ranks share statistics; nil: this rank alone, which takes two numbers or more.
function BatchNorm:_ranks(x)
  local group = self.group
  if group == nil then group = core.world() end
  if group and group:size() > 1 then return group end
  if x:size(1) * x:size(3) < 2 then
    core.raise(("BatchNorm: %s: training takes two or more numbers of a channel; call eval() to \z
      use running statistics"):format(tostring(x)))
  end
end

-- x [batch, channels, size] minus the mean of its channel; 1 / sqrt(variance + eps), [channels].
function BatchNorm:_of_batch(x)
  local group = self:_ranks(x)
  local mean, n = mean_of(x, group)
  local apart = x - mean:view(-1, 1)
  local squares = channel_sums(apart:square())
  if group then squares = group:all_reduce(squares):value() end
  core.no_grad(function()
    local unbiased = squares / (n - 1)
    self.running_mean:lerp_(mean:to(self.running_mean:dtype()), self.momentum)
    self.running_var:lerp_(unbiased:to(self.running_var:dtype()), self.momentum)
    self.num_batches_tracked:add_(1)
  end)
  return apart, (squares / n + self.eps):rsqrt()
end

-- The same by the running statistics.
function BatchNorm:_of_past(x)
  return x - self.running_mean:to "f32":view(-1, 1),
    (self.running_var:to "f32" + self.eps):rsqrt()
end

local function batch_norm(self, x, shape)
  local size = 1
  for i = 3, #shape do size = size * shape[i] end
  local planes = x:to "f32":reshape(shape[1], shape[2], size)
  local normalize = self:is_training() and self._of_batch or self._of_past
  local apart, factor = normalize(self, planes)
  if self.weight then factor = factor * self.weight:to "f32" end
  local y
  if self.bias then y = by_channel(self.bias, 3):addcmul(apart, factor:view(-1, 1))
  else y = apart * factor:view(-1, 1) end
  return y:view(shape):to(x:dtype())
end

---@param x ms.Tensor [batch, channels, ...]
---@return ms.Tensor
function BatchNorm:forward(x)
  return core.tidy(batch_norm, self, x, shape_of("BatchNorm", x, self.channels))
end

return norms
