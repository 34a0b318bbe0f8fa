-- Random programs: models with units that are nested, frozen, reused, skipped, recomputed, run
-- several times before a backward, go through several backwards, or are used by some ranks only,
-- some of them in low precision, offloaded, made from "meta" or gathered by functions of their own.
-- Each is compared with the same model without shards, which computes the passes of all ranks.
-- Prints how many programs had each of these.
local ms = require "moonshard"
local casts = require "moonshard.parallel.ddp.precision"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local rank, size = ms.rank(), ms.world_size()
local options = ms.config { programs = 60, seed = 1 }

local LAYERS, WIDTH, ROWS, STEPS = 4, 8, 4, 3

local Net = ms.nn.class "Net"
function Net:init()
  local layers = {}
  for i = 1, LAYERS do layers[i] = ms.nn.Linear(WIDTH, WIDTH) end
  self.layers = ms.nn.List(layers)
  self.inner = ms.nn.Sequential(ms.nn.Linear(WIDTH, WIDTH),
    ms.nn.Sequential(ms.nn.Linear(WIDTH, WIDTH), ms.nn.Linear(WIDTH, WIDTH)))
  self.scale = ms.nn.Parameter(ms.ones { WIDTH })
end
-- plan: 0 is the inner block, i a layer with a residual, -i a layer that is recomputed, with what
-- it gets computed there as well.
function Net:forward(x, plan)
  for _, i in ipairs(plan) do
    if i == 0 then x = self.inner(x):tanh()
    elseif i > 0 then x = self.layers[i](x):tanh() + x
    else x = ms.recompute(function(y) return self.layers[-i](y * 0.9):tanh() end, x) end
  end
  return x * self.scale:to(x:dtype())
end

-- A generator of its own: all ranks draw the same programs.
local state = options.seed
local function draw(least, most)
  state = (state * 6364136223846793005 + 1442695040888963407) & math.maxinteger
  return least + (state >> 33) % (most - least + 1)
end

