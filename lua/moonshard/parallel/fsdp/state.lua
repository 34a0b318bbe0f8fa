-- States of sharded models: what each rank has of each tensor; all of it on rank 0; loading, of
-- which each rank takes what it has.
--
-- Whole tensors are put together on rank 0 one at a time, from what the ranks of its own copy send
-- it, so nothing is gathered elsewhere.
local adapter_files = require "moonshard.nn.adapter_files"
local agree = require "moonshard.parallel.agree"
local core = require "moonshard.core"
local named = require "moonshard.base.named"
local files = require "moonshard.nn.files"
local gather_codec = require "moonshard.parallel.fsdp.gather_codec"
local module = require "moonshard.nn.module"
local options_of = require "moonshard.base.options"
local piece = require "moonshard.parallel.shard_piece"
local whole = require "moonshard.nn.whole"
local ownership = require "moonshard.base.ownership"

local state = {}

--- A tensor of a model's state.
---@class ms.StateItem
---@field name string
---@field shape integer[] of the whole
---@field dtype ms.DType
---@field tensor? ms.Tensor the model's handle; nil: other ranks have the parameter (group_of)
---@field position? integer in sharded:pieces(); nil: each rank has the whole
---@field own? boolean shared by the ranks of group_of alone
---@field holder? integer a rank of the model's group that has it, if this one does not
---@field first integer of this rank's piece
---@field count integer
--- What the ranks that share it have, by rank in the model's group; empty on ranks of a copy that
--- rank 0 is not one of. nil: each rank has the whole.
---@field parts? { rank: integer, first: integer, count: integer }[]

-------------------------------------------------------------------------------------- who has what

-- World rank -> rank of the model's group.
local function ranks_in(group)
  local found = {}
  for rank = 0, group:size() - 1 do found[group:_world_rank(rank)] = rank end
  return found
end

local function has_rank(group, world_rank)
  for rank = 0, group:size() - 1 do
    if group:_world_rank(rank) == world_rank then return true end
  end
  return false
end

