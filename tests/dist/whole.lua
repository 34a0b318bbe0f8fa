-- Run by every rank of whole_spec.lua: kinds of optimizers that need whole matrices (`whole` of
-- optim.define). what=steps compares sharded models with a replicated one, whose kind steps each
-- matrix by itself. what=save trains, saves in the middle and keeps the end; what=resume must come
-- to the same end; what=other loads on another number of ranks, and compares the numbers.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local cfg = ms.config { folder = "", what = "steps", layout = "flat", replicas = 1, plain = false }
local nn, optim, rank, world = ms.nn, ms.optim, ms.rank(), ms.world()
local STEPS <const>, MIDDLE <const> = 6, 3

-- Matrices of several shapes, one of a single row; an embedding, a vector, a number and a
-- parameter of three dimensions, which the second kind steps.
local Net = nn.class "Net"
function Net:init()
  ms.seed(4)
  self.embed = nn.Parameter(ms.randn { 13, 6 })
  self.up, self.down, self.one = nn.Linear(6, 11), nn.Linear(11, 6), nn.Linear(6, 1)
  self.cube = nn.Parameter(ms.randn { 2, 3, 6 })
  self.scale = nn.Parameter(ms.ones {})
end
function Net:forward(ids)
  local h = self.down(self.up(ids:embedding(self.embed)):tanh()) * self.scale
  return self.one(h + self.cube:sum(1):sum(1)) + h
end
local MATRICES <const> = { ["up.weight"] = 66, ["down.weight"] = 66, ["one.weight"] = 6 }

-- Two iterations of Newton's for the orthonormal factor, of a momentum that the owner preconditions
-- with what it has seen: states of a piece and of the whole.
local function orthonormal(m)
  local x = m / (m:norm() + 1e-7)
  local is_tall = x:size(1) > x:size(2)
  if is_tall then x = x:t() end
  for _ = 1, 2 do x = x * 1.5 - x:matmul(x:t()):matmul(x) * 0.5 end
  return is_tall and x:t() or x
end
local function momentum(grad, state, group)
  state.m = state.m or grad:zeros_like()
  state.m:mul_(group.momentum):add_(grad)
  return grad + state.m * group.momentum
end
local function update(matrix, owned)
  owned.seen = owned.seen or ms.zeros { matrix:size(1), matrix:size(1) }
  local u = orthonormal(matrix)
  owned.seen:mul_(0.9):add_(u:matmul(u:t()))
  return u + owned.seen:matmul(u) * 0.1
end
local defaults = { lr = 0.05, momentum = 0.8, betas = { 0.9, 0.95 } }
local whole = optim.define {
  name = "whole_test", defaults = defaults,
  whole = {
    before = function(_, grad, state, group) return momentum(grad, state, group) end,
    update = update,
  },
}
-- The twin: a rank with all of a matrix computes by itself.
local twin = optim.define {
  name = "twin_of_whole_test", defaults = defaults,
  step_param = function(p, grad, state, group)
    local change = update(momentum(grad, state, group), state)
    p:mul_(1 - group.lr * group.weight_decay)
    p:sub_(change * group.lr)
  end,
}

local function is_matrix(p) return MATRICES[p:name():gsub("^module%.", "")] ~= nil end
local function groups_of(net)
  local ours, others = {}, {}
  for _, p in ipairs(net:parameters()) do table.insert(is_matrix(p) and ours or others, p) end
  return ours, others
end
local options = { weight_decay = 0.1, schedule = optim.linear { steps = 40, floor = 0.1 } }
local function make(net, more)
  local ours, others = groups_of(net)
  local given = { shard = more }
  for key, value in pairs(options) do given[key] = value end
  return whole({ { params = ours }, { params = others, whole = false, lr = 0.01 } }, given)
end

-- Each rank has rows of its own.
local function ids_of(step)
  return ms.tensor({ (3 * step + 5 * rank) % 13, (step + rank) % 13, 12 - rank }, "i64")
end
local function backward(net, step) net(ids_of(step)):square():mean():backward() end

