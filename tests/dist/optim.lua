-- Run by every rank of optim_spec.lua: sharded optimizers compared with whole ones, bit for bit,
-- and averagers compared with numbers computed by hand. how=other_group: sharded over other ranks
-- than those of the join; how=more_here: ranks without inputs have another optimizer.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local bits, make_model, heavy = expect.bits, expect.models.layers, expect.models.heavy()
local hooks, nn, optim = ms.hooks, ms.nn, ms.optim
local options = ms.config { how = "all" }
local rank, size, world = ms.rank(), ms.world_size(), ms.world()

local function pass(net, step)
  net(ms.randn { 4, 8, seed = 1000 * rank + step }):square():mean():backward()
end

local function same(a, b, what) if a ~= b then error(what .. ": not the same bits", 2) end end

-------------------------------------------------------------------------------------------- sharded

-- An optimizer of a model's parameters in two groups.
local function in_groups(make, model, sharded, schedule)
  local parameters = model:parameters()
  return make({
    { params = { parameters[1], parameters[2], parameters[3] }, lr = 0.1 },
    { params = { table.unpack(parameters, 4) } },
  }, { lr = 0.05, schedule = schedule, shard = sharded and world or nil })
end

-- way(model, opt): what is trained.
local function train(make, sharded, way)
  local model = make_model()
  local opt = in_groups(make, model, sharded)
  local net = way(model, opt)
  for step in ms.steps(5) do
    pass(net, step)
    opt:step()
  end
  return bits(model:parameters()), opt, model
end

local function plain(model) return ms.ddp(model, { bucket_bytes = 256 }) end
local function by_policy(name)
  return function(model, opt)
    local net = plain(model)
    opt:overlap(net, name)
    return net
  end
end
local function linked(model, opt)
  return ms.ddp(model, {
    bucket_bytes = 256,
    comm_hook = hooks.chain { hooks.then_optimizer { optimizer = opt }, "all_reduce" },
  })
end

-- These two end the job.
if options.how == "more_here" then
  local model = make_model()
  local opt, net = optim.sgd({ model:parameters()[1] }, { shard = world }), plain(model)
  net:join({}, function()
    if rank == 0 then return end
    opt:add_group { params = { model:parameters()[2] } }
    pass(net, 1)
    opt:step()
  end)
end

if options.how == "other_group" then
  local model = make_model()
  local opt, net = optim.sgd(model, { shard = world:split { { 0, 1 } } }), plain(model)
  net:join({}, function()
    pass(net, 1)
    opt:step()
  end)
end

for name, make in ms.sorted_pairs {
  adamw = optim.adamw, sgd = optim.sgd, rprop = optim.rprop, heavy = heavy,
} do
  local want = train(make, false, plain)
  for how, way in ms.sorted_pairs {
    plain = plain, in_backward = by_policy "in_backward", deferred = by_policy "deferred",
    linked = linked,
  } do
    same(want, train(make, true, way), name .. ", sharded, " .. how)
  end
end

-- A single parameter's step reaches everyone, too.
do
  local function one(sharded)
    local p = nn.Parameter(ms.ones { 5 })
    local opt = optim.adam({ nn.Parameter(ms.ones { 9 }), p },
      { lr = 0.1, shard = sharded and world or nil })
    for step = 1, 3 do opt:step_param(p, ms.randn { 5, seed = step }) end
    return bits { p }
  end
  same(one(false), one(true), "step_param")
end

-- Stochastic rounding draws the same numbers, sharded or not.
do
  local function round(sharded)
    ms.seed(3)
    local model = make_model():to "bf16"
    local opt = optim.sgd(model, { lr = 1e-3, master = "none", shard = sharded and world or nil })
    for _ = 1, 3 do
      for _, p in ipairs(model:parameters()) do p:set_grad(ms.ones(p:shape()):to "bf16") end
      opt:step()
    end
    return bits(model:parameters()) .. bits { ms.rand { 3 } }
  end
  same(round(false), round(true), "stochastic rounding")
