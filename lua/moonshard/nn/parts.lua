-- What ranks hold of one model, where each has another part of it: nn.split, nn.owned, nn.shared.
--
-- A split parameter is a part of a tensor that the ranks of a group have together. An owned module
-- is one that no other rank of a group has: a stage, an expert. A shared parameter has copies on
-- all ranks of a group, and its gradient is the sum of theirs. Parameters that are not declared, of
-- a model that has others, are equal on the ranks of these groups, and so are their gradients.
--
-- Invariants. A declaration belongs to the parameter, and ends with it. Groups of one parameter are
-- different ones. The groups of a model's split and owned parameters are axes: each rank is in one
-- group of each axis, so sums over one axis after the other are sums over all of its ranks. Ranks
-- must take the axes in one order: that in which the groups were split from the world.
--
-- Who reads the declarations: clipping, scalers and steps (counts, axes, settle), ms.ddp and
-- ms.fsdp (refuse), states, save and load (checkpoint/, whole.lua), delayed.lua (initial).
local core = require "moonshard.core"
local module = require "moonshard.nn.module"
local names = require "moonshard.nn.names"
local options_of = require "moonshard.base.options"
local ownership = require "moonshard.base.ownership"
local piece = require "moonshard.parallel.shard_piece"
local region = require "moonshard.parallel.region"

local parts = {}

--- What is declared of a parameter.
---@class ms.Declared
--- region: what of the whole this rank has. copies: the ranks that have the same part; nil: no
--- other
---@field split? { group: ms.Group, region: ms.Region, copies?: ms.Group }
---@field owned ms.Group[]
---@field shared ms.Group[]

--- How a parameter's values are made. record: of core.initializer, or the source that they are read
--- from. region: what of the recorded tensor the parameter has; nil: all.
---@class ms.Initial
---@field record any
---@field region? ms.Region
---@field version? integer
local Initial = { __name = "ms.Initial" }
local function initial_of(record, r)
  return setmetatable({ record = record, region = r }, Initial)
end

-- parameter -> ms.Declared
local declared = ownership.declared
-- parameter -> how its values are made, while it has that version
local initial = setmetatable({}, { __mode = "k" })
-- group -> number of copies -> the groups of ranks that have the same part
local copies_of = setmetatable({}, { __mode = "k" })

---@param p ms.Tensor
---@return ms.Declared?
function parts.of(p) return declared[p] end

local function name_of(p)
  local name = p:name()
  return name ~= "" and name or "a parameter"
end

local function entry_of(p)
  declared[p] = declared[p] or { owned = {}, shared = {} }
  return declared[p]
end

