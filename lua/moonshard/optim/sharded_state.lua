-- States of optimizers whose parameters are sharded by fsdp: a state that is laid out as its
-- parameter does (a momentum) is in pieces, others (a count of steps) are the same on all ranks.
local core = require "moonshard.core"
local matrices = require "moonshard.optim.matrices"
local shard = require "moonshard.optim.shard"
local module = require "moonshard.nn.module"
local piece = require "moonshard.parallel.shard_piece"
local sharded_state = require "moonshard.parallel.fsdp.state"
local values = require "moonshard.checkpoint.values"
local ownership = require "moonshard.base.ownership"

local saved = {}

local function sorted_keys(t)
  local keys = {}
  for key in pairs(t) do keys[#keys + 1] = key end
  table.sort(keys, function(a, b) return tostring(a) < tostring(b) end)
  return keys
end

--- The sharded models of parameters of which this rank has parts, in order; empty if there are
--- none. Raises unless it is their turn: outside of joins, between passes.
---@param self ms.Optimizer
---@param what string
---@return ms.FSDPState[]
function saved.models(self, what)
  local list, seen = {}, {}
  for _, p in ipairs(self.order) do
    local s = module.is_part(p) and ownership.sharded[p].model
    if s and not seen[s] then
      seen[s], list[#list + 1] = true, s
      if s.joining then
        core.raise(what .. ": inside join ranks without inputs left would not take part for a \z
          sharded model: call it before or after")
      end
      if list[1].group ~= s.group then
        core.raise(what .. ": parameters of models over different groups of ranks: make an \z
          optimizer for each model")
      end
      s.sharded:check_idle(what)
    end
  end
  return list
end

-- A copy of an item, as a parameter of that name.
local function renamed(item, s, name)
  local copy = { of = s }
  for key, value in pairs(item) do copy[key] = value end
  copy.name = name
  return copy
end

-- The parameters of an optimizer that are in pieces, as items of their models, by the optimizer's
-- names, and the items that only other ranks have. Each item has its model as `of`.
local function items_of(self, models)
  local names, found = {}, {}
  for _, p in ipairs(self.order) do names[p] = p:name() end
  for _, s in ipairs(models) do
    local prefix = ""
    for _, item in ipairs(sharded_state.items(s)) do
      local name = item.position and names[item.tensor]
      if name then
        prefix = name:sub(1, #name - #item.name)
        found[#found + 1] = renamed(item, s, name)
      elseif item.holder then found[#found + 1] = renamed(item, s, prefix .. item.name) end
    end
  end
  return found
end

-- What this rank has of the states of an item, for the others: its tensors, and on the first rank
-- that shares a parameter that not all ranks have, its other values.
local function describe(item, state)
  local told = { tensors = core.json_list {}, values = core.json_list {} }
  for _, key in ipairs(sorted_keys(state)) do
    local value = state[key]
    if core.is_tensor(value) then
      local alike = piece.same_shape(value:shape(), item.tensor:shape())
      table.insert(told.tensors, {
        key = key, placed = alike and (value:numel() > 1 and "yes" or "perhaps") or "no",
        dtype = value:dtype(), shape = core.json_list(value:shape()),
      })
    elseif item.own and ownership.sharded[item.tensor].shards:rank() == 0 then
      table.insert(told.values, { key = key, value = values.encode(value, "value", 1, {}) })
    end
  end
  return told
end

-- Raises where ranks have different states of a parameter.
local function check_same(name, one, other)
  for key in pairs(one.tensors) do
    if not other.tensors[key] then
      core.raise(("optimizer:state: rank %d has a state '%s' of parameter '%s', and rank %d has \z
        none: all ranks must step the same parameters"):format(one.rank, key, name, other.rank))
    end
  end
end

-- What one rank has told of a parameter, with tensors by key as text.
local function read_told(one, rank)
  local tensors = {}
  for _, entry in ipairs(one.tensors) do tensors[values.name_part(entry.key)] = entry end
  return { tensors = tensors, values = one.values, rank = rank }
end

-- What all ranks have: by name of a parameter, by key as text, whether the state is laid out as the
-- parameter does, and its dtype and shape. A piece of one number looks as a state of one number
-- does; ranks with longer pieces tell. alone: states are those of a native kind, which differ in
-- shape from counts, also where a piece has one number: what this rank has tells all, unless others
-- have other parameters.
local function agree(items, states, alone)
  local told, known = {}, {}
  for _, item in ipairs(items) do
    if item.tensor then told[item.name] = describe(item, states[item.name] or {}) end
    alone = alone and not item.own
  end
  if alone then
    for name, one in pairs(told) do known[name] = read_told(one, 0) end
    return known
  end
  local all = items[1].of.group:_share_texts(core.json_encode { told = told }, "optimizer")
  for r, text in ipairs(all) do
    for name, one in pairs(core.json_decode(text).told) do
      local before = known[name]
      one = read_told(one, r - 1)
      known[name] = before or one
      if before then
        check_same(name, before, one)
        check_same(name, one, before)
        for key, entry in pairs(one.tensors) do
          local first = before.tensors[key]
          if entry.placed == "no" or first.placed == "perhaps" then first.placed = entry.placed end
        end
        if #before.values == 0 then before.values = one.values end
      end
    end
  end
  return known
end

local function is_placed_alike(known, item, key)
  local entry = known[item.name] and known[item.name].tensors[values.name_part(key)]
  return entry ~= nil and entry.placed ~= "no"
end

-- A tensor of a state on rank 0. own: this rank's; nil: only other ranks have the parameter.
local function gather_tensor(item, entry, own)
  local s, first = item.of, item.of.group:rank() == 0
  if entry.placed ~= "no" then
    local flat = first and core.empty { piece.elements(item.shape), dtype = entry.dtype }
    sharded_state.collect(s, item, flat, own and own:detach():view(-1))
    return flat and flat:view(table.unpack(item.shape)) or nil
  end
  if own then
    if item.own and not item.at_root and ownership.sharded[item.tensor].shards:rank() == 0 then
      s.group:send(own:detach():contiguous():view(-1), 0)
    end
    return own
  end
  if not first then return nil end
  local flat = core.empty { piece.elements(entry.shape), dtype = entry.dtype }
  s.group:recv(flat, item.holder):value()
  return flat:view(table.unpack(entry.shape))
end

-- The states of one parameter on rank 0, in place of pieces.
local function gather(item, told, state)
  local made = {}
  for key, value in pairs(state or {}) do
    if not core.is_tensor(value) then made[key] = value end
  end
  for _, one in ipairs(not state and told.values or {}) do
    made[one.key] = values.decode(one.value)
  end
  for _, key in ipairs(sorted_keys(told.tensors)) do
    local entry = told.tensors[key]
    made[entry.key] = gather_tensor(item, entry, state and state[entry.key])
  end
  return made
end

-- Owners' states of matrices: on each rank as pieces that are all of a tensor, or all of them on
-- rank 0, of one copy of the model.
local function add_owned(items, states, owned, kind)
  local group, of = items[1].of.group, {}
  for _, item in ipairs(items) do
    -- Ranks agree on this in one order, whatever they own.
    local saves = sharded_state.saves(item.of, item)
    local found = item.tensor and owned[item.name]
    if found and kind == "sharded" then
      for key, value in pairs(found) do
        found[key] = piece.new(value:detach():contiguous():view(-1), value:shape(), 0, saves)
      end
    end
    if kind == "sharded" or saves then of[item.name] = found end
  end
  if kind == "full" then of = shard.gather_states(group, of) end
  for name, found in pairs(of) do
    states[name] = states[name] or {}
    for key, value in pairs(found) do states[name][key] = value end
  end
end

--- Changes the states of parameters of sharded models. kind "sharded": to pieces. "full": to whole
--- tensors on rank 0; elsewhere nothing is left. All ranks call it.
---@param self ms.Optimizer
---@param models ms.FSDPState[]
---@param states table<string, table> by name of the parameter
---@param kind "full"|"sharded"
---@return table<string, table>?
function saved.change(self, models, states, kind)
  local items, owned = items_of(self, models), self.kind.whole and matrices.split(states)
  local known = agree(items, states, self.kind.native)
  for _, item in ipairs(items) do
    local state = states[item.name]
    local told = known[item.name]
    if kind == "full" and told then
      local whole = core.no_grad(function() return gather(item, told, state) end)
      states[item.name] = next(whole) ~= nil and whole or nil
    elseif kind == "sharded" and state then
      for key, value in pairs(state) do
        if is_placed_alike(known, item, key) then
          state[key] = piece.new(value:detach():view(-1), item.shape, item.first,
            sharded_state.saves(item.of, item))
        elseif item.own and core.is_tensor(value) then
          -- The file of whole tensors is rank 0's, which may not have it.
          state[key] = piece.new(value:detach():contiguous():view(-1), value:shape(), 0,
            ownership.sharded[item.tensor].shards:rank() == 0)
        end
      end
    end
  end
  if owned then add_owned(items, states, owned, kind) end
  if kind == "full" and models[1].group:rank() ~= 0 then return nil end
  return states
end

--------------------------------------------------------------------------------------- loading

local floats = { f32 = true, f16 = true, bf16 = true }

-- Whether a state of this shape is laid out as the item's parameter. Of a parameter that is one
-- number, an integer (a count of steps) is not such a state.
local function is_like(item, shape, dtype)
  return piece.same_shape(shape, item.shape) and (floats[dtype] or piece.elements(shape) ~= 1)
end

-- Whether a value of a state represents all of what this rank has a piece of.
local function is_whole_of(item, value)
  if piece.is(value) then return piece.same_shape(value.shape, item.shape) end
  return piece.is_tensor(value) and is_like(item, value:shape(), value:dtype())
end

-- Keys of states that are not laid out as parameters are. Of a parameter that is one number both
-- kinds look alike, so other parameters tell.
local function shared_keys(by_name, states)
  local shared = {}
  for name, state in pairs(states) do
    local item = by_name[name]
    local tells = item and piece.elements(item.shape) ~= 1
    for key, value in pairs(item and state or {}) do
      if matrices.owned_name(key)
        or tells and piece.is_tensor(value) and not is_whole_of(item, value)
      then
        shared[key] = true
      end
    end
  end
  return shared
end

-- Names of such keys as they are in names of tensors.
local function parts_of_names(shared)
  local list = core.json_list {}
  for key in pairs(shared) do list[#list + 1] = values.name_part(key) end
  return list
end

-- Rank 0's state as text, and its tensors in order.
local function write_down(given, by_name)
  local out = { names = {}, tensors = {} }
  local tree, list = values.encode(given, "state", 1, out), core.json_list {}
  for i, t in ipairs(out.tensors) do
    if not core.is_tensor(t) then
      core.raise "load_state: rank 0 gives pieces, and the other ranks nothing: each rank gives \z
        its own, or rank 0 gives whole tensors"
    end
    list[i] = { name = out.names[i], dtype = t:dtype(), shape = core.json_list(t:shape()) }
  end
  return core.json_encode {
    tree = tree, tensors = list, shared = parts_of_names(shared_keys(by_name, given.parameters)),
  }, out.tensors
end

-- The item whose state is the tensor of that name in a tree, if it is laid out as the item's
-- parameter.
local function item_of(by_path, one, shared)
  local path, key = one.name:match "^(state/parameters/.*)/([^/]*)$"
  local item = by_path[path]
  return item and not shared[key] and is_like(item, one.shape, one.dtype) and item or nil
end

-- The state that rank 0 alone gives, as each rank needs it: of sharded parameters its pieces.
local function receive(items, group, given)
  local first, by_path, by_name, tensors, shared = group:rank() == 0, {}, {}, {}, {}
  for _, item in ipairs(items) do
    by_name[item.name] = item
    by_path["state/parameters/" .. values.name_part(item.name)] = item
    if item.of.replicas then sharded_state.copy(item.of) end
  end
  local text, whole = "", nil
  if first then text, whole = write_down(given, by_name) end
  local told = core.json_decode(group:_share_text(text, 0, "load_state"))
  for _, key in ipairs(told.shared) do shared[key] = true end
  core.no_grad(function()
    for i, one in ipairs(told.tensors) do
      local item = item_of(by_path, one, shared)
      if item then
        local own = item.position and core.empty { item.count, dtype = one.dtype }
        sharded_state.spread(item.of, item, whole and whole[i], own, one.dtype)
        tensors[one.name] = own and piece.new(own, item.shape, item.first, false) or false
      else
        local t = whole and whole[i]:detach():contiguous():clone()
          or core.empty { dtype = one.dtype, table.unpack(one.shape) }
        tensors[one.name] = group:broadcast(t, 0):value()
      end
    end
  end)
  return values.decode(told.tree, function(name) return tensors[name] end)
end

--- The state that each rank loads. Where rank 0 alone gives one, and the others empty tables, it is
--- what this rank has of it. problem(given, foreign) gives a text about what does not fit here;
--- foreign: names of parameters that only other ranks have. All ranks call it, and raise alike.
---@param self ms.Optimizer
---@param models ms.FSDPState[]
---@param given table
---@param problem fun(given: table, foreign: table<string, boolean>): string?
---@return table given
---@return table<string, ms.StateItem> items by name, those that only other ranks have too
---@return table<any, boolean> shared keys of states that are not laid out as parameters are
function saved.given(self, models, given, problem)
  local items, foreign, by_name, group = items_of(self, models), {}, {}, models[1].group
  for _, item in ipairs(items) do
    by_name[item.name] = item
    if item.holder then foreign[item.name] = true end
  end
  local function check(values_given)
    local text = problem(values_given, foreign)
    for name, state in pairs(not text and values_given.parameters or {}) do
      local item = by_name[name]
      for key, value in pairs(item and not item.holder and state or {}) do
        local is_all = piece.is(value)
          and (matrices.owned_name(key) or not is_whole_of(item, value))
          and value.count == piece.elements(value.shape)
        if piece.is(value) and not is_all and (not is_whole_of(item, value)
            or value.first ~= item.first or value.count ~= item.count) then
          text = ("the state '%s' of '%s' is %s; here it has %d elements from %d on"):format(
            tostring(key), name, tostring(value), item.count, item.first)
        end
      end
    end
    return text
  end
  local own, empty = check(given), type(given) == "table" and next(given) == nil
  local words = core.json_encode { empty = empty, problem = own }
  local others_empty, first_problem, zero = group:_has_others(), nil, nil
  for r, text in ipairs(group:_share_texts(words, "load_state")) do
    local said = core.json_decode(text)
    if r == 1 then zero = said else others_empty = others_empty and said.empty end
    first_problem = first_problem or said.problem
  end
  if others_empty and not zero.empty then first_problem = zero.problem end
  if first_problem then core.raise("load_state: " .. first_problem) end
  if others_empty and not zero.empty then given = receive(items, group, given) end
  return given, by_name, shared_keys(by_name, given.parameters)
end

--- f(source, first, count) for what each rank will read of a state of sources.
---@param self ms.Optimizer
---@param models ms.FSDPState[]
---@param given table
---@param f fun(source: ms.Source, first: integer, count: integer)
function saved.each_source(self, models, given, f)
  local by_name = {}
  for _, item in ipairs(items_of(self, models)) do by_name[item.name] = item end
  for i, p in ipairs(self.order) do
    local name = p:name()
    local item, states = by_name[name], given.parameters or {}
    for key, value in pairs(states[name ~= "" and name or ("#%d"):format(i)] or {}) do
      local alike = item and piece.is_source(value) and is_whole_of(item, value)
      if matrices.owned_name(key) then
        if matrices.is_owner(self, p) then f(value, 0, piece.elements(value:shape())) end
      elseif alike then f(value, item.first, item.count)
      elseif piece.is_source(value) then f(value, 0, piece.elements(value:shape())) end
    end
  end
end

--- A new state of a parameter's piece with this rank's elements of what was saved; nil if the
--- value is not one that is laid out as the parameter is. place: memory for it (see init.lua), or
--- nil.
---@param item ms.StateItem
---@param key string
---@param value ms.Tensor|ms.Piece|ms.Source
---@param place? fun(name: string): ms.Tensor
---@return ms.Tensor?
function saved.take(item, key, value, place)
  if not is_whole_of(item, value) then return nil end
  return core.no_grad(function()
    local dtype = piece.is(value) and value.tensor:dtype() or value:dtype()
    local made = dtype == "f32" and place and place(key)
    if not made then
      made = core.empty { dtype = dtype, table.unpack(item.tensor:shape()) }:keep()
    end
    piece.put(made:detach():view(-1), value, item.first, item.count)
    return made
  end)
end

return saved
