-- What users have of a sharded model: its object's methods. ms.fsdp makes it.
local core = require "moonshard.core"
local edges = require "moonshard.parallel.fsdp.module_hooks"
local fsdp_options = require "moonshard.parallel.fsdp.options"
local future = require "moonshard.parallel.future"
local hooks = require "moonshard.hooks"
local join = require "moonshard.parallel.fsdp.join"
local lora = require "moonshard.nn.lora"
local module = require "moonshard.nn.module"
local options_of = require "moonshard.base.options"
local overlap = require "moonshard.parallel.overlap"
local piece = require "moonshard.parallel.shard_piece"
local whole = require "moonshard.nn.whole"
local prefetch = require "moonshard.parallel.fsdp.prefetch"
local precision = require "moonshard.parallel.fsdp.precision"
local replicas = require "moonshard.parallel.replicas"
local state = require "moonshard.parallel.fsdp.state"
local statistics = require "moonshard.parallel.statistics"
local values = require "moonshard.parallel.fsdp.values"
local ownership = require "moonshard.base.ownership"
local check, strategies = options_of.check, fsdp_options.strategies

local objects = {}

---@class ms.FSDP: ms.DDP
local FSDP = {}

--- The state of a sharded model, kept in its object's metatable and known to its modules.
---@class ms.FSDPState: ms.GradientSource
---@field wrapped ms.Module
---@field options ms.FSDPOptions as they were given
---@field groups table<string, ms.Group> name of a parameter of fewer ranks -> these
---@field shards ms.Group whose ranks share one copy of the parameters
---@field replicas? ms.Group whose ranks hold the same shard; nil: this rank alone
---@field strategy string
---@field sharded? any the model in the core; nil: unwrapped
---@field units { modules: ms.Module[], name: string, index: integer }[] the root first
---@field precision? ms.FSDPPrecision nil: units compute in their parameters' dtypes
---@field in_fp8 table<string, boolean> names of parameters that travel in fp8
---@field accumulate "local"|"shard"|"all"
---@field methods table<string, boolean> what forward_method has replaced
---@field joining? ms.ShardedJoining join runs
---@field optimizers table<integer, ms.Optimizer> of its parameters, by number
---@field numbers table<ms.Optimizer, integer>
---@field optimizer_count integer
---@field planner ms.Prefetch that the options give
---@field prefetching ms.Prefetching
---@field structure? integer of names.structure, when the parameters were looked at
---@field unit_of table<ms.Parameter, integer> index of its unit
---@field unit_of_module table<ms.Module, table> the innermost unit; nil: the root
---@field later? ms.Delayed while it is wrapped: what of it is on "meta"

-- modules that are units of a sharded model, or below one -> its state
local owner = setmetatable({}, { __mode = "k" })

---@param self any
---@return ms.FSDPState
local function state_of(self)
  local meta = getmetatable(self)
  if type(meta) ~= "table" or not meta.fsdp then
    core.raise("an fsdp model is expected, not " .. type(self))
  end
  return meta.fsdp
end

-- The same for calls that need the shards.
local function sharded_of(self, what)
  local s = state_of(self)
  if not s.sharded then core.raise(what .. ": this model was unwrapped") end
  return s
end