-- The groups that a parameter is declared with in such a way, and the one over which it is split.
local function groups_of(own, kind)
  local list = { table.unpack(own[kind] or {}) }
  if own.split then list[#list + 1] = own.split.group end
  return list
end

-- Raises unless a parameter can be declared so with this group. kind: "owned" or "shared".
local function check_free(what, p, group, kind)
  if ownership.sharded[p] or ownership.reduced[p] and ownership.reduced[p].reducer then
    core.raise(("%s: '%s' belongs to a model that is wrapped by %s: declare it before"):format(what,
      name_of(p), ownership.sharded[p] and "fsdp" or "ddp"))
  elseif ownership.alone[p] then
    core.raise(("%s: '%s' is declared by nn.alone, so that each rank trains its own"):format(what,
      name_of(p)))
  elseif ownership.coded[p] then
    core.raise(("%s: '%s' has the codes of a weight: declare the weight before nn.lora encodes it")
      :format(what, name_of(p)))
  end
  for _, other in ipairs(declared[p] and groups_of(declared[p], kind) or {}) do
    if other == group then
      core.raise(("%s: '%s' is declared with this group already"):format(what, name_of(p)))
    end
  end
end

local function check_arguments(what, p, group, kind)
  if not core.is_parameter(p) then
    core.raise(("%s: a parameter is expected, not %s"):format(what,
      core.is_tensor(p) and "a tensor that is none" or type(p)))
  end
  options_of.argument(what, "group", group, "group")
  check_free(what, p, group, kind)
end

----------------------------------------------------------------------------------- initial values

-- How the values of a parameter were made, as long as nothing else has written them.
local function record_of(p)
  local known = initial[p]
  if known and known.version == core.tensor_version(p) then return known end
  local unread = module.unread[p]
  if unread then
    return unread.version == core.tensor_version(p) and initial_of(unread.source) or nil
  end
  local record = core.initializer(p)
  return record and initial_of(record) or nil
end

-- Values of a part, in its memory, from how those of the whole are made. Padding is 0.
local function make_part(t, record, r)
  local flat = t:detach():view(-1)
  flat:fill_(0)
  if piece.is_source(record) then return piece.put(flat, record, 0, flat:numel(), r) end
  local whole = core.empty { dtype = t:dtype(), table.unpack(r.shape) }
  core.initialize(whole, record)
  region.take(flat, r, 0, flat:numel(), whole)
end

--- Makes the values of a parameter, in its memory, whatever the current device is.
---@param t ms.Tensor
---@param known ms.Initial
function parts.initialize(t, known)
  core.no_grad(function()
    core.on_device("cpu", function()
      local record, r = known.record, known.region
      if r then make_part(t, record, r)
      elseif piece.is_source(record) then piece.put(t:detach():view(-1), record, 0, t:numel())
      else core.initialize(t, record) end
    end)
  end)
end

---@param value any
---@return boolean
function parts.is_initial(value) return getmetatable(value) == Initial end

--- How the values of a declared parameter on "meta" are made; nil: as those of any other are.
---@param what string for messages
---@param p ms.Tensor
---@param name string
---@return ms.Initial?
function parts.initial(what, p, name)
  local known = initial[p]
  if known and known.version ~= core.tensor_version(p) then
    core.raise(("%s: '%s' was written on \"meta\" after it was declared to be a part, and this \z
      write would be lost: change it after it has its values"):format(what, name))
  end
  return known
end

--- From now on the values of a parameter are made so. Without memory this is done later.
---@param p ms.Tensor
---@param record any
---@param r? ms.Region
function parts.note_initial(p, record, r)
  local known = initial_of(record, r)
  if p:device() ~= "meta" then parts.initialize(p, known) end
  known.version = core.tensor_version(p)
  initial[p] = known
end
local note_initial = parts.note_initial

local function refuse_unknown(what, p)
  core.raise(("%s: nothing records how '%s' got its values, and ranks must not draw the same \z
    ones: declare it right after its module is made, or say values = \"kept\", if each rank has \z
    given it its own"):format(what, name_of(p)))
end

-------------------------------------------------------------------------------------------- split

-- The sizes of the whole's blocks; padding is at the end of the last one.
local function blocks_of(what, how, size, count)
  local blocks, total = how.blocks or { size }, 0
  for i, one in ipairs(blocks) do
    if math.type(one) ~= "integer" or one < 1 or one % count ~= 0 then
      core.raise(("%s: block %d has %s indices, which %d parts do not divide"):format(what, i,
        tostring(one), count))
    end
    total = total + one
  end
  if total ~= size then
    core.raise(("%s: the blocks have %d indices, the whole with its padding %d"):format(what, total,
      size))
  end
  return blocks
end

-- The stretches of part number `index` of `count` parts.
local function stretches_of(blocks, index, count, real)
  local list, at, from = {}, 0, 0
  for _, size in ipairs(blocks) do
    local own = size // count
    local begin = from + index * own
    list[#list + 1] = { at = at, from = begin, size = math.max(0, math.min(own, real - begin)) }
    at, from = at + own, from + size
  end
  return list
end

-- The group of the ranks that have this rank's part. All ranks of the group call it.
local function group_of_copies(group, repeats)
  if repeats == 1 then return nil end
  copies_of[group] = copies_of[group] or {}
  local found = copies_of[group][repeats]
  if not found then
    found = group:levels(repeats)
    copies_of[group][repeats] = found
  end
  return found
end

-- Puts a new parameter wherever modules have the old one.
local function put_in_place(old, new)
  for _, place in ipairs(names.places(old)) do place.state.fields[place.key] = new end
  names.replace(old, new)
end

-- A parameter with this rank's part of the values of another one. On "meta" they are made later.
local function cut_whole(p, r)
  local known = record_of(p)
  local meta = p:device() == "meta"
  local new = core.empty { dtype = p:dtype(), device = meta and "meta" or "cpu",
    table.unpack(r.part) }
  if meta then
    if not known then refuse_unknown("nn.split", p) end
  else
    core.no_grad(function() new:fill_(0) end)
    region.take(new:view(-1), r, 0, new:numel(), p)
  end
  local needs = p:requires_grad()
  new = module.Parameter(new)
  if not needs then new:requires_grad_(false) end
  module.loaded_dtype[new] = module.loaded_dtype[p]
  put_in_place(p, new:keep())
  if meta then note_initial(new, known.record, r)
  elseif known then
    initial[new] = initial_of(known.record, r)
    initial[new].version = core.tensor_version(new)
  end
  return new
end

---@param parameter ms.Parameter
---@param group ms.Group
---@param how ms.SplitOptions
---@return ms.Parameter
function parts.split(parameter, group, how)
  local what = "nn.split"
  check_arguments(what, parameter, group)
  local o = options_of.check(what, how, {
    dim = "integer", blocks = "table", pad = "integer", repeats = "integer", whole = "boolean",
    values = "string",
  })
  local dim, pad, repeats = o.dim or 1, o.pad or 0, o.repeats or 1
  local shape, size = parameter:shape(), group:size()
  if dim < 0 then dim = #shape + 1 + dim end
  if dim < 1 or dim > #shape then
    core.raise(("%s: dim %s of '%s', which is %s"):format(what, tostring(o.dim), name_of(parameter),
      tostring(parameter)))
  elseif repeats < 1 or size % repeats ~= 0 then
    core.raise(("%s: repeats = %d does not divide the %d ranks of the group"):format(what, repeats,
      size))
  elseif o.values ~= nil and o.values ~= "kept" then
    core.raise(('%s: values is "kept" or nothing, not %q'):format(what, o.values))
  end
  local own = declared[parameter]
  if own and own.split then
    core.raise(("%s: '%s' is split already, over another group"):format(what, name_of(parameter)))
  end
  local count = size // repeats
  local padded = o.whole and shape[dim] + pad or shape[dim] * count
  if padded % count ~= 0 then
    core.raise(("%s: dimension %d of '%s' has %d indices, which %d parts do not divide: pad = %d \z
      makes it %d"):format(what, dim, name_of(parameter), padded, count,
      pad + count - padded % count, padded + count - padded % count))
  elseif pad < 0 or pad >= padded then
    core.raise(("%s: pad = %d: 0 or more, and less than all %d indices"):format(what, pad, padded))
  end
  local blocks = blocks_of(what, o, padded, count)
  local part, all = { table.unpack(shape) }, { table.unpack(shape) }
  part[dim], all[dim] = padded // count, padded - pad
  local r = region.new(all, part, dim,
    stretches_of(blocks, group:rank() // repeats, count, padded - pad))
  local p = parameter
  if o.whole then
    if ownership.optimizer_of(p) then
      core.raise(("%s: '%s' belongs to an optimizer: split it before"):format(what, name_of(p)))
    elseif core.has_hooks(p) then
      core.raise(("%s: '%s' has functions of on_grad, which would be lost: split it before they \z
        are given"):format(what, name_of(p)))
    end
    p = cut_whole(p, r)
    if own then declared[p] = own end
  elseif o.values ~= "kept" then
    local known = record_of(p)
    if not known then refuse_unknown(what, p) end
    if size > 1 then note_initial(p, known.record, r) end
  end
  entry_of(p).split = { group = group, region = r, copies = group_of_copies(group, repeats) }
  if repeats > 1 then table.insert(entry_of(p).shared, entry_of(p).split.copies) end
  return p
end

-------------------------------------------------------------------------------------------- owned

-- Whether a module has one of these parameters itself.
local function has_one_of(one, list)
  local state = getmetatable(one)
  for _, key in ipairs(state.order) do
    local value = rawget(state.fields, key)
    if core.is_tensor(value) and list[value] then return true end
  end
  return false
end

-- The draws of the modules of a tree that have these parameters: seed, step, the first and the one
-- after the last; nil: none.
local function draws_of(object, list)
  local seed, step, first, last
  local has = {}
  for _, p in ipairs(list) do has[p] = true end
  for _, one in object:modules() do
    local drawn = getmetatable(one).drawn
    if drawn and drawn.last > drawn.first and has_one_of(one, has) then
      if seed and (seed ~= drawn.seed or step ~= drawn.step) then
        core.raise "nn.owned: the module was made in several steps, or with several seeds"
      end
      seed, step = drawn.seed, drawn.step
      first = math.min(first or drawn.first, drawn.first)
      last = math.max(last or drawn.last, drawn.last)
    end
  end
  return seed, step, first, last
end

-- The ranks of a group have made their modules one by one with the same numbers, as if each were
-- the first one. They get those that they have in one model, in which they follow each other. Where
-- a rank has taken its module out of a whole model, its numbers are right. Without the other ranks
-- (in `moonshard check`) nothing tells which it is, and values do not matter.
local function redraw_in_turn(object, list, group)
  if not group:_has_others() then return end
  local seed, step, first, last = draws_of(object, list)
  local told = group:_share("all_gather", "i64", { first or 0, (last or 0) - (first or 0) },
    "nn.owned")
  local before, total, same = 0, 0, true
  for r = 0, group:size() - 1 do
    if r < group:rank() then before = before + told[2 * r + 2] end
    total, same = total + told[2 * r + 2], same and told[2 * r + 1] == told[1]
  end
  if not same or total == 0 then return end
  local now_seed, now_step, now = core.random_state()
  if first and (now_seed ~= seed or now_step ~= step or now ~= last) then
    core.raise "nn.owned: numbers were drawn after the module was made: declare it right after"
  end
  for _, p in ipairs(list) do
    local known = record_of(p)
    if not known then refuse_unknown("nn.owned", p) end
    if not piece.is_source(known.record) then
      note_initial(p, core.moved_initializer(known.record, before), known.region)
    end
  end
  for _, one in object:modules() do
    local state = getmetatable(one)
    if state.drawn then
      state.drawn.first, state.drawn.last = state.drawn.first + before, state.drawn.last + before
    end
    if state.counter then state.counter[3] = state.counter[3] + before end
  end
  core.set_random_state(now_seed, now_step, now + total - (last or 0) + (first or 0))
end

-- Whether a parameter was declared to have a copy on another rank of the group.
local function is_shared_in(p, group)
  local inside = {}
  for _, rank in ipairs(group:_members()) do inside[rank] = true end
  for _, other in ipairs(declared[p] and declared[p].shared or {}) do
    local count = 0
    for _, rank in ipairs(other:_members()) do count = count + (inside[rank] and 1 or 0) end
    if count > 1 then return true end
  end
  return false
end

---@param object ms.Module
---@param group ms.Group
---@param options? { values?: "kept" }
---@return ms.Module
function parts.owned(object, group, options)
  local what = "nn.owned"
  options_of.argument(what, "module", object, "module")
  options_of.argument(what, "group", group, "group")
  local o = options_of.check(what, options, { values = "string" })
  if o.values ~= nil and o.values ~= "kept" then
    core.raise(('%s: values is "kept" or nothing, not %q'):format(what, o.values))
  end
  local list, alone = object:parameters(), {}
  if #list == 0 then core.raise(what .. ": the module has no parameter") end
  for _, p in ipairs(list) do
    check_free(what, p, group, "owned")
    if not is_shared_in(p, group) then alone[#alone + 1] = p end
  end
  if group:size() > 1 and o.values ~= "kept" then redraw_in_turn(object, alone, group) end
  for _, p in ipairs(list) do table.insert(entry_of(p).owned, group) end
  return object
end

------------------------------------------------------------------------------------------- shared

-- Gives the copies the numbers of the first rank's, where those of all ranks were drawn.
local function redraw_alike(p, group)
  local known = record_of(p)
  local draw = known and not piece.is_source(known.record) and core.initializer_draw(known.record)
  local own = { draw and 1 or 0, draw or 0 }
  local told = group:_share("all_gather", "i64", own, "nn.shared")
  for r = 0, group:size() - 1 do if told[2 * r + 1] == 0 then return end end
  if told[2] ~= draw then
    note_initial(p, core.moved_initializer(known.record, told[2] - draw), known.region)
  end
end

---@param parameter ms.Parameter
---@param group ms.Group
---@return ms.Parameter
function parts.shared(parameter, group)
  check_arguments("nn.shared", parameter, group, "shared")
  if group:size() > 1 then redraw_alike(parameter, group) end
  table.insert(entry_of(parameter).shared, group)
  return parameter
end

-------------------------------------------------------------------------------------- who asks

--- For what holds parameters alike on the ranks of a group, or cuts them over it: raises if ranks
--- of it have different parts of one of these.
---@param what string
---@param parameters ms.Parameter[]
---@param list string[] their names
---@param group ms.Group
function parts.refuse(what, parameters, list, group)
  local members
  for i, p in ipairs(parameters) do
    local own = declared[p]
    if own then
      members = members or {}
      for _, rank in ipairs(next(members) and {} or group:_members()) do members[rank] = true end
      local axes = { own.split and own.split.group, table.unpack(own.owned) }
      for k, axis in pairs(axes) do
        local both = 0
        for _, rank in ipairs(axis:_members()) do both = both + (members[rank] and 1 or 0) end
        if both > 1 then
          core.raise(("%s: '%s' is %s over ranks that are among these %d: give %s the group of \z
            ranks that hold the same part, or name it in ignored"):format(what, list[i],
            own.split and k == 1 and "split" or "owned", group:size(), what))
        end
      end
    end
  end
end

-- The place of a group's split among all splits, for an order that is the same on all ranks.
local function order_of(group)
  local list = {}
  for number in group:name():gsub("%.%d+", ""):gmatch "/(%d+)" do
    list[#list + 1] = tonumber(number)
  end
  return list
end

local function is_before(a, b)
  local x, y = order_of(a), order_of(b)
  for i = 1, math.min(#x, #y) do if x[i] ~= y[i] then return x[i] < y[i] end end
  return #x < #y
end

local function each_axis(own, f)
  if own.split then f(own.split.group) end
  for _, group in ipairs(own.owned) do f(group) end
end

--- The groups over which these parameters are split or owned, in the order in which all ranks take
--- them. Groups of one rank are left out.
---@param parameters ms.Parameter[]
---@return ms.Group[]
function parts.axes(parameters)
  local list, seen = {}, {}
  for _, p in ipairs(parameters) do
    if declared[p] then
      each_axis(declared[p], function(group)
        if not seen[group] and group:size() > 1 then seen[group], list[#list + 1] = true, group end
      end)
    end
  end
  table.sort(list, is_before)
  return list
end

-- Whether this rank is the first of a group's ranks that are on this axis.
local function is_first_on(axis, group)
  local on_axis = {}
  for r = 0, axis:size() - 1 do on_axis[axis:_world_rank(r)] = true end
  for r = 0, group:rank() - 1 do
    if on_axis[group:_world_rank(r)] then return false end
  end
  return true
end

--- Whether this rank's values of a parameter count in sums over the axes. Of ranks that hold the
--- same, one counts; copies on ranks of no axis are in no sum of this rank's.
---@param p ms.Parameter
---@param axes ms.Group[]
---@return boolean
function parts.counts(p, axes)
  local own, over = declared[p], {}
  if own then
    local counts = true
    each_axis(own, function(axis)
      over[axis] = true
      for _, group in ipairs(own.shared) do counts = counts and is_first_on(axis, group) end
    end)
    if not counts then return false end
  end
  for _, group in ipairs(axes) do if not over[group] and group:rank() ~= 0 then return false end end
  return true
end

-- Gradients of this many bytes are summed by themselves; smaller ones go together.
local ALONE <const> = 1 << 20

-- Sums these gradients over a group.
local function sum_over(group, gradients)
  local futures, small = {}, {}
  for _, grad in ipairs(gradients) do
    if grad:numel() * 4 >= ALONE then futures[#futures + 1] = group:all_reduce(grad, "sum")
    else
      small[grad:dtype()] = small[grad:dtype()] or {}
      table.insert(small[grad:dtype()], grad)
    end
  end
  for _, dtype in ipairs { "f32", "bf16", "f16" } do
    local list, views = small[dtype] or {}, {}
    for i, grad in ipairs(list) do views[i] = grad:view(-1) end
    if #list > 0 then
      local all, at = core.cat(views, 1), 1
      group:all_reduce(all, "sum"):value()
      for _, view in ipairs(views) do
        view:copy_(all:narrow(1, at, view:numel()))
        at = at + view:numel()
      end
    end
  end
  for _, future in ipairs(futures) do future:value() end
end

-- Raises if copies of a shared parameter differ. Once for each parameter, since later all copies
-- get the same sums.
local function compare(group, list)
  local tensors, fresh = {}, {}
  for _, p in ipairs(list) do
    local own = declared[p]
    own.compared = own.compared or {}
    if not own.compared[group] then
      own.compared[group], tensors[#tensors + 1], fresh[#fresh + 1] = true, p:detach(), p
    end
  end
  if #tensors == 0 or core.is_sim() then return end
  local hashes = core.hashes(tensors)
  local all = group:_share("all_gather", "i64", hashes, "nn.shared")
  for i, number in ipairs(all) do
    local at = (i - 1) % #hashes + 1
    if number ~= hashes[at] then
      core.raise(("nn.shared: '%s' of rank %d differs from that of rank %d: copies of a shared \z
        parameter begin, and are loaded, alike"):format(name_of(fresh[at]), core.world():rank(),
        group:_world_rank((i - 1) // #hashes)), 5)
    end
  end
end

--- Sums gradients of shared parameters over their groups, unless that was done since they were
--- zeroed. All ranks of these groups call it.
---@param parameters ms.Parameter[]
function parts.settle(parameters)
  local lists, order = {}, {}
  for _, p in ipairs(parameters) do
    local own = declared[p]
    if own and #own.shared > 0 and p:grad() and not core.is_summed(p) then
      core.mark_summed(p)
      for _, group in ipairs(own.shared) do
        if group:size() > 1 then
          if not lists[group] then lists[group], order[#order + 1] = {}, group end
          table.insert(lists[group], p)
        end
      end
    end
  end
  if #order == 0 then return end
  table.sort(order, is_before)
  core.no_grad(function()
    for _, group in ipairs(order) do
      local gradients = {}
      compare(group, lists[group])
      for i, p in ipairs(lists[group]) do gradients[i] = p:grad() end
      sum_over(group, gradients)
    end
  end)
end

--- For steps in backward: raises if the gradient of this parameter is to be summed first.
---@param what string
---@param p ms.Parameter
function parts.refuse_early(what, p)
  local own = declared[p]
  if own and #own.shared > 0 and not core.is_summed(p) then
    core.raise(("%s: '%s' is shared (ms.nn.shared), and its gradient is summed over its ranks \z
      after backward: step it after_backward"):format(what, name_of(p)))
  end
end

--- The number of elements of these parameters in the whole model, and of those that are trained.
--- All ranks of its axes call it, and it blocks for them.
---@param parameters ms.Parameter[]
---@return integer
---@return integer
function parts.count(parameters)
  local axes, numbers = parts.axes(parameters), { 0, 0 }
  -- What group_of of fsdp gives to some ranks: the first of these counts it. All ranks have some.
  local group, rare = nil, { 0, 0 }
  for _, p in ipairs(parameters) do
    local own, codes, entry = declared[p], ownership.coded[p], ownership.sharded[p]
    local r = own and own.split and own.split.region
    local elements = r and region.count(r, 0, piece.elements(r.part))
      or piece.elements(codes and codes.shape or p:full_shape())
    local list, counts = numbers, parts.counts(p, axes)
    if entry and entry.own then
      group, list, counts = entry.model.group, rare, entry.shards:rank() == 0
    end
    if counts then
      list[1] = list[1] + elements
      if p:requires_grad() then list[2] = list[2] + elements end
    end
  end
  for _, axis in ipairs(axes) do numbers = axis:_share("sum", "i64", numbers, "parameters") end
  if group then rare = group:_share("sum", "i64", rare, "parameters") end
  return numbers[1] + rare[1], numbers[2] + rare[2]
end

return parts