-- What the twin gives after so many steps: values and states by name.
local function expected(steps, flag_of)
  local net = ms.ddp(Net())
  local ours, others = groups_of(net)
  local a = twin(ours, options)
  local b = optim.adamw(others, { lr = 0.01, betas = defaults.betas, weight_decay = 0.1,
    schedule = options.schedule })
  for step in ms.steps(steps) do
    backward(net, step)
    local flag = flag_of and flag_of(step)
    a:step(flag)
    b:step(flag)
  end
  local values, states = net.module:state(), {}
  for _, one in ipairs { a, b } do
    for name, state in pairs(one:state().parameters) do states[name] = state end
  end
  net:unwrap()
  return values, states
end

local FSDP <const> = {
  flat = { wrap = { class = "Linear" } },
  rows = { wrap = { class = "Linear" }, layout = "rows" },
  grads = { wrap = { class = "Linear" }, strategy = "shard_grad_op" },
  alone = { strategy = "no_shard" },
}
local function hybrid(ranks)
  local shards, replicas = world:levels(ranks)
  return { wrap = { class = "Linear" }, strategy = "hybrid_shard", shard_group = shards,
    replica_group = replicas }
end

-- The optimizer's state on rank 0 has the numbers of the twin's.
local function compare_states(optimizer, states, what)
  local full = optimizer:state()
  if rank ~= 0 then return assert(next(full) == nil) end
  for name, state in pairs(states) do
    local own = full.parameters[name:gsub("^module%.", "")] or full.parameters[name]
    for key, value in pairs(state) do
      local mine = own[key == "seen" and "owned/seen" or key]
      if type(value) == "userdata" then expect.equal(mine, value, what .. " " .. name .. key)
      else assert(mine == value, name .. key) end
    end
  end
end

local what = {}
function what.steps()
  local values, states = expected(STEPS)
  local list = {}
  for name, o in pairs(FSDP) do list[name] = o end
  if ms.world_size() == 4 then list.hybrid = hybrid(2) end
  for name, o in ms.sorted_pairs(list) do
    local net = ms.fsdp(Net(), o)
    local optimizer = make(net)
    for step in ms.steps(STEPS) do
      backward(net, step)
      optimizer:step()
    end
    -- Bit for bit: sums over ranks are the same, and an update is made of the same matrix. Copies
    -- of a sharded model add gradients up in another order.
    if name ~= "hybrid" then expect.same(expect.whole(net), values, name)
    else expect.close(expect.whole(net), values, 1e-5, name) end
    if name ~= "alone" and name ~= "hybrid" then compare_states(optimizer, states, name) end
    net:unwrap()
  end

  -- Replicated, and with the work divided over ranks.
  for _, group in ipairs { false, world } do
    local net = ms.ddp(Net())
    local optimizer = make(net, group or nil)
    for step in ms.steps(STEPS) do
      backward(net, step)
      optimizer:step()
    end
    expect.same(net.module:state(), values, "ddp")
    net:unwrap()
  end
end

-- Steps that a flag prevents, while gradients are nan, leave no trace.
function what.flags()
  local values, states = expected(2)
  local net = ms.fsdp(Net(), FSDP.flat)
  local optimizer = make(net)
  for step in ms.steps(2) do
    for _, good in ipairs(step == 0 and { false, true } or { true, false }) do
      net(ids_of(step)):square():mean():mul(good and 1 or math.huge):backward()
      optimizer:step { only_if = ms.tensor(good) }
    end
  end
  expect.same(expect.whole(net), values, "flags")
  compare_states(optimizer, states, "flags")
end

-- Plans move steps into backward or the next forward; results stay.
function what.plans()
  local values = expected(STEPS)
  for _, plan in ipairs { "classic", "in_backward", "deferred" } do
    local net = ms.fsdp(Net(), FSDP.flat)
    local optimizer = make(net)
    optimizer:overlap(net, plan)
    for step in ms.steps(STEPS) do
      backward(net, step)
      optimizer:step()
    end
    expect.same(expect.whole(net), values, plan)
    net:unwrap()
  end
end

-- A matrix that each rank has for itself, in a sharded model.
local Own = nn.class "Own"
function Own:init()
  ms.seed(4)
  self.up, self["expert" .. rank] = nn.Linear(6, 11), nn.Linear(11, 6)
end
function Own:forward(ids)
  return self["expert" .. rank](self.up(ids:to("f32"):view(-1, 1):expand(3, 6)):tanh())