local function parts_of(s, position, shards, numbers)
  local parts = {}
  for i = 0, shards:size() - 1 do
    local first, count = s.sharded:cut(position, i)
    if count > 0 then
      parts[#parts + 1] = { rank = numbers[shards:_world_rank(i)], first = first, count = count }
    end
  end
  return parts
end

-- The items of this rank's model, in its order. Those of group_of come last, so that all ranks have
-- what they share in one order.
local function own_items(s)
  local numbers, root, places, list = ranks_in(s.group), s.group:_world_rank(0), {}, {}
  for position, one in ipairs(s.sharded:pieces()) do
    one.position = position
    places[one.name] = one
  end
  local rare = {}
  for _, saved in ipairs(module.saved(s.wrapped)) do
    local entry, place = ownership.sharded[saved.tensor], places[saved.name]
    local item = { name = saved.name, tensor = saved.tensor, dtype = saved.tensor:dtype() }
    if entry and module.is_part(saved.tensor) then
      item.position, item.shape, item.own = place.position, place.shape, entry.own
      item.first, item.count = place.first, place.count
      item.at_root = has_rank(entry.shards, root)
      item.parts = (item.own or item.at_root)
        and parts_of(s, place.position, entry.shards, numbers) or {}
    else
      item.shape = entry and entry.shape or saved.tensor:shape()
      item.first, item.count = 0, piece.elements(item.shape)
    end
    table.insert(item.own and rare or list, item)
  end
  return table.move(rare, 1, #rare, #list + 1, list)
end

-- Items of parameters that only other ranks have. The first rank of each group of group_of
-- describes its own.
local function foreign_items(s, list)
  if not next(s.groups) then return {} end
  local told, known = core.json_list {}, {}
  for _, item in ipairs(list) do
    known[item.name] = true
    if item.own and ownership.sharded[item.tensor].shards:rank() == 0 then
      told[#told + 1] = {
        name = item.name, dtype = item.dtype, shape = core.json_list(item.shape),
        parts = core.json_list(item.parts),
      }
    end
  end
  local foreign = {}
  for r, text in ipairs(s.group:_share_texts(core.json_encode { items = told }, "state")) do
    for _, item in ipairs(core.json_decode(text).items) do
      if not known[item.name] then
        known[item.name], item.own, item.holder = true, true, r - 1
        foreign[#foreign + 1] = item
      end
    end
  end
  return foreign
end

--- The items of a model: those of its own on every rank, then those that only others have. All
--- ranks of a model with group_of must call it alike. Buffers and handles may be assigned again, so
--- own items are found each time.
---@param s ms.FSDPState
---@return ms.StateItem[]
function state.items(s)
  local list = own_items(s)
  s.foreign = s.foreign or foreign_items(s, list)
  return table.move(s.foreign, 1, #s.foreign, #list + 1, list)
end

-- For a sharded item: this rank's elements, in the memory of its shard.
local function own_part(s, item) return s.sharded:piece(item.position) end

--- Whether, of the ranks that have the same elements of an item, this one saves them.
---@param s ms.FSDPState
---@param item ms.StateItem
---@return boolean
function state.saves(s, item)
  return item.own or not s.replicas or state.copy(s).is_first
end

--- Which copy of the parameters this rank has. is_first: that of rank 0 of the model. at: which
--- rank of s.replicas has that copy. All ranks call it alike.
---@param s ms.FSDPState
---@return { is_first: boolean, at: integer }
function state.copy(s)
  if s.copy then return s.copy end
  local is_first, at = has_rank(s.shards, s.group:_world_rank(0)), 0
  if s.replicas then
    local all = s.replicas:_share("all_gather", "i64", { is_first and 1 or 0 }, "state")
    for i, yes in ipairs(all) do if yes == 1 then at = i - 1 end end
  end
  s.copy = { is_first = is_first, at = at }
  return s.copy
end

------------------------------------------------------------------------------------- to rank 0

--- Puts an item together on rank 0 of the model, in `flat` there (1-D, of its length and dtype).
--- All ranks call it, for the same items in one order. own: of a sharded item, this rank's
--- elements, if they are not the parameter's.
---@param s ms.FSDPState
---@param item ms.StateItem
---@param flat? ms.Tensor
---@param own? ms.Tensor
function state.collect(s, item, flat, own)
  local rank = s.group:rank()
  core.no_grad(function()
    if not item.parts then
      if rank == 0 then flat:copy_(item.tensor:detach():contiguous():view(-1)) end
      return
    end
    for _, part in ipairs(item.parts) do
      local mine = part.rank == rank and (own or own_part(s, item))
      local there = rank == 0 and flat:narrow(1, part.first + 1, part.count)
      if mine and there then there:copy_(mine)
      elseif mine then s.group:send(mine, 0)
      elseif there then s.group:recv(there, part.rank):value() end
    end
  end)
end

--- The state on rank 0, as copies; elsewhere an empty table. All ranks call it.
---@param s ms.FSDPState
---@return table<string, ms.Tensor>
function state.full(s)
  local items = state.part_items(s)
  if items then return whole.full("state", items) end
  local found = named.table {}
  for _, item in ipairs(state.items(s)) do
    local flat
    if s.group:rank() == 0 then
      flat = core.empty { piece.elements(item.shape), dtype = item.dtype }
      found[item.name] = core.no_grad(function() return flat:view(table.unpack(item.shape)) end)
    end
    state.collect(s, item, flat)
  end
  return found
end

-- What this rank has, as items of nn/whole.lua: all ranks of the world have one model, of which
-- this sharded one is a part.
local function items_of_part(s)
  local list = {}
  for _, item in ipairs(own_items(s)) do
    local r = whole.region_of(item.tensor)
    list[#list + 1] = {
      name = item.name, dtype = item.dtype, shape = r and r.shape or item.shape, region = r,
      first = item.first, count = item.count, tensor = item.tensor,
      is_shard = item.position ~= nil,
      flat = item.position and own_part(s, item)
        or core.no_grad(function() return item.tensor:detach():contiguous():view(-1) end),
      sharded = s.sharded,
    }
  end
  return list
end

--- The items of a model with declared parameters (nn/parts.lua); nil: none is declared.
---@param s ms.FSDPState
---@return ms.PartItem[]?
function state.part_items(s) return whole.has(s.wrapped) and items_of_part(s) or nil end

-- For a module above sharded models, of which it has the parameters (chunks of a pipeline): the
-- items of one of them, by parameter; none in summon, where parameters are whole. Raises where the
-- sharded model has more than its parameters say.
function ownership.functions.items_of_shards(s)
  if #gather_codec.items(s) > 0 then
    core.raise "state: this module is above an fsdp model of which before_gather keeps a state: \z
      call what ms.fsdp returned"
  elseif s.precision and s.precision.buffers and #s.precision.buffers.list > 0 then
    core.raise "state: this module is above an fsdp model with buffers of another dtype \z
      (precision): call what ms.fsdp returned"
  end
  local found, idle = {}, pcall(s.sharded.check_idle, s.sharded, "state")
  for _, item in ipairs(idle and items_of_part(s) or {}) do
    if item.is_shard then found[item.tensor] = item end
  end
  return found
end

--- What this rank has: pieces of sharded tensors, in their memory, and the others as they are.
---@param s ms.FSDPState
---@return table<string, ms.Tensor|ms.Piece>
function state.pieces(s)
  local items, kept = state.part_items(s), gather_codec.items(s)
  if items then
    return whole.pieces("state", table.move(kept, 1, #kept, #items + 1, items))
  end
  local found = named.table {}
  for _, item in ipairs(state.items(s)) do
    if item.position then
      found[item.name] = piece.new(own_part(s, item), item.shape, item.first, state.saves(s, item))
    elseif item.tensor then found[item.name] = item.tensor end
  end
  local saves = not s.replicas or state.copy(s).is_first
  for _, item in ipairs(kept) do
    found[item.name] = piece.new(item.flat, item.shape, item.first, saves)
  end
  return found
end

--------------------------------------------------------------------------------------- loading

local function fits(item, value)
  if not piece.is_tensor(value) then return false end
  if not piece.same_shape(item.shape, piece.shape_of(value)) then return false end
  return not piece.is(value)
    or item.position and value.first == item.first and value.count == item.count
end

-- How an item is called in a message.
local function describe(item)
  local text = ("%s [%s]"):format(item.dtype, table.concat(item.shape, ", "))
  if not item.position then return text end
  return ("%s, of which %d elements from %d on"):format(text, item.count, item.first)
end

-- A text about what does not fit; nil if all does. complete: the values of other ranks' parameters
-- are needed too.
local function problem_of(items, given, partial, complete)
  local missing, unknown, wrong, known = {}, {}, {}, {}
  for _, item in ipairs(items) do
    local value = given[item.name]
    known[item.name] = true
    if value == nil then
      if item.tensor or complete then missing[#missing + 1] = item.name end
    elseif (item.tensor or complete) and not fits(item, value) then
      wrong[#wrong + 1] = ("%s (%s here, %s given)"):format(item.name, describe(item),
        tostring(value))
    end
  end
  for name in pairs(given) do if not known[name] then unknown[#unknown + 1] = tostring(name) end end
  return module.misfit(wrong, missing, unknown, partial)
end

-- Each rank copies what it has of each item.
local function take_own(s, items, given)
  core.no_grad(function()
    for _, item in ipairs(items) do
      local value = item.tensor and given[item.name]
      if value and item.position then
        piece.put(own_part(s, item), value, item.first, item.count)
      elseif value then piece.put(item.tensor:detach():view(-1), value, 0, item.count) end
    end
  end)
  s.sharded:note_written()
end

--- The opposite of collect: the elements of a sharded item, or of a tensor that is sharded alike,
--- go from rank 0 to the ranks of its copy, and from there to the replicas. All ranks call it.
---@param s ms.FSDPState
---@param item ms.StateItem
---@param value? ms.Tensor the whole tensor, on rank 0
---@param own? ms.Tensor where this rank's elements go, 1-D
---@param dtype ms.DType of own
function state.spread(s, item, value, own, dtype)
  local rank = s.group:rank()
  local flat = rank == 0 and value:detach():to(dtype):contiguous():view(-1)
  for _, part in ipairs(item.parts) do
    local there = flat and flat:narrow(1, part.first + 1, part.count)
    local mine = part.rank == rank and own
    if mine and there then mine:copy_(there)
    elseif mine then s.group:recv(mine, 0):value()
    elseif there then s.group:send(there, part.rank) end
  end
  if s.replicas and item.position and not item.own and item.count > 0 then
    s.replicas:broadcast(own, state.copy(s).at):value()
  end
end

local function send_item(s, item, value)
  if item.parts then
    state.spread(s, item, value, item.position and own_part(s, item), item.dtype)
    return
  end
  if s.group:rank() == 0 then item.tensor:detach():copy_(value) end
  s.group:broadcast(item.tensor:detach(), 0):value()
end

-- How ranks give a state: each what it needs (nil), or rank 0 alone ("rank 0"). Raises the first
-- problem, the same on all ranks.
local function how_given(s, items, given, partial)
  local empty = next(given) == nil
  local alone = s.group:rank() == 0 and problem_of(items, given, partial, true)
  local together = problem_of(items, given, partial, false)
  if s.group:size() == 1 then return nil, together end
  local all = s.group:_share_texts(core.json_encode {
    empty = empty, alone = alone or nil, together = together,
  }, "load_state")
  local said, others_empty, first = {}, s.group:_has_others(), nil
  for r, text in ipairs(all) do
    said[r] = core.json_decode(text)
    if r > 1 and not said[r].empty then others_empty = false end
    first = first or said[r].together
  end
  if others_empty and not said[1].empty then return "rank 0", said[1].alone end
  return nil, first
end

--- Loads a state by name. Each rank gives values of at least what it has: whole tensors, pieces
--- that fit, or sources; or rank 0 gives all of them, and the others empty tables. All ranks call
--- it. Raises what does not fit, before anything changes.
---@param s ms.FSDPState
---@param given table<string, ms.Tensor|ms.Piece|ms.Source>
---@param options? ms.LoadOptions
function state.load(s, given, options)
  options_of.argument("load_state", "state", given, "table")
  given = gather_codec.take(s, given)
  local of_parts = state.part_items(s)
  if of_parts then
    return whole.load_state(of_parts, given, options)
  end
  local o, items = options_of.check("load_state", options, { partial = "boolean" }), state.items(s)
  local from, problem = how_given(s, items, given, o.partial)
  if problem then core.raise("load_state: " .. problem) end
  if from == nil then return take_own(s, items, given) end
  state.copy(s)
  -- Which names rank 0 has, where they may be a part.
  local names = o.partial and s.group:rank() == 0 and core.json_list {} or nil
  for name in pairs(names and given or {}) do names[#names + 1] = name end
  local wanted
  if o.partial then
    wanted = {}
    local text = s.group:_share_text(names and core.json_encode(names) or "", 0, "load_state")
    for _, name in ipairs(core.json_decode(text)) do wanted[name] = true end
  end
  core.no_grad(function()
    for _, item in ipairs(items) do
      if not wanted or wanted[item.name] then send_item(s, item, given[item.name]) end
    end
  end)
  s.sharded:note_written()
end

--------------------------------------------------------------------------------------- in files

-- Compares a repeated tied weight with the one that it repeats, as far as this rank has it.
local function copy_problem(items, given, copies)
  if core.is_sim() then return nil end
  local by_name = {}
  for _, item in ipairs(items) do by_name[item.name] = item end
  for name, copy in pairs(copies) do
    local item, own = by_name[copy.of], given[copy.of]
    if item and own and item.tensor then
      local same = piece.same_shape(own:shape(), copy.tensor:shape()) and core.no_grad(function()
        local a = piece.cut(own, item.first, item.count):to "f32"
        return a:eq(piece.cut(copy.tensor, item.first, item.count):to "f32"):all():item()
      end)
      if not same then return name, copy.of end
    end
  end
end

-- The same for a model with declared parameters.
local function read_parts(s, items, path, options, reader)
  local found, message, code = files.find(reader or s.wrapped, path)
  message, code = agree(core.world(), message, code)
  if not message then
    local ok, why = pcall(whole.load_state, items, found.state, options)
    if not ok then
      message, code = ("%s: %s"):format(files.first_of(path),
        tostring(why):match "load_state: (.*)" or tostring(why)), "mismatch"
    end
  end
  if found then files.close(found) end
  if message then return core.refuse(message, code) end
  return true
end

--- Reads files into the model, each rank what it has. All ranks call it.
---@param s ms.FSDPState
---@param path string|string[]
---@param options? ms.LoadOptions
---@param reader? table whose own_name names what is in the files; the model unless given
---@return true?
---@return string? message
---@return string? code
function state.read(s, path, options, reader)
  local of_parts = state.part_items(s)
  if of_parts then return read_parts(s, of_parts, path, options, reader) end
  local items = state.items(s)
  local o = options_of.check("load", options, { partial = "boolean" })
  local found, message, code = files.find(reader or s.wrapped, path)
  if found then
    local problem = problem_of(items, found.state, o.partial, false)
    if problem then message, code = ("%s: %s"):format(files.first_of(path), problem), "mismatch" end
    local ok, differs, of = pcall(copy_problem, items, found.state, found.copies)
    if not ok then message, code = message or tostring(differs), code or "io"
    elseif differs then message, code = message or files.differs(differs, of), "mismatch" end
  end
  message, code = agree(s.group, message, code)
  if not message then
    local ok, why = pcall(take_own, s, items, found.state)
    message, code = agree(s.group, not ok and tostring(why) or nil, "io")
  end
  if found then files.close(found) end
  if message then return core.refuse(message, code) end
  return true
end

--- Each rank reads what it has of these tensors of the model, by name. Raises the first failure of
--- any rank, the same on all. All ranks call it.
---@param s ms.FSDPState
---@param given table<string, ms.Source>
function state.take_sources(s, given)
  local ok, why = pcall(take_own, s, state.items(s), given)
  local message = agree(s.group, not ok and tostring(why):gsub("^[^\n]-:%d+: ", "") or nil)
  if message then core.raise("fsdp: " .. message) end
end

-- Memory that whole tensors of each dtype are put together in, one after the other.
local function make_room(items)
  local most, room = {}, {}
  for _, item in ipairs(items) do
    most[item.dtype] = math.max(most[item.dtype] or 0, piece.elements(item.shape))
  end
  for dtype, count in pairs(most) do room[dtype] = core.empty { count, dtype = dtype } end
  return room
end

-- Writes these items on rank 0, where begin() gives what writes them. All ranks call it, and have
-- the same result.
local function write(s, items, begin)
  local writer, message, code, room
  if s.group:rank() == 0 then
    writer, message, code = begin()
    room = make_room(items)
  end
  for i, item in ipairs(items) do
    local flat = room and room[item.dtype]:narrow(1, 1, piece.elements(item.shape))
    state.collect(s, item, flat)
    if writer and not message then message, code = select(2, writer:write(i, flat)) end
  end
  if writer and not message then message, code = select(2, writer:commit()) end
  message, code = agree(s.group, message, code)
  if message then return core.refuse(message, code) end
  return true
end

--- Writes the model's file, or folder, on rank 0. All ranks call it, and have the same result.
---@param s ms.FSDPState
---@param path string
---@param options? ms.SaveOptions
---@return true?
---@return string? message
---@return string? code
function state.save(s, path, options)
  local dtype, of_parts = files.check_save(s.wrapped, path, options), state.part_items(s)
  if of_parts then
    return whole.write("save", of_parts, function(list)
      return files.begin(s.wrapped, path, list, dtype)
    end)
  end
  local items = state.items(s)
  return write(s, items, function() return files.begin(s.wrapped, path, items, dtype) end)
end

--- Writes the folder of the model's adapters, on rank 0. All ranks call it, and have the same
--- result.
---@param s ms.FSDPState
---@param folder string
---@return true?
---@return string? message
---@return string? code
function state.save_adapters(s, folder)
  local items = {}
  adapter_files.check_save(s.wrapped, folder)
  for _, item in ipairs(state.items(s)) do
    if adapter_files.is_adapter(item.name) then items[#items + 1] = item end
  end
  return write(s, items, function() return adapter_files.begin(s.wrapped, folder, items) end)
end

--- Reads adapters into those of the model, each rank what it has. All ranks call it, and have the
--- same result.
---@param s ms.FSDPState
---@param folder string
---@return true?
---@return string? message
---@return string? code
function state.load_adapters(s, folder)
  local path, message, code = adapter_files.examine(s.wrapped, folder)
  message, code = agree(s.group, not path and message or nil, not path and code or nil)
  if message then return core.refuse(message, code) end
  return state.read(s, path, { partial = true }, adapter_files.reader(s.wrapped))
end

return state
