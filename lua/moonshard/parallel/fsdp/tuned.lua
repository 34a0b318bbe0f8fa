-- The strategy "tuned". It measures some passes as "backward_pre", and forecasts from each what a
-- pass would take with each of several plans. The best ones and the default then run in turn, and
-- the fastest one stays. It depends on nothing but views, which are equal on all ranks, so all
-- ranks decide alike.
--
-- Invariants
-- - It is asked before each pass until it is settled. A view tells how long the pass before the
--   last has taken, and the time counts for the plan that ran then: the first LAG times after a
--   begin count for none.
-- - Measuring: the default runs, which is the first candidate that fits the budget. Each view gives
--   a forecast of each candidate.
-- - Trial: the default and the best candidates by forecast run in turn, so that a machine that
--   becomes slower is so for all of them. What ran in pass n of the trial is arm n % arms.
-- - Settled: the plan with the least median runs; the default unless another one is faster.
-- - Another order of uses begins again. What was reported stays until the next choice.
local core = require "moonshard.core"
local by_budget = require "moonshard.parallel.fsdp.by_budget"
local held = require "moonshard.parallel.fsdp.held"

local tuned = {}

-- Passes that are measured with a plan. Views have the times of the pass before the last, so the
-- first two after a change are not of the new plan.
local SAMPLES <const>, LAG <const> = 5, 2
-- Plans that run in turn; the part of the default's forecast below which a gain is none.
local ARMS <const>, LEAST_GAIN <const> = 3, 0.001
-- Passes between two questions when all is decided.
local SETTLED <const> = 100

---------------------------------------------------------------------------------------- candidates

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

-- Plans by name, the default first, and whether they fit the budget.
local function candidates(view)
  local list = {
    { "backward_pre", ahead(view, 0, 1) }, { "none", ahead(view, 0, 0) },
    { "backward_post", ahead(view, 0, 0, true) }, { "forward", ahead(view, 1, 0) },
    { "both", ahead(view, 1, 1) }, { "both, 2 ahead", ahead(view, 2, 2) },
    { "both, 4 ahead", ahead(view, 4, 4) }, { "by_budget", by_budget(view) },
  }
  for _, one in ipairs(list) do one.fits = held.most(view, one[2]) <= view.budget_bytes end
  return list
end

-- The first that fits. Where none does, the one that gathers nothing ahead.
local function first_that_fits(list)
  for number, one in ipairs(list) do if one.fits then return number end end
  list[2].fits = true
  return 2
end

local function order_of(view)
  local list = {}
  for i, visit in ipairs(view.visits) do list[i] = visit.phase:sub(1, 1) .. visit.unit end
  return table.concat(list, " ")
end

------------------------------------------------------------------------------------------ decisions

local function median(samples)
  local sorted = table.move(samples, 1, #samples, 1, {})
  table.sort(sorted)
  return sorted[(#sorted + 1) // 2]
end

local function start(view, order)
  local list = candidates(view)
  local state = { order = order, step = "measuring", asked = 0, samples = {}, forecasts = {} }
  state.list, state.first = list, first_that_fits(list)
  state.present = state.first
  for number in ipairs(list) do state.forecasts[number] = {} end
  return state
end

-- What the model leaves out is the same with all plans, and takes no less than 0: where passes are
-- faster than the default's forecast, the gain is smaller in proportion.
local function report(state, chosen, tried, default_ms)
  local part = default_ms < state.forecast_ms and default_ms / state.forecast_ms or 1
  state.report = {
    plan = state.list[chosen][1], tried = state.list[tried.number][1],
    predicted_ms = default_ms - part * tried.gain, default_ms = default_ms,
  }
end

local function settle(state, chosen, tried, measured_ms, default_ms)
  report(state, chosen, tried, default_ms)
  state.report.measured_ms, state.step, state.present = measured_ms, "settled", chosen
end

-- By how much a forecast is below the default's: the median over the views.
local function gain_of(state, number)
  local gains = {}
  for i, ms in ipairs(state.forecasts[state.first]) do
    gains[i] = ms - state.forecasts[number][i]
  end
  return median(gains)
end

-- The default was measured: the best are tried, unless none gains anything.
local function choose(state)
  local ms, list = median(state.samples), {}
  state.forecast_ms = median(state.forecasts[state.first])
  for number, one in ipairs(state.list) do
    local gain = one.fits and number ~= state.first and gain_of(state, number) or 0
    if gain > LEAST_GAIN * state.forecast_ms then
      list[#list + 1] = { number = number, gain = gain, samples = {} }
    end
  end
  table.sort(list, function(a, b)
    if a.gain ~= b.gain then return a.gain > b.gain end
    return a.number < b.number
  end)
  state.arms = { { number = state.first, gain = 0, samples = {} } }
  table.move(list, 1, ARMS - 1, 2, state.arms)
  if #list == 0 then return settle(state, state.first, state.arms[1], ms, ms) end
  report(state, list[1].number, list[1], ms)
  state.step, state.asked = "trial", 0
end

local function judge(state)
  local best
  for i, arm in ipairs(state.arms) do
    arm.ms = median(arm.samples)
    if i > 1 and (not best or arm.ms < best.ms) then best = arm end
  end
  local default = state.arms[1]
  settle(state, (best.ms < default.ms and best or default).number, best, best.ms, default.ms)
end

-- The time counts for the arm that ran two passes before.
local function try_next(state, pass_ms)
  local function arm_of(pass) return state.arms[pass % #state.arms + 1] end
  if state.asked >= LAG then table.insert(arm_of(state.asked - LAG).samples, pass_ms) end
  if #state.arms[#state.arms].samples == SAMPLES then return judge(state) end
  state.present, state.asked = arm_of(state.asked).number, state.asked + 1
end

local function measure(state, view, pass_ms)
  state.asked = state.asked + 1
  if state.asked <= LAG then return end
  table.insert(state.samples, pass_ms)
  for number, one in ipairs(state.list) do
    table.insert(state.forecasts[number], core.forecast(view, one[2]))
  end
end

--- A planner of a model's own. Its field report is what stats show.
---@param make fun(given: ms.PrefetchPlanner): ms.Prefetch
---@return ms.Prefetch
function tuned.new(make)
  local planner, state
  local function plan(view)
    if not view.training then return ahead(view, 1, 0) end
    local order, pass_ms = order_of(view), view.forward_ms + view.backward_ms + view.exposed_ms
    if not state or state.order ~= order then
      local before = state and state.report
      state = start(view, order)
      state.report = before
    end
    if state.step == "measuring" then
      measure(state, view, pass_ms)
      if #state.samples == SAMPLES then choose(state) end
    end
    if state.step == "trial" then try_next(state, pass_ms) end
    planner.every = state.step == "settled" and SETTLED or 1
    planner.report = state.report
    return state.list[state.present][2]
  end
  planner = make { name = "tuned", plan = plan }
  return planner
end

return tuned
