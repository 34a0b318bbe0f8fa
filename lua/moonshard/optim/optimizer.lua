-- The class ms.Optimizer: parameter groups, and the parameters of an optimizer. Its methods are in
-- step.lua and saved_state.lua, too.
local core = require "moonshard.core"
local log = require "moonshard.base.log"
local module = require "moonshard.nn.module"
local options_of = require "moonshard.base.options"
local argument = options_of.argument
local joined = require "moonshard.optim.sharded_join"
local sharded_join = require "moonshard.parallel.fsdp.join"
local kinds = require "moonshard.optim.kinds"
local shard = require "moonshard.optim.shard"
local written = require "moonshard.optim.overrides"
local ownership = require "moonshard.base.ownership"
local parts = require "moonshard.nn.parts"

---@class ms.Optimizer
local Optimizer = {}
-- Fields of an optimizer that may be nil.
local unset = { shard = true, number = true, released = true, scaler = true, idle = true,
  swapped = true }
function Optimizer.__index(_, name)
  local value = Optimizer[name]
  if value ~= nil or unset[name] then return value end
  return options_of.no_field("an optimizer", name, Optimizer)
end
Optimizer.__name = "ms.Optimizer"

-- Hyper-parameters are of groups, so writing them here would change nothing.
function Optimizer.__newindex(self, name, value)
  if unset[name] then return rawset(self, name, value) end
  local kind = rawget(self, "kind")
  core.raise(("an optimizer has no field '%s' to write%s"):format(tostring(name),
    kind and kind.all_defaults[name] ~= nil
      and (": optimizer:groups()[1].%s = ... sets that of a group"):format(name)
      or "; hyper-parameters are those of its groups(): " .. "lr, weight_decay ..."))
end

local optimizers = { class = Optimizer }

---@return string
function optimizers.name_of(p, position)
  local name = p:name()
  return name ~= "" and name or ("#%d"):format(position)
end

--- Whether this rank steps the parameter.
function optimizers.is_own(self, p) return not self.shard or self.owner[p] == self.shard:rank() end

--- A gradient that is still multiplied by the loss scale would give a step, or a norm, of the wrong
--- size.
function optimizers.refuse_scaled(self_called, p, position, instead)
  if core.is_marked(p) then
    core.raise(("%s: the gradient of parameter '%s' is still multiplied by the loss scale: %s")
      :format(self_called, optimizers.name_of(p, position), instead))
  end
end

--- States of a sharded model's parameters that are together are together as well, in one storage
--- for each kind of state: ranks, which have different pieces, then allocate alike. Only an
--- optimizer of all these parameters does so.
function optimizers.place_of(self, p)
  local entry = ownership.sharded[p]
  local model = entry and entry.model
  if not model or not model.sharded then return nil end
  for _, other in ipairs(entry.together) do
    if not self.slots[other] then return nil end
  end
  self.storages[entry.together] = self.storages[entry.together] or {}
  local storages = self.storages[entry.together]
  return function(name)
    storages[name] = storages[name] or model.sharded:state(p)
    return model.sharded:state(p, storages[name])
  end
end

-- Turns a module, a list of parameters or tensors, or a list of groups into a list of groups.
local function groups_of(params)
  if module.is_module(params) then return { { params = params:parameters() } } end
  argument("optimizer", "params", params, "module|list")
  if params.params then core.raise("groups come in a list: { { params = ... }, ... }") end
  local first = params[1]
  if core.is_tensor(first) then return { { params = params } } end
  if first == nil then core.raise("an optimizer needs at least one parameter") end
  return params
end