-- The same for calls that need all ranks: inside a join some may have no inputs left, and do not
-- make them.
local function outside_join(self, what)
  local s = sharded_of(self, what)
  if s.joining then
    core.raise(what .. ": inside join, ranks without inputs left would not take part: call it \z
      before or after")
  end
  return s
end

join.define("buffers", function(s, words) values.share_buffers(s, words.first) end)

local function forward(self, ...)
  local s = sharded_of(self, "forward")
  local root = s.joining and join.before_forward(s) or 0
  if s.options.broadcast_buffers and core.is_recording() then values.share_buffers(s, root) end
  return s.wrapped(...)
end

-------------------------------------------------------------------------------------------- methods

-- f with a setting of the core, which is then what it was before.
local function within(s, setting, f)
  local before = s.sharded[setting](s.sharded, false)
  local scope <close> = setmetatable({}, { __close = function() -- luacheck: ignore scope
    if s.sharded then s.sharded[setting](s.sharded, before) end
  end })
  return f()
end

---@param f function
function FSDP:no_sync(f)
  local s = sharded_of(self, "no_sync")
  if type(f) ~= "function" then core.raise("no_sync: a function is expected, not " .. type(f)) end
  return within(s, "sync", f)
end

function FSDP:reduce()
  local s = outside_join(self, "reduce")
  local before = s.sharded:sync(true)
  s.sharded:sync(before)
  if not before then core.raise "reduce: inside no_sync gradients are not reduced" end
  s.sharded:check_idle("reduce")
  overlap.await(s)
  overlap.begin(s, true)
  s.sharded:reduce()
end

-- The setting that is off in passes of a window before the last.
local off_before_last = { ["local"] = "sync", shard = "replica_sync" }

-- Raises for a chain that clips: it would clip each pass, or each part, by itself.
local function check_clip(s, what)
  for _, link in ipairs(s.how.chain or {}) do
    if type(link) == "table" and link.facts and link.facts.clips then
      core.raise(("%s: the model's chain clips (%s), and it would clip the gradients of each pass \z
        by themselves: use accumulate = 'local', or clip by model:clip_grad_norm()")
        :format(what, hooks._name(link)))
    end
  end
end

---@param count integer
---@param f fun(i: integer)
function FSDP:accumulate(count, f)
  local s = sharded_of(self, "accumulate")
  if type(f) ~= "function" then
    core.raise("accumulate: a function is expected, not " .. type(f))
  end
  if count ~= 1 and s.accumulate ~= "local" then check_clip(s, "accumulate") end
  local setting, before = off_before_last[s.accumulate], s.partial
  local scope <close> = setmetatable({}, { -- luacheck: ignore scope
    __close = function() s.partial = before end,
  })
  s.wrapped:accumulate(count, function(i)
    s.partial = before or i < count
    if i == count or not setting then return f(i) end
    return within(s, setting, function() return f(i) end)
  end)
end

---@param yes boolean whether the backward passes to come reduce
function FSDP:set_gradient_sync(yes)
  local s = sharded_of(self, "set_gradient_sync")
  options_of.argument("set_gradient_sync", "yes", yes, "boolean")
  s.sharded:sync(yes)
end

---@param options { divisor?: "all"|"live", stop?: boolean }
---@param f function
---@return any ... what f returned
function FSDP:join(options, f)
  local s = sharded_of(self, "join")
  overlap.check_join(s)
  return join.run(s, options, f)
end

-- Where a copy is one rank's, or there is one copy, a pass has one reduction, and nothing can wait.
local function has_two_levels(s)
  return strategies[s.strategy].levels and s.shards:size() > 1 and s.replicas:size() > 1
end

---@param yes boolean
function FSDP:set_replica_sync(yes)
  local s = sharded_of(self, "set_replica_sync")
  options_of.argument("set_replica_sync", "yes", yes, "boolean")
  if not yes and has_two_levels(s) and not s.sharded:can_be_partial() then
    core.raise "set_replica_sync: a part of the gradients can wait only where they are added up: \z
      comm_hook must have native links only, and end in hooks.reduce with op \"avg\" or \"sum\""
  end
  if not yes and has_two_levels(s) then check_clip(s, "set_replica_sync") end
  s.sharded:replica_sync(yes)
end

---@return ms.FSDPStats
function FSDP:stats()
  local s = sharded_of(self, "stats")
  local stats, gathers = statistics.of(s), s.sharded:gather_stats()
  for _, name in ipairs { "gather_ms", "exposed_gather_ms", "copy_ms", "copy_overlap_ms" } do
    stats[name] = gathers[name]
  end
  stats.peak_bytes = core.memory().peak
  local count, wait_ms = s.sharded:agreements()
  stats.agreements = { count = count, wait_ms = wait_ms }
  stats.prefetch = {
    hits = gathers.hits, misses = gathers.misses, wasted_bytes = gathers.wasted_bytes,
    replans = s.prefetching.replans, tuned = s.prefetching.planner.report,
  }
  return stats
end

---@return ms.Group
function FSDP:shard_group() return sharded_of(self, "shard_group").shards end

---@return ms.Unit[] the root first
function FSDP:units()
  local s = sharded_of(self, "units")
  local list = s.sharded:units()
  for i, unit in ipairs(list) do unit.parameters = s.units[i].parameters end
  return list
end

---@return { name: string, shape: integer[], first: integer, count: integer }[]
function FSDP:pieces()
  local list = sharded_of(self, "pieces").sharded:pieces()
  for _, one in ipairs(list) do one.unit = nil end
  return list
end

---@param index integer
---@return ms.Future value: true, once the whole parameters are there
function FSDP:unshard(index)
  return future.at(true, outside_join(self, "unshard").sharded:unshard(index))
end

---@param strategy string|ms.Prefetch
function FSDP:set_prefetch(strategy)
  local s = sharded_of(self, "set_prefetch")
  local planner = prefetch.planner_of(strategy)
  prefetch.check_options(s.options, planner)
  prefetch.use(s, planner)
  s.sharded:set_prefetch(prefetch.mode_of(planner))
  s.in_force.prefetch = planner.name
end

---@param index integer
function FSDP:reshard(index) sharded_of(self, "reshard").sharded:reshard(index) end

-- Numbers of units: those of the list, or all from `first` on.
local function each_unit(s, what, list, first)
  local all = {}
  for _, index in ipairs(list or {}) do
    if not s.units[index + 1] then
      core.raise(("%s: there is no unit %s"):format(what, tostring(index)))
    end
    all[#all + 1] = index
  end
  for index = list and #s.units or first, #s.units - 1 do all[#all + 1] = index end
  return all
end

---@param options { forward?: boolean, backward?: boolean, units?: integer[] }
function FSDP:set_reshard(options)
  local s = sharded_of(self, "set_reshard")
  local o = check("set_reshard", options,
    { forward = "boolean", backward = "boolean", units = "table" })
  for _, index in ipairs(each_unit(s, "set_reshard", o.units, 1)) do
    local unit = s.units[index + 1]
    if o.forward ~= nil then unit.reshard = o.forward end
    if o.backward ~= nil then unit.reshard_backward = o.backward end
    s.sharded:set_reshard(index, unit.reshard, unit.reshard_backward)
  end
end

---@param yes boolean
---@param units_? integer[]
function FSDP:set_unshard_in_backward(yes, units_)
  local s = sharded_of(self, "set_unshard_in_backward")
  options_of.argument("set_unshard_in_backward", "yes", yes, "boolean")
  options_of.argument("set_unshard_in_backward", "units", units_, "table?")
  for _, index in ipairs(each_unit(s, "set_unshard_in_backward", units_, 0)) do
    s.units[index + 1].stay_sharded = not yes
    s.sharded:set_unshard_in_backward(index, yes)
  end
end

-- The units that have parameters of these names, and the parameters; all of them without names.
local function find_named(s, names)
  local wanted, indices, parameters = names and {}, {}, {}
  for _, name in ipairs(names or {}) do wanted[name] = true end
  for _, unit in ipairs(s.units) do
    local any = not wanted
    for _, name in ipairs(unit.names) do any = any or wanted and wanted[name] end
    if any then
      indices[#indices + 1] = unit.index
      for i, p in ipairs(unit.parameters) do
        if not wanted or wanted[unit.names[i]] then parameters[#parameters + 1] = p end
        if wanted then wanted[unit.names[i]] = nil end
      end
    end
  end
  local unknown = wanted and next(wanted)
  if unknown then core.raise(("summon: no parameter is called '%s'"):format(unknown)) end
  return indices, parameters
end

-- Raises for values that would be copied for nothing.
local function check_offload(s, o)
  if not o.offload then return end
  if o.offload ~= "cpu" then
    core.raise(("summon: offload = '%s': values are offloaded to 'cpu'"):format(o.offload))
  end
  if s.strategy == "no_shard" and not s.options.offload then
    core.raise "summon: offload = 'cpu' is for what is gathered, and under the strategy no_shard \z
      every rank has whole parameters in its memory at all times: leave offload out"
  end
end

-- The parameters whose gradients are summed over their ranks (nn.shared). Gathers take gradients
-- out of parameters and put them back; without the mark they would be summed again.
local function summed_of(s)
  local list = {}
  for _, p in ipairs(s.wrapped:parameters()) do
    if core.is_summed(p) then list[#list + 1] = p end
  end
  return list
end

local function mark_summed(list) for _, p in ipairs(list) do core.mark_summed(p) end end

---@param options ms.SummonOptions
---@param f fun(parameters: ms.Parameter[])
function FSDP:summon(options, f)
  local s = outside_join(self, "summon")
  local o = check("summon", options, {
    writeback = "boolean", names = "table", rank0_only = "boolean", grads = "boolean",
    offload = "string",
  })
  options_of.argument("summon", "f", f, "function")
  if o.rank0_only and o.writeback ~= false then
    core.raise "summon: with rank0_only only rank 0 could write: say writeback = false"
  end
  check_offload(s, o)
  local indices, parameters = find_named(s, o.names)
  local ok, here = false, not o.rank0_only or s.group:rank() == 0
  local summed = summed_of(s)
  s.sharded:summon(indices,
    { gradients = o.grads == true, offload = o.offload ~= nil, absent = not here })
  mark_summed(summed)
  local scope <close> = setmetatable({}, { __close = function() -- luacheck: ignore scope
    if here then s.sharded:summon_end(ok and o.writeback ~= false) end
    mark_summed(summed)
  end })
  local results = table.pack(core.no_grad(function() return f(here and parameters or {}) end))
  ok = true
  return table.unpack(results, 1, results.n)
end

---@param options? { kind?: "full"|"sharded", live?: boolean }
---@return table<string, ms.Tensor|ms.Piece>
function FSDP:state(options)
  local s = outside_join(self, "state")
  local kind, live = module.kind_of_state("state", options)
  s.sharded:check_idle("state")
  return precision.with_buffers(s, function(...)
    local found = (kind == "full" and state.full or state.pieces)(...)
    if kind == "sharded" and not live then return module.copied(found) end
    -- What rank 0 has put together is its own already.
    return kind == "full" and module.copied(found, function() return false end) or found
  end)
end

---@param given table<string, ms.Tensor|ms.Piece>
---@param options? ms.LoadOptions
function FSDP:load_state(given, options)
  local s = outside_join(self, "load_state")
  s.sharded:check_idle("load_state")
  precision.with_buffers(s, state.load, given, options)
end

-- For checkpoints: f(source, first, count) for what load_state will read of a state of sources.
function FSDP:_each_source(given, f)
  local of_parts = state.part_items(sharded_of(self, "load_state"))
  if of_parts then return whole.each_source(of_parts, given, f) end
  for _, item in ipairs(state.items(sharded_of(self, "load_state"))) do
    local value = item.tensor and given[item.name]
    if value and piece.is_source(value) and piece.same_shape(value:shape(), item.shape) then
      f(value, item.first, item.count)
    end
  end
end

---@param path string
---@param options? ms.SaveOptions
---@return true?, string?, string?
function FSDP:save(path, options)
  local s = outside_join(self, "save")
  s.sharded:check_idle("save")
  return precision.with_buffers(s, state.save, path, options)
end

---@param path string|string[]
---@param options? ms.LoadOptions
---@return true?, string?, string?
function FSDP:load(path, options)
  local s = outside_join(self, "load")
  options_of.argument("load", "path", path, "string|list")
  if type(path) == "table" then options_of.items("load", "path", path, "string") end
  s.sharded:check_idle("load")
  return precision.with_buffers(s, state.read, path, options)
end

---@param folder string
---@return true?, string?, string?
function FSDP:save_adapters(folder)
  local s = outside_join(self, "save_adapters")
  s.sharded:check_idle("save_adapters")
  return state.save_adapters(s, folder)
end

---@param folder string
---@return true?, string?, string?
function FSDP:load_adapters(folder)
  local s = outside_join(self, "load_adapters")
  options_of.argument("load_adapters", "folder", folder, "string")
  lora.check_wrapped("load_adapters", s.wrapped)
  s.sharded:check_idle("load_adapters")
  return state.load_adapters(s, folder)
end

---@return ms.Module
function FSDP:merge_adapters()
  lora.check_wrapped("merge_adapters", state_of(self).wrapped)
  return lora.merge(self:unwrap())
end

---@param optimizer? ms.Optimizer
function FSDP:check_replicas(optimizer)
  local s = outside_join(self, "check_replicas")
  s.sharded:check_idle("check_replicas")
  replicas.check_model(self, s.group, optimizer)
end

---@param name string
function FSDP:forward_method(name)
  local s = sharded_of(self, "forward_method")
  options_of.argument("forward_method", "name", name, "string")
  local method = s.wrapped[name]
  if type(method) ~= "function" then
    core.raise(("forward_method: the model has no method '%s'"):format(name))
  end
  local through = edges.around(s, 0, 1)
  rawset(getmetatable(s.wrapped).fields, name, function(object, ...)
    return through(object, method, ...)
  end)
  s.methods[name] = true
end

function FSDP:reset()
  local s = outside_join(self, "reset")
  s.sharded:reset()
  overlap.reset(s)
end

---@return ms.Module
function FSDP:unwrap()
  local s = state_of(self)
  if s.sharded then
    outside_join(self, "unwrap")
    overlap.unwrap(s)
    statistics.drop(s)
    prefetch.drop(s)
    hooks._release(s.how.chain or {})
    s.sharded:unwrap()
    s.sharded, s.reducer = nil, nil
    local buffers = s.precision and s.precision.buffers
    if buffers then buffers:set_full(true) end
    hooks._unwatch(s.how.chain or {})
    for _, unit in ipairs(s.units) do
      for _, object in ipairs(unit.modules) do getmetatable(object).around = nil end
      for _, p in ipairs(unit.parameters) do ownership.sharded[p] = nil end
    end
    for name in pairs(s.methods) do rawset(getmetatable(s.wrapped).fields, name, nil) end
    for _, object in s.wrapped:modules() do owner[object] = nil end
  end
  return s.wrapped
end

----------------------------------------------------------------------------------------- the object

local function index(self, key)
  if FSDP[key] ~= nil then return FSDP[key] end
  local s = state_of(self)
  if key == "module" then return s.wrapped end
  return module.field_of_inner(self, s.wrapped, key)
end

--- The object of a sharded model, in place of its module.
---@param s ms.FSDPState
---@return ms.FSDP
function objects.new(s)
  return module.wrapper(s.wrapped, { fsdp = s, __index = index, __call = forward }, "fsdp",
    fsdp_options.known)
end

options_of.methods(FSDP, "an fsdp model", function(value)
  local meta = type(value) == "table" and getmetatable(value)
  return type(meta) == "table" and meta.fsdp ~= nil
end)

--- The state of the sharded model that a module belongs to, if one is.
---@param part ms.Module
---@return ms.FSDPState?
function objects.owner(part) return owner[part] end

--- From now on a module belongs to a sharded model.
---@param part ms.Module
---@param s ms.FSDPState
function objects.own(part, s) owner[part] = s end

return objects
