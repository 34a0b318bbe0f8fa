-- States of optimizers with parameters of which ranks have parts, or which other ranks do not have
-- (nn/parts.lua). A state that is laid out as its parameter is (a momentum) is a part as well. One
-- number is the same on all ranks. Any other state of a split parameter is of this part alone: its
-- key names the part, and no other split can take it.
local core = require "moonshard.core"
local module = require "moonshard.nn.module"
local optimizers = require "moonshard.optim.optimizer"
local ownership = require "moonshard.base.ownership"
local piece = require "moonshard.parallel.shard_piece"
local sharded = require "moonshard.parallel.fsdp.state"
local sorted_pairs = require "moonshard.base.sorted_pairs"
local values = require "moonshard.checkpoint.values"
local whole = require "moonshard.nn.whole"

local part_states = {}

local floats = { f32 = true, f16 = true, bf16 = true }

--- Whether an optimizer has declared parameters.
---@param self ms.Optimizer
---@return boolean
function part_states.has(self)
  for _, p in ipairs(self.order) do if ownership.declared[p] then return true end end
  return false
end

-- Whether a tensor of this shape and dtype is laid out as all of the parameter is. Of a parameter
-- that is one number, an integer (a count of steps) is not.
local function is_like(shape, dtype, of)
  return piece.same_shape(shape, of) and (floats[dtype] or piece.elements(shape) ~= 1)
end

-- The first element of each sharded parameter that this rank has.
local function firsts_of(self)
  local firsts, seen = {}, {}
  for _, p in ipairs(self.order) do
    local s = module.is_part(p) and ownership.sharded[p].model
    if s and not seen[s] then
      seen[s] = true
      for _, item in ipairs(sharded.items(s)) do
        if item.tensor then firsts[item.tensor] = item.first end
      end
    end
  end
  return firsts
end

-- The shape of the whole tensor of which a rank has a parameter, and the region that this is.
local function place_of(p)
  local r = whole.region_of(p)
  if r then return r.shape, r end
  local entry = ownership.sharded[p]
  return entry and entry.shape or p:shape()
end

local function by_name(self)
  local found = {}
  for position, p in ipairs(self.order) do found[optimizers.name_of(p, position)] = p end
  return found
end

-- The key of a state that is of a part alone.
local function odd_key(key, r) return ("#part %s#%s"):format(r.text, tostring(key)) end
local function part_of_key(key) return type(key) == "string" and key:match "^#part (.-)#" end

-- Puts pieces in the place of tensors.
local function cut(self, states)
  local own, firsts = by_name(self), firsts_of(self)
  for name, state in pairs(states) do
    local p = own[name]
    local shape, r = place_of(p)
    for key, value in sorted_pairs(state) do
      if core.is_tensor(value) then
        local flat = core.no_grad(function() return value:detach():contiguous():view(-1) end)
        if is_like(value:shape(), value:dtype(), p:shape()) then
          state[key] = piece.new(flat, shape, firsts[p] or 0, false, r)
        else
          local is_odd = r and value:numel() > 1
          state[key] = nil
          state[is_odd and odd_key(key, r) or key] = piece.new(flat, value:shape(), 0, false)
        end
      end
    end
  end
end

local function items_of(states)
  local items = {}
  for name, state in sorted_pairs(states) do
    for key, value in sorted_pairs(state) do
      if piece.is(value) then
        items[#items + 1] = {
          name = name .. "\n" .. tostring(key), dtype = value.tensor:dtype(), shape = value.shape,
          region = value.region, first = value.first, count = value.count, flat = value.tensor,
          state = state, key = key,
        }
      end
    end
  end
  return items
end

