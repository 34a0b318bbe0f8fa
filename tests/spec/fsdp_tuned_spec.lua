-- Forecasts of passes of sharded models, the strategy that is tuned by them, and "by_budget". The
-- views are made up, so that times are known.
local command = require "command"
local core = require "moonshard.core"
local prefetch = require "moonshard.parallel.fsdp.prefetch"
local support = require "support"

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

-- What a pass takes; link: the latencies of the channels, which then share a link.
local function forecast(visits, plan, max_in_flight, max_reductions, link)
  local channel = link and { latency_ms = link } or nil
  return core.forecast({
    visits = visits, max_in_flight = max_in_flight, max_reductions = max_reductions,
    gather = channel, reduce = channel,
  }, plan)
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
    assert.near(8 * 10 + 2 + 1, forecast(visits, plan_of(visits), 9, 9), 1e-9)
    -- Computing bounds it: the first gather, eight uses, and the last reduction.
    visits = visits_of(4, { gather = 1, compute = 20, reduce = 3 })
    assert.near(1 + 8 * 20 + 3, forecast(visits, plan_of(visits), 9, 9), 1e-9)
    -- Reductions bound it: the first ends after the first backward.
    visits = visits_of(4, { gather = 1, compute = 2, reduce = 30 })
    assert.near(1 + 5 * 2 + 4 * 30, forecast(visits, plan_of(visits), 9, 9), 1e-9)
  end)

  it("knows what stays gathered", function()
    local visits = visits_of(4, { gather = 10, compute = 2, reduce = 0 })
    local plan = plan_of(visits, function(entry, visit)
      if visit.phase == "forward" then entry.keep = true end
    end)
    assert.near(4 * 10 + 5 * 2, forecast(visits, plan, 9, 9), 1e-9)
  end)

  it("waits for limits", function()
    -- After a unit is dropped, a gather waits until the one dropped before it is not used any more.
    local visits = visits_of(4, { gather = 1, compute = 20, reduce = 0 })
    local free = forecast(visits, plan_of(visits), 9, 9)
    assert.near(free, forecast(visits, plan_of(visits), 1, 9), 1e-9)
    -- One reduction at a time: backward waits for all but the last.
    visits = visits_of(4, { gather = 1, compute = 2, reduce = 30 })
    assert.near(1 + 5 * 2 + 4 * 30, forecast(visits, plan_of(visits), 9, 1), 1e-9)
  end)

  it("gathers in the order of the plan", function()
    local visits = visits_of(2, { gather = 10, compute = 1, reduce = 0 })
    local plan = plan_of(visits, function(entry, _, i) if i == 1 then entry.gather = { 2 } end end)
    assert.near(4 * 10 + 1, forecast(visits, plan, 9, 9), 1e-9)
    -- Unit 1 is gathered before unit 2, whose backward comes first and waits for both.
    plan = plan_of(visits, function(entry, _, i) if i == 2 then entry.after = { 1 } end end)
    assert.near(4 * 10 + 2, forecast(visits, plan, 9, 9), 1e-9)
  end)

  it("lets gathers and reductions share a link", function()
    -- Two units: four gathers end at 40, and the last use at 41. The first reduction is hidden.
    local visits = visits_of(2, { gather = 10, compute = 1, reduce = 10 })
    assert.near(41 + 10, forecast(visits, plan_of(visits), 9, 9), 1e-9)
    -- The first reduction is ready at 31. The last gather has had the link since 30, for all of its
    -- 10 ms but the latency. The other reduction begins when the first one ends.
    assert.near(39 + 10 + 10, forecast(visits, plan_of(visits), 9, 9, 1), 1e-9)
    -- Where nothing is gathered in backward, the first begins after the first use there.
    local kept = plan_of(visits, function(entry, visit)
      if visit.phase == "forward" then entry.keep = true end
    end)
    assert.near(20 + 2 + 10 + 10, forecast(visits, kept, 9, 9, 1), 1e-9)
  end)

  it("refuses a plan of another length", function()
    support.fails(function()
      forecast(visits_of(2, { gather = 1, compute = 1, reduce = 1 }), {}, 9, 9)
    end, "an entry for each visit")
  end)
end)