end

-- Each state is on one rank only. Rank 0 gets all of them to save. Saved states load into any
-- optimizer.
do
  local _, whole = train(optim.adam, false, plain)
  local _, opt = train(optim.adam, true, plain)
  local own = 0
  for _, slot in pairs(opt.slots) do if next(slot.state) then own = own + 1 end end
  local all = world:all_reduce(ms.tensor { own }):sync():item()
  assert(all == 6, "a state is held twice, or not at all")
  local saved, expected = opt:state(), whole:state()
  if rank == 0 then
    for name, state in pairs(expected.parameters) do
      for key, value in pairs(state) do
        local got = saved.parameters[name][key]
        if type(value) == "userdata" then
          same(bits { value }, bits { got }, name .. "." .. key)
        else
          assert(got == value, key)
        end
      end
    end
  end
  -- Every rank loads the whole state: here the one of the optimizer that is not sharded.
  local function go_on(sharded)
    local model = make_model()
    local loaded = in_groups(optim.adam, model, sharded)
    loaded:load_state(expected)
    local net = plain(model)
    for step in ms.steps(3) do
      pass(net, step)
      loaded:step()
    end
    return bits(model:parameters())
  end
  same(go_on(false), go_on(true), "after loading")
end

-- Numbers that JSON cannot hold reach rank 0 unchanged.
do
  local values = { best = math.huge, worst = -math.huge, tenth = 0.1, whole = 2.0, count = 3 }
  local keeps = optim.define {
    name = "keeps",
    step_param = function(_, _, state)
      for key, value in pairs(values) do state[key] = value end
    end,
  }
  local model = make_model()
  local net, opt = plain(model), keeps(model, { shard = world })
  pass(net, 1)
  opt:step()
  local saved = opt:state()
  for _, p in ipairs(rank == 0 and model:parameters() or {}) do
    for key, value in pairs(values) do
      local got = saved.parameters[p:name()][key]
      assert(got == value and math.type(got) == math.type(value), p:name() .. "." .. key)
    end
  end
end

--------------------------------------------------------------------------------------------- joined

-- Uneven inputs: ranks without inputs still step the parameters that they own, and all ranks get
-- the results of an optimizer that is not sharded.
local inputs = ({ { 3 }, { 2, 4 }, { 4, 1, 2 }, { 1, 5, 3, 0 } })[size][rank + 1]

local function train_joined(make, sharded, o)
  local model = make_model()
  local parameters = model:parameters()
  local opt = in_groups(make, model, sharded, optim.linear { steps = 20 })
  local net, scaler = o.way(model, opt), o.scaler and optim.scaler { init_scale = 4 } or nil
  net:join({ divisor = o.divisor }, function()
    for step in ms.steps(inputs) do
      net:accumulate(o.passes or 1, function(i)
        local x = ms.randn { 4, 8, seed = 1000 * rank + 10 * step + i }
        local loss = net(x, step):square():mean()
        if o.overflow == step and i == 1 then loss = loss / 0 end
        if scaler then loss = scaler:scale(loss) end
        loss:backward()
      end)
      if o.clip then net:clip_grad_norm(0.01) end
      if o.by_hand then opt:groups()[2].lr = 0.5 / (step + 1) end
      if scaler then scaler:step(opt) elseif not o.stepless then opt:step() end
    end
  end)
  return bits(parameters)
end

local Sometimes = nn.class "Sometimes"
function Sometimes:init(model) self.model, self.never = model, nn.Linear(2, 2) end
function Sometimes:forward(x, step)
  for i = 1, 5 do if i ~= 3 or step % 2 == 0 then x = self.model[i](x) end end
  return x
end
local function unused(model, opt)
  local whole = Sometimes(model)
  opt:add_group { params = whole.never, lr = 1 }
  return ms.ddp(whole, { bucket_bytes = 256, find_unused = true })