-- All tensors on rank 0, and the other values of all ranks' parameters; elsewhere nil.
local function gather(items, states)
  local world, rest = core.world(), {}
  for name, state in pairs(states) do
    rest[name] = {}
    for key, value in pairs(state) do
      if not piece.is_tensor(value) then rest[name][key] = value end
    end
  end
  local found = whole.full("optimizer:state", items)
  local text = core.json_encode(values.encode(rest, "state", 1, { names = {}, tensors = {} }))
  local all = world:size() > 1 and world:_share_texts(text, "optimizer:state") or { text }
  if world:rank() ~= 0 then return nil end
  for _, one in ipairs(all) do
    for name, state in pairs(values.decode(core.json_decode(one))) do
      rest[name] = rest[name] or state
    end
  end
  for path, t in pairs(found) do
    local name, key = path:match "^([^\n]*)\n(.*)$"
    rest[name] = rest[name] or {}
    rest[name][key] = t
  end
  return rest
end

--- Changes the states of parameters. kind "sharded": to pieces. "full": to whole tensors on rank 0;
--- elsewhere nothing is left. All ranks call it.
---@param self ms.Optimizer
---@param states table<string, table> by name of the parameter
---@param kind "full"|"sharded"
---@return table<string, table>?
function part_states.change(self, states, kind)
  cut(self, states)
  local items = items_of(states)
  if kind == "full" then return gather(items, states) end
  local _, saves = whole.plan("optimizer:state", items)
  for _, item in ipairs(items) do item.state[item.key].saves = saves[item.name] end
  return states
end

----------------------------------------------------------------------------------------- loading

-- What this rank has of a parameter's state, if a value is that of a state that is laid out as the
-- parameter is: its region, and the first element and their number. nil: it is not.
local function place_in(firsts, p, value)
  local shape, r = place_of(p)
  local dtype = piece.is(value) and value.tensor:dtype() or value:dtype()
  if not is_like(piece.shape_of(value), dtype, shape) then return nil end
  return { region = r, first = firsts[p] or 0, count = p:numel() }
end

--- The key of a state in the optimizer, by its key in what was saved; nil: other ranks have it.
---@param p ms.Parameter
---@param key any
---@return any
function part_states.key_of(p, key)
  local part, _, r = part_of_key(key), place_of(p)
  if not part then return key end
  return r and part == r.text and key:match "^#part .-#(.*)$" or nil
end

-- A new state of a parameter with what this rank has of a value.
local function take(firsts, p, value)
  local own = place_in(firsts, p, value)
  if not own then return nil end
  return core.no_grad(function()
    local dtype = piece.is(value) and value.tensor:dtype() or value:dtype()
    local made = core.empty { dtype = dtype, table.unpack(p:shape()) }:keep()
    piece.put(made:view(-1), value, own.first, own.count, own.region)
    return made
  end)
end

--- A function that makes a new state of a parameter with what this rank has of a value; it gives
--- nil where the value is not laid out as the parameter is.
---@param self ms.Optimizer
---@return fun(p: ms.Parameter, value: ms.Tensor|ms.Piece|ms.Source): ms.Tensor?
function part_states.taker(self)
  local firsts = firsts_of(self)
  return function(p, value) return take(firsts, p, value) end
end

