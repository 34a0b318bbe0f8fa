-- States of models of which ranks have parts (parts.lua): whole tensors, put together on rank 0 of
-- the world one at a time; what each rank has of them; and loading, of which each rank takes what
-- it has.
--
-- A plan says which ranks have what of each tensor. It is made from what all ranks tell, so it is
-- the same everywhere. Of ranks that have the same elements the lowest one sends or saves them, and
-- all must hold the same bits.
local agree = require "moonshard.parallel.agree"
local core = require "moonshard.core"
local module = require "moonshard.nn.module"
local named = require "moonshard.base.named"
local options_of = require "moonshard.base.options"
local ownership = require "moonshard.base.ownership"
local parts = require "moonshard.nn.parts"
local piece = require "moonshard.parallel.shard_piece"
local region = require "moonshard.parallel.region"
local sorted_pairs = require "moonshard.base.sorted_pairs"

local whole = {}

--- What this rank has of a tensor.
---@class ms.PartItem
---@field name string
---@field dtype ms.DType
---@field shape integer[] of the whole
---@field region? ms.Region nil: of all of it
---@field first integer of this rank's elements, in the part
---@field count integer
---@field tensor? ms.Tensor the model's handle
---@field flat ms.Tensor these elements, 1-D, in their memory
---@field is_shard? boolean flat is the memory of a shard of fsdp, and tensor may be on none
---@field sharded? table of the core: the sharded model, which is told that its shards are written

--- A tensor of the model, and which ranks have it.
---@class ms.PlanItem
---@field name string
---@field dtype ms.DType
---@field shape integer[]
---@field tensor? ms.Tensor this rank's handle
---@field parts { rank: integer, first: integer, count: integer, region?: ms.Region }[]

--- Whether a model has declared parameters.
---@param object ms.Module
---@return boolean
function whole.has(object)
  if not module.is_module(object) then return false end
  for _, item in ipairs(object:named_parameters()) do
    if ownership.declared[item.parameter] then return true end
  end
  return false
end

--- The region that a parameter is of a larger tensor; nil: it is one.
---@param p ms.Tensor
---@return ms.Region?
function whole.region_of(p)
  local own = ownership.declared[p]
  return own and own.split and own.split.region
end

--- What this rank has of a module, in the order of its names. Models below it may be sharded.
---@param object ms.Module
---@return ms.PartItem[]
function whole.items(object)
  local list, of_shards = {}, {}
  for _, saved in ipairs(module.saved(object)) do
    local t, r = saved.tensor, whole.region_of(saved.tensor)
    local s = ownership.sharded[t] and ownership.sharded[t].model
    if s then of_shards[s] = of_shards[s] or ownership.functions.items_of_shards(s) end
    local item = s and of_shards[s][t]
    if item then item.name = saved.name end
    list[#list + 1] = item or {
      name = saved.name, tensor = t, dtype = t:dtype(), shape = r and r.shape or t:shape(),
      region = r, first = 0, count = t:numel(),
      flat = core.no_grad(function() return t:detach():contiguous():view(-1) end),
    }
  end
  return list
end

------------------------------------------------------------------------------------------- plans

local function key_of(one)
  return ("%d+%d %s"):format(one.first, one.count, one.region and one.region.text or "")
end

local function tell(items)
  local told, flats = core.json_list {}, {}
  for i, item in ipairs(items) do flats[i] = item.flat end
  local hashes = #flats > 0 and not core.is_sim() and core.hashes(flats) or {}
  for i, item in ipairs(items) do
    local r = item.region
    told[i] = {
      name = item.name, dtype = item.dtype, shape = core.json_list { table.unpack(item.shape) },
      first = item.first, count = item.count, hash = hashes[i] and ("%016x"):format(hashes[i]),
      region = r and region.written(r),
    }
  end
  return core.json_encode { told = told }
end

-- A name as messages show it: part_states.lua puts a parameter and a key together.
local function shown(name) return (name:gsub("\n", "/")) end

-- Adds to the plan what one rank has told of a tensor. Raises what contradicts the ranks before.
local function add(what, found, one, rank, keys)
  one.region = one.region and region.read(one.region, one.shape)
  local before = found[one.name]
  if not before then
    before = { name = one.name, dtype = one.dtype, shape = one.shape, parts = {}, rank = rank }
    found[one.name], keys[one.name] = before, {}
  elseif before.dtype ~= one.dtype or not piece.same_shape(before.shape, one.shape) then
    core.raise(("%s: '%s' is %s [%s] on rank %d, and %s [%s] on rank %d"):format(what,
      shown(one.name),
      before.dtype, table.concat(before.shape, ", "), before.rank, one.dtype,
      table.concat(one.shape, ", "), rank), 5)
  end
  local key = key_of(one)
  local same = keys[one.name][key]
  if same and same.hash ~= one.hash then
    core.raise(("%s: '%s' of rank %d differs from that of rank %d, and one model is saved: what \z
      is not split, owned or shared must be equal on all ranks"):format(what, shown(one.name), rank,
      same.rank), 5)
  elseif not same then
    keys[one.name][key] = { rank = rank, hash = one.hash }
    if one.count > 0 or piece.elements(one.shape) == 0 then
      table.insert(before.parts,
        { rank = rank, first = one.first, count = one.count, region = one.region })
    end
  end
