-- When sharded parameters are gathered: modes that the engine has, and plans (numbers in, table
-- out) that say for each use of a unit what is gathered then, and whether the unit stays gathered.
local by_budget = require "moonshard.parallel.fsdp.by_budget"
local core = require "moonshard.core"
local held = require "moonshard.parallel.fsdp.held"
local made_by = require "moonshard.scripts.made_by"
local planners = require "moonshard.parallel.planner"
local tuned = require "moonshard.parallel.fsdp.tuned"
local watch = require "moonshard.train.watch"

local prefetch = {}

---@class ms.Prefetch
local Prefetch = planners.kind("ms.Prefetch", "prefetch plan")

--- What a sharded model has gathered ahead by.
---@class ms.Prefetching
---@field planner ms.Prefetch
---@field replans integer
---@field budget_bytes integer
---@field budgets table<string, integer>
---@field training ms.PrefetchPlans
---@field evaluation ms.PrefetchPlans

--- The plans for passes of one kind.
---@class ms.PrefetchPlans
---@field changes? integer of the order that the plan is for
---@field next? integer number of the pass of the next plan
---@field version? integer of the planner's file

------------------------------------------------------------------------------------------- planners

---@param given ms.PrefetchPlanner
---@return ms.Prefetch
function prefetch.prefetch(given) return planners.make(Prefetch, "prefetch", given) end

-- What the engine does by itself: when backward gathers one unit ahead, and whether forward does.
local function native(name, backward, forward)
  return setmetatable({
    name = name, every = 1, native = { backward = backward, forward = forward, planner = false },
  }, Prefetch)
end

local ready_made = {
  none = native("none", "none", false),
  backward_pre = native("backward_pre", "pre", false),
  backward_post = native("backward_post", "post", false),
  forward = native("forward", "none", true),
  both = native("both", "pre", true),
  by_budget = prefetch.prefetch { name = "by_budget", every = 100, plan = by_budget },
  -- It has a state for each model. Its field report is what stats show.
  tuned = setmetatable({
    name = "tuned", every = 1, new = function() return tuned.new(prefetch.prefetch) end,
  }, Prefetch),
}

prefetch.ready_made = planners.names(ready_made)

local words = { what = "fsdp: prefetch", thing = "strategy", maker = "ms.prefetch" }

--- Finds a strategy: value is a planner, the name of a ready-made one, or a file that returns one.
--- options, are_given: for a file that makes its planner from options, as in scripts/made_by.lua.
---@param value any
---@param options? table
---@param are_given? boolean
---@return ms.Prefetch
function prefetch.planner_of(value, options, are_given)
  planners.refuse_options(options, ready_made, value)
  local make = options and made_by.planner(options, are_given)
  return planners.find(Prefetch, value, ready_made, words, make)
end

--- What the core is told of a strategy. Until there is a plan, backward gathers one unit ahead.
---@param planner ms.Prefetch
---@return { backward: string, forward: boolean, planner: boolean }
function prefetch.mode_of(planner)
  return planner.native or { backward = "pre", forward = false, planner = true }
end

-- Defaults are DeepSpeed's.
local budgets = {
  prefetch_elements = 50000000, live_elements = 1000000000, reuse_elements = 1000000000,
  keep_elements = 100000,
}

--- Checks the option budgets, and fills it up.
---@param given any
---@return table<string, integer>
function prefetch.budgets_of(given)
  local all = {}
  for name, value in pairs(budgets) do all[name] = value end
  for name, value in pairs(given or {}) do
    if not budgets[name] then
      local known = { "prefetch_elements", "live_elements", "reuse_elements", "keep_elements" }
      core.raise(("fsdp: budgets: unknown field '%s': did you mean '%s'?"):format(tostring(name),
        core.nearest(tostring(name), known) or known[1]))
    end
    local count = math.type(value) and math.tointeger(value)
    if not count or count < 0 then
      core.raise(("fsdp: budgets.%s must be a whole number of 0 or more, not %s"):format(name,
        tostring(value)))
    end
    all[name] = count
  end
  return all
end