end
function what.own()
  local singles = {}
  for one = 0, world:size() - 1 do singles[one + 1] = { one } end
  local alone = world:split(singles)
  local function trained(kind, load)
    local net = ms.fsdp(Own(), { wrap = { class = "Linear" },
      group_of = function(name) if name:find "^expert" then return alone end end })
    local experts, others = {}, {}
    for _, p in ipairs(net:parameters()) do
      table.insert(p:name():find "expert.*weight" and experts or others, p)
    end
    local a, b = kind(experts, options), optim.adamw(others, { lr = 0.01 })
    if load then
      net:load_state(load[1])
      a:load_state(load[2])
      b:load_state(load[3])
    end
    for step = load and MIDDLE or 0, STEPS - 1 do
      if step == MIDDLE and not load then
        load = { net:state { kind = "sharded" }, a:state { kind = "sharded" },
          b:state { kind = "sharded" } }
      end
      backward(net, step)
      a:step()
      b:step()
    end
    local values
    net:summon({ writeback = false }, function()
      values = { up = net.module.up.weight:detach():clone(),
        own = net.module["expert" .. rank].weight:detach():clone() }
    end)
    net:unwrap()
    return values, load
  end
  local values, middle = trained(whole)
  expect.same(values, trained(twin), "own")
  expect.same(trained(whole, middle), values, "own, resumed")
end