-- Uses of units as models have them: backward in the reverse order of forward, some units inside of
-- others, or used again.
local function random_view(draw)
  local units, visits, open = draw(1, 6), {}, {}
  local sizes, ended = {}, 0
  for unit = 0, units do sizes[unit] = draw(0, 3) * draw(1, 2000) end
  local needs = draw(1, 4) > 1
  local function finish()
    local i = table.remove(open)
    visits[i].last, ended = #visits, ended + 1
    visits[i].ended = ended
  end
  for _, phase in ipairs { "forward", "backward" } do
    for _ = 1, draw(1, 12) do
      while #open > 0 and draw(1, 3) > 1 do finish() end
      local unit = draw(0, units)
      visits[#visits + 1] = {
        unit = unit, phase = phase, elements = sizes[unit], bytes = 4 * sizes[unit],
        stays = draw(1, 4) == 1, needs_values = needs or phase == "forward" or unit > 1,
        gather_ms = draw(0, 20) / 2, compute_ms = draw(0, 20) / 2,
        reduce_ms = phase == "backward" and draw(0, 20) / 2 or 0,
      }
      open[#open + 1] = #visits
    end
    while #open > 0 do finish() end
  end
  local function budget() return draw(1, 3) == 1 and draw(0, 3000) or draw(0, 30000) end
  return {
    training = true, visits = visits, max_in_flight = draw(1, 3), max_reductions = draw(1, 3),
    gather = { latency_ms = draw(0, 4) / 2 }, reduce = { latency_ms = draw(0, 4) / 2 },
    budget_bytes = draw(1, 3) == 1 and math.maxinteger or draw(0, 60000),
    budgets = {
      prefetch_elements = budget(), live_elements = budget(), reuse_elements = budget(),
      keep_elements = budget(),
    },
  }
end

-- As a line of the golden data.
local SIGNS <const> = { [true] = "+", [false] = "-" }
local function text(plan)
  local list = {}
  for i, entry in ipairs(plan) do
    local gather, after = entry.gather or {}, entry.after or {}
    list[i] = entry.unit .. (#gather > 0 and ":" .. table.concat(gather, ",") or "")
      .. (#after > 0 and "/" .. table.concat(after, ",") or "") .. (SIGNS[entry.keep] or "")
  end
  return table.concat(list, " ")
end

local function golden(name)
  return io.lines(("%s/tests/golden/planners/%s.txt"):format(command.source, name))
end

-- The answers in tuned.txt, one by one.
local function answers()
  return coroutine.wrap(function()
    for line in golden "tuned" do
      local count, answer = line:match "^(%d+) (.*)$"
      for _ = 1, tonumber(count or 0) do coroutine.yield(answer) end
    end
  end)
end

local function answer_of(planner, plan)
  local report, shown = planner.report, ""
  if report then
    local measured = report.measured_ms and ("%.17g"):format(report.measured_ms) or ""
    shown = ("%s; %s; %.17g; %.17g; %s"):format(report.plan, report.tried, report.predicted_ms,
      report.default_ms, measured)
  end
  return ("%d; %s; %s"):format(planner.every, shown, plan)
end

describe("the strategy", function()
  local random

  before_each(function()
    local state = 1
    random = function(low, high)
      state = (state * 1103515245 + 12345) % 2147483648
      return low + state // 65536 % (high - low + 1)
    end
  end)

  it("by_budget plans what it did in C", function()
    local planner, expected = prefetch.planner_of "by_budget", golden "by_budget"
    for _ = 1, 2000 do assert.equal(expected(), text(planner.plan(random_view(random)))) end
    assert.is_nil(expected())
  end)

  it("tuned plans and decides what it did in C", function()
    local expected = answers()
    for _ = 1, 60 do
      local view, before = random_view(random), nil
      local planner = prefetch.planner_of("tuned").new()
      for ask = 1, 50 do
        if ask == 30 and random(1, 2) == 1 then view = random_view(random) end
        for _, visit in ipairs(view.visits) do visit.gather_ms = visit.gather_ms + random(0, 2) end
        view.forward_ms, view.backward_ms = random(10, 40), random(10, 40)
        view.exposed_ms = random(0, 5)
        local plan = text(planner.plan(view))
        assert.equal(expected(), answer_of(planner, plan == before and "=" or plan))
        before = plan
      end
    end
    assert.is_nil(expected())
  end)
end)

describe("tuned", function()
  local function new() return prefetch.planner_of("tuned").new() end

  local function view_of(budget, pass_ms)
    return {
      training = true, world_size = 2, budget_bytes = budget, max_in_flight = 2,
      max_reductions = 2,
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

  -- Asks until it is settled. pass_ms(kept, pass): what the pass before the last took; kept:
  -- whether units stayed gathered then.
  local function run(planner, budget, pass_ms)
    local plans = {}
    for pass = 1, 100 do
      local kept = plans[pass - 2] and plans[pass - 2][1].keep or false
      plans[pass] = planner.plan(view_of(budget, pass_ms(kept, pass)))
      if planner.every > 1 then return plans end
    end
    error "it does not settle"
  end

  it("keeps the default where nothing is faster", function()
    local planner, view = new(), view_of(200, 90)
    ask(planner, view, 6)
    assert.is_nil(planner.report)
    assert.equal(1, planner.every)
    local plan = ask(planner, view, 1)
    assert.same({
      plan = "backward_pre", tried = "backward_pre", predicted_ms = 90, default_ms = 90,
      measured_ms = 90,
    }, planner.report)
    assert.is_nil(plan[1].keep)
    assert.is_true(planner.every > 1)
  end)

  it("tries the best plan in turn with the default, and keeps it if it is faster", function()
    local planner = new()
    -- The machine becomes slower by 1 ms in each pass, and is by_budget's at 55 ms less.
    local plans = run(planner, 10000, function(kept, pass)
      if pass == 8 then
        assert.equal("by_budget", planner.report.plan)
        assert.is_nil(planner.report.measured_ms)
      end
      return (kept and 35 or 90) + pass
    end)
    local report = planner.report
    assert.equal("by_budget", report.plan)
    assert.equal("by_budget", report.tried)
    -- Four gathers of 10 ms are spared; but for the last one computing hides nothing of them.
    assert.near(report.default_ms - 40, report.predicted_ms, 8)
    assert.near(report.default_ms - 55, report.measured_ms, 2)
    assert.is_true(plans[#plans][1].keep)
    for pass = 7, #plans - 2 do
      assert.equal((pass - 7) % 2 == 1, plans[pass][1].keep or false, "pass " .. pass)
    end
    -- It is asked seven times until it chooses, then for five pairs and two passes more.
    assert.equal(7 + 10 + 2 - 1, #plans)
  end)

  it("goes back to the default if that is faster", function()
    local planner = new()
    local plans = run(planner, 10000, function(kept) return kept and 95 or 90 end)
    assert.equal("backward_pre", planner.report.plan)
    assert.equal("by_budget", planner.report.tried)
    assert.equal(95, planner.report.measured_ms)
    assert.equal(90, planner.report.default_ms)
    assert.is_nil(plans[#plans][1].keep)
  end)

  it("keeps units gathered within budgets alone", function()
    local planner = new()
    ask(planner, view_of(math.maxinteger, 90), 7)
    assert.equal("by_budget", planner.report.plan)
  end)

  it("predicts no time below 0", function()
    local planner = new()
    run(planner, 10000, function(_, pass) return pass > 7 and 3 or 90 end)
    assert.is_true(planner.report.predicted_ms > 0 and planner.report.predicted_ms < 3)
  end)

  it("is not deceived by single passes", function()
    local planner = new()
    run(planner, 10000, function(kept, pass)
      return (kept and 50 or 90) + (pass % 5 == 0 and 500 or 0)
    end)
    assert.equal("by_budget", planner.report.plan)
    assert.equal(50, planner.report.measured_ms)
    assert.equal(90, planner.report.default_ms)
  end)

  it("begins anew with another order", function()
    local planner = new()
    run(planner, 10000, function() return 90 end)
    local other = view_of(10000, 90)
    table.remove(other.visits)
    table.remove(other.visits)
    for i, visit in ipairs(other.visits) do visit.last, visit.ended = i, i end
    local plan = ask(planner, other, 1)
    assert.equal(1, planner.every)
    assert.is_nil(plan[1].keep)
  end)
end)
