-- What every rank of fsdp_prefetch_spec.lua runs: gathers ahead by modes and by plans. Whatever is
-- planned, losses are those of the default bit by bit, and gathers come in the order of the plan.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local nn, fails = ms.nn, expect.fails
local rank, size = ms.rank(), ms.world_size()
local cfg = ms.config { plans = 20 }

-- Blocks of different sizes, one inside of another one, and one that is used twice.
local Block = nn.class "Block"
function Block:init(width, inner)
  self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)
  if inner then self.inner = Block(inner) end
end
function Block:forward(x)
  x = x + self.down(self.up(x):gelu())
  return self.inner and self.inner(x) or x
end

local Net = nn.class "Net"
function Net:init()
  self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
  self.blocks = nn.List { Block(5), Block(20, 7), Block(11), Block(3) }
end
function Net:forward(x, skip)
  x = self.first(x)
  for i = 1, 4 do if i ~= skip then x = self.blocks[i](x) end end
  if not skip then x = self.blocks[1](x) end
  return self.last(x)
end

local function input(step) return ms.randn { 3, 8, seed = 100 * step + rank } end

local function new(options)
  ms.seed(1)
  options.wrap = { class = "Block" }
  local net = ms.fsdp(Net(), options)
  return net, ms.optim.sgd(net, { lr = 0.1 })
end

local function pass(net, optimizer, step, skip)
  local loss = net(input(step), skip):square():mean()
  loss:backward()
  optimizer:step()
  optimizer:zero_grad()
  return loss:item()
end

local function run(options, steps, skips)
  local net, optimizer = new(options)
  local losses = {}
  for step = 1, steps do losses[step] = pass(net, optimizer, step, skips and skips[step]) end
  return losses, net, optimizer
end

