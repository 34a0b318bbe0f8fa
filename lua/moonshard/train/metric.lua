-- ms.metric: named series with one value for each step. Values are read some steps later, so that
-- the host does not wait.
local core = require "moonshard.core"
require "moonshard.parallel.group"                -- methods of the world
local options_of = require "moonshard.base.options"
local steps = require "moonshard.train.steps"

local metric = {}

---@class ms.Metric
local Metric = {}
Metric.__index = Metric
Metric.__name = "ms.Metric"

local all, order = {}, {}
local REMEMBERED = 64                     -- steps that lag() can look back

local combine = {
  avg = function(a, b) return a + b end,
  sum = function(a, b) return a + b end,
  prod = function(a, b) return a * b end,
  min = function(a, b)
    if core.is_tensor(a) then return a:minimum(b) end
    if core.is_tensor(b) then return b:minimum(a) end
    return a ~= a and a or b ~= b and b or math.min(a, b)    -- a nan stays, as in tensors
  end,
  max = function(a, b)
    if core.is_tensor(a) then return a:maximum(b) end
    if core.is_tensor(b) then return b:maximum(a) end
    return a ~= a and a or b ~= b and b or math.max(a, b)
  end,
}

-- For each op: the neutral value, which a rank without a value contributes, and the function that
-- combines the ranks' values.
local over_ranks = {
  avg = { 0, function(values) return values:sum(1) end },
  sum = { 0, function(values) return values:sum(1) end },
  min = { math.huge, function(values) return values:min(1) end },
  max = { -math.huge, function(values) return values:max(1) end },
  prod = { 1, function(values)
    local product = values:select(1, 1)
    for i = 2, #values do product = product * values:select(1, i) end
    return product
  end },
}

local function scalar(value)
  return core.is_tensor(value) and value:reshape(1) or core.full(value, { 1 })
end

-- Combines all metrics of a step with one all-gather, of each metric's value and the number of
-- times that it was pushed. Values are combined in rank order.
local function close_together(step, world)
  local own = {}
  for _, self in ipairs(order) do
    own[#own + 1] = scalar(self.count > 0 and self.value or over_ranks[self.op][1])
    own[#own + 1] = core.full(self.count, { 1 })
  end
  local everyones = world:all_gather(core.cat(own):unsqueeze(1)):value()
  for i, self in ipairs(order) do
    local value, count = over_ranks[self.op][2](everyones:select(2, 2 * i - 1)),
      everyones:select(2, 2 * i):sum(1)
    if self.op == "avg" then value = value / count end
    self.values[step] = { value = core.probe(value), count = core.probe(count) }
    self.values[step - REMEMBERED] = nil
    self.value, self.count = nil, 0
  end
end

local closed                              -- the end of step at which values were completed last

--- Turns the values of a step into numbers or probes, before the step's tensors are released.
--- Called once in each step, on all ranks.
---@param step integer
function metric.close(step)
  if closed == steps.ends or #order == 0 then return end
  closed = steps.ends
  local world = core.world()
  if world:size() > 1 then
    core.no_grad(function() close_together(step, world) end)
    return
  end
  for _, self in ipairs(order) do
    if self.count > 0 then
      local value = self.value
      if self.op == "avg" and self.count > 1 then value = value / self.count end
      self.values[step] = core.is_tensor(value) and core.probe(value) or value
      self.value, self.count = nil, 0
    end
    self.values[step - REMEMBERED] = nil
  end
end

---@param name string
---@param op? ms.Op "avg" unless given
---@return ms.Metric
function metric.metric(name, op)
  if type(name) ~= "string" or name == "" then
    core.raise("metric: a name is expected, not " .. (name == "" and "an empty one" or type(name)))
  end
  if op ~= nil and not combine[op] then
    core.raise(("unknown op '%s' of a metric: known are sum, avg, min, max, prod")
      :format(tostring(op)))
  end
  local found = all[name]
  if found then
    if op and found.op ~= op then
      core.raise(("metric '%s' exists with op %s, not %s"):format(name, found.op, op))
    end
    return found
  end
  if #order == 0 then steps.on_end(metric.close) end
  local self = setmetatable({ name = name, op = op or "avg", values = {}, count = 0 }, Metric)
  all[name] = self
  order[#order + 1] = self
  return self
end

---@param value ms.Number
function Metric:push(value)
  if core.is_tensor(value) then
    if value:numel() ~= 1 then
      core.raise(("metric '%s': push one element, not %s"):format(self.name, tostring(value)))
    end
    value = core.no_grad(function() return value:detach():reshape():to "f32":keep() end)
  elseif type(value) ~= "number" then
    core.raise(("metric '%s': push a number or a one-element tensor, not %s")
      :format(self.name, type(value)))
  end
  if self.count > 0 then
    value = core.no_grad(function() return combine[self.op](self.value, value) end)
  end
  self.value = core.is_tensor(value) and value:keep() or value
  self.count = self.count + 1
end

local function number(value)
  if type(value) == "table" then return value.count:value() > 0 and value.value:value() or nil end
  return type(value) == "userdata" and value:value() or value
end

---@param back integer 1 or more
---@return number?
function Metric:lag(back)
  if math.type(back) ~= "integer" or back < 1 then
    core.raise("lag: a number of steps of 1 or more; the value of this step is not known yet")
  end
  if back >= REMEMBERED then core.raise(("lag: at most %d steps back"):format(REMEMBERED - 1)) end
  return number(self.values[steps.step() - back])
end

options_of.methods(Metric, "a metric")

--- The values of all metrics of a step, by name.
---@param step integer
---@return table<string, number>
function metric.values(step)
  local result = {}
  for _, self in ipairs(order) do result[self.name] = number(self.values[step]) end
  return result
end

return metric
