-- The state of links: hooks.state. The engine keeps a state's numbers, by parameter; the state's
-- tables are kept here. Checkpoints save both.
--
-- A tensor that is equal on all ranks is saved once. A tensor that differs (a rank's own residual)
-- is saved for every rank. If the same number of ranks loads it, each rank gets its own tensor.
-- Another number of ranks gets equal parts, so that what residuals add to the result is kept. If
-- the result is a mean over the ranks, each gets the mean of all. If it adds up (op = "sum", or a
-- divide_factor), M ranks get 1 / M of the sum each. Of one rank all tensors are equal on all
-- ranks; its residuals are then the numbers that are parallel to gradients (State:flat). Numbers of
-- links between two reductions are of shards: link_shards.lua saves them.
local core = require "moonshard.core"
local named = require "moonshard.base.named"
local link_shards = require "moonshard.parallel.link_shards"
local options_of = require "moonshard.base.options"
local log = require "moonshard.base.log"
local piece = require "moonshard.parallel.shard_piece"
local steps = require "moonshard.train.steps"
local sorted_pairs = require "moonshard.base.sorted_pairs"
local ms = require "moonshard"

local link_state = {}

---@class ms.State
local State = {}
State.__index = State
State.__name = "ms.State"

local live = setmetatable({}, { __mode = "v" })            -- name -> state, until it is collected
-- name -> loaded values of a state that is not made yet
local waiting = {}

-- state -> { core, texts, parameters, buckets, put, adds_up, between, parallel, loaded }. adds_up,
-- between: see serve; nil: no chain has used it since it was made. parallel: names of numbers that
-- are parallel to gradients. loaded: adds_up as it was saved.
local inner = setmetatable({}, { __mode = "k" })

local function self_of(state)
  return inner[state] or core.raise("a state of hooks.state is expected, not " .. type(state))
end

-- Whether a state of this name is in use; states that are not are collected.
local function is_taken(name)
  if live[name] then core.collect() end
  return live[name] ~= nil
end

-- While inherit runs: { before = names of the states that the earlier version of the script made,
-- names = those that this version has made }
local heir

local function make(name)
  local state = setmetatable({}, State)
  if heir then heir.names[name] = true end
  inner[state] = {
    name = name,
    core = core.link_state(),
    texts = {},
    parameters = setmetatable({}, { __mode = "k" }),
    buckets = {},
    put = {},
    parallel = {},
  }
  live[name] = state
  if waiting[name] then
    link_state.restore(state, waiting[name])
    waiting[name] = nil
  end
  return state
end

-- The state of this name that an earlier version of the running script made; nil if there is none.
local function inherited(name)
  if not heir or heir.names[name] then return nil end
  local state = heir.before[name] and live[name]
  if state then heir.names[name] = true end
  return state
end

--- Calls f, a new version of a script. It gets the states that its earlier version made, by name.
--- Returns the result of f and the names of its states, for the next version.
---@param before? table<string, true>
---@param f function
---@return any, table<string, true>
function link_state.inherit(before, f)
  local outer = heir
  heir = { before = before or {}, names = {} }
  local names = heir.names
  local ok, value = pcall(f)
  heir = outer
  if not ok then error(value, 0) end
  return value, names
end

---@param name string
---@return ms.State
function link_state.new(name)
  if type(name) ~= "string" or name == "" then
    core.raise("hooks.state: a name is expected, not " .. type(name))
  end
  local old = inherited(name)
  if old then return old end
  if is_taken(name) then
    core.raise(("hooks.state: there is a state '%s' already, and two links cannot share one: \z
      choose another name"):format(name))
  end
  return make(name)
end

--- Makes the state of a native link of that kind. Its name is the kind; from the second state on,
--- the kind and a number.
---@param kind string
---@return ms.State
function link_state.numbered(kind)
  local name, number = kind, 1
  while is_taken(name) do
    local old = inherited(name)
    if old then return old end
    number = number + 1
    name = ("%s %d"):format(kind, number)
  end
  return make(name)
end

--- The state of that name, or nil.
---@param name string
---@return ms.State?
function link_state.find(name) return live[name] end

-- What a model takes gradients by. adds_up: the result is a sum, whatever the number of ranks; a
-- mean becomes smaller with more ranks; nil: not known, and loaded states tell. sums: the same of
-- links between two reductions, which see what a divide_factor has divided. model: weak; nil: none
-- has taken it.
---@alias ms.LinkUse { adds_up?: boolean, sums: boolean, model?: { [1]: table? } }

-- The chain that runs, and whether a link between two reductions does; nil: none does.
local running, inside

local function note(own, how, between)
  own.adds_up = how.adds_up
  own.between = nil
  if between then own.adds_up, own.between = how.sums, how.model end
end

--- A model takes a link that has this state. between: it runs between two reductions.
---@param state ms.State
---@param how ms.LinkUse
---@param between boolean
function link_state.serve(state, how, between) note(self_of(state), how, between) end

--- The same for states that links ask for while a chain runs. nil: it has ended.
---@param how? ms.LinkUse
function link_state.run(how) running = how end

--- From begin to end of links between two reductions.
---@param yes boolean
function link_state.run_between(yes) inside = yes end

-- A state that a link asks for.
local function used(state)
  local own = self_of(state)
  if running then note(own, running, inside) end
  return own
end

--- The engine's object of a state, for native links.
---@param state ms.State
---@return userdata
function link_state.core(state) return self_of(state).core end

---@param bucket ms.Bucket
---@param name string
---@return ms.Tensor
function State:flat(bucket, name)
  if not core.is_bucket(bucket) then
    core.raise("state:flat: a bucket is expected, not " .. type(bucket))
  end
  if type(name) ~= "string" then
    core.raise("state:flat: a name is expected, not " .. type(name))
  end
  return (used(self).core:flat(bucket, name))
end

---@param bucket ms.Bucket
---@param name string
---@param lengths integer[]
---@return ms.Tensor, boolean[]
function State:pieces(bucket, name, lengths)
  if not core.is_bucket(bucket) then
    core.raise("state:pieces: bucket must be a bucket, not a " .. type(bucket))
  end
  options_of.argument("state:pieces", "name", name, "string")
  options_of.items("state:pieces", "lengths", lengths, "integer")
  return used(self).core:flat(bucket, name, lengths)
end

-- The table in `tables` at key; at its first use it is made from the loaded values under `called`.
local function table_at(own, tables, kind, key, called)
  local found = tables[key]
  if not found then
    local put = own.put[kind]
    found = put and put[called] or named.table {}
    if put then put[called] = nil end
    tables[key] = found
  end
  return found
end

-- A bucket is identified by its parameters. The tables of other buckets that have one of them are
-- dropped.
local function bucket_table(own, bucket)
  local key = bucket:_key()
  local entry = own.buckets[key]
  if entry then return entry.table end
  local parameters = bucket:parameters()
  local mine = {}
  for _, p in ipairs(parameters) do mine[p] = true end
  for other, old in pairs(own.buckets) do
    for _, p in ipairs(old.parameters) do if mine[p] then own.buckets[other] = nil break end end
  end
  local put = own.put.buckets
  entry = { table = put and put[key] or named.table {}, parameters = parameters }
  if put then put[key] = nil end
  own.buckets[key] = entry
  return entry.table
end

---@param owner ms.Parameter|ms.Bucket|string
---@return table
function State:of(owner)
  local own = used(self)
  if type(owner) == "string" then return table_at(own, own.texts, "texts", owner, owner) end
  if core.is_parameter(owner) then
    return table_at(own, own.parameters, "parameters", owner, owner:name())
  end
  if core.is_bucket(owner) then return bucket_table(own, owner) end
  core.raise(("state:of: a parameter, a bucket or a string is expected, not %s")
    :format(core.is_tensor(owner) and "a tensor that is no parameter" or type(owner)))
end

options_of.methods(State, "a state of hooks.state", function(value) return inner[value] ~= nil end)

State.__tostring = function(self) return ("state '%s'"):format(self_of(self).name) end

-- Tensors in tables outlive the step that made them.
local function keep(value, seen)
  if core.is_tensor(value) then value:keep()
  elseif type(value) == "table" and not seen[value] then
    seen[value] = true
    for _, item in pairs(value) do keep(item, seen) end
  end
end

steps.on_end(function()
  local seen = {}
  for _, state in pairs(live) do
    local own = inner[state]
    keep(own.texts, seen)
    keep(own.buckets, seen)
    for _, value in pairs(own.parameters) do keep(value, seen) end
  end
end)

------------------------------------------------------------------------------------ saving, loading

-- All values of a state, as one table; of links between two reductions without the numbers of
-- shards.
local function content(state)
  local own = self_of(state)
  local result = {
    iteration = own.core:iteration(), flats = {}, texts = {}, parameters = {}, buckets = {},
  }
  for _, one in ipairs(own.between and {} or own.core:pieces()) do
    local name, parameter, tensor, parallel = table.unpack(one)
    result.flats[name] = result.flats[name] or {}
    result.flats[name][parameter] = tensor
    if parallel then own.parallel[name] = true end
  end
  for kind, tables in pairs(own.put) do
    for name, value in pairs(tables) do result[kind][name] = value end
  end
  for name, value in pairs(own.texts) do result.texts[name] = value end
  for p, value in pairs(own.parameters) do
    if next(value) ~= nil then result.parameters[p:name()] = value end
  end
  for key, entry in pairs(own.buckets) do
    if next(entry.table) ~= nil then result.buckets[key] = entry.table end
  end
  return result
end

--- Sets a state to saved values.
---@param state ms.State
---@param saved table
function link_state.restore(state, saved)
  local own = self_of(state)
  own.core:clear()
  own.core:iteration(saved.iteration)
  for name, list in sorted_pairs(saved.flats) do
    for parameter, tensor in sorted_pairs(list) do
      own.core:put(name, parameter, tensor)
    end
  end
  for p in pairs(own.parameters) do own.parameters[p] = nil end
  own.texts, own.buckets = {}, {}
  own.parallel, own.loaded = saved.parallel or {}, saved.adds_up
  own.between = own.between or saved.between and {}
  own.put = { texts = saved.texts, parameters = saved.parameters, buckets = saved.buckets }
end

-- Whether what the state's numbers are added to is a sum: see serve.
local function adds_up(own)
  if own.adds_up ~= nil then return own.adds_up end
  return own.loaded == true
end

-- Whether two hashes are equal on all ranks: that of the names and types of tensors, and that of
-- all other values.
local function same_everywhere(world, numbers)
  local list, same = world:_share("all_gather", "i64", numbers, "states of links"), { true, true }
  for i, number in ipairs(list) do
    local which = (i - 1) % #numbers + 1
    same[which] = same[which] and number == numbers[which]
  end
  return table.unpack(same)
end

-- Whether a tensor is equal on all ranks.
local function is_same(world, own)
  return core.no_grad(function()
    local first = own:clone()
    world:broadcast(first, 0):value()
    local same = own:eq(first):all():to "i32"
    return world:all_reduce(same:view(1), "min"):value():item() == 1
  end)
end

-- If the tensor is equal on all ranks, the tensor and false. Otherwise, on rank 0, the stacked
-- tensors of all ranks, and true; where ranks write files of their own (parts), each rank's tensor
-- becomes its piece of them.
local function merge(world, tensor, name, parts)
  local own = core.no_grad(function() return tensor:detach():contiguous():clone() end)
  if is_same(world, own) then return tensor, false end
  if parts then
    local count = own:numel()
    table.insert(parts.names, name)
    table.insert(parts.pieces, piece.new(own:view(-1), { world:size(), table.unpack(own:shape()) },
      world:rank() * count, true))
    return nil, true
  end
  local all = world:gather(own:view(1, -1), 0):value()
  if world:rank() ~= 0 then return tensor, true end
  return all:view(world:size(), table.unpack(tensor:shape())), true
end

--- All states as values of a checkpoint. All ranks call it. encode(value, name, out) is the
--- checkpoint's function; out collects tensors.
---@param encode fun(value: any, name: string, out: table): any
---@param out { names: string[], tensors: ms.Tensor[] }
---@param parts? { names: string[], pieces: ms.Piece[] } collects pieces, where ranks write them
---@return table<string, table>?
function link_state.save(encode, out, parts)
  if next(live) ~= nil then core.collect() end
  if next(live) == nil then return nil end
  local world, saved = ms.world(), {}
  local found, shards = { names = {}, tensors = {} }, nil
  for name, state in ms.sorted_pairs(live) do
    if inner[state].between then
      shards = shards or {}
      table.insert(shards, {
        state = name, model = inner[state].between[1], pieces = inner[state].core:pieces(),
      })
    end
    local own, value = inner[state], encode(content(state), name, found)
    saved[name] = { value = value, adds_up = adds_up(own), parallel = own.parallel }
  end
  local types = {}
  for i, t in ipairs(found.tensors) do
    types[i] = ("%s %s [%s]"):format(found.names[i], t:dtype(), table.concat(t:shape(), ","))
  end
  local of_rank, apart = {}, nil
  if world:size() > 1 then
    local text = core.json_encode(saved)
    local same_types, same_values = same_everywhere(world,
      { core.hash(table.concat(types, "\n")), core.hash(text) })
    if not same_types then
      core.raise "checkpoint: states of links hold tensors of other names or shapes on other \z
        ranks: use the same ones on all ranks"
    end
    for i, t in ipairs(found.tensors) do
      local merged, of_ranks = merge(world, t, found.names[i], parts)
      found.tensors[i], of_rank[found.names[i]] = merged or false, of_ranks
    end
    if not same_values then saved, apart = {}, world:_share_texts(text, "states of links") end
  end
  for i, name in ipairs(found.names) do
    if found.tensors[i] then
      out.names[#out.names + 1], out.tensors[#out.tensors + 1] = name, found.tensors[i]
    end
    if not of_rank[name] then of_rank[name] = nil end
  end
  return {
    ranks = world:size(), states = saved, apart = apart, of_rank = of_rank,
    shards = shards and link_shards.save(world, shards, parts),
  }
end

-- This rank's tensor, from the saved tensors of all ranks. If another number of ranks saved them:
-- their sum divided by `divisor`, or for integers the first. Raises where it cannot be read.
local function own_part(source, ranks, world, divisor)
  local shape, dtype = source:shape(), source:dtype()
  table.remove(shape, 1)
  local count = piece.elements(shape)
  local function of(rank)
    local ok, message = source:check(rank * count, count)
    if not ok then error(message, 0) end
    return assert(source:read(rank * count, count))
  end
  return core.no_grad(function()
    if ranks == world:size() then return of(world:rank()):view(table.unpack(shape)) end
    if dtype ~= "f32" and dtype ~= "f16" and dtype ~= "bf16" then
      return of(0):view(table.unpack(shape))
    end
    local sum = of(0):to "f32":clone()
    for rank = 1, ranks - 1 do sum:add_(of(rank):to "f32") end
    return sum:mul_(1 / divisor):to(dtype):view(table.unpack(shape))
  end)
end

-- Divides what one rank has kept for each number of its gradients.
local function split(value, ranks)
  for name in pairs(value.parallel or {}) do
    for parameter, t in pairs(value.flats[name] or {}) do
      value.flats[name][parameter] = core.no_grad(function() return t / ranks end)
    end
  end
end

-- Adds the numbers of shards to the values by state.
local function read_shards(links, result, source)
  local world, warned = core.world(), {}
  for _, entry in ipairs(links.shards or {}) do
    local name = entry.state
    local own, value = live[name] and inner[live[name]] or {}, result[name]
    local model, sums = own.between and own.between[1], own.adds_up
    if sums == nil then sums = value.adds_up end
    if not model and links.ranks ~= world:size() and not warned[name] then
      warned[name] = true
      log.log("state '%s' of a link between reductions starts anew: it is not known yet of which \z
        model it will be", name)
    end
    value.between = true
    value.flats[entry.flat] = value.flats[entry.flat] or {}
    value.flats[entry.flat][entry.parameter] = link_shards.read(entry, links.ranks, world, model,
      sums, source(entry.tensor))
  end
end

--- Reads the result of save: values by state. source(name) and decode(value, tensor) are the
--- checkpoint's. Raises where a tensor cannot be read.
---@param links? table
---@param decode fun(value: any, tensor: fun(name: string): ms.Tensor): any
---@param source fun(name: string): ms.Source
---@return table<string, table>
function link_state.read(links, decode, source)
  if not links then return {} end
  local world, states = ms.world(), links.states
  if links.apart then
    local other = links.ranks ~= world:size()
    states = core.json_decode(links.apart[other and 1 or world:rank() + 1])
    if other then
      log.log("states of links that %d ranks had apart: their numbers outside of tensors are \z
        those of rank 0", links.ranks)
    end
  end
  local result = {}
  for name, state in pairs(states) do
    local own = live[name] and inner[live[name]]
    local sums = own and own.adds_up
    if sums == nil then sums = state.adds_up end
    local divisor = sums and world:size() or links.ranks
    local value = decode(state.value, function(key)
      local found = source(key)
      if links.of_rank[key] then return own_part(found, links.ranks, world, divisor) end
      local t, message = found:whole()
      return t or error(message, 0)
    end)
    value.adds_up, value.parallel = state.adds_up, state.parallel
    if links.ranks == 1 and divisor > 1 then split(value, divisor) end
    result[name] = value
  end
  read_shards(links, result, source)
  return result
end

--- Sets all states to their saved values; states that the checkpoint does not have are reset.
---@param saved table<string, table>
function link_state.load(saved)
  waiting = {}
  for name, value in pairs(saved) do waiting[name] = value end
  for name, state in pairs(live) do
    link_state.restore(state,
      saved[name] or { iteration = 0, flats = {}, texts = {}, parameters = {}, buckets = {} })
    waiting[name] = nil
  end
end

--- The names of loaded states that no link has, in order.
---@return string[]
function link_state.unclaimed()
  local names = {}
  for name in pairs(waiting) do names[#names + 1] = name end
  table.sort(names)
  return names
end

return link_state