local function same(a, b, what)
  assert(#a == #b)
  for i, loss in ipairs(a) do
    assert(loss == b[i], ("%s: loss %d is %.9g, not %.9g"):format(what, i, loss, b[i]))
  end
end

-- Units whose gathers f enqueues, in order.
local function gathers(net, f)
  local number = {}
  for _, unit in ipairs(net:units()) do
    number[unit.index == 0 and "root" or unit.name] = unit.index
  end
  local list = {}
  for _, call in ipairs(expect.records(f)) do
    if call.op == "all_gather" then list[#list + 1] = number[call.label] end
  end
  return list
end

local function text(list) return table.concat(list, " ") end

local skips = { nil, nil, nil, 3, 3, 2, nil, nil }
-- The default's losses: of as many steps as any run takes, and those of the first six.
local is_tuned = expect.takes(1, 3)                          -- 2 ranks, or in long ranges all
local default, odd = run({}, is_tuned and 28 or 6), run({}, 8, skips)
local usual = { table.unpack(default, 1, 6) }

---------------------------------------------------------------------------------------------- modes

local modes = { "none", "backward_pre", "backward_post", "forward", "both", "by_budget", "tuned" }
for i, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard" } do
  for k, mode in ipairs(strategy == "full_shard" and modes or { "both", "by_budget" }) do
    local what, o = strategy .. ", " .. mode, { prefetch = mode, strategy = strategy }
    if expect.takes(i + k, 4) then same(run(o, 6), usual, what) end
    if expect.takes(i + k + 1, 4) then same(run(o, 8, skips), odd, what .. ", other orders") end
    o.find_unused = true
    if expect.takes(i + k + 2, 4) then same(run(o, 8, skips), odd, what) end
  end
end

-- Units 1 to 5: blocks 1, 2, its inner one, 3, 4. Forward uses 0 1 2 3 4 5 1. The backward of unit
-- 1 goes on until its first use. That of a nested unit may begin before that of the outer one.
if size > 1 then
  local backward = {
    none = "1 5 4 3 2", backward_pre = "1 5 4 2 3", backward_post = "1 5 4 3 2",
    forward = "1 5 4 3 2", both = "1 5 4 2 3",
  }
  local hits = { none = 0, backward_pre = 4, backward_post = 2, forward = 6, both = 10 }
  for _, mode in ipairs { "none", "backward_pre", "backward_post", "forward", "both" } do
    local _, net, optimizer = run({ prefetch = mode }, 3)
    local loss
    local there = gathers(net, function() loss = net(input(1)):square():mean() end)
    assert(text(there) == "0 1 2 3 4 5 1", mode .. ": " .. text(there))
    local back = gathers(net, function() loss:backward() end)
    assert(text(back) == backward[mode], mode .. ": " .. text(back))
    optimizer:zero_grad()
    local counts = net:stats().prefetch
    assert(counts.hits == hits[mode] and counts.wasted_bytes == 0,
      ("%s: %d hits, %d bytes wasted"):format(mode, counts.hits, counts.wasted_bytes))
  end
end

---------------------------------------------------------------------------------------------- plans

-- Planners that draw: any units ahead, any that stay. All ranks draw the same.
local function random_plan(seed)
  local state = seed
  local function draw(n)
    state = (state * 1103515245 + 12345) % 2147483648
    return state // 65536 % n
  end
  return function(view)
    local plan = {}
    for i, visit in ipairs(view.visits) do
      local entry = { unit = visit.unit, gather = {}, after = {} }
      for _ = 1, draw(4) do table.insert(entry.gather, draw(6)) end
      if draw(3) == 0 then entry.after[1] = draw(6) end
      local keep = draw(4)
      if keep < 2 then entry.keep = keep == 0 end
      if draw(6) > 0 then plan[i] = entry end
    end
    return plan
  end
end

-- The gathers that a plan asks for, from its entries and from what the visits hold.
local function expected_gathers(view, plan)
  local there, list = {}, {}
  local ends = require "moonshard.parallel.fsdp.held".endings(view.visits)
  local function gather(unit)
    if not there[unit] then list[#list + 1] = unit end
    there[unit] = true
  end
  for i, visit in ipairs(view.visits) do
    local entry = plan[i] or {}
    gather(visit.unit)
    for _, unit in ipairs(entry.gather or {}) do gather(unit) end
    for _, ended in ipairs(ends[i]) do
      local one, visited = plan[ended] or {}, view.visits[ended]
      local keep = one.keep
      if keep == nil then keep = visited.stays end
      if not keep then there[visited.unit] = nil end
      for _, unit in ipairs(one.after or {}) do gather(unit) end
    end
  end
  return list
end

for seed = 1, cfg.plans do
  local views, plans, make = {}, {}, random_plan(seed)
  local planner = ms.prefetch { name = "random", every = 2, plan = function(view)
    views[#views + 1], plans[#plans + 1] = view, make(view)
    return plans[#plans]
  end }
  local losses, net, optimizer = run({ prefetch = planner }, 6)
  same(losses, usual, "random plan " .. seed)
  assert(#plans == 2, #plans)
  -- The optimizer's steps make all that is gathered old, so each pass begins with nothing. The
  -- third plan is made before this pass.
  local list = gathers(net, function() pass(net, optimizer, 7) end)
  local plan, view = plans[3], views[3]
  if size > 1 then
    local wanted = expected_gathers(view, plan)
    assert(text(list) == text(wanted),
      ("plan %d: gathered %s, planned %s"):format(seed, text(list), text(wanted)))
  end
  assert(view.training and #view.visits == 13 and view.visits[1].unit == 0)
  assert(view.visits[1].last == 7 and view.visits[3].last == 4, "the inner block ends first")
  -- Other orders, and evaluations with orders of their own.
  local odds = {}
  net, optimizer = new { prefetch = planner }
  for step = 1, 8 do
    if step > 5 then ms.no_grad(function() net(input(1), 3) end) end
    odds[step] = pass(net, optimizer, step, skips[step])
  end
  same(odds, odd, "random plan in other orders " .. seed)
  assert(net:stats().prefetch.replans > 0)
end

-- A unit that is gathered after its own backward is given back when the pass ends, before the
-- optimizer's step, and counts as waste; unless the plan keeps it.
if size > 1 then
  for _, kept in ipairs { false, true } do
    local net, optimizer = new { prefetch = ms.prefetch { name = "late", plan = function(view)
      local plan, seen = {}, nil
      for i, visit in ipairs(view.visits) do
        if visit.phase == "backward" and visit.unit == 4 then
          seen = i
          plan[i] = { unit = 4, keep = kept or nil }
        elseif seen and #plan == seen then
          plan[i] = { unit = visit.unit, gather = { 4 } }
        else plan[i] = { unit = visit.unit } end
      end
      return plan
    end } }
    for step = 1, 4 do
      net(input(step)):square():mean():backward()
      if step == 4 then                     -- plans begin with the third pass
        local unit, counts = net:units()[5], net:stats().prefetch
        assert(unit.gathered == kept, ("step %d: gathered %s"):format(step, unit.gathered))
        assert(counts.wasted_bytes == (kept and 0 or unit.bytes), tostring(counts.wasted_bytes))
      end
      optimizer:step()
      optimizer:zero_grad()
    end
  end
end

-- The file that has the modes as planners gathers the same units, and as many ahead.
do
  local planner_of = require "moonshard.parallel.fsdp.prefetch".planner_of
  local recipe = debug.getinfo(1, "S").source:sub(2):match "^(.*)tests/dist/"
    .. "recipes/prefetch/ahead.lua"
  local function seen(prefetch)
    local losses, net, optimizer = run({ prefetch = prefetch }, 4)
    local list = gathers(net, function() losses[5] = pass(net, optimizer, 5) end)
    table.sort(list)
    return losses, text(list), net:stats().prefetch.hits
  end
  local number = 0
  for mode, how in ms.sorted_pairs {
    none = { forward = false, backward = "none" }, forward = { backward = "none" },
    backward_pre = { forward = false }, both = {},
    backward_post = { forward = false, backward = "post" },
  } do
    number = number + 1
    if expect.takes(number, 2) then
      local losses, list, hits = seen(mode)
      local theirs, other, ahead = seen(planner_of(recipe, how, true))
      same(theirs, losses, mode)
      assert(list == other, ("%s: gathered %s, and the planner %s"):format(mode, list, other))
      -- Before the backward of a nested unit the mode guesses by the order of forward.
      assert(hits == ahead or mode:find "pre$" or mode == "both",
        ("%s: %d and %d hits"):format(mode, hits, ahead))
    end
  end
end

-- The default is measured, then what seems best is, and the faster one stays.
if is_tuned then
  local losses, net = run({ prefetch = "tuned", budget_bytes = 1 << 20 }, 28)
  same(losses, default, "tuned")
  local report = net:stats().prefetch.tuned
  assert(report.default_ms > 0 and report.predicted_ms > 0 and report.measured_ms > 0)
  assert(report.measured_ms < report.default_ms and report.plan == report.tried
    or report.plan == "backward_pre")
end

-- Evaluations are planned for by themselves.
do
  local kinds = {}
  local net = new { prefetch = ms.prefetch { name = "seen", plan = function(view)
    kinds[#kinds + 1] = ("%s %d"):format(view.training and "training" or "evaluation",
      #view.visits)
    return {}
  end } }
  for _ = 1, 3 do ms.no_grad(function() net(input(1)) end) end
  assert(text(kinds) == "evaluation 7", text(kinds))
end

-- What a view has. The host's clock counts nanoseconds. A GPU's events count half microseconds, so
-- what takes less may take 0 there.
do
  local seen
  local least = ms.device() == "cuda" and 0 or 1e-6
  local function takes(time, happens)
    if happens then return time >= least end
    return time == 0
  end
  local _, net = run({ prefetch = ms.prefetch { name = "view", plan = function(view)
    seen = view
    return {}
  end } }, 4)
  assert(seen.world_size == size and seen.step >= 3 and seen.max_in_flight == 2)
  assert(seen.forward_ms > 0 and seen.backward_ms > 0 and seen.budget_bytes == math.maxinteger)
  local units = net:units()
  for i, visit in ipairs(seen.visits) do
    local unit = units[visit.unit + 1]
    assert(visit.name == unit.name and visit.shard_bytes == unit.shard_bytes)
    assert(visit.bytes == (size > 1 and unit.bytes or 0))
    assert(visit.phase == (i <= 7 and "forward" or "backward"))
    assert(visit.compute_ms >= least and takes(visit.gather_ms, size > 1))
    assert(takes(visit.reduce_ms, visit.phase == "backward"))
  end
  if size > 1 then assert(seen.gather.bytes_per_ms > 0 and seen.reduce.bytes_per_ms > 0) end
end

--------------------------------------------------------------------------------------------- budget

if size > 1 then
  local net = new {}
  local bytes = {}
  for _, unit in ipairs(net:units()) do bytes[unit.index] = unit.bytes end
  local largest = math.max(table.unpack(bytes))
  -- The root is used throughout, the first block through all of backward, and the inner block
  -- inside of the largest one.
  local least = bytes[0] + bytes[1] + largest + bytes[3]
  local budgets = { prefetch_elements = 1000, keep_elements = 0 }
  for _, budget in ipairs { least, least + bytes[1], 2 * least } do
    local losses = run({ prefetch = "by_budget", budget_bytes = budget, budgets = budgets }, 5)
    same({ table.unpack(usual, 1, 5) }, losses, "by_budget")
  end
  fails(function() new { prefetch = "by_budget", budget_bytes = largest - 1 } end,
    "budget_bytes = ", 'unit 2 "blocks.1"')
  fails(function() new { budget_bytes = largest } end, "prefetch = 'backward_pre' makes none")
  fails(function() new { prefetch = "by_budget", budgets = { live_element = 1 } } end,
    "budgets: unknown field 'live_element'", "'live_elements'")
  fails(function() new { prefetch = "by_budget", budgets = { keep_elements = 0.5 } } end,
    "budgets.keep_elements must be a whole number")
end

------------------------------------------------------------------------------------------ bad input

fails(function() new { prefetch = "backward" } end, "fsdp: prefetch", "'backward'",
  "did you mean 'backward_pre'")
fails(function() new { prefetch = 3 } end, "fsdp: prefetch", "not a number")
fails(function() ms.prefetch { name = "x" } end, "plan must be a function")
fails(function() ms.prefetch { name = "x", every = 0, plan = print } end, "every must be")

-- A planner's mistakes are errors with its line, the same on every rank. The pass has not begun,
-- and the model goes on with another strategy.
-- The last two are for several ranks. Of the others each number of ranks has some.
local bad = {
  { "nothing", "it returned nothing" },
  { "a string", "it returned a string" },
  { "a tensor", "planner" },
  { function() error "on purpose" end, "on purpose" },
  { function(plan) plan[14] = { unit = 0 } end, "there is no visit 14; they are 1 to 13" },
  { function(plan) plan[0] = { unit = 0 } end, "there is no visit 0" },
  { function(plan) plan.first = { unit = 0 } end, "there is no visit first" },
  { function(plan) plan[1.5] = { unit = 0 } end, "there is no visit 1.5" },
  { function(plan) plan[2] = 1 end, "entry 2 is a number" },
  { function(plan) plan[2] = { gather = { 1 } } end, "entry 2 is for unit nil" },
  { function(plan) plan[2].unit = 3 end, "entry 2 is for unit 3, and visit 2 is of unit 1" },
  { function(plan) plan[3].gahter = { 1 } end, "entry 3: unknown field 'gahter': did you mean" },
  { function(plan) plan[3].gather = 4 end, "entry 3: gather is a list of units, not a number" },
  { function(plan) plan[3].gather = { 6 } end, "entry 3: gather: there is no unit 6" },
  { function(plan) plan[3].gather = { -1 } end, "entry 3: gather: there is no unit -1" },
  { function(plan) plan[3].gather = { 1.5 } end, "entry 3: gather: there is no unit 1.5" },
  { function(plan) plan[3].gather = { unit = 1 } end, "entry 3: gather: unknown field 'unit'" },
  { function(plan) plan[4].after = { "1" } end, "entry 4: after: there is no unit 1" },
  { function(plan) plan[4].keep = 1 end, "entry 4: keep must be true, false or nil" },
  { function(plan) plan[5].gather = { 1, 2, 4, 5 } end, "it would hold", "budget_bytes is" },
  { function(plan) if size > 1 then plan[1].keep = rank == 0 end end,
    "ranks planned differently: entry 1 gathers {}, after it {}, keep = true on rank 0",
    "keep = false on rank 1" },
}
for number, one in ipairs(bad) do
  local is_taken = expect.takes(number, 3) or size > 1 and number > #bad - 2
  local budget = one[2] == "it would hold" and 3000 or nil
  local alone = size == 1 and (number == #bad or budget)
  local line = debug.getinfo(1, "l").currentline + 1
  local planner = ms.prefetch { name = "bad", plan = function(view)
    local plan, change = {}, one[1]
    if change == "nothing" then return nil end
    if change == "a string" then return "forward" end
    if change == "a tensor" then return ms.rand { 2 } end
    for i, visit in ipairs(view.visits) do plan[i] = { unit = visit.unit } end
    change(plan)
    return plan
  end }
  if is_taken and not alone then
    local net, optimizer = new { prefetch = planner, budget_bytes = budget }
    local losses = {}
    for step = 1, 2 do losses[step] = pass(net, optimizer, step) end
    fails(function() pass(net, optimizer, 3) end, "prefetch plan bad (",
      ("fsdp_prefetch.lua:%d)"):format(line), table.unpack(one, 2))
    if not budget and expect.takes(number, 6) then
      net:set_prefetch "both"
      for step = 3, 6 do losses[step] = pass(net, optimizer, step) end
      same(losses, usual, "after a bad plan")
    end
  end
end

print(("rank %d is done"):format(rank))