end

--- Which ranks have what of each tensor, by name in order; and for this rank, by name, whether it
--- is the one that saves its elements. Raises where ranks contradict each other, or have not all of
--- a tensor. All ranks of the world call it, and it blocks until the tensors have their values.
---@param what string the call's name, for messages
---@param items ms.PartItem[]
---@return ms.PlanItem[]
---@return table<string, boolean>
function whole.plan(what, items)
  local world, found, keys, list, saves = core.world(), {}, {}, {}, {}
  local text = tell(items)
  local all = world:size() > 1
    and world:_share_texts(text, ("all ranks call %s"):format(what)) or { text }
  for r, one in ipairs(all) do
    for _, told in ipairs(core.json_decode(one).told) do add(what, found, told, r - 1, keys) end
  end
  for name, one in sorted_pairs(found) do
    local problem = world:_has_others() and piece.gap(one.parts, one.shape)
    if problem then
      core.raise(("%s: '%s': %s: no rank has them"):format(what, shown(name), problem), 5)
    end
    list[#list + 1] = one
  end
  for _, item in ipairs(items) do
    found[item.name].tensor = item.tensor
    saves[item.name] = keys[item.name][key_of(item)].rank == world:rank()
  end
  return list, saves
end

--- Puts a tensor of a plan together on rank 0 of the world, in `flat` there (1-D, of its length and
--- dtype). All ranks call it, for the same tensors in one order.
---@param one ms.PlanItem
---@param own? ms.PartItem
---@param flat? ms.Tensor
function whole.collect(one, own, flat)
  local world = core.world()
  local rank = world:rank()
  core.no_grad(function()
    for _, part in ipairs(one.parts) do
      local values
      if part.rank == rank then values = own.flat end
      if rank == 0 and part.rank ~= 0 then
        values = core.empty { part.count, dtype = one.dtype }
        world:recv(values, part.rank):value()
      elseif part.rank == rank and rank ~= 0 then world:send(values, 0) end
      if rank == 0 and part.region then
        region.put(flat, part.region, part.first, part.count, values)
      elseif rank == 0 then flat:narrow(1, part.first + 1, part.count):copy_(values) end
    end
  end)
end

local function by_name(items)
  local found = {}
  for _, item in ipairs(items) do found[item.name] = item end
  return found
end

--- All tensors on rank 0 of the world, as new ones; elsewhere an empty table. All ranks call it.
---@param what string
---@param items ms.PartItem[]
---@return table<string, ms.Tensor>
function whole.full(what, items)
  local found, own = named.table {}, by_name(items)
  for _, one in ipairs((whole.plan(what, items))) do
    local flat
    if core.world():rank() == 0 then
      flat = core.empty { piece.elements(one.shape), dtype = one.dtype }
      found[one.name] = core.no_grad(function() return flat:view(table.unpack(one.shape)) end)
    end
    whole.collect(one, own[one.name], flat)
  end
  return found
end

--- What this rank has, as pieces in their memory. All ranks call it.
---@param what string
---@param items ms.PartItem[]
---@return table<string, ms.Piece>
function whole.pieces(what, items)
  local found, _, saves = named.table {}, whole.plan(what, items)
  for _, item in ipairs(items) do
    found[item.name] =
      piece.new(item.flat, item.shape, item.first, saves[item.name], item.region)
  end
  return found
end

--- state() of a model that is not sharded. All ranks call it.
---@param object ms.Module
---@param kind "full"|"sharded"
---@param live boolean
---@return table<string, ms.Tensor|ms.Piece>
function whole.state(object, kind, live)
  local items = whole.items(object)
  if kind == "full" then return whole.full("state", items) end
  local found = whole.pieces("state", items)
  return live and found or module.copied(found)
end

--- Writes all tensors on rank 0 of the world, where begin(list) gives what writes them. All ranks
--- call it, and have the same result.
---@param what string
---@param items ms.PartItem[]
---@param begin fun(list: ms.PlanItem[]): table?, string?, string?
---@return true?
---@return string? message
---@return string? code
function whole.write(what, items, begin)
  local world, own = core.world(), by_name(items)
  local list = whole.plan(what, items)
  local writer, message, code
  if world:rank() == 0 then writer, message, code = begin(list) end
  message, code = agree(world, message, code, ("all ranks call %s"):format(what))
  if message then return core.refuse(message, code) end
  for i, one in ipairs(list) do
    local flat = writer and core.empty { piece.elements(one.shape), dtype = one.dtype }
    whole.collect(one, own[one.name], flat or nil)
    if writer and not message then message, code = select(2, writer:write(i, flat)) end
    if flat then core.collect() end
  end
  if writer and not message then message, code = select(2, writer:commit()) end
  message, code = agree(world, message, code, ("all ranks call %s"):format(what))
  if message then return core.refuse(message, code) end
  return true
end

----------------------------------------------------------------------------------------- loading

-- Names of all ranks' tensors. All ranks call it.
local function all_names(items)
  local names, list = {}, core.json_list {}
  for i, item in ipairs(items) do list[i] = item.name end
  local world, text = core.world(), core.json_encode(list)
  for _, one in ipairs(world:size() > 1 and world:_share_texts(text, "load_state") or { text }) do
    for _, name in ipairs(core.json_decode(one)) do names[name] = true end
  end
  return names
end

local function describe(item)
  local text = ("%s [%s]"):format(item.dtype, table.concat(item.shape, ", "))
  return item.region and ("%s, of which %s"):format(text, item.region.text) or text
end

--- Whether a value of a state can be that of an item.
---@param item ms.PartItem
---@param value any
---@return boolean
function whole.fits(item, value)
  return piece.is_tensor(value) and piece.same_shape(item.shape, piece.shape_of(value))
    and (not piece.is(value) or piece.has(value, item.first, item.count, item.region))
end

--- A text about what of a state does not fit; nil if all does.
---@param items ms.PartItem[]
---@param given table<string, any>
---@param partial? boolean
---@return string?
function whole.problem(items, given, partial)
  local names, missing, unknown, wrong = all_names(items), {}, {}, {}
  for _, item in ipairs(items) do
    local value = given[item.name]
    if value == nil then missing[#missing + 1] = item.name
    elseif not whole.fits(item, value) then
      wrong[#wrong + 1] = ("%s (%s here, %s given)"):format(item.name, describe(item),
        tostring(value))
    end
  end
  for name in pairs(given) do if not names[name] then unknown[#unknown + 1] = tostring(name) end end
  return module.misfit(wrong, missing, unknown, partial)
end

-- Copies a value to what this rank has of it. On "meta" it is read later.
local function take(item, value)
  local t = item.tensor
  if t and not item.is_shard and t:device() == "meta" then
    if not piece.is_source(value) then
      core.raise(("load_state: '%s' is a part on \"meta\": call materialize() before, or load a \z
        file"):format(item.name))
    end
    return parts.note_initial(t, value, item.region)
  end
  local flat = t and not item.is_shard
    and core.no_grad(function() return t:detach():view(-1) end) or item.flat
  piece.put(flat, value, item.first, item.count, item.region)
end

-- Values that rank 0 alone gives go to all ranks, one at a time, and each takes what it has.
local function spread(items, given, partial)
  local world, own = core.world(), by_name(items)
  for _, one in ipairs((whole.plan("load_state", items))) do
    local value = given[one.name]
    local has = world:_share("sum", "i64", { value and 1 or 0 }, "load_state")[1] > 0
    if has then
      local t = value and core.no_grad(function()
        return value:detach():to(one.dtype):contiguous():clone()
      end) or core.empty { dtype = one.dtype, table.unpack(one.shape) }
      core.no_grad(function() world:broadcast(t, 0):value() end)
      if own[one.name] then take(own[one.name], t) end
    elseif not partial then core.raise(("load_state: missing: %s"):format(one.name)) end
  end
end

-- Sharded models gather what was written.
local function note_written(items)
  local told = {}
  for _, item in ipairs(items) do
    if item.sharded and not told[item.sharded] then
      told[item.sharded] = true
      item.sharded:note_written()
    end
  end
end

--- Loads a state by name. Each rank gives values of at least what it has: whole tensors, pieces
--- that fit, or sources; or rank 0 gives whole tensors, and the others empty tables. All ranks of
--- the world call it. Raises what does not fit, the same on all ranks, before anything changes.
---@param items ms.PartItem[]
---@param given table<string, any>
---@param options? ms.LoadOptions
function whole.load_state(items, given, options)
  options_of.argument("load_state", "state", given, "table")
  local partial = options_of.check("load_state", options, { partial = "boolean" }).partial
  local world, alone = core.world(), false
  if world:size() > 1 then
    local full = world:_share("all_gather", "i64", { next(given) ~= nil and 1 or 0 }, "load_state")
    alone = full[1] == 1
    for r = 2, #full do alone = alone and full[r] == 0 end
    alone = alone and world:_has_others()
  end
  local problem
  if not alone then problem = whole.problem(items, given, partial) end
  problem = agree(world, problem, nil, "load_state")
  if problem then core.raise("load_state: " .. problem) end
  if alone then
    spread(items, given, partial)
    return note_written(items)
  end
  local ok, why = pcall(function()
    for _, item in ipairs(items) do
      if given[item.name] then take(item, given[item.name]) end
    end
  end)
  note_written(items)
  why = not ok and tostring(why):gsub("^[^\n]-:%d+: ", "") or nil
  problem = agree(world, why, nil, "load_state")
  if problem then core.raise(problem) end
end

--- f(source, first, count, region) for what load_state will read of a state of sources.
---@param items ms.PartItem[]
---@param given table<string, any>
---@param f fun(source: ms.Source, first: integer, count: integer, r?: ms.Region)
function whole.each_source(items, given, f)
  for _, item in ipairs(items) do
    local value = given[item.name]
    if piece.is_source(value) and piece.same_shape(value:shape(), item.shape) then
      f(value, item.first, item.count, item.region)
    end
  end
end

ownership.functions.whole = whole

return whole