-- What travels in a step: of each matrix its pieces to the owner, and back. The second kind sends
-- nothing. Owners have about equal work.
function what.bytes()
  local net = ms.fsdp(Net(), FSDP.flat)
  local optimizer = make(net)
  backward(net, 0)
  local function sent() return (select(2, world:_traffic())) end
  local before = sent()
  optimizer:step()
  local bytes = ms.tensor({ sent() - before }, "i64")
  local numbers, most, load = 0, 0, 0
  for name, state in pairs(optimizer:state { kind = "sharded" }.parameters) do
    local count = MATRICES[name]
    if count then
      numbers = numbers + count
      local short = math.min(count // 6, 6)
      local cost = math.max(count // 6, 6) * short * short
      most = math.max(most, cost)
      if state["owned/seen"] then load = load + cost end
    end
  end
  local all = world:all_reduce(bytes):value():to_table()[1]
  assert(all == 2 * 4 * numbers, ("%d bytes of %d numbers"):format(all, numbers))
  local loads = world:all_gather(ms.tensor { load + 0.0 }):value():to_table()
  local whole_load, biggest = 0, 0
  for _, one in ipairs(loads) do whole_load, biggest = whole_load + one, math.max(biggest, one) end
  assert(whole_load == 2 * 11 * 36 + 6, "each matrix has one owner")
  assert(biggest <= whole_load / world:size() + most)
end

-- A 16-bit model, and a kind that sends 16 bits: each rank has what the others have.
function what.half()
  local kind = optim.define { name = "half_test", defaults = { lr = 0.05 }, whole = {
    before = function(_, grad) return grad:to "bf16" end,
    update = function(matrix) return orthonormal(matrix:to "f32") end,
  } }
  for _, dtype in ipairs { "f32", "bf16" } do
    local nets = { ms.fsdp(Net():to(dtype), FSDP.flat), ms.ddp(Net():to(dtype)) }
    for _, net in ipairs(nets) do
      local ours = groups_of(net)
      local optimizer = kind(ours)
      for step in ms.steps(3) do
        backward(net, step)
        optimizer:step()
      end
    end
    -- ddp rounds no update to 16 bits, as it does not travel.
    expect.close(expect.whole(nets[1]), nets[2].module:state(), 0.02, dtype)
    for _, net in ipairs(nets) do net:unwrap() end
  end
end

function what.refused()
  local fails = expect.fails
  local ok = { update = function(m) return m end }
  fails(function() optim.define { name = "x", whole = {} } end, "update = function")
  fails(function() optim.define { name = "x", whole = ok, step_param = print } end, "no step_param")
  fails(function() optim.define { name = "x", whole = ok, second = "lamp" } end, "no such kind")
  fails(function() optim.define { name = "x", second = "sgd", step_param = print } end,
    "no `whole`")
  optim.define { name = "needs_all", step_param = function() end }
  fails(function() optim.define { name = "x", whole = ok, second = "needs_all" } end,
    "not elementwise")
  local function stepped(kind)
    local net = ms.fsdp(Net(), FSDP.flat)
    local optimizer = optim.define(kind)((groups_of(net)))
    backward(net, 0)
    local function step() optimizer:step() end
    local good, message = pcall(step)
    net:unwrap()
    assert(not good)
    return tostring(message)
  end
  local message = stepped { name = "shape", whole = {
    before = function(_, grad) return grad:narrow(1, 1, 0) end, update = ok.update } }
  assert(ms.world_size() == 1 or message:find("before must return a tensor", 1, true), message)
  -- The owner alone can see it; others are told that it has failed.
  message = stepped { name = "other", whole = {
    update = function(m) return m:narrow(1, 1, 0) end } }
  assert(message:find("update must return a tensor of the shape of the matrix", 1, true), message)
end

------------------------------------------------------------------------------------------ files

local function things_of()
  local net
  if cfg.plain then net = ms.ddp(Net())
  else net = ms.fsdp(Net(), cfg.replicas > 1 and hybrid(world:size() // cfg.replicas)
      or FSDP[cfg.layout]) end
  local optimizer = make(net)
  return { model = net, optimizer = optimizer }
end
local function train(things, from, to)
  for step in ms.steps(to, from) do
    -- Equal rows: means over any number of ranks are the same.
    things.model(ms.tensor({ step, 5, 12 }, "i64")):square():mean():backward()
    things.optimizer:step()
  end
end
local function all_of(things)
  local found = {}
  for name, t in pairs(cfg.plain and things.model.module:state() or expect.whole(things.model)) do
    found[name] = t
  end
  return found
end
local function state_of(things)
  local found = {}
  for name, state in pairs(things.optimizer:state().parameters or {}) do
    for key, value in pairs(state) do
      if type(value) == "userdata" then
        found[("%s %s"):format(name:gsub("^module%.", ""), key)] = value
      end
    end
  end
  return found
end
local function keep(things, file)
  local values, states = all_of(things), state_of(things)
  if rank ~= 0 then return end
  assert(ms.safetensors.save(("%s/%s-values"):format(cfg.folder, file), values))
  assert(ms.safetensors.save(("%s/%s-states"):format(cfg.folder, file), states))
end
local function compare(things, file, tolerance)
  local values, states = all_of(things), state_of(things)
  local function near(own, name)
    for key, t in pairs(assert(ms.safetensors.load(("%s/%s-%s"):format(cfg.folder, file, name)))) do
      expect.equal(own[key], t, ("%s %s"):format(file, key), tolerance)
    end
  end
  near(values, "values")
  if rank == 0 then near(states, "states") end
end

function what.save()
  local things = things_of()
  train(things, 0, MIDDLE)
  things.step = MIDDLE
  assert(ms.checkpoint.save(cfg.folder .. "/kept", things))
  keep(things, "middle")
  train(things, MIDDLE, STEPS)
  keep(things, "end")
end
function what.resume()
  local things = things_of()
  assert(ms.checkpoint.load(cfg.folder .. "/kept/step-00000003", things))
  compare(things, "middle", 0)
  train(things, MIDDLE, STEPS)
  -- Another number of ranks adds gradients up in another order.
  compare(things, "end", 2e-6)
end
function what.texts()
  -- A state of rank 0 alone goes to owners; ranks with the same pieces load theirs.
  local one, made = things_of(), {}
  train(one, 0, MIDDLE)
  for _, kind in ipairs { "full", "sharded" } do
    local other = things_of()
    other.model:load_state(one.model:state { kind = kind })
    other.optimizer:load_state(one.optimizer:state { kind = kind })
    local a, b = state_of(other), state_of(one)
    if rank == 0 then expect.same(a, b, kind) end
    made[kind] = other
  end
  train(one, MIDDLE, STEPS)
  for kind, other in ms.sorted_pairs(made) do
    train(other, MIDDLE, STEPS)
    expect.same(all_of(other), all_of(one), kind)
  end
end

what[cfg.what]()
print(("rank %d is done"):format(rank))
