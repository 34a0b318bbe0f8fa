-- ms.fsdp: a model whose parameters, gradients and optimizer states are kept in shards over the
-- ranks. A unit's parameters are gathered before it is used, and dropped after.
local alone = require "moonshard.nn.alone"
local core = require "moonshard.core"
local delayed = require "moonshard.nn.delayed"
local edges = require "moonshard.parallel.fsdp.module_hooks"
local hooks = require "moonshard.hooks"
local launch = require "moonshard.base.launch"
local listed = require "moonshard.nn.listed"
local module = require "moonshard.nn.module"
local overlap = require "moonshard.parallel.overlap"
local statistics = require "moonshard.parallel.statistics"
local prefetch = require "moonshard.parallel.fsdp.prefetch"
local compare = require "moonshard.parallel.fsdp.compare"
local extension = require "moonshard.parallel.fsdp.gather_codec"
local objects = require "moonshard.parallel.fsdp.object"
local fp8 = require "moonshard.parallel.fsdp.fp8"
local precision = require "moonshard.parallel.fsdp.precision"
local fsdp_options = require "moonshard.parallel.fsdp.options"
local units_of = require "moonshard.parallel.fsdp.units"
local values = require "moonshard.parallel.fsdp.values"
local ownership = require "moonshard.base.ownership"
local parts = require "moonshard.nn.parts"
local strategies = fsdp_options.strategies
require "moonshard.parallel.group"

local function check_model(model)
  if not module.is_module(model) then
    core.raise("fsdp: a module is expected, not " .. type(model))
  end
  local meta = getmetatable(model)
  if meta.ddp then core.raise "fsdp: this model is wrapped in ddp; unwrap() it first" end
  if meta.fsdp then core.raise "fsdp: this model is wrapped already" end
  for name, object in model:modules() do
    if objects.owner(object) then
      core.raise(("fsdp: %s is part of an fsdp model already: wrap the whole model once")
        :format(name == "" and "this model" or "module '" .. name .. "'"))
    end
  end
  -- Before ranks compare shapes: those of pieces may differ.
  for _, item in ipairs(model:named_parameters()) do
    if ownership.sharded[item.parameter] then
      core.raise(("fsdp: '%s' is sharded already: wrap a model once, or call unwrap() on the first")
        :format(item.name))
    end
    local reduced = ownership.reduced[item.parameter]
    if reduced and reduced.reducer then
      core.raise(("fsdp: the gradient of '%s' is reduced by ddp already: unwrap() that model first")
        :format(item.name))
    end
  end
  if core.in_hook() then
    core.raise "fsdp cannot be used inside a hook: wrap models before training"
  end
end

-- What the reductions of gradients over `ranks` are to links, where `count` share one copy.
local function kind_of(count, ranks)
  if count == 1 then return "all_reduce" end
  return count < ranks and "hybrid" or "reduce_scatter"
end

