-- Replicas: what several ranks hold and what must be equal on them. These are parameters whose
-- gradients are reduced over a group (of a sharded model, the copies of one shard), the states of
-- their optimizers with the groups' numbers, and the buffers that each pass copies from one rank.
-- Whatever makes them differ would otherwise train other weights on each rank without a word: a
-- file that some ranks have read, a learning rate that one rank has changed, a gradient that was
-- not reduced.
--
-- Each rank hashes what it holds, and ranks exchange one number for each group. Only if these
-- differ they exchange the hash of each name. What a rank has of its own is not compared:
-- parameters that are ignored, parameters of group_of, models whose chain has a link that says
-- is_local, and buffers that a forward writes (running statistics).
local core = require "moonshard.core"
local hooks = require "moonshard.hooks"
local listed = require "moonshard.nn.listed"
local module = require "moonshard.nn.module"
local values = require "moonshard.checkpoint.values"
local sorted_pairs = require "moonshard.base.sorted_pairs"
local options_of = require "moonshard.base.options"
local layouts = require "moonshard.parallel.ddp.layouts"
local ownership = require "moonshard.base.ownership"

local replicas = {}

-------------------------------------------------------------------------------------- collecting

--- What is compared over one group of ranks. Names are those of checkpoints. own: a buffer that a
--- forward of this rank has written. is_saved: a checkpoint holds the tensor's bytes.
---@class ms.ReplicaEntry
---@field name string
---@field tensor? ms.Tensor
---@field shown? string of what is no tensor
---@field own? boolean
---@field is_saved? boolean

--- What is to be compared, by group, in an order that is the same on all ranks.
---@class ms.Replicas
---@field groups ms.Group[]
---@field lists table<ms.Group, ms.ReplicaEntry[]>

---@return ms.Replicas
function replicas.new() return { groups = {}, lists = {} } end

