-- Plans for optimizers (numbers in, table out): for each bucket, the moment at which its parameters
-- are stepped. Planners, their views, and the use of their answers.
local core = require "moonshard.core"
local made_by = require "moonshard.scripts.made_by"
local planners = require "moonshard.parallel.planner"
local watch = require "moonshard.train.watch"

local plans = {}

---@class ms.Overlap
local Overlap = planners.kind("ms.Overlap", "overlap plan")

local moments = { "on_reduced", "after_backward", "before_next_use" }
local number_of = { on_reduced = 1, after_backward = 2, before_next_use = 3 }

------------------------------------------------------------------------------------------- planners

---@param given ms.OverlapPlanner
---@return ms.Overlap
function plans.overlap(given) return planners.make(Overlap, "overlap", given) end

local function always(name, moment)
  return setmetatable({ name = name, every = 1, always = moment }, Overlap)
end

-- Steps a bucket in backward if its reduction ends before backward does.
local function early_where_hidden(view)
  local plan = {}
  for i, b in ipairs(view.buckets) do
    local hidden = b.ready_ms + b.reduce_ms < view.backward_ms and not view.needs_global_norm
    plan[i] = { bucket = b.index, step = hidden and "on_reduced" or "after_backward" }
  end
  return plan
end

local ready_made = {
  classic = always("classic", "after_backward"),
  in_backward = always("in_backward", "on_reduced"),
  deferred = always("deferred", "before_next_use"),
  early_where_hidden = plans.overlap {
    name = "early_where_hidden", every = 50, plan = early_where_hidden,
  },
}

plans.ready_made = planners.names(ready_made)

local words = { what = "overlap", thing = "policy", maker = "ms.overlap" }

--- Finds a planner: value is a planner, the name of a ready-made one, or a file that returns one.
--- options, are_given: for a file that makes its planner from options, as in scripts/made_by.lua.
---@param policy any
---@param options? table
---@param are_given? boolean
---@return ms.Overlap
function plans.planner_of(policy, options, are_given)
  planners.refuse_options(options, ready_made, policy)
  local make = options and made_by.planner(options, are_given)
  return planners.find(Overlap, policy, ready_made, words, make)
end

---------------------------------------------------------------------------------------------- views