local wraps = {
  { class = "Linear" }, { class = "Sequential" }, { class = { "Linear", "Sequential" } },
  { names = { "layers%.[02]", "inner%.1" } },
  -- Each group has a part of the inner block, which every plan uses.
  { names = { "inner%.1" },
    groups = { { "layers%.0", "inner%.0" }, { "layers%.[13]", "inner%.1%.0" } } },
}
-- Half of the programs are in f32. Without shards the same casts are made in the same places, but
-- sums over ranks are f32, so those in bf16 differ by its rounding.
local precisions = {
  { param = "bf16", output = "f32" }, { reduce = "bf16" },
  { param = "bf16", output = "f32", reduce = "bf16" },
  { param = "bf16", output = "f32", keep = { "sc.*" } },
}
-- What travels has other numbers, and half the bytes are of no use; the result has the same bits.
local gathers = {
  before = function(shard) return ms.cat { shard * 2, shard } end,
  after = function(gathered, _, part)
    return gathered:view(-1, 2, part.length):narrow(2, 1, 1):flatten() * 0.5
  end,
}
local strategies = { "full_shard", "shard_grad_op", "no_shard", "hybrid_shard" }
-- Any units ahead, and any that stay. Ranks draw the same, from what the view has.
local function drawn_plan(view)
  local number, plan = view.step, {}
  local function drawn(n)
    number = (number * 1103515245 + 12345) % 2147483648
    return number // 65536 % n
  end
  local visits = view.visits
  for i, visit in ipairs(visits) do
    plan[i] = { unit = visit.unit, gather = {}, after = {} }
    for _ = 1, drawn(3) do table.insert(plan[i].gather, visits[1 + drawn(#visits)].unit) end
    if drawn(3) == 0 then plan[i].after[1] = visits[1 + drawn(#visits)].unit end
    if drawn(3) == 0 then plan[i].keep = drawn(2) == 0 end
  end
  return plan
end
local prefetches = {
  "none", "backward_pre", "backward_post", "forward", "both", "by_budget",
  ms.prefetch { name = "drawn", plan = drawn_plan },
  ms.prefetch { name = "drawn, for two passes", every = 2, plan = drawn_plan },
}
-- When optimizers step, if there is one backward a step.
local policies = { "none", "in_backward", "deferred", "own" }

-- Where ranks may use different units, some leave out the inner block, or use no unit at all.
local function draw_plan(any)
  local plan = { not (any and draw(1, 2) == 1) and 0 or nil }
  for _ = 1, draw(any and 0 or 1, 5) do
    table.insert(plan, draw(1, #plan + 1), draw(-LAYERS, LAYERS))
  end
  return plan
end

local function draw_program()
  local program = {
    frozen = draw(1, 3) == 1 and draw(1, LAYERS) or nil, strategy = strategies[draw(1, 4)],
    prefetch = prefetches[draw(1, #prefetches)], wrap = wraps[draw(1, #wraps)],
    several_backwards = draw(1, 2) == 1, find_unused = draw(1, 3) == 1, steps = {},
    layout = draw(1, 2) == 1 and "rows" or "flat",
    near = draw(1, 2) == 1 and size == 4 and 2 or nil, policy = policies[draw(1, #policies)],
    precision = precisions[draw(1, 2 * #precisions)],
    low_gradients = draw(1, 2) == 1, full_eval = draw(1, 2) == 1, later = draw(1, 3) == 1,
    gathers = draw(1, 3) == 1 and gathers or {}, offload = draw(1, 3) == 1 and "cpu" or nil,
  }
  for step = 1, STEPS do
    local forwards = {}
    for f = 1, draw(1, 3) == 1 and 2 or 1 do
      local plans = {}
      for r = 1, size do
        plans[r] = not program.find_unused and plans[1] or draw_plan(program.find_unused)
      end
      forwards[f] = plans
    end
    program.steps[step] = forwards
  end
  return program
end

-- Whether steps are taken in backward: not where a second backward needs the weights.
local function steps_early(program)
  local several = false
  for _, forwards in ipairs(program.steps) do
    several = several or #forwards > 1 and program.several_backwards
  end
  return not several and (program.policy == "in_backward" or program.policy == "own")
end

-- What a program has of the kinds that are counted.
local function kinds_of(program)
  local kinds = {
    frozen = program.frozen ~= nil, ["low precision"] = program.precision ~= nil,
    ["own gathers"] = program.gathers.before ~= nil, ["on meta"] = program.later,
    offloaded = program.offload ~= nil,
    nested = type(program.wrap.class) ~= "string",
    ["own units"] = program.find_unused,
    ["several backwards"] = false, ["early steps"] = steps_early(program),
  }
  for _, forwards in ipairs(program.steps) do
    if #forwards > 1 then
      kinds["several forwards"] = true
      kinds["several backwards"] = kinds["several backwards"] or program.several_backwards
    end
    local used = {}
    for _, plans in ipairs(forwards) do
      for _, i in ipairs(plans[1]) do
        local layer = math.abs(i)
        if used[layer] then kinds.reused = true end
        if i < 0 then kinds.recomputed = true end
        used[layer] = true
      end
    end
    for i = 1, LAYERS do if not used[i] then kinds.skipped = true end end
  end
  return kinds
end

local function new_net(program)
  ms.seed(3)
  local net = Net()
  local frozen = program.frozen and net.layers[program.frozen]
  if frozen then
    for _, p in ipairs(frozen:parameters()) do p:requires_grad_(false) end
  end
  return net
end

local function input(step, forward, r)
  return expect.models.input(ROWS, WIDTH, step * 100 + forward * 10 + r)
end

-- run(step, forward, plans) -> losses; the losses' gradients add up. A parameter that no rank uses
-- has no gradient: neither decay nor momentum moves it.
local function train(program, model, sharded, run)
  local trained = model:parameters(function(p) return p:requires_grad() end)
  local function make(params)
    return ms.optim.sgd(params, { lr = 0.1, momentum = 0.9, weight_decay = 0.1 })
  end
  local own = sharded and program.policy == "own" and steps_early(program)
  local optimizer = not own and make(trained)
  if own then ms.optim.in_backward(make, trained)
  elseif sharded and (program.policy == "deferred" or steps_early(program)) then
    optimizer:overlap(model, program.policy)
  end
  for step in ms.steps(STEPS) do
    local all = {}
    for forward, plans in ipairs(program.steps[step + 1]) do
      for _, loss in ipairs(run(step, forward, plans)) do all[#all + 1] = loss end
    end
    if program.several_backwards then
      for _, loss in ipairs(all) do loss:backward() end
    else
      local total = all[1]
      for i = 2, #all do total = total + all[i] end
      total:backward()
    end
    if optimizer then
      optimizer:step()
      optimizer:zero_grad()
    end
  end
  return expect.whole(model)
end

-- The model without shards, with the casts of program.precision.
local function run_whole(program, whole, x, plan)
  local p = program.precision
  if not (p and p.param) then return whole(x, plan) end
  local given = { param = p.param, output = p.output, cast_inputs = true }
  return casts.run(whole, given, function(parameter)
    return p.keep ~= nil and parameter:name() == "scale"
  end, x, plan)
end

local counts, worst = {}, 0
for number = 1, options.programs do
  local program = draw_program()
  for kind, yes in pairs(kinds_of(program)) do
    counts[kind] = (counts[kind] or 0) + (yes and 1 or 0)
  end
  local net
  local function make() net = new_net(program) end
  if program.later then ms.device("meta", make) else make() end
  local model = ms.fsdp(net, {
    before_gather = program.gathers.before, after_gather = program.gathers.after,
    wrap = program.wrap, strategy = program.strategy, prefetch = program.prefetch,
    reshard_after_forward = program.strategy == "full_shard" and program.near or nil,
    layout = program.layout, find_unused = program.find_unused,
    precision = program.precision, offload = program.offload,
    keep_low_precision_grads = program.precision and program.low_gradients or nil,
    full_precision_eval = program.precision and program.full_eval or nil,
  })
  local whole = new_net(program)
  local expected = train(program, whole, false, function(step, forward, plans)
    local losses = {}
    for r = 0, size - 1 do
      local out = run_whole(program, whole, input(step, forward, r), plans[r + 1])
      losses[r + 1] = out:sum() * (0.01 / size)
    end
    return losses
  end)
  local own = train(program, model, true, function(step, forward, plans)
    return { model(input(step, forward, rank), plans[rank + 1]):sum() * 0.01 }
  end)
  local most = expect.difference(own, expected)
  -- Sums over ranks are added in another order. In bf16 2^-9 of a gradient is 1e-3 of a weight
  -- after three steps, and a gradient that is lost once 4e-2.
  local tolerance = program.precision and 3e-3 or 1e-5
  worst = math.max(worst, most / tolerance)
  assert(most <= tolerance, ("program %d (%s, %s, %s, %s): %g"):format(number, program.strategy,
    tostring(program.prefetch), program.layout, program.policy, most))
end
local text = {}
for kind, count in ms.sorted_pairs(counts) do
  assert(count >= 0.15 * options.programs, kind .. " is rare: " .. count)
  text[#text + 1] = ("%s %d"):format(kind, count)
end
print(("rank %d: %d programs, worst %.2g of its tolerance; %s"):format(rank, options.programs,
  worst, table.concat(text, ", ")))