-- Names of parameters of all ranks. All ranks call it.
local function all_names(self)
  local names, list, world = {}, core.json_list {}, core.world()
  for name in sorted_pairs(by_name(self)) do list[#list + 1] = name end
  local text = core.json_encode(list)
  for _, one in ipairs(world:size() > 1 and world:_share_texts(text, "load_state") or { text }) do
    for _, name in ipairs(core.json_decode(one)) do names[name] = true end
  end
  return names
end

-- A text about states that cannot be had with this split.
local function problem_of(self, given)
  local firsts = firsts_of(self)
  for name, p in sorted_pairs(by_name(self)) do
    local state = type(given.parameters) == "table" and given.parameters[name] or {}
    local _, r = place_of(p)
    local others, own_odd
    for key in sorted_pairs(state) do
      local part = part_of_key(key)
      if part and r and part == r.text then own_odd = part else others = others or part end
    end
    if others and not own_odd then
      return ("states of '%s' were saved by ranks with other parts of it (%s), and are no parts \z
        themselves: load them with the same split"):format(name, others)
    end
    for key, value in sorted_pairs(state) do
      local own = piece.is(value) and place_in(firsts, p, value)
      if own and not piece.has(value, own.first, own.count, own.region) then
        return ("the state '%s' of '%s' is %s, and this rank has another part"):format(
          tostring(key), name, tostring(value))
      end
    end
  end
end

-- Rank 0's state, whose tensors go to all ranks one at a time; each keeps what it has of them.
local function receive(self, given)
  local world, out, own = core.world(), { names = {}, tensors = {} }, by_name(self)
  local firsts = firsts_of(self)
  local text = ""
  if world:rank() == 0 then
    local tree, list = values.encode(given, "state", 1, out), core.json_list {}
    for i, t in ipairs(out.tensors) do
      list[i] = { name = out.names[i], dtype = t:dtype(), shape = core.json_list(t:shape()) }
    end
    text = core.json_encode { tree = tree, tensors = list }
  end
  local told, tensors, of = core.json_decode(world:_share_text(text, 0, "load_state")), {}, {}
  for name, p in pairs(own) do of["state/parameters/" .. values.name_part(name)] = p end
  core.no_grad(function()
    for i, one in ipairs(told.tensors) do
      local t = out.tensors[i] and out.tensors[i]:detach():contiguous():clone()
        or core.empty { dtype = one.dtype, table.unpack(one.shape) }
      world:broadcast(t, 0):value()
      local p = of[one.name:match "^(.*)/[^/]*$"]
      local place = p and place_in(firsts, p, t)
      if place then
        local shape = place_of(p)
        local mine = piece.cut(t, place.first, place.count, place.region)
        t = piece.new(mine:clone(), shape, place.first, false, place.region)
      end
      tensors[one.name] = t
    end
  end)
  return values.decode(told.tree, function(name) return tensors[name] end)
end

--- The state that each rank loads; problem(given, foreign) gives a text about what does not fit
--- here. All ranks call it, and raise alike.
---@param self ms.Optimizer
---@param given table
---@param problem fun(given: table, foreign: table<string, boolean>): string?
---@return table
function part_states.given(self, given, problem)
  local world, foreign = core.world(), all_names(self)
  local empty = type(given) == "table" and next(given) == nil
  local own = not empty and (problem(given, foreign) or problem_of(self, given)) or nil
  if world:size() == 1 then
    own = own or empty and problem(given, foreign)
    if own then core.raise("load_state: " .. own) end
    return given
  end
  local words = core.json_encode { empty = empty, problem = own }
  local first_problem, some_empty, zero_empty = nil, false, false
  for r, text in ipairs(world:_share_texts(words, "load_state")) do
    local said = core.json_decode(text)
    first_problem = first_problem or said.problem
    if r == 1 then zero_empty = said.empty else some_empty = some_empty or said.empty end
  end
  if not first_problem and zero_empty then first_problem = problem({}, foreign) end
  if first_problem then core.raise("load_state: " .. first_problem) end
  if some_empty then return receive(self, given) end
  return given
end

--- f(source, first, count, region) for what load_state will read of a state of sources.
---@param self ms.Optimizer
---@param given table
---@param f fun(source: ms.Source, first: integer, count: integer, r?: ms.Region)
function part_states.each_source(self, given, f)
  local firsts = firsts_of(self)
  for name, p in sorted_pairs(by_name(self)) do
    for key, value in sorted_pairs((given.parameters or {})[name] or {}) do
      if piece.is_source(value) and part_states.key_of(p, key) ~= nil then
        local own = place_in(firsts, p, value)
        if own then f(value, own.first, own.count, own.region)
        else f(value, 0, piece.elements(value:shape())) end
      end
    end
  end
end

return part_states