end

for what, o in ms.sorted_pairs {
  plain = { way = plain },
  ["mean over live ranks"] = { way = plain, divisor = "live" },
  ["in_backward"] = { way = by_policy "in_backward" },
  deferred = { way = by_policy "deferred" }, linked = { way = linked },
  ["linked without step()"] = { way = linked, stepless = true },
  accumulating = { way = plain, passes = 2 },
  ["accumulating, in_backward"] = { way = by_policy "in_backward", passes = 2 },
  clipped = { way = plain, clip = true },
  scaled = { way = plain, scaler = true, overflow = 1 },
  ["rates set by hand"] = { way = plain, by_hand = true },
  unused = { way = unused },
} do
  for name, make in ms.sorted_pairs { adamw = optim.adamw, heavy = heavy } do
    same(train_joined(make, false, o), train_joined(make, true, o),
      ("joined, %s, %s"):format(what, name))
  end
end

-- Calls in which ranks without inputs left would not take part.
do
  local model = make_model()
  local opt, net = optim.sgd(model, { shard = world }), plain(model)
  net:join({}, function()
    for what, f in pairs {
      ["optimizer:state"] = function() opt:state() end,
      step_param = function() opt:step_param(model:parameters()[1], ms.ones { 16, 8 }) end,
    } do
      local ok, message = pcall(f)
      assert(not ok and message:find(
        what .. ": inside join ranks without inputs left would not take part", 1, true), message)
    end
  end)
end

------------------------------------------------------------------------------------------ averaging

local mean = (size - 1) / 2
local function rank_tensor() return ms.full(rank, { 3 }):keep() end

-- By period, after a warm-up.
do
  local averager, due = optim.averager { period = 4, warmup = 6 }, {}
  for step = 0, 20 do
    local t, half = rank_tensor(), ms.full(rank, { 2, dtype = "bf16" }):keep()
    local averaged = averager:step { t, nested = { half } }
    assert(t[1]:item() == (averaged and mean or rank)
      and half[2]:item() == (averaged and mean or rank))
    if averaged then due[#due + 1] = step end
  end
  assert(table.concat(due, " ") == "6 10 14 18", table.concat(due, " "))
end

-- By two periods: pairs of ranks every 4 steps, all every 16; counted from the first step.
if size == 4 then
  local averager = optim.averager { periods = { { 4, 2 }, { 16, 4 } }, warmup = 100 }
  for step = 0, 113 do
    local t = rank_tensor()
    averager:step { t }
    local want = rank
    if step == 112 then
      want = mean
    elseif step >= 100 and step % 4 == 0 then
      want = rank // 2 * 2 + 0.5
    end
    assert(t[1]:item() == want, ("step %d: %g, not %g"):format(step, t[1]:item(), want))
  end
end

-- Towards a centre: compared with the same in plain numbers; the state is saved and loaded in
-- between.
do
  local averager, p, centre = optim.averager { period = 2, elastic = 0.25 }, {}, 0
  for r = 0, size - 1 do p[r] = r end
  local t = rank_tensor()
  for step = 0, 9 do
    if step == 5 then
      local state = averager:state()
      averager = optim.averager { period = 2, elastic = 0.25 }
      averager:load_state(state)
    end
    t:add_(rank + 1)
    for r = 0, size - 1 do p[r] = p[r] + r + 1 end
    local averaged = averager:step { t }
    assert(averaged == (step % 2 == 0))
    if averaged then
      if step == 0 then centre = p[0] end
      local sum = 0
      for r = 0, size - 1 do
        local d = 0.25 * (p[r] - centre)
        p[r], sum = p[r] - d, sum + d
      end
      centre = centre + sum
    end
    assert(math.abs(t[1]:item() - p[rank]) < 1e-4,
      ("step %d: %g, not %g"):format(step, t[1]:item(), p[rank]))
  end
end

print(("rank %d is done"):format(rank))
