-- Forecasts of passes of sharded models, and the strategy that is tuned by them. The views are made
-- up, so that times are known.
local ms = require "moonshard"
local core = require "moonshard.core"
local tuned = require "moonshard.fsdp.tuned"

-- Units 1 to `count`, forward then backward, one after another.
local function visits_of(count, times)
  local visits = {}
  for i = 1, 2 * count do
    local backward = i > count
    visits[i] = {
      unit = backward and 2 * count + 1 - i or i, phase = backward and "backward" or "forward",
      bytes = 100, shard_bytes = 50, elements = 25, last = i, ended = i, stays = false,
      needs_values = true, gather_ms = times.gather, compute_ms = times.compute,
      reduce_ms = backward and times.reduce or 0,
    }
  end
  return visits
end

local function plan_of(visits, change)
  local plan = {}
  for i, visit in ipairs(visits) do
    plan[i] = { unit = visit.unit }
    if change then change(plan[i], visit, i) end
  end
  return plan
end

describe("a forecast", function()
  it("adds up what cannot overlap", function()
    -- Gathers bound the pass: eight of them, and the last computing and reduction.
    local visits = visits_of(4, { gather = 10, compute = 2, reduce = 1 })
    assert.near(8 * 10 + 2 + 1, core.forecast(visits, plan_of(visits), 9, 9), 1e-9)
    -- Computing bounds it: the first gather, eight uses, and the last reduction.
    visits = visits_of(4, { gather = 1, compute = 20, reduce = 3 })
    assert.near(1 + 8 * 20 + 3, core.forecast(visits, plan_of(visits), 9, 9), 1e-9)
    -- Reductions bound it: the first ends after the first backward.
    visits = visits_of(4, { gather = 1, compute = 2, reduce = 30 })
    assert.near(1 + 5 * 2 + 4 * 30, core.forecast(visits, plan_of(visits), 9, 9), 1e-9)
  end)

  it("knows what stays gathered", function()
    local visits = visits_of(4, { gather = 10, compute = 2, reduce = 0 })
    local plan = plan_of(visits, function(entry, visit)
      if visit.phase == "forward" then entry.keep = true end
    end)
    assert.near(4 * 10 + 5 * 2, core.forecast(visits, plan, 9, 9), 1e-9)
  end)

  it("waits for limits", function()
    -- After a unit is dropped, a gather waits until the one dropped before it is not used any more.
    local visits = visits_of(4, { gather = 1, compute = 20, reduce = 0 })
    local free = core.forecast(visits, plan_of(visits), 9, 9)
    assert.near(free, core.forecast(visits, plan_of(visits), 1, 9), 1e-9)
    -- One reduction at a time: backward waits for all but the last.
    visits = visits_of(4, { gather = 1, compute = 2, reduce = 30 })
    assert.near(1 + 5 * 2 + 4 * 30, core.forecast(visits, plan_of(visits), 9, 1), 1e-9)
  end)

  it("gathers in the order of the plan", function()
    local visits = visits_of(2, { gather = 10, compute = 1, reduce = 0 })
    local plan = plan_of(visits, function(entry, _, i) if i == 1 then entry.gather = { 2 } end end)
    assert.near(4 * 10 + 1, core.forecast(visits, plan, 9, 9), 1e-9)
    -- Unit 1 is gathered before unit 2, whose backward comes first and waits for both.
    plan = plan_of(visits, function(entry, _, i) if i == 2 then entry.after = { 1 } end end)
    assert.near(4 * 10 + 2, core.forecast(visits, plan, 9, 9), 1e-9)
  end)
end)

describe("tuned", function()
  local function view_of(budget, pass_ms)
    return {
      training = true, world_size = 2, budget_bytes = budget, max_in_flight = 2, max_reductions = 2,
      budgets = {
        prefetch_elements = 1000, live_elements = 1000, reuse_elements = 1000, keep_elements = 0,
      },
      forward_ms = pass_ms / 2, backward_ms = pass_ms / 2 - 1, exposed_ms = 1,
      visits = visits_of(4, { gather = 10, compute = 2, reduce = 1 }),
    }
  end

  local function ask(planner, view, times)
    local plan
    for _ = 1, times do plan = planner.plan(view) end
    return plan
  end

  it("keeps the default where nothing is faster", function()
    local planner = tuned.new(ms.prefetch)
    ask(planner, view_of(math.maxinteger, 90), 6)
    assert.is_nil(planner.report)
    assert.equal(1, planner.every)
    ask(planner, view_of(math.maxinteger, 90), 1)
    assert.equal("backward_pre", planner.report.plan)
    assert.equal(90, planner.report.measured_ms)
    assert.is_true(planner.every > 1)
  end)

  it("tries the best plan, and keeps it if it is faster", function()
    local planner = tuned.new(ms.prefetch)
    local plan = ask(planner, view_of(10000, 90), 7)
    assert.equal("by_budget", planner.report.plan)
    assert.is_true(plan[1].keep)
    -- Four gathers of 10 ms are spared.
    assert.near(90 - 40, planner.report.predicted_ms, 8)
    assert.is_nil(planner.report.measured_ms)
    -- The first two views after the change are of passes before it.
    ask(planner, view_of(10000, 90), 2)
    plan = ask(planner, view_of(10000, 60), 5)
    assert.equal(60, planner.report.measured_ms)
    assert.equal("by_budget", planner.report.plan)
    assert.is_true(plan[1].keep)
  end)

  it("goes back to the default if that is faster", function()
    local planner = tuned.new(ms.prefetch)
    ask(planner, view_of(10000, 90), 7)
    local plan = ask(planner, view_of(10000, 95), 7)
    assert.equal("backward_pre", planner.report.plan)
    assert.equal(95, planner.report.measured_ms)
    assert.is_nil(plan[1].keep)
    assert.is_true(planner.every > 1)
  end)

  it("begins anew with another order", function()
    local planner = tuned.new(ms.prefetch)
    ask(planner, view_of(10000, 90), 20)
    local other = view_of(10000, 90)
    table.remove(other.visits)
    table.remove(other.visits)
    for i, visit in ipairs(other.visits) do visit.last, visit.ended = i, i end
    ask(planner, other, 1)
    assert.equal(1, planner.every)
  end)
end)