--- Raises for options of plans where there is no planner.
---@param o ms.FSDPOptions
---@param planner ms.Prefetch
function prefetch.check_options(o, planner)
  prefetch.budgets_of(o.budgets)
  for _, name in ipairs { "budget_bytes", "budgets" } do
    if o[name] ~= nil and planner.native then
      core.raise(("fsdp: %s is what plans keep to, and prefetch = '%s' makes none: use \z
        'by_budget', or a planner"):format(name, planner.name))
    end
  end
end

--- Raises if a unit alone does not fit into budget_bytes.
---@param o ms.FSDPOptions
---@param units table[]
function prefetch.check_units(o, units)
  for _, unit in ipairs(units) do
    local bytes = 0
    for _, p in ipairs(unit.parameters) do
      bytes = bytes + p:numel() * (p:dtype() == "f32" and 4 or 2)
    end
    if bytes > (o.budget_bytes or math.maxinteger) then
      core.raise(("fsdp: budget_bytes = %d, and unit %d \"%s\" has %d bytes: wrap smaller \z
        modules, or give more"):format(o.budget_bytes, unit.index,
        unit.index == 0 and "root" or unit.name, bytes))
    end
  end
end

--- For models: when they are unwrapped.
---@param s ms.FSDPState
function prefetch.drop(s) watch.drop(s.prefetching.planner) end

--- Makes a strategy a model's, before it is wrapped or later.
---@param s ms.FSDPState
---@param planner ms.Prefetch
function prefetch.use(s, planner)
  local before = s.prefetching
  if planner.new then planner = planner.new() end
  if before then watch.drop(before.planner) end
  s.prefetching = {
    planner = planner, replans = before and before.replans or 0,
    budget_bytes = s.options.budget_bytes or math.maxinteger,
    budgets = prefetch.budgets_of(s.options.budgets), training = {}, evaluation = {},
  }
  watch.use(planner)
end

---------------------------------------------------------------------------------------------- views

-- What each reduction of a unit takes, by the unit's index.
local function reductions(s)
  local took, bytes = {}, {}
  for _, bucket in ipairs(s.sharded:bucket_times()) do
    local first = bucket.positions[1]
    local index = s.unit_of[s.trained[first]]
    took[index] = (took[index] or 0) + (bucket.reduce_ms or 0)
    bytes[index] = (bytes[index] or 0) + bucket.bytes
  end
  return took, bytes
end

-- Times of units: four numbers for each, then those of a pass. nil: this rank has none.
local function numbers_of(s)
  local times, pass = s.sharded:unit_times(), s.sharded:stats()
  if not times then return nil end
  local numbers, reduced = {}, reductions(s)
  for i, one in ipairs(times) do
    numbers[4 * i - 3], numbers[4 * i - 2] = one.forward_ms, one.backward_ms
    numbers[4 * i - 1], numbers[4 * i] = one.gather_ms, reduced[i - 1] or 0
  end
  for _, ms in ipairs { pass.forward_ms, pass.backward_ms, pass.exposed_ms } do
    numbers[#numbers + 1] = ms
  end
  return numbers
end

local function elements_of(unit)
  local count = 0
  for _, shape in ipairs(unit.shapes) do
    local product = 1
    for _, size in ipairs(shape) do product = product * size end
    count = count + product
  end
  return count
end

-- Whether a unit stays gathered after a use unless a plan says something else.
local function stays(unit, backward)
  if backward then return not unit.reshard_backward end
  return not unit.reshard
end

local function channel(units, bytes_of, took)
  local samples = {}
  for i in ipairs(units) do
    local bytes, ms = bytes_of(i), took(i)
    if bytes > 0 and ms > 0 then samples[#samples + 1] = { bytes, ms } end
  end
  local latency, rate = planners.fit(samples)
  return { latency_ms = latency, bytes_per_ms = rate }
end

-- The view of the last order, with mean times; nil if no rank has any, but for an evaluation.
local function view_of(s, kind, passes, uses)
  local infos, entry = s.sharded:units(), s.prefetching
  local numbers = planners.mean_over_ranks(s, numbers_of(s), 4 * #infos + 3)
  if not numbers then
    if kind == "training" then return nil end
    numbers = {}
    for i = 1, 4 * #infos + 3 do numbers[i] = 0 end
  end
  local _, reduced_bytes = reductions(s)
  local view = {
    step = passes + 1, world_size = s.group:size(), training = kind == "training",
    forward_ms = numbers[#numbers - 2], backward_ms = numbers[#numbers - 1],
    exposed_ms = numbers[#numbers],
    budget_bytes = entry.budget_bytes, budgets = entry.budgets,
    max_in_flight = s.in_force.max_in_flight, max_reductions = s.in_force.max_reductions,
    visits = {},
    gather = channel(infos, function(i) return infos[i].bytes end,
      function(i) return numbers[4 * i - 1] end),
    reduce = channel(infos, function(i) return reduced_bytes[i - 1] or 0 end,
      function(i) return numbers[4 * i] end),
  }
  for i, use in ipairs(uses) do
    local at, unit = use.unit + 1, s.units[use.unit + 1]
    view.visits[i] = {
      unit = use.unit, name = unit.name, phase = use.backward and "backward" or "forward",
      bytes = infos[at].gathered_bytes, shard_bytes = infos[at].shard_bytes,
      elements = elements_of(unit), last = use.last, ended = use.ended,
      stays = stays(unit, use.backward),
      needs_values = not (use.backward and unit.stay_sharded),
      gather_ms = numbers[4 * at - 1],
      compute_ms = numbers[4 * at - (use.backward and 2 or 3)],
      reduce_ms = use.backward and numbers[4 * at] or 0,
    }
  end
  return view
end

---------------------------------------------------------------------------------------------- plans

local function check_units(list, field, i, count, refuse)
  if list == nil then return end
  if type(list) ~= "table" then
    refuse("entry %d: %s is a list of units, not a %s", i, field, type(list))
  end
  planners.check_fields(list, {}, true, function(what)
    refuse("entry %d: %s: %s", i, field, what)
  end)
  for _, unit in ipairs(list) do
    if math.type(unit) ~= "integer" or unit < 0 or unit >= count then
      refuse("entry %d: %s: there is no unit %s; they are 0 to %d", i, field, tostring(unit),
        count - 1)
    end
  end
end

local function check_entry(item, i, visit, count, refuse)
  if item == nil then return { unit = visit.unit } end
  if type(item) ~= "table" then
    refuse("entry %d is a %s; { unit = %d, gather = { ... } } is expected", i, type(item),
      visit.unit)
  end
  planners.check_fields(item, { "unit", "gather", "after", "keep" }, false, function(what)
    refuse("entry %d: %s", i, what)
  end)
  if item.unit ~= visit.unit then
    refuse("entry %d is for unit %s, and visit %d is of unit %d", i, tostring(item.unit), i,
      visit.unit)
  end
  if item.keep ~= nil and type(item.keep) ~= "boolean" then
    refuse("entry %d: keep must be true, false or nil, not a %s", i, type(item.keep))
  end
  check_units(item.gather, "gather", i, count, refuse)
  check_units(item.after, "after", i, count, refuse)
  return { unit = item.unit, gather = item.gather, after = item.after, keep = item.keep }
end

-- The entries, one for each visit. A wrong answer raises with the planner's line.
local function check_plan(entry, plan, view, count)
  local function refuse(format, ...)
    core.raise(("prefetch plan %s: %s"):format(planners.line(entry.planner), format:format(...)))
  end
  if type(plan) ~= "table" then
    refuse("it returned %s; a list of { unit = index, gather = { ... } } is expected",
      plan == nil and "nothing" or "a " .. type(plan))
  end
  for key in pairs(plan) do
    if math.type(key) ~= "integer" or key < 1 or key > #view.visits then
      refuse("there is no visit %s; they are 1 to %d", tostring(key), #view.visits)
    end
  end
  local entries = {}
  for i, visit in ipairs(view.visits) do
    entries[i] = check_entry(plan[i], i, visit, count, refuse)
  end
  local most, at = held.most(view, entries)
  if most > view.budget_bytes then
    refuse("at visit %d (unit %d, %s) it would hold %d bytes, and budget_bytes is %d", at,
      view.visits[at].unit, view.visits[at].phase, most, view.budget_bytes)
  end
  return entries
end

local function line_of(i, one)
  local function list(units) return units and table.concat(units, " ") or "" end
  return ("entry %d gathers {%s}, after it {%s}, keep = %s"):format(i, list(one.gather),
    list(one.after), tostring(one.keep))
end

-- Raises unless all ranks have made the same plan.
local function compare(entry, s, entries)
  local lines = {}
  for i, one in ipairs(entries) do lines[i] = line_of(i, one) end
  local text, same = table.concat(lines, "\n"), true
  local hashes = planners.gather(s, { core.hash(text) & math.maxinteger })
  for _, row in ipairs(hashes or {}) do same = same and row[1] == hashes[1][1] end
  if same then return end
  local first
  for rank, other in ipairs(s.group:_share_texts(text, "plans")) do
    local theirs = {}
    for line in other:gmatch "[^\n]+" do theirs[#theirs + 1] = line end
    first = first or theirs
    for i = 1, math.max(#first, #theirs) do
      if first[i] ~= theirs[i] then
        core.raise(("prefetch plan %s: ranks planned differently: %s on rank 0, and %s on rank \z
          %d: plan from the view alone"):format(planners.line(entry.planner),
          first[i] or "nothing", theirs[i] or "nothing", rank - 1))
      end
    end
  end
end

local function plan_now(entry, s, view)
  local plan = planners.ask(entry.planner, view, function(message)
    core.raise(("prefetch plan %s: %s"):format(planners.line(entry.planner), message))
  end)
  local entries = check_plan(entry, plan, view, #s.units)
  compare(entry, s, entries)
  return entries
end

--- Before the first forward of a pass: makes a plan if one is due. The first two passes are
--- recorded, and gather ahead as "backward_pre". Where ranks use different units nothing is
--- gathered ahead.
---@param s ms.FSDPState
---@param kind "training"|"evaluation"
function prefetch.begin(s, kind)
  local entry = s.prefetching
  if entry.planner.native or s.joining or s.options.find_unused then return end
  local passes, changes = s.sharded:passes_of(kind)
  local made, version = entry[kind], entry.planner.version
  local strayed = made.changes ~= changes
  if passes < 2 or not (strayed or made.version ~= version or passes >= made.next) then return end
  s.sharded:await_times()
  local _, _, uses = s.sharded:order(kind)
  local view = view_of(s, kind, passes, uses)
  if not view then return end
  local entries = watch.tried(entry.planner, function() return plan_now(entry, s, view) end)
  if made.changes and strayed then entry.replans = entry.replans + 1 end
  made.changes, made.version, made.next = changes, version, passes + entry.planner.every
  if entries then s.sharded:set_plan(kind, entries) end
end

return prefetch