-- The view of a pass with the present buckets; nil if no rank has the times of one. In join, ranks
-- that took part with zeros have no times.
local function view_of(entry, s, buckets)
  local times, bytes, numbers = s.reducer:stats(), 0, {}
  local known, timed = times.backward_ms > 0, 0
  for _, b in ipairs(buckets) do
    if b.ready_ms then timed = timed + 1 end
    bytes = bytes + b.bytes
  end
  -- Units of a sharded model that were never used have no times.
  known = known and (timed == #buckets or s.adds_up and timed > 0)
  if known then
    numbers[1], numbers[2], numbers[3] = times.forward_ms, times.backward_ms, times.step_ms
    for i, b in ipairs(buckets) do
      numbers[2 * i + 2], numbers[2 * i + 3] = b.ready_ms or 0, b.reduce_ms or 0
    end
  else numbers = nil end
  local asked
  numbers, asked = planners.mean_over_ranks(s, numbers, 2 * #buckets + 3, entry.norm or entry.flag)
  if not numbers then return nil end
  -- Ranks without inputs left do not clip, so they learn from the others that norms are used.
  entry.norm = entry.norm or asked > 0 and not entry.flag
  local view = {
    step = entry.pass, world_size = s.group:size(), forward_ms = numbers[1],
    backward_ms = numbers[2],
    needs_global_norm = (asked > 0 or entry.whole) and true or false, buckets = {},
  }
  for i, b in ipairs(buckets) do
    local ready = numbers[2 * i + 2]
    -- Estimates: the time of a step is proportional to its bytes, and parameters whose gradients
    -- are ready early in backward are used late in forward.
    view.buckets[i] = {
      index = b.index,
      bytes = b.bytes,
      ready_ms = ready,
      reduce_ms = numbers[2 * i + 3],
      step_ms = bytes > 0 and numbers[3] * b.bytes / bytes or 0,
      first_use_ms = view.backward_ms > 0
        and view.forward_ms * math.max(0, 1 - ready / view.backward_ms) or 0,
    }
  end
  table.sort(view.buckets, function(a, b)
    if a.ready_ms ~= b.ready_ms then return a.ready_ms < b.ready_ms end
    return a.index < b.index
  end)
  return view
end

---------------------------------------------------------------------------------------------- plans

local function refuse_plan(entry, message)
  core.raise(("overlap plan %s: %s"):format(planners.line(entry.planner), message))
end

-- Moments by bucket index, from a planner's answer. A wrong answer raises with the planner's line.
local function check_plan(entry, plan, count)
  local function refuse(format, ...) refuse_plan(entry, format:format(...)) end
  if type(plan) ~= "table" then
    refuse("it returned %s; a list of { bucket = index, step = moment } is expected",
      plan == nil and "nothing" or "a " .. type(plan))
  end
  local chosen = {}
  planners.check_fields(plan, {}, true, function(what) refuse("%s", what) end)
  for i, item in ipairs(plan) do
    if type(item) ~= "table" then
      refuse("entry %d is a %s; { bucket = index, step = moment } is expected", i, type(item))
    end
    planners.check_fields(item, { "bucket", "step" }, false, function(what)
      refuse("entry %d: %s", i, what)
    end)
    local index = type(item) == "table" and item.bucket
    if math.type(index) ~= "integer" or index < 0 or index >= count then
      refuse("entry %d: there is no bucket %s; they are 0 to %d", i, tostring(index), count - 1)
    end
    if chosen[index] then refuse("entry %d: bucket %d is there twice", i, index) end
    if not number_of[item.step] then
      local near = type(item.step) == "string" and core.nearest(item.step, moments)
      refuse("entry %d: unknown step '%s'%s; it is one of %s", i, tostring(item.step),
        near and (": did you mean '%s'?"):format(near) or "", table.concat(moments, ", "))
    end
    chosen[index] = item.step
  end
  for index = 0, count - 1 do
    if not chosen[index] then refuse("bucket %d is missing", index) end
  end
  return chosen
end

-- Raises unless all ranks have made the same plan.
local function compare(entry, s, chosen, count)
  local own = {}
  for index = 0, count - 1 do own[index + 1] = number_of[chosen[index]] end
  local all = planners.gather(s, own)
  for rank, row in ipairs(all or {}) do
    for i, number in ipairs(row) do
      if number ~= all[1][i] then
        core.raise(("overlap plan %s: ranks planned differently: bucket %d steps %s on rank \z
          0 and %s on rank %d: plan from the view alone"):format(
          planners.line(entry.planner), i - 1, moments[all[1][i]], moments[number], rank - 1))
      end
    end
  end
end

-- Raises if the plan steps a bucket in backward although the chain or the loop needs all gradients
-- before the first step.
local function check_early(entry, chosen)
  local early
  for index, moment in pairs(chosen) do
    if moment == "on_reduced" then early = math.min(early or index, index) end
  end
  if early then plans.refuse_early(entry, ("bucket %d"):format(early)) end
end

--- Advice for messages: what to do if gradients are clipped by the global norm and steps are taken
--- in backward.
plans.instead_of_norm = "clip in the model's chain by the norm of the step before, "
  .. "hooks.clip { max_norm = x, scope = 'lagged' } (after then_optimizer, if the chain has one), "
  .. "or use the policy 'classic' or 'deferred'"

--- Raises if something needs all gradients before the first step.
---@param entry ms.OverlapEntry
---@param what string what would be stepped in backward
function plans.refuse_early(entry, what)
  local why = entry.whole and ("before %s: use \"classic\" or \"deferred\""):format(entry.whole)
  if not why and entry.norm then
    why = "but clip_grad_norm, which needs all gradients, comes after it: " .. plans.instead_of_norm
  elseif not why and entry.flag then
    why = "but step's only_if (of a loss scaler) is known only later: use 'classic' or 'deferred'"
  end
  if not why then return end
  core.raise(("overlap: policy %s steps %s in backward, %s")
    :format(planners.called(entry.planner), what, why))
end

-- Writes into each slot whether its parameter is stepped late, and its turn among those: parameters
-- that forward uses first come first.
local function apply(entry, s, chosen, buckets)
  entry.chosen = chosen
  for _, b in ipairs(buckets) do
    for _, at in ipairs(b.positions) do
      local slot = entry.optimizer.slots[s.trained[at]]
      if slot then slot.late, slot.turn = chosen[b.index] == "before_next_use", -b.index end
    end
  end
end

local function plan_now(entry, s, view, count)
  local plan = planners.ask(entry.planner, view, function(message) refuse_plan(entry, message) end)
  local chosen = check_plan(entry, plan, count)
  compare(entry, s, chosen, count)
  check_early(entry, chosen)
  return chosen
end

-- Whether a new plan for the present buckets is due. The planner needs two passes with them, so
-- that the times of the pass before the last are times with these buckets.
local function is_due(entry, s)
  local planner = entry.planner
  if planner.always then return false end
  local layout, passes = s.reducer:layout()
  return passes >= 2
    and (entry.layout ~= layout or entry.version ~= planner.version or entry.pass >= entry.next)
end

--- Before the reducer's forward: if a plan is due, waits for the times of the pass before the last,
--- so that the view does not depend on how far the device has come.
---@param entry ms.OverlapEntry
---@param s ms.GradientSource
function plans.await(entry, s) if is_due(entry, s) then s.reducer:await_times() end end

local function begin_always(entry, s)
  local layout = s.reducer:layout()
  if entry.layout == layout then return end
  local chosen, buckets = {}, s.reducer:bucket_times()
  for _, b in ipairs(buckets) do chosen[b.index] = entry.planner.always end
  check_early(entry, chosen)
  entry.layout = layout
  apply(entry, s, chosen, buckets)
end

--- After the reducer's forward: the first passes with these buckets are recorded and run as
--- "classic". A plan holds for `every` passes, or until buckets are rebuilt.
---@param entry ms.OverlapEntry
---@param s ms.GradientSource
function plans.begin(entry, s)
  local planner, pass, due = entry.planner, entry.pass, is_due(entry, s)
  entry.pass = pass + 1
  if pass == 0 then return end
  if planner.always then begin_always(entry, s)
  elseif due then
    local buckets = s.reducer:bucket_times()
    local view = view_of(entry, s, buckets)
    if view then
      local chosen = watch.tried(planner, function() return plan_now(entry, s, view, #buckets) end)
      entry.layout, entry.next, entry.version = s.reducer:layout(), pass + planner.every,
        planner.version
      apply(entry, s, chosen, buckets)
    end
  elseif entry.layout and entry.layout ~= s.reducer:layout() then
    entry.layout = nil
    apply(entry, s, {}, s.reducer:bucket_times())
  end
  check_early(entry, entry.chosen)
end

return plans