local function put(found, group, entry)
  if not found.lists[group] then
    found.groups[#found.groups + 1], found.lists[group] = group, {}
  end
  table.insert(found.lists[group], entry)
end

-- The shortest text that reads back as this value.
local function text_of(coded)
  if math.type(coded) ~= "float" then return core.json_encode { coded } :sub(2, -2) end
  for _, form in ipairs { "%.6g", "%.14g" } do
    if tonumber(form:format(coded)) == coded then return form:format(coded) end
  end
  return ("%.17g"):format(coded)
end

-- A value of any kind that checkpoints can hold: its tensors, and the rest as text.
local function put_value(found, group, name, value)
  local out = { names = {}, tensors = {} }
  local coded = values.encode(value, name, 1, out)
  for i, t in ipairs(out.tensors) do
    put(found, group, { name = out.names[i], tensor = t, is_saved = true })
  end
  if not core.is_tensor(value) then
    put(found, group, { name = name, shown = text_of(coded) })
  end
end

-- The ranks that must hold the parameters of a ddp model alike; nil: each rank has its own.
local function ranks_of_ddp(s)
  local group = s.reducer and hooks._equal_over(s.how.chain or {}, s.group)
  return group and group:size() > 1 and group or nil
end

-- The ranks that hold copies of this rank's shard.
local function ranks_of_copies(s)
  local group = s.sharded and s.replicas and hooks._equal_over(s.how.chain or {}, s.replicas)
  return group and group:size() > 1 and group or nil
end

-- What of a sharded parameter this rank has: its shard, whatever is gathered now.
local function part_of(s, name, p)
  if not module.is_part(p) then return p end
  for position, one in ipairs(s.sharded:pieces()) do
    if one.name == name then return s.sharded:piece(position) end
  end
end

-- The ranks that hold a parameter alike, and what this rank has of it. wrapper: the state of the
-- ddp model that is asked, which has copied untrained parameters as well.
local function place_of(p, name, wrapper)
  local entry, s = ownership.sharded[p], ownership.reduced[p]
  if entry then
    local group = not entry.own and ranks_of_copies(entry.model)
    return group or nil, group and part_of(entry.model, name, p)
  end
  if not s and wrapper and wrapper.options.init_sync ~= false
      and not listed.has(wrapper.options.ignored, name) then
    s = wrapper
  end
  return s and ranks_of_ddp(s), p
end

-- Buffers of a ddp model that each pass copies from one rank.
local function collect_buffers(found, where, s)
  local group = ranks_of_ddp(s)
  if not group or s.options.broadcast_buffers == false and not s.options.buffer_hook then return end
  for name, t in sorted_pairs(s.wrapped:buffers()) do
    if not listed.has(s.options.ignored, name) then
      put(found, group,
        { name = where .. values.name_part(name), tensor = t,
          own = s.own_buffers and s.own_buffers[name] })
    end
  end
end

--- Adds what ranks must hold alike of a module, wrapped or not.
---@param found ms.Replicas
---@param where string comes before names in messages
---@param object ms.Module
function replicas.add_module(found, where, object)
  local wrapper = getmetatable(object).ddp
  for _, item in ipairs(object:named_parameters()) do
    local group, tensor = place_of(item.parameter, item.name, wrapper)
    if group and tensor:device() ~= "meta" then
      put(found, group,
        { name = where .. values.name_part(item.name), tensor = tensor, is_saved = true })
    end
  end
  if wrapper then collect_buffers(found, where, wrapper) end
end

-- The ranks on which an optimizer's settings for this parameter are equal, and those on which its
-- state is.
local function places_of_state(p)
  local entry, s = ownership.sharded[p], ownership.reduced[p]
  if not entry then
    local group = s and ranks_of_ddp(s) or nil
    return group, group
  end
  local over = not entry.own and entry.model.sharded and entry.model.group
  return over and over:size() > 1 and over or nil, not entry.own and ranks_of_copies(entry.model)
end

-- The numbers of an optimizer's group, once for each group of ranks.
local function add_settings(found, where, optimizer, group, seen)
  for _, p in ipairs(group.params) do
    local ranks = places_of_state(p)
    if ranks and not seen[ranks] then
      seen[ranks] = true
      for name in sorted_pairs(optimizer.kind.all_defaults) do
        put_value(found, ranks, where .. name, group[name])
      end
    end
  end
end

--- Adds what ranks must hold alike of an optimizer. Of a sharded optimizer, each rank has the
--- states of other parameters.
---@param found ms.Replicas
---@param where string comes before names in messages
---@param optimizer ms.Optimizer
function replicas.add_optimizer(found, where, optimizer)
  local counted = {}
  for i, group in ipairs(optimizer.list) do
    add_settings(found, ("%sgroups/%d/"):format(where, i), optimizer, group, {})
  end
  for position, p in ipairs(optimizer.order) do
    local over, ranks = places_of_state(p)
    if over and not counted[over] then
      counted[over] = true
      put_value(found, over, where .. "steps", optimizer.steps)
    end
    if ranks and not optimizer.shard then
      local slot, name = optimizer.slots[p], p:name()
      local at = ("%sparameters/%s"):format(where,
        values.name_part(name ~= "" and name or "#" .. position))
      for key, value in sorted_pairs(slot.state) do
        put_value(found, ranks, ("%s/%s"):format(at, values.name_part(key)), value)
      end
      if slot.taken then put_value(found, ranks, at .. "/taken", slot.taken) end
    end
  end
end

--- Adds what ranks must hold alike of the things of a checkpoint.
---@param found ms.Replicas
---@param things table<string, any>
function replicas.add_things(found, things)
  for name, thing in sorted_pairs(things) do
    local meta = type(thing) == "table" and getmetatable(thing)
    local where = values.name_part(name) .. "/"
    if module.is_module(thing) then replicas.add_module(found, where, thing)
    elseif type(meta) == "table" and meta.__name == "ms.Optimizer" then
      replicas.add_optimizer(found, where, thing)
    end
  end
end

--- The names that all ranks of the world must hold alike.
---@param found ms.Replicas
---@return table<string, boolean>
function replicas.names(found)
  local names, ranks = {}, core.world():size()
  for _, group in ipairs(found.groups) do
    for _, entry in ipairs(group:size() == ranks and found.lists[group] or {}) do
      if not entry.own then names[entry.name] = true end
    end
  end
  return names
end

--------------------------------------------------------------------------------- running statistics

--- Before a forward that is recorded: the versions of a ddp model's buffers, if a forward may still
--- be the first that writes them.
---@param s ms.DDPState
---@return table<string, { [1]: ms.Tensor, [2]: integer }>?
function replicas.before_forward(s)
  local marks
  for name, t in pairs(s.wrapped:buffers()) do
    if not (s.own_buffers and s.own_buffers[name]) then
      marks = marks or {}
      marks[name] = { t, core.tensor_version(t) }
    end
  end
  return marks
end

--- After that forward: what it has written or assigned is this rank's own from now on.
---@param s ms.DDPState
---@param marks? table<string, { [1]: ms.Tensor, [2]: integer }>
function replicas.after_forward(s, marks)
  if not marks then return end
  local now = s.wrapped:buffers()
  for name, mark in pairs(marks) do
    if now[name] ~= mark[1] or core.tensor_version(mark[1]) ~= mark[2] then
      s.own_buffers = s.own_buffers or {}
      s.own_buffers[name] = true
    end
  end
end

--------------------------------------------------------------------------------------- comparing

-- The hash of each entry, as text; "own" for what is not compared.
local function hash_all(list, known)
  local tensors, entries = {}, {}
  for _, entry in ipairs(list) do
    local read = entry.is_saved and known[entry.name]
    if entry.own then entry.hash = "own"
    elseif read and read.count == entry.tensor:numel() then entry.hash = read.hash
    elseif entry.tensor then tensors[#tensors + 1], entries[#entries + 1] = entry.tensor, entry
    else entry.hash = entry.shown end
  end
  for i, hash in ipairs(#tensors > 0 and core.hashes(tensors) or {}) do
    entries[i].hash = ("%016x"):format(hash)
  end
  for _, entry in ipairs(list) do
    local t = not entry.own and entry.tensor
    if t then entry.hash = ("%s %s %s"):format(entry.hash, t:dtype(), t:numel()) end
  end
end

local function fold(list)
  local parts = {}
  for i, entry in ipairs(list) do parts[i] = entry.name .. "\0" .. entry.hash end
  return core.hash(table.concat(parts, "\0"))
end

-- "rank 2", "ranks 0, 1 and 3"
local function named(ranks)
  if #ranks == 1 then return "rank " .. ranks[1] end
  return ("ranks %s and %d"):format(table.concat(ranks, ", ", 1, #ranks - 1), ranks[#ranks])
end

-- Ranks that hold the same of a name, as { ranks = world ranks, shown }, in order of their first.
local function classes_of(name, all, members)
  local classes, by_hash = {}, {}
  for r, list in ipairs(all) do
    local one = list[name] or { hash = "none", shown = "nothing" }
    if one.hash == "own" then return {} end
    local class = by_hash[one.hash]
    if not class then
      class = { ranks = {}, shown = one.shown }
      by_hash[one.hash], classes[#classes + 1] = class, class
    end
    table.insert(class.ranks, members[r])
  end
  return classes
end

local function describe(name, classes)
  local is_shown = true
  for _, class in ipairs(classes) do is_shown = is_shown and class.shown and #class.shown < 60 end
  if is_shown then
    local parts = {}
    for i, class in ipairs(classes) do
      parts[i] = ("%s on %s"):format(class.shown, named(class.ranks))
    end
    return ("'%s' is %s"):format(name, table.concat(parts, ", "))
  end
  if #classes == 2 then
    -- Who is alone is named first.
    local a, b = classes[1], classes[2]
    if #a.ranks >= #b.ranks then a, b = b, a end
    return ("'%s' of %s differs from that of %s"):format(name, named(a.ranks), named(b.ranks))
  end
  local parts = {}
  for i, class in ipairs(classes) do parts[i] = named(class.ranks) end
  return ("'%s' differs: %s"):format(name, table.concat(parts, "; "))
end

-- A text about the first name that differs within a group; nil if only what is not compared does.
-- All ranks of the group call it.
local function find(group, list)
  local own = core.json_list {}
  for i, entry in ipairs(list) do
    own[i] = { name = entry.name, hash = entry.hash, shown = entry.shown }
  end
  local all, order, seen = {}, {}, {}
  for r, text in ipairs(group:_share_texts(core.json_encode { own = own }, "check_replicas")) do
    all[r] = {}
    for _, one in ipairs(core.json_decode(text).own) do
      all[r][one.name] = one
      if not seen[one.name] then seen[one.name], order[#order + 1] = true, one.name end
    end
  end
  local members, first, setting, count = group:_members(), nil, nil, 0
  for _, name in ipairs(order) do
    local classes = classes_of(name, all, members)
    if #classes > 1 then
      count, first = count + 1, first or { name, classes }
      -- A setting is the cause of what differs beside it.
      if classes[1].shown then setting = setting or { name, classes } end
    end
  end
  if not first then return nil end
  return ("%s%s; %s reduce gradients together, so they must hold the same. Ranks begin, load and \z
    change alike; a link that leaves each rank gradients of its own says is_local = true")
    :format(describe(table.unpack(setting or first)),
      count > 1 and (" (%d more names differ)"):format(count - 1) or "", named(members))
end

--- The first difference as text; nil if nothing differs that must not. All ranks that share a group
--- with another call it. Blocks until the tensors have their values. On "sim", which has none,
--- nothing is compared.
---@param found ms.Replicas
---@param known table<string, { hash: string, count: integer }> of tensors that this rank has read
--- already, by name: the hash of their elements, and how many there are
---@return string?
function replicas.problem(found, known)
  if core.is_sim() then return nil end
  local folds, tickets, first = {}, {}, nil
  for i, group in ipairs(found.groups) do
    hash_all(found.lists[group], known)
    folds[i] = fold(found.lists[group])
    tickets[i] = group:_share_begin("all_gather", "i64", { folds[i] }, "check_replicas")
  end
  for i, group in ipairs(found.groups) do
    local differs = false
    for _, other in ipairs(group:_share_end("all_gather", "i64", 1, tickets[i])) do
      differs = differs or other ~= folds[i]
    end
    local text = differs and find(group, found.lists[group])
    first = first or text or nil
  end
  return first
end

-- The problem of the first rank of the group that has one, on all of its ranks.
local function agreed(group, text)
  if group:_share("sum", "i64", { text and 1 or 0 }, "check_replicas")[1] == 0 then return nil end
  for _, one in ipairs(group:_share_texts(text or "", "check_replicas")) do
    if one ~= "" then return one end
  end
end

--- Raises; the program then ends with code 5.
---@param what string who asks, for messages
---@param text string of replicas.problem
function replicas.raise(what, text) core.raise(("%s: %s"):format(what, text), 5) end

--- Raises on all ranks of the group if something of what was added differs where it must not. All
--- ranks of the group call it, and it blocks, as replicas.problem does.
---@param what string who asks, for messages
---@param found ms.Replicas
---@param group ms.Group
---@param known? table<string, { hash: string, count: integer }>
function replicas.check(what, found, group, known)
  if core.is_sim() or group:size() == 1 then return end
  local text = agreed(group, replicas.problem(found, known or {}))
  if text then replicas.raise(what, text) end
end

--- check_replicas of a wrapped model.
---@param model ms.DDP|ms.FSDP
---@param group ms.Group of the model
---@param optimizer? ms.Optimizer
function replicas.check_model(model, group, optimizer)
  options_of.argument("check_replicas", "optimizer", optimizer, "optimizer?")
  if core.in_hook() then
    core.raise "check_replicas cannot be used inside a hook: it waits for the values"
  end
  layouts.check()
  local found = replicas.new()
  replicas.add_module(found, "", model)
  if optimizer then replicas.add_optimizer(found, "optimizer/", optimizer) end
  replicas.check("check_replicas", found, group)
end

return replicas
