-- Averages parameters over ranks in some steps: local SGD with one period, with several group
-- sizes, or with an elastic pull towards a common centre.
local core = require "moonshard.core"
local log = require "moonshard.base.log"
local module = require "moonshard.nn.module"
local options_of = require "moonshard.base.options"
local ownership = require "moonshard.base.ownership"
local check = options_of.check

---@class ms.Averager
local Averager = {}
Averager.__index = Averager
Averager.__name = "ms.Averager"

local function whole(value, least, what)
  if math.type(value) ~= "integer" or value < least then
    core.raise(("averager: %s must be a whole number of %d or more, not %s")
      :format(what, least, tostring(value)))
  end
  return value
end

-- { { period, group } ... } in ascending order, from { { period, ranks } ... }.
local function hierarchy(periods, group)
  if type(periods) ~= "table" or #periods == 0 then
    core.raise "averager: periods is a list of { period, ranks }"
  end
  local levels, size = {}, group:size()
  for i, pair in ipairs(periods) do
    if type(pair) ~= "table" then
      core.raise(("averager: periods[%d] must be { period, ranks }, not a %s")
        :format(i, type(pair)))
    end
    local period, ranks = whole(pair[1], 1, ("periods[%d][1]"):format(i)),
      whole(pair[2], 1, ("periods[%d][2]"):format(i))
    if i > 1 and (period <= periods[i - 1][1] or ranks <= periods[i - 1][2]) then
      core.raise(("averager: periods[%d]: periods and numbers of ranks must ascend"):format(i))
    end
    if size % ranks ~= 0 then
      core.raise(("averager: periods[%d]: %d ranks do not divide into blocks of %d")
        :format(i, size, ranks))
    end
    levels[i] = { period = period, group = ranks == size and group or (group:levels(ranks)) }
  end
  if periods[#periods][2] ~= size then
    core.raise(("averager: the last of periods averages %d ranks; it must be all %d")
      :format(periods[#periods][2], size))
  end
  return levels
end

---@param options ms.AveragerOptions
---@return ms.Averager
local function averager(options)
  local o = check("averager", options, { "period", "periods", "elastic", "warmup", "group" })
  options_of.check_group("averager", "group", o.group)
  local group = o.group or core.world()
  if (o.period == nil) == (o.periods == nil) then
    core.raise "averager: either period or periods is needed"
  end
  local self = setmetatable(
    { group = group, warmup = whole(o.warmup or 0, 0, "warmup"), steps = 0 }, Averager)
  if o.periods then
    if o.elastic then core.raise "averager: elastic goes with period, not with periods" end
    self.levels = hierarchy(o.periods, group)
  else
    self.period = whole(o.period, 1, "period")
    if o.period == 1 and not o.elastic then
      log.warn "averager: with a period of 1 parameters are averaged in every step: averaging \z
        gradients (ms.ddp) costs the same"
    end
  end
  if o.elastic ~= nil
      and (type(o.elastic) ~= "number" or not (o.elastic > 0 and o.elastic <= 1)) then
    core.raise(("averager: elastic must be a number above 0 and up to 1, not %s")
      :format(tostring(o.elastic)))
  end
  self.elastic = o.elastic
  return self
end

-- Ranks have different parts of a sharded parameter: the mean of those means nothing.
local function refuse_pieces(list)
  for _, p in ipairs(list) do
    local entry = ownership.sharded[p]
    if entry and (entry.own or entry.shards:size() > 1) then
      core.raise(("averager: parameter '%s' is sharded by fsdp: ranks share one copy of it, so \z
        there is nothing to average; use strategy = \"no_shard\" or ms.ddp"):format(p:name()))
    end
  end
  return list
end

-- The tensors of a module, a list, or nested tables of them, in an order that is the same on all
-- ranks.
local function tensors_of(params)
  if module.is_module(params) then return refuse_pieces(params:parameters()) end
  local list = {}
  local function walk(value, path)
    if core.is_tensor(value) then list[#list + 1] = value
    elseif type(value) == "table" then
      local keys = {}
      for key in pairs(value) do keys[#keys + 1] = key end
      table.sort(keys, function(a, b)
        if type(a) ~= type(b) then return type(a) < type(b) end
        return a < b
      end)
      for _, key in ipairs(keys) do walk(value[key], path .. "." .. tostring(key)) end
    else core.raise(("averager: params%s is a %s, not a tensor"):format(path, type(value))) end
  end
  walk(params, "")
  if #list == 0 then core.raise "averager: there are no parameters" end
  return refuse_pieces(list)
end

-- f(flat, views, tensors) for the tensors of each dtype, packed.
local function each_dtype(tensors, f)
  local order, by_dtype = {}, {}
  for _, t in ipairs(tensors) do
    local dtype = t:dtype()
    if not by_dtype[dtype] then
      by_dtype[dtype] = {}
      order[#order + 1] = dtype
    end
    table.insert(by_dtype[dtype], t)
  end
  core.no_grad(function()
    for _, dtype in ipairs(order) do
      local flat, views = core.pack(by_dtype[dtype])
      f(flat, views, by_dtype[dtype], dtype)
    end
  end)
end

local function average(group, tensors)
  if group:size() == 1 then return end
  each_dtype(tensors, function(flat, views, list)
    group:all_reduce(flat, "avg"):value()
    for i, t in ipairs(list) do t:copy_(views[i]) end
  end)
end

-- d = alpha (p - c); p -= d; c += the sum of all ranks' d.
local function pull(self, tensors)
  self.centre = self.centre or {}
  each_dtype(tensors, function(flat, _, list, dtype)
    local centre = self.centre[dtype]
    if not centre then
      -- The first centre is rank 0's parameters.
      centre = flat:clone():keep()
      self.group:broadcast(centre, 0):value()
      self.centre[dtype] = centre
    end
    if centre:numel() ~= flat:numel() then
      core.raise(("averager: there were %d numbers of %s before, and now there are %d")
        :format(centre:numel(), dtype, flat:numel()))
    end
    local difference, at = flat:sub(centre):mul_(self.elastic), 0
    for _, t in ipairs(list) do
      t:sub_(difference:narrow(1, at + 1, t:numel()):view(table.unpack(t:shape())))
      at = at + t:numel()
    end
    centre:add_(self.group:all_reduce(difference):value())
  end)
end

-- The group that averages in this step, or nil.
local function group_now(self)
  local step = self.steps
  if step < self.warmup then return nil end
  if self.period then return (step - self.warmup) % self.period == 0 and self.group or nil end
  for i = #self.levels, 1, -1 do
    if step % self.levels[i].period == 0 then return self.levels[i].group end
  end
end

---@param params ms.Module|ms.Parameter[]|table nested tables of tensors will do
---@return boolean averaged
function Averager:step(params)
  local group, tensors = group_now(self), tensors_of(params)
  if self.elastic and group then pull(self, tensors)
  elseif group then average(group, tensors) end
  self.steps = self.steps + 1
  return group ~= nil
end

---@return table
function Averager:state()
  local centre
  for dtype, t in pairs(self.centre or {}) do
    centre = centre or {}
    centre[dtype] = t
  end
  return module.copied { steps = self.steps, centre = centre }
end

---@param saved table
function Averager:load_state(saved)
  if type(saved) ~= "table" or math.type(saved.steps) ~= "integer" then
    core.raise "load_state: this is no state of an averager"
  end
  self.steps, self.centre = saved.steps, nil
  for dtype, t in pairs(saved.centre or {}) do
    self.centre = self.centre or {}
    self.centre[dtype] = core.no_grad(function() return t:clone():keep() end)
  end
end

options_of.methods(Averager, "an averager")

return averager