-- A rank has a piece of a parameter that fsdp has sharded, so a kind whose step needs the whole of
-- it would compute something else.
local function refuse_shards(self, name)
  if self.shard then
    core.raise(("%s: option shard, and parameter '%s' is sharded by fsdp already: leave out \z
      the option"):format(self.kind.name, name))
  end
  if not self.kind.elementwise and not self.kind.whole then
    core.raise(("%s: parameter '%s' is sharded by fsdp, and this kind of optimizer needs whole \z
      parameters: use an elementwise kind (adamw), strategy = \"no_shard\", or ms.ddp; a kind \z
      of optim.define that computes each number by itself says elementwise = true, and one that \z
      needs whole matrices has `whole`"):format(self.kind.name, name))
  end
end

-- The same of a part of a tensor.
local function refuse_part(self, name)
  core.raise(("%s: parameter '%s' is a part of a tensor (ms.nn.split), and this kind of optimizer \z
    needs whole parameters: use an elementwise kind (adamw); a kind of optim.define that computes \z
    each number by itself says elementwise = true"):format(self.kind.name, name))
end

local function check_sharded(self, p, i, group)
  local entry, declared = ownership.sharded[p], ownership.declared[p]
  local steps_parts = self.kind.elementwise
    or self.kind.whole and (rawget(group, "whole") == false or #p:full_shape() ~= 2)
  if declared and module.is_part(p) and not steps_parts then
    core.raise(("%s: parameter '%s' is a part of a model (ms.nn.owned, shared) that fsdp has cut, \z
      and this kind of optimizer needs whole matrices: use an elementwise kind (adamw) or ms.ddp")
      :format(self.kind.name, p:name()))
  end
  if declared and declared.split and declared.split.group:size() > 1 and not steps_parts then
    refuse_part(self, p:name() ~= "" and p:name() or ("#%d"):format(i))
  end
  if not entry then return end
  if entry.shards:size() == 1 and not (entry.own and self.shard) then return end
  local name = p:name()
  refuse_shards(self, name ~= "" and name or ("#%d"):format(i))
end

-- Tells others that the optimizer steps this parameter.
local function enter(self, p)
  -- One that steps nothing keeps others from changing a parameter, and is no part of joins.
  if self.kind.observes then
    local observers = ownership.observed[p] or setmetatable({}, { __mode = "k" })
    ownership.observed[p], observers[self] = observers, true
    return
  end
  ownership.stepped[p] = self
  local entry = ownership.sharded[p]
  if entry then sharded_join.add_optimizer(entry.model, self) end
end

local function add_group(self, group)
  kinds.check(self.kind, group)
  local list = group.params
  if module.is_module(list) then list = list:parameters() end
  if type(list) ~= "table" then core.raise("a group needs params: a list of parameters") end
  local seen = {}
  for i, p in ipairs(list) do
    if not core.is_tensor(p) then
      core.raise(("parameter %d of the group is a %s, not a tensor"):format(i, type(p)))
    end
    check_sharded(self, p, i, group)
    if p:device() == "meta" then
      core.raise(("parameter '%s' is on \"meta\" and has no values to step: call materialize() of \z
        the model, or wrap it with ms.ddp or ms.fsdp, before its optimizer is made")
        :format(p:name()))
    end
    if self.slots[p] or seen[p] then
      local name = p:name()
      core.raise(("parameter %s is in two groups, or twice in one")
        :format(name ~= "" and "'" .. name .. "'" or i))
    end
    seen[p] = true
  end
  if self.shard then
    local list_names = {}
    for i, p in ipairs(list) do list_names[i] = p:name() end
    parts.refuse("option shard", list, list_names, self.shard)
    for p, rank in pairs(shard.assign(list, self.shard:size())) do self.owner[p] = rank end
  end
  -- Options that the group does not have are looked up in the optimizer's at each use.
  local live = setmetatable(group, { __index = self.defaults, __newindex = function(t, name, value)
    if self.kind.all_defaults[name] == nil and not kinds.settings[name] then
      local known = kinds.known_options(self.kind)
      core.raise(("%s: a group has no option '%s'%s"):format(self.kind.name, tostring(name),
        core.nearest(tostring(name), known)
          and (": did you mean '%s'?"):format(core.nearest(tostring(name), known))
          or "; it has " .. table.concat(known, ", ")))
    end
    rawset(t, name, value)
  end })
  live.params = list
  self.list[#self.list + 1] = live
  self.begins[live] = written.begin(live, self.kind.all_defaults)
  for _, p in ipairs(list) do
    self.count = self.count + 1
    self.slots[p] = { group = live, state = {}, position = self.count }
    self.order[self.count] = p
    if not core.is_parameter(p) then p:keep() end
    enter(self, p)
  end
end

-- Under fsdp a rank has pieces, which are vectors: a loop that asks p:dim() puts all parameters
-- into one group, and leaves another one empty.
local function warn_of_empty(self)
  local sharded
  for _, p in ipairs(self.order) do
    local entry = ownership.sharded[p]
    if entry and #entry.shape > 1 and module.is_part(p) then sharded = p end
  end
  for i, group in ipairs(sharded and self.list or {}) do
    if #group.params == 0 then
      log.warn("%s: group %d has no parameter; a piece of '%s', which is sharded, has one \z
        dimension: choose by #p:full_shape(), or with model:parameters(f)", self.kind.name, i,
        sharded:name())
    end
  end
end

--- A new optimizer of a kind (kinds.lua). meta: its metatable, if it is not of the class.
function optimizers.new(kind, params, options, meta)
  options = options or {}
  kinds.check(kind, options)
  local defaults = setmetatable({}, { __index = kind.all_defaults })
  for name, value in pairs(options) do defaults[name] = value end
  local self = setmetatable({
    kind = kind, defaults = defaults, list = {}, begins = {}, slots = {}, order = {}, count = 0,
    steps = 0, lost = 0, skipped = {}, counted = false, storages = {}, shard = options.shard,
    owner = {},
  }, meta or Optimizer)
  if self.shard then self.number = joined.number(self) end
  for _, group in ipairs(groups_of(params)) do add_group(self, group) end
  warn_of_empty(self)
  return self
end

-- For fsdp.lua: raises unless the parameter may become a piece now. name: of the parameter.
function Optimizer:_allow_piece(p, name, is_sharded)
  if is_sharded then refuse_shards(self, name) end
  if self.steps > 0 or next(self.slots[p].state) then
    core.raise(("fsdp: parameter '%s' was stepped already by the optimizer of then_optimizer: \z
      wrap the model before the first step"):format(name))
  end
end

--- For scripts: another optimizer takes the parameters over. This one may still be asked for its
--- groups.
function Optimizer:_withdraw()
  for _, p in ipairs(self.order) do
    if ownership.stepped[p] == self then ownership.stepped[p] = nil end
    local entry = ownership.sharded[p]
    if entry then sharded_join.remove_optimizer(entry.model, self) end
  end
end

--- After _withdraw: the optimizer steps its parameters after all.
function Optimizer:_return() for _, p in ipairs(self.order) do enter(self, p) end end

---@return ms.ParamGroup[]
function Optimizer:groups() return self.list end

---@param group ms.ParamGroup
function Optimizer:add_group(group)
  argument("add_group", "group", group, "table")
  add_group(self, group)
end

return optimizers
