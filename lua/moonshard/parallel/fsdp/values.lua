-- The values that a sharded model begins with: rank 0's, or those of a model on "meta", which are
-- made, or read from files, when it is sharded.
local core = require "moonshard.core"
local delayed = require "moonshard.nn.delayed"
local listed = require "moonshard.nn.listed"
local module = require "moonshard.nn.module"
local piece = require "moonshard.parallel.shard_piece"
local state = require "moonshard.parallel.fsdp.state"

local values = {}

--- All ranks get the buffers of rank `root`, but for ignored ones. They are looked up each time,
--- since modules may assign them again.
---@param s ms.FSDPState
---@param root integer
function values.share_buffers(s, root)
  local buffers, list = s.wrapped:buffers(), {}
  for name in pairs(buffers) do
    if not listed.has(s.options.ignored, name) then list[#list + 1] = name end
  end
  table.sort(list)
  for i, name in ipairs(list) do list[i] = buffers[name] end
  if #list > 0 then core.ddp_broadcast(s.group, list, root) end
end

--- All ranks begin with rank 0's values; ranks that share parameters alone, with those of their
--- first. What is on "meta" has none yet, and what is ignored keeps its own.
---@param s ms.FSDPState
function values.share_parameters(s)
  local tensors, own, group = {}, {}, nil
  for _, item in ipairs(s.wrapped:named_parameters()) do
    group = group or s.groups[item.name]
    local here = s.later.records[item.parameter] == nil
    if here and not listed.has(s.options.ignored, item.name) then
      table.insert(s.groups[item.name] and own or tensors, item.parameter)
    end
  end
  if #tensors > 0 then core.ddp_broadcast(s.group, tensors, 0) end
  if #own > 0 then core.ddp_broadcast(group, own, 0) end
end

--- Of a model that was made on "meta": the values of what is not sharded, which each rank makes.
---@param s ms.FSDPState
function values.make_unsharded(s)
  local sharded, list = {}, {}
  for _, unit in ipairs(s.units) do
    for _, p in ipairs(unit.parameters) do sharded[p] = unit end
  end
  for _, t in ipairs(s.later.tensors) do if not sharded[t] then list[#list + 1] = t end end
  delayed.make(s.later, list)
  s.later.unit_of = sharded
end

-- The unit that a reset needs whole: that of the parameters that it computes, else that of its
-- module's others; nil: it needs none.
local function unit_of_reset(s, one)
  for _, item in ipairs(one.computes) do
    if s.later.unit_of[item.tensor] then return s.later.unit_of[item.tensor] end
  end
  for _, t in ipairs(delayed.tensors_of(one)) do
    if s.later.unit_of[t] then return s.later.unit_of[t] end
  end
end

--- The values of parameters that were on "meta", but for those in files, one unit at a time: no
--- rank has more than its shards and one unit in memory.
---@param s ms.FSDPState
function values.make_units(s)
  local resets, seen = {}, {}
  for _, one in ipairs(s.later.resets) do
    local unit = unit_of_reset(s, one)
    if unit then
      resets[unit] = resets[unit] or {}
      table.insert(resets[unit], one)
      for _, t in ipairs(delayed.tensors_of(one)) do seen[t] = true end
    else delayed.reset(s.later, "fsdp", one) end
  end
  for _, unit in ipairs(s.units) do
    local list, is_read = {}, false
    for _, p in ipairs(unit.parameters) do
      local record = s.later.records[p]
      if piece.is_source(record) then is_read = true end
      -- Of what is in files, only what a reset may use is read here.
      if record ~= nil and (seen[p] or not piece.is_source(record)) then list[#list + 1] = p end
    end
    if #list == 0 and not resets[unit] then
      if is_read then s.sharded:have_values(unit.index) end
    else
      s.sharded:begin_values(unit.index)
      delayed.initialize(s.later, list)
      for _, one in ipairs(resets[unit] or {}) do delayed.reset(s.later, "fsdp", one) end
      s.sharded:end_values(unit.index, s.options.init_sync ~= false)
    end
  end
end

--- The values of parameters that were on "meta" and are in files: each rank reads what it has.
--- Raises the first failure of any rank, on all of them.
---@param s ms.FSDPState
function values.read_parameters(s)
  local given = {}
  for _, item in ipairs(s.wrapped:named_parameters()) do
    local record = s.later.records[item.parameter]
    if piece.is_source(record) and s.unit_of[item.parameter] then
      given[item.name], module.unread[item.parameter] = record, nil
    end
  end
  s.later = nil
  -- Parameters of group_of may be read by some ranks alone.
  if next(given) or next(s.groups) then state.take_sources(s, given) end
end

return values
