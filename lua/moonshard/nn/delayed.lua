-- Models that were made on "meta": making their values later, with the bits that they would have
-- without it. A tensor that was filled or drawn, and then changed element by element, has a record
-- of that (engine/tensor/initial.c). One that was loaded is read from its file. For others the
-- class of its module has a method reset(self) that computes them; it runs with the random numbers
-- that it had in init.
local coded = require "moonshard.nn.coded"
local core = require "moonshard.core"
local module = require "moonshard.nn.module"
local names = require "moonshard.nn.names"
local ownership = require "moonshard.base.ownership"
local parts = require "moonshard.nn.parts"
local piece = require "moonshard.parallel.shard_piece"

local delayed = {}

--- What is to be made of a model.
---@class ms.Delayed
--- tensor on "meta" -> its record, or the source that it is read from; false: a reset computes it
---@field records table<ms.Tensor, any>
---@field tensors ms.Tensor[] those on "meta", in order
---@field resets ms.DelayedReset[]

---@class ms.DelayedReset
---@field object ms.Module
---@field computes { name: string, tensor: ms.Tensor }[] what has no record

local function class_of(object) return getmetatable(object).class.class_name end

--- From now on the values of a tensor on "meta" come from a file. The record of how its module
--- would have made them is dropped.
---@param t ms.Tensor
---@param source ms.Source
function delayed.read_later(t, source)
  core.no_grad(function()
    t:copy_(core.empty { dtype = t:dtype(), device = "meta", table.unpack(t:shape()) })
  end)
  module.unread[t] = { source = source, version = core.tensor_version(t) }
end

-- Where the values of a tensor are read, if they are.
local function source_of(what, t, name)
  local unread = module.unread[t]
  if not unread then return nil end
  if unread.version ~= core.tensor_version(t) then
    core.raise(("%s: '%s' was written on \"meta\" after its file was opened, and this write \z
      would be lost: change it after it has its values"):format(what, name))
  end
  return unread.source
end

-- A reset that does not exist is reported with all else that is wrong with its module.
local function add(plan, what, prefix, object, key, t)
  local name = names.join(prefix, key)
  local record = parts.initial(what, t, name) or source_of(what, t, name) or ownership.coded[t]
    or core.initializer(t)
  plan.tensors[#plan.tensors + 1], plan.records[t] = t, record or false
  if record then return end
  local last = plan.resets[#plan.resets]
  if not last or last.object ~= object then
    last = { object = object, computes = {} }
    plan.resets[#plan.resets + 1] = last
  end
  table.insert(last.computes, { name = name, tensor = t })
end

--- Finds what of a model is on "meta". Raises if some value cannot be made.
---@param what string the function that users call, for messages
---@param model ms.Module
---@return ms.Delayed
function delayed.find(what, model)
  local plan, seen = { tensors = {}, records = {}, resets = {} }, {}
  for prefix, object in model:modules() do
    local state = getmetatable(object)
    for _, key in ipairs(state.order) do
      local t = state.fields[key]
      if core.is_tensor(t) and not seen[t] and t:device() == "meta" then
        add(plan, what, prefix, object, key, t)
      end
      if core.is_tensor(t) then seen[t] = true end
    end
  end
  for _, one in ipairs(plan.resets) do
    if not one.object.reset then
      core.raise(("%s: nothing records how '%s' on \"meta\" gets its values, as they are computed \z
        in init: give %s a method reset(self) that computes them, which init calls too")
        :format(what, one.computes[1].name, class_of(one.object)))
    end
  end
  return plan
end

-- Runs f with the engine's own device, without recording.
local function outside_meta(f) core.no_grad(function() core.on_device("cpu", f) end) end

--- Makes the recorded values of these tensors, which have memory. Raises what cannot be read.
---@param plan ms.Delayed
---@param tensors ms.Tensor[]
function delayed.initialize(plan, tensors)
  outside_meta(function()
    for _, t in ipairs(tensors) do
      local record = plan.records[t]
      if parts.is_initial(record) then parts.initialize(t, record)
      elseif piece.is_source(record) then
        piece.put(t:detach():view(-1), record, 0, t:numel())
        module.unread[t] = nil
      elseif record and ownership.coded[t] == record then coded.initialize(t, record)
      elseif record then core.initialize(t, record) end
    end
  end)
end

--- The tensors of a module that a reset may write or use.
---@param one ms.DelayedReset
---@return ms.Tensor[]
function delayed.tensors_of(one)
  local state, list = getmetatable(one.object), {}
  for _, key in ipairs(state.order) do
    if core.is_tensor(state.fields[key]) then list[#list + 1] = state.fields[key] end
  end
  return list
end

-- The module's tensors that a reset has to leave as they are: those that had memory, a record or a
-- file. Their versions; and copies of those that could not be made again.
local function others_of(plan, one)
  local computes, others = {}, {}
  for _, item in ipairs(one.computes) do computes[item.tensor] = true end
  for _, t in ipairs(delayed.tensors_of(one)) do
    if not computes[t] then
      others[#others + 1] = {
        tensor = t, version = core.tensor_version(t),
        copy = not plan.records[t] and core.no_grad(function() return t:detach():clone() end),
      }
    end
  end
  return others
end

-- Undoes what a reset wrote to these.
local function put_back(plan, others)
  for _, other in ipairs(others) do
    local t = other.tensor
    if core.tensor_version(t) ~= other.version then
      if other.copy then core.no_grad(function() t:copy_(other.copy) end)
      else delayed.initialize(plan, { t }) end
    end
  end
end

--- Runs one of the resets. All tensors of its module have memory and, but for those that it
--- computes, their values; these it cannot change.
---@param plan ms.Delayed
---@param what string
---@param one ms.DelayedReset
function delayed.reset(plan, what, one)
  local counter, before, versions = getmetatable(one.object).counter, { core.random_state() }, {}
  for i, item in ipairs(one.computes) do versions[i] = core.tensor_version(item.tensor) end
  local others = others_of(plan, one)
  local scope <close> = setmetatable({}, { __close = function() -- luacheck: ignore scope
    core.set_random_state(table.unpack(before))
  end })
  if counter then core.set_random_state(table.unpack(counter)) end
  outside_meta(function() one.object:reset() end)
  for i, item in ipairs(one.computes) do
    if core.tensor_version(item.tensor) == versions[i] then
      core.raise(("%s: reset of %s did not write '%s', which has no values without it")
        :format(what, class_of(one.object), item.name))
    end
  end
  put_back(plan, others)
end

--- Gives these tensors memory, and those of them that have a record their values.
---@param plan ms.Delayed
---@param tensors ms.Tensor[]
function delayed.make(plan, tensors)
  for _, t in ipairs(tensors) do core.take_memory(t) end
  delayed.initialize(plan, tensors)
end

--- Makes all of a model. Nothing happens to tensors with memory.
---@param what string
---@param model ms.Module
function delayed.materialize(what, model)
  local plan = delayed.find(what, model)
  delayed.make(plan, plan.tensors)
  for _, one in ipairs(plan.resets) do delayed.reset(plan, what, one) end
end
ownership.functions.materialize = delayed.materialize

return delayed
