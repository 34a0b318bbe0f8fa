-- The strategy "tuned": measures some passes as "backward_pre", forecasts what a pass would take
-- with each of several plans, and measures the best of them. If that takes longer than the default,
-- it goes back to the default.
local core = require "moonshard.core"
local by_budget = require "moonshard.fsdp.by_budget"
local held = require "moonshard.fsdp.held"

local tuned = {}

-- Passes that are measured with a plan. Views have the times of the pass before the last, so the
-- first two after a change are not of the new plan.
local SAMPLES <const>, LAG <const> = 5, 2
-- Passes between two questions when all is decided.
local SETTLED <const> = 100

-- So many units ahead in forward and in backward; or one when a backward has ended.
local function ahead(view, forward, backward, after)
  local plan = {}
  for i, visit in ipairs(view.visits) do
    local is_backward = visit.phase == "backward"
    local entry = { unit = visit.unit, gather = {} }
    for k = i + 1, math.min(i + (is_backward and backward or forward), #view.visits) do
      local one = view.visits[k]
      if one.phase == visit.phase then table.insert(entry.gather, one.unit) end
    end
    local next_one = is_backward and after and view.visits[visit.last + 1]
    if next_one then entry.after = { next_one.unit } end
    plan[i] = entry
  end
  return plan
end

-- Plans by name, the default first. Units stay gathered only where the user has set a budget.
local function candidates(view)
  local list = {
    { "backward_pre", ahead(view, 0, 1) }, { "none", ahead(view, 0, 0) },
    { "backward_post", ahead(view, 0, 0, true) }, { "forward", ahead(view, 1, 0) },
    { "both", ahead(view, 1, 1) }, { "both, 2 ahead", ahead(view, 2, 2) },
    { "both, 4 ahead", ahead(view, 4, 4) },
  }
  if view.budget_bytes < math.maxinteger then
    list[#list + 1] = { "by_budget", by_budget(view) }
  end
  local fit = {}
  for _, one in ipairs(list) do
    if held.most(view, one[2]) <= view.budget_bytes then fit[#fit + 1] = one end
  end
  return #fit > 0 and fit or { list[2] }
end

local function forecast(view, plan)
  return core.forecast(view.visits, plan, view.max_in_flight, view.max_reductions)
end

-- The plan with which a pass takes the least time; the default unless another one gains something.
local function best_of(view, list)
  local best
  for _, one in ipairs(list) do
    one.ms = forecast(view, one[2])
    if not best or one.ms < best.ms * 0.999 then best = one end
  end
  return best
end

local function median(samples)
  local sorted = table.move(samples, 1, #samples, 1, {})
  table.sort(sorted)
  return sorted[(#sorted + 1) // 2]
end

local function order_of(view)
  local list = {}
  for i, visit in ipairs(view.visits) do list[i] = visit.phase:sub(1, 1) .. visit.unit end
  return table.concat(list, " ")
end

-- Adds the times of this view; the median once there are enough.
local function measure(state, view)
  state.seen = state.seen + 1
  if state.seen > LAG then
    table.insert(state.samples, view.forward_ms + view.backward_ms + view.exposed_ms)
  end
  return #state.samples == SAMPLES and median(state.samples) or nil
end

local function measure_anew(state, chosen)
  state.plan, state.seen, state.samples = chosen[2], 0, {}
end

-- The default was measured: the best plan is next, unless that is the default.
local function choose(state, view, ms)
  local list = candidates(view)
  local best = best_of(view, list)
  -- What the model leaves out is the same with all plans.
  local predicted = ms + best.ms - forecast(view, list[1][2])
  state.report = {
    plan = best[1], predicted_ms = predicted, measured_ms = nil, default_ms = ms,
  }
  state.default, state.step = list[1], best == list[1] and "settled" or "trial"
  if best == list[1] then state.report.measured_ms = ms end
  measure_anew(state, best)
end

local function judge(state, ms)
  state.report.measured_ms, state.step = ms, "settled"
  if ms > state.report.default_ms then
    state.plan, state.report.plan = state.default[2], state.default[1]
  end
end

--- A planner of a model's own. Its field report is what stats show.
---@param make fun(given: ms.PrefetchPlanner): ms.Prefetch
---@return ms.Prefetch
function tuned.new(make)
  local planner, state
  local function plan(view)
    if not view.training then return ahead(view, 1, 0) end
    local order = order_of(view)
    if not state or state.order ~= order then
      state = { order = order, step = "default" }
      measure_anew(state, candidates(view)[1])
    end
    local ms = state.step ~= "settled" and measure(state, view) or nil
    if ms and state.step == "default" then choose(state, view, ms)
    elseif ms then judge(state, ms) end
    planner.every = state.step == "settled" and SETTLED or 1
    planner.report = state.report
    return state.plan
  end
  planner = make { name = "tuned", plan = plan }
  return planner
end

return tuned
