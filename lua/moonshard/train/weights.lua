-- Weights of passes: the loss of a step is the mean over all its targets, however they are divided
-- into passes and ranks. Passes whose weights differ would otherwise give a mean of means.
--
-- With weights w of P passes on each of R ranks, the loss of a pass is multiplied by w P R / sum(w)
-- before its backward. What is there already, the mean over passes and the mean over ranks, makes
-- sum(w loss) / sum(w) of it. Where all weights are equal the factor is 1, to the bit. A pass of
-- weight 0 counts nothing, whatever its loss is. If all weights are 0, the loss is nan.
local core = require "moonshard.core"
require "moonshard.parallel.group"                -- methods of the world
local options_of = require "moonshard.base.options"

local weights = {}

local IGNORED <const> = -100             -- cross_entropy's ignore_index, unless given

--- How many targets count, as cross_entropy counts them: a tensor of one element. nil: y has none.
---@param y any
---@return ms.Tensor?
function weights.counted(y)
  if not core.is_tensor(y) then return nil end
  local dtype = y:dtype()
  if dtype ~= "i64" and dtype ~= "i32" and dtype ~= "u16" then return nil end
  return y:ne(IGNORED):sum()
end

-- A weight as f32 [1].
local function as_tensor(what, value)
  if core.is_tensor(value) and value:numel() == 1 then
    return value:detach():to "f32":reshape(1)
  end
  if type(value) ~= "number" or value < 0 or value ~= value or value == math.huge then
    core.raise(("%s: a weight is a finite number of 0 or more, or a tensor of one element, not %s")
      :format(what, tostring(value)))
  end
  return core.full(value, { 1 })
end

-- The loss of one pass times a factor []; nothing is left of it where its weight [] is 0.
local function weighted(loss, weight, factor)
  if loss:dtype() ~= "f32" then loss = loss:to "f32" end
  return core.where(weight:ne(0), loss * factor, factor)
end

-- own: f32 [P], the weights of this rank's passes. Over the ranks of the group (nil: this rank
-- alone): the factors of the passes [P], the number by which a loss that was weighted by w alone is
-- multiplied [], the sum of weights [], and whether all are equal [].
local function over(own, group)
  local all = group and group:size() > 1 and group:all_gather(own):value() or own
  local sum, equal = all:sum(), all:max():eq(all:min())
  local rest = all:numel() / sum
  local factors = own * rest
  -- No weight at all: 0 * inf is nan, and stays.
  return core.where(equal, core.where(sum:ne(0), 1, factors), factors), rest, sum, equal
end

--- loss_weight over the ranks of a group; nil: over the passes of this rank alone.
---@param values (ms.Tensor|number)[]
---@param group? ms.Group
---@return fun(i: integer, loss: ms.Tensor): ms.Tensor
function weights.of_passes(values, group)
  if #values == 0 then core.raise "loss_weight: weights is empty: give one for each pass" end
  local own, factors
  core.no_grad(function()
    local list = {}
    for i, value in ipairs(values) do list[i] = as_tensor("loss_weight", value) end
    own = core.cat(list, 1)
    factors = over(own, group)
  end)
  return function(i, loss)
    if math.type(i) ~= "integer" or i < 1 or i > #values then
      core.raise(("loss_weight: pass %s: there are weights of %d"):format(tostring(i), #values))
    end
    options_of.argument("loss_weight", "loss", loss, "tensor")
    if loss:numel() ~= 1 then core.raise "loss_weight: the loss must have one element" end
    return weighted(loss, own:narrow(1, i, 1):reshape(), factors:narrow(1, i, 1):reshape())
  end
end

---@param values (ms.Tensor|number)[]
---@param group? ms.Group
---@return fun(i: integer, loss: ms.Tensor): ms.Tensor
function weights.loss_weight(values, group)
  options_of.argument("loss_weight", "weights", values, "table")
  options_of.check_group("loss_weight", "group", group)
  return weights.of_passes(values, group or core.world())
end

------------------------------------------------------------------------------------- of ms.train

---@class ms.StepWeights               the weights of one step of ms.train
---@field count integer                passes
---@field group? ms.Group              over whose ranks gradients are averaged; nil: none
---@field late boolean                 gradients cannot be changed between two passes
---@field sum? ms.Tensor               of all weights, once it is known; nil: passes have none
---@field own (ms.Tensor?)[]           f32 [1] each
---@field factors? ms.Tensor           [count]
---@field unit? ms.Tensor              []: the first pass's weight, over the ranks
---@field rest? ms.Tensor              []: what earlier passes are multiplied by
local StepWeights = {}
StepWeights.__index = StepWeights

--- late: the model reduces gradients in each pass, and they are multiplied when all are there.
---@param count integer
---@param group? ms.Group
---@param late boolean
---@return ms.StepWeights
function weights.step(count, group, late)
  return setmetatable({ count = count, group = group, late = late, own = {} }, StepWeights)
end

--- For weights that are known before the first pass.
---@param values ms.Tensor[]
function StepWeights:set(values)
  core.no_grad(function()
    for i, value in ipairs(values) do self.own[i] = as_tensor("train", value) end
    local factors, _, sum = over(core.cat(self.own, 1), self.group)
    self.factors, self.sum = factors, sum
  end)
end

-- The first weight, as ranks have it in the mean: what later ones are compared with until all are
-- known, so that gradients keep their size. It is exact if weights are equal.
local function unit_of(own, group)
  local _, rest, sum, equal = over(own, group)
  return core.where(sum:ne(0), core.where(equal, own:reshape(), 1 / rest), 1)
end

-- A weight that came with a loss. Before the last pass the sum is not known: what was added up till
-- then is multiplied by `rest` afterwards.
local function add_weight(self, i, value)
  self.own[i] = as_tensor("train: the third result of loss", value)
  if i == 1 and self.count > 1 then self.unit = unit_of(self.own[1], self.group) end
  if i < self.count then return end
  local rest, equal
  self.factors, rest, self.sum, equal = over(core.cat(self.own, 1), self.group)
  if self.unit then
    self.rest = core.where(equal, core.where(self.sum:ne(0), 1, rest), self.unit * rest)
  end
end

--- The loss of pass i as it goes into backward. weight: what the function loss has given, or nil.
---@param i integer
---@param loss ms.Tensor
---@param weight? ms.Tensor|number
---@return ms.Tensor
function StepWeights:of(i, loss, weight)
  if not self.factors and i > 1 and (weight == nil) ~= (self.own[1] == nil) then
    core.raise("train: the function loss gives a weight, its third result, in some passes of a \z
      step only: give one in each")
  end
  if weight ~= nil then core.no_grad(function() add_weight(self, i, weight) end) end
  if not self.own[i] then return loss end
  local own = self.own[i]:reshape()
  local factor
  if self.factors and not (self.late and self.unit) then
    factor = self.factors:narrow(1, i, 1):reshape()
  else
    factor = core.no_grad(function() return own / self.unit end)
  end
  return weighted(loss, own, factor)
end

return weights