-- What a link decides from the buckets of one group of ranks, others would decide otherwise.
local function check_links_of_groups(chain)
  for i, link in ipairs(chain) do
    local native = type(link) == "table" and link.needs
    if native and (native.skips_steps or link.kind == "clip" and link.scope ~= "bucket") then
      core.raise(("fsdp: comm_hook: link %d (%s) judges all gradients of a pass, and with \z
        group_of no rank has parts of all: call model:clip_grad_norm(), or use ms.optim.scaler")
        :format(i, hooks._name(link)))
    end
  end
end

-- The chain of a hook. Parameters of fewer ranks may have buckets of another kind. stepping: a list
-- that gets the links that step optimizers.
local function compile(hook, kind, groups, stepping)
  if hook == nil then return {} end
  local _, own = next(groups)
  local other = own and kind_of(own:size(), own:size())
  if other and other ~= kind then hooks._compile(hook, "fsdp: comm_hook", nil, other, {}) end
  local how = hooks._compile(hook, "fsdp: comm_hook", nil, kind, stepping)
  if own then check_links_of_groups(how.chain) end
  return how
end

-- Optimizers come after wrapping: they count on shapes that parameters will not have. The chain's
-- own are made before, and have no states yet.
local function check_optimizers(s, stepping)
  local linked = {}
  for _, link in ipairs(stepping) do linked[link.optimizer] = true end
  for _, item in ipairs(s.wrapped:named_parameters()) do
    local p = item.parameter
    local observers = ownership.observed[p]
    if linked[ownership.stepped[p]] and not (observers and next(observers)) then
      local shards = s.groups[item.name] or s.shards
      ownership.stepped[p]:_allow_piece(p, item.name, shards:size() > 1)
    elseif ownership.optimizer_of(p) then
      core.raise(("fsdp: parameter '%s' belongs to an optimizer already: wrap the model first, \z
        then make its optimizer"):format(item.name))
    end
  end
end

-- Parameters that need gradients, in the order in which the core gets them.
local function trained_of(units)
  local list = {}
  for _, unit in ipairs(units) do
    for _, p in ipairs(unit.parameters) do if p:requires_grad() then list[#list + 1] = p end end
  end
  return list
end

-- Parameters that are trained and not sharded.
local function left_out_of(model, o)
  local list = {}
  for _, item in ipairs(model:named_parameters()) do
    if listed.has(o.ignored, item.name) and item.parameter:requires_grad() then
      list[#list + 1] = item.parameter
    end
  end
  return list
end

-- The options in force, as stats shows them.
local function options_in_force(o, s)
  return {
    strategy = s.strategy, accumulate = s.accumulate, prefetch = s.planner.name,
    max_in_flight = o.max_in_flight or 2, max_in_flight_bytes = o.max_in_flight_bytes,
    max_reductions = o.max_reductions or 2, divide_factor = o.divide_factor, ignored = o.ignored,
    init_sync = o.init_sync ~= false, precision = precision.in_force(o, s.precision, s.units),
    offload = o.offload, pin = o.offload and o.pin ~= false or nil, dtype = o.dtype,
  }
end

-- The state of a model before it is sharded. Nothing of the model has changed or travelled yet, but
-- what ranks compare. Second: the links that step optimizers.
local function prepare(model, options)
  check_model(model)
  local o = fsdp_options.check(options)
  local strategy, group = fsdp_options.strategy_of(o), o.group or core.world()
  listed.check_matches("fsdp", "ignored", o.ignored, model)
  local units, unit_of_module = units_of.find(model, o)
  local later = delayed.find("fsdp", model)
  for _, unit in ipairs(units) do
    alone.refuse("fsdp", unit.parameters, unit.names)
    parts.refuse("fsdp", unit.parameters, unit.names, group)
  end
  local low = precision.of(o, units, model, unit_of_module)
  local eight = fp8.of(o, units, model, low)
  local count = fsdp_options.count_shards(o, strategy, group)
  fsdp_options.check_near(o.reshard_after_forward, count)
  local planner = prefetch.planner_of(o.prefetch == nil and "backward_pre" or o.prefetch)
  prefetch.check_options(o, planner)
  if count > 1 then prefetch.check_units(o, units) end
  local groups, stepping = compare.groups(units, group, o.group_of), {}
  local how = compile(o.comm_hook, kind_of(count, group:size()), groups, stepping)
  if o.divide_factor ~= nil and not how.adds_up then
    -- nil: a factor that is the number of ranks may stay the same, or not, with another number.
    how.adds_up = o.divide_factor ~= group:size() or nil
  end
  compare.compare(units, group, groups, o, strategy, how.name, low, eight)
  if o.init_sync ~= false then compare.files(units, group, groups) end
  local shards, replicas = fsdp_options.groups_of(o, strategy, group)
  ---@type ms.FSDPState
  local s = {
    wrapped = model, group = group, shards = shards, replicas = replicas, options = o,
    strategy = strategy, units = units, how = how, groups = groups, precision = low,
    in_fp8 = eight,
    accumulate = o.accumulate or "shard", methods = {}, trained = trained_of(units),
    left_out = left_out_of(model, o), later = later, planner = planner, unit_of = {},
    unit_of_module = unit_of_module,
    uses_all = true, adds_up = true,
    whole = how.whole, guards = how.guards,
    hook_name = how.name or "reduce", optimizers = setmetatable({}, { __mode = "v" }),
    numbers = setmetatable({}, { __mode = "k" }), optimizer_count = 0,
  }
  s.in_force = options_in_force(o, s)
  check_optimizers(s, stepping)
  overlap.check_links(s, stepping)
  return s, stepping
end

-- Lists of the parameters and units for the core; units get the shapes of their parameters.
local function describe(s)
  local reshard, low = strategies[s.strategy].reshard, s.precision
  if s.options.reshard_after_forward ~= nil then
    reshard = s.options.reshard_after_forward ~= false
  end
  local parameters, described = {}, {}
  for i, unit in ipairs(s.units) do
    -- The root is needed again at once: its backward is the first.
    unit.reshard, unit.reshard_backward = reshard and i > 1, true
    local computes, reduces
    if low then
      computes, reduces = precision.dtypes(low, unit, s.how.chain and s.how.chain[1])
      unit.is_cast = precision.is_cast(low, unit)
    end
    described[i] = {
      name = unit.name, reshard_after_forward = unit.reshard, parts = #unit.modules,
      computes = computes, reduces = reduces,
    }
    unit.shapes = {}
    for k, p in ipairs(unit.parameters) do
      unit.shapes[k] = p:shape()
      parameters[#parameters + 1] = {
        tensor = p, name = unit.names[k], unit = unit.index, group = s.groups[unit.names[k]],
        coded = s.in_fp8[unit.names[k]],
        keeps_dtype = low and low.keeps[unit.names[k]] or ownership.coded[p] ~= nil,
      }
    end
  end
  return parameters, described
end

-- From here on parameters are pieces.
local function shard(s)
  local o, how = s.options, s.how
  local parameters, described = describe(s)
  local near = math.type(o.reshard_after_forward) == "integer"
    and fsdp_options.levels(s.shards, o.reshard_after_forward) or nil
  local mode = prefetch.mode_of(s.planner)
  s.sharded = core.sharded(parameters, described, {
    group = s.group, shards = s.shards, replicas = s.replicas, near = near,
    rows = o.layout == "rows", find_unused = o.find_unused,
    backward = mode.backward, forward = mode.forward, planner = mode.planner,
    max_in_flight = o.max_in_flight, max_in_flight_bytes = o.max_in_flight_bytes,
    max_reductions = o.max_reductions,
    offload = o.offload ~= nil,
    low_gradients = o.keep_low_precision_grads,
    links = how.links, hook = how.hook, name = how.name,
    hook_links = how.hook and #how.accounts + 1, hook_whole = how.holds,
    hook_once = how.once,
  })
  s.reducer = s.sharded
  prefetch.use(s, s.planner)
  if o.divide_factor then s.sharded:divisor(o.divide_factor) end
end

-- Makes the model's state known to its modules and parameters.
local function install(s)
  for _, unit in ipairs(s.units) do
    for part, object in ipairs(unit.modules) do
      getmetatable(object).around = edges.around(s, unit.index, part)
    end
    local together = {}
    for i, p in ipairs(unit.parameters) do
      s.unit_of[p] = unit.index
      local own = s.groups[unit.names[i]]
      local keeps = s.precision and s.precision.keeps[unit.names[i]] == true
      local key = ("%s %s %s %s %s"):format(p:dtype(), p:requires_grad(), own ~= nil, keeps,
        s.in_fp8[unit.names[i]] == true)
      together[key] = together[key] or {}
      table.insert(together[key], p)
      ownership.sharded[p] = {
        model = s, shape = unit.shapes[i], shards = own or s.shards, own = own ~= nil,
        together = together[key],
      }
    end
  end
  for _, object in s.wrapped:modules() do objects.own(object, s) end
  -- For `moonshard check`, which runs one rank for each shard.
  if launch.sharded then
    table.insert(launch.sharded, { shards = s.shards, replicas = s.replicas })
    if next(s.groups) then table.insert(launch.sharded, { shards = s.group }) end
  end
end

---@param model ms.Module
---@param options? ms.FSDPOptions
---@return ms.FSDP
local function wrap(model, options)
  local s, stepping = prepare(model, options)
  values.make_unsharded(s)
  if s.options.init_sync ~= false then values.share_parameters(s) end
  hooks._claim(s.how.chain or {}, s)
  shard(s)
  values.make_units(s)
  if s.options.init_sync ~= false then values.share_buffers(s, 0) end
  precision.cast_buffers(s)
  install(s)
  values.read_parameters(s)
  hooks._watch(s.how.chain or {})
  overlap.wrap(s, stepping)
  statistics.watch(s)
  local object = objects.new(s)
  if model.last_logits then object:forward_method "last_logits" end
  s.object = setmetatable({ object }, { __mode = "v" })
  extension.install(s)
  return object
end

---@param object ms.Module
---@return ms.FSDP[]
local function roots(object)
  local list, seen = {}, {}
  if type(object) == "table" and (getmetatable(object) or {}).fsdp then return { object } end
  if not module.is_module(object) then
    core.raise("fsdp.roots: a module is expected, not " .. type(object))
  end
  for _, one in object:modules() do
    local s = objects.owner(one)
    if s and not seen[s] and s.object[1] then
      seen[s] = true
      list[#list + 1] = s.object[1]
    end
  end
  return list
end

---@class ms.fsdp
local fsdp = setmetatable({ roots = roots }, {
  __call = function(_, model, options) return wrap(model, options) end,
})

return { fsdp = fsdp, _strategies = fsdp_options.names_of_strategies }
