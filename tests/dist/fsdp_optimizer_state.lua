-- What every rank of fsdp_state_spec.lua runs: states of optimizers of sharded models. What one
-- strategy saves after some steps, another one loads, and goes on with the same bits. Inputs are
-- the same on all ranks, so means over 1, 2 or 4 ranks are exact.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local fails = expect.fails
local rank, size, world = ms.rank(), ms.world_size(), ms.world()
local exact = size ~= 3

local Net = ms.nn.class "Net"
function Net:init(seed)
  ms.seed(seed)
  self.embed = ms.nn.Parameter(ms.randn { 13, 6 })
  self.inside = ms.nn.Sequential(ms.nn.Linear(6, 7), ms.nn.Linear(7, 6))
  self.frozen = ms.nn.Linear(6, 6)
  self.frozen.weight:requires_grad_(false)
  self.scale = ms.nn.Parameter(ms.ones {})
  self.shift = ms.nn.Parameter(ms.ones { 1 })
end
function Net:forward(x)
  local h = self.inside(x:embedding(self.embed)):tanh() * self.scale + self.shift
  return self.frozen(h):linear(self.embed)
end

-- Kinds of Lua: a momentum in a state without a name, a number and a flag beside it, and a state of
-- one number that all parameters have, also those of one number.
local plain = ms.optim.define {
  name = "plain", elementwise = true,
  step_param = function(p, grad, state, group, step)
    state[1] = state[1] or p:zeros_like()
    state.scale = state.scale or ms.ones { 1 }
    state.words = { "kept", step, 0.1 * step }
    state[1]:mul_(0.9):add_(grad)
    p:sub_(state[1] * state.scale:view() * group.lr)
    state.scale:mul_(1.5)
  end,
}
local kinds = {
  sgd = { lr = 0.1, momentum = 0.9 }, adamw = { lr = 0.01, amsgrad = true },
  adam = { lr = 0.01 }, adagrad = { lr = 0.01 }, adadelta = { lr = 0.5 },
  rmsprop = { lr = 0.01, momentum = 0.9, centered = true }, rprop = { lr = 0.01 },
  adamax = { lr = 0.01 },
}

local function make(kind, model)
  if kind == "plain" then return plain(model, { lr = 0.1 }) end
  return ms.optim[kind](model, kinds[kind])
end

local configs = {
  ddp = function(net) return ms.ddp(net, { bucket_bytes = 100 }) end,
  full = function(net) return ms.fsdp(net, { wrap = { class = "Sequential" } }) end,
  rows = function(net)
    return ms.fsdp(net, { layout = "rows", strategy = "shard_grad_op",
      wrap = { class = "Sequential" } })
  end,
  whole = function(net) return ms.fsdp(net, { strategy = "no_shard" }) end,
  partly = function(net) return ms.fsdp(net, { ignored = { "embed" } }) end,
}
if size == 4 then
  for name, strategy in pairs { hybrid = "hybrid_shard", hybrid2 = "hybrid_shard_zero2" } do
    configs[name] = function(net)
      local layout = name == "hybrid" and "rows" or nil
      return expect.models.fsdp(net, { strategy = strategy, layout = layout })
    end
  end
end

local function step(model, optimizer)
  model(ms.tensor({ 1, 12, 5 }, "i64")):square():mean():backward()
  -- Gradients of ignored parameters are not averaged; here all ranks have the same inputs.
  optimizer:step()
end

local function trained(how, kind, steps)
  local model = configs[how](Net(1))
  local optimizer = make(kind, model)
  for _ = 1, steps do step(model, optimizer) end
  return model, optimizer
end

local function same(what, a, b)
  for name, t in pairs(b) do
    local d = (a[name]:detach() - t:detach()):abs():max():item()
    -- A mean over three ranks is rounded; ten steps later that is some units in the last place.
    local most = exact and 0 or 1e-5 * math.max(1, t:detach():abs():max():item())
    assert(d <= most, ("%s: %s differs by %g"):format(what, name, d))
  end
end

-- The state of a plain optimizer after three steps, which all others have on rank 0.
local references = {}
local function check_full(what, optimizer, kind)
  local full = optimizer:state()
  local reference = references[kind]
  if not reference then
    local net = Net(1)
    reference = make(kind, net)
    references[kind] = reference
    for _ = 1, 3 do step(net, reference) end
  end
  if rank ~= 0 and what ~= "ddp" and what ~= "whole" and size > 1 then
    assert(next(full) == nil)
    return
  end
  local expected = reference:state()
  assert(full.kind == kind and full.steps == 3)
  for name, state in pairs(expected.parameters) do
    local own = assert(full.parameters[name], name)
    for key, value in pairs(state) do
      if type(value) == "userdata" then
        assert(tostring(own[key]) == tostring(value), ("%s %s: %s"):format(name, key, own[key]))
        same(what .. " " .. kind .. " " .. name, { own[key] }, { value })
      elseif type(value) == "table" then
        assert(own[key][1] == value[1] and own[key][2] == value[2])
        assert(own[key][3] == value[3])
      else assert(own[key] == value, key) end
    end
    for key in pairs(own) do assert(state[key] ~= nil, "too much: " .. key) end
  end
  for name in pairs(full.parameters) do assert(expected.parameters[name], name) end
end

local names = {}
for name in pairs(configs) do names[#names + 1] = name end
table.sort(names)
local all_kinds = { "plain" }
for kind in pairs(kinds) do all_kinds[#all_kinds + 1] = kind end
table.sort(all_kinds)

-- k, i: the places of the kind and of the strategy in their lists.
local function check_kind(k, i)
  local kind, how = all_kinds[k], names[i]
  local model, optimizer = trained(how, kind, 3)
  check_full(how, optimizer, kind)
  -- Each kind goes from some strategies to others, and over time all to all.
  local to = names[(i + k) % #names + 1]
  local other = configs[to](Net(2))
  local loaded = make(kind, other)
  step(other, loaded)
  other:load_state(expect.whole(model))
  local state = optimizer:state()
  if to == "ddp" or to == "whole" or size == 1 then
    -- Without shards each rank needs it.
    state = how == "ddp" and state or how == "whole" and state or nil
  elseif rank ~= 0 and (how == "ddp" or how == "whole") then
    state = k % 2 == 0 and state or {}
  end
  if state then
    loaded:load_state(state)
    for _ = 1, 2 do
      step(model, optimizer)
      step(other, loaded)
    end
    same(("%s: %s to %s"):format(kind, how, to), expect.whole(other), expect.whole(model))
  end
  -- In pieces, to the same strategy.
  local again = configs[how](Net(3))
  local own = make(kind, again)
  again:load_state(expect.whole(model))
  own:load_state(optimizer:state { kind = "sharded" })
  step(model, optimizer)
  step(again, own)
  same(("%s: %s in pieces"):format(kind, how), expect.whole(again), expect.whole(model))
end
for k in ipairs(all_kinds) do
  for i in ipairs(names) do if expect.takes(k + i, 6) then check_kind(k, i) end end
end

-- A step that was prevented, groups with hyper-parameters of their own, and the middle of nothing.
do
  local model = configs.full(Net(1))
  local function make_groups(net)
    local list = net:parameters()
    return ms.optim.adamw { { params = { list[1] }, lr = 0.5 }, { params = { list[2], list[3] } } }
  end
  local optimizer = make_groups(model)
  step(model, optimizer)
  optimizer:groups()[1].lr = 0.25
  model(ms.tensor({ 1 }, "i64")):square():mean():backward()
  optimizer:step { only_if = ms.full(0, {}):gt(1) }
  local other = configs.rows(Net(2))
  local loaded = make_groups(other)
  other:load_state(expect.whole(model))
  loaded:load_state(optimizer:state())
  assert(loaded:groups()[1].lr == 0.25)
  for _ = 1, 3 do
    step(model, optimizer)
    step(other, loaded)
  end
  same("groups", expect.whole(other), expect.whole(model))
end

-- Experts: rank 0 gets the states of those that only other ranks have.
if size > 1 then
  local blocks = size == 4 and 2 or 1
  local groups, mine = world:levels(blocks), rank // blocks + 1
  local Experts = ms.nn.class "Experts"
  function Experts:init(own)
    ms.seed(5)
    for _, number in ipairs(own) do
      ms.seed(10 + number)
      self["expert" .. number] = ms.nn.Linear(6, 6 + number)
    end
    ms.seed(6)
    self.base = ms.nn.Linear(6, 6)
  end
  function Experts:forward(x, number) return self["expert" .. number](self.base(x)) end
  local function wrap(layout)
    return ms.fsdp(Experts { mine }, {
      layout = layout, group_of = function(name) return name:find "expert" and groups or nil end,
    })
  end
  for _, kind in ipairs { "adamw", "plain" } do
    local model = wrap "flat"
    local optimizer = make(kind, model)
    local function pass(of, with)
      of(ms.randn { 2, 6, seed = 3 }, mine):square():mean():backward()
      with:step()
    end
    pass(model, optimizer)
    local full, pieces = optimizer:state(), optimizer:state { kind = "sharded" }
    if rank == 0 then
      for number = 1, size // blocks do
        local state = full.parameters[("expert%d.weight"):format(number)]
        local t = state.exp_avg or state[1]
        assert(t:size(1) == 6 + number and t:abs():max():item() > 0)
        assert(kind == "adamw" or state.words[1] == "kept" and state.scale:numel() == 1)
      end
      assert(full.parameters["base.bias"])
    end
    local weights, others = model:state(), {}
    for i, state in ipairs { full, pieces } do
      local other = wrap(state == full and "rows" or "flat")
      local loaded = make(kind, other)
      other:load_state(weights)
      loaded:load_state(state)
      others[i] = { other, loaded }
    end
    pass(model, optimizer)
    for _, one in ipairs(others) do
      pass(table.unpack(one))
      same("experts " .. kind, expect.whole(one[1]), expect.whole(model))
    end
  end
end

if size > 1 then
  -- What is wrong is said on every rank.
  local model, optimizer = trained("full", "adamw", 1)
  local full = optimizer:state()
  local sgd = ms.optim.sgd(configs.full(Net(1)))
  fails(function() sgd:load_state(full) end, "the state is of adamw, the optimizer is sgd")
  fails(function() sgd:load_state {} end, "this is no state of an optimizer")
  if rank == 0 then full.parameters.other = {} end
  fails(function() optimizer:load_state(full) end, "parameter 'other' is unknown here")
  local rows = make("adamw", configs.rows(Net(1)))
  local pieces = optimizer:state { kind = "sharded" }
  fails(function() rows:load_state(pieces) end, "is a piece of", "elements from")
  fails(function() make("adamw", Net(1)):load_state(pieces) end, "not sharded here")
  fails(function() optimizer:state { kind = "half" } end, "kind is full or sharded")
  model:summon({ writeback = false }, function()
    fails(function() optimizer:state() end, "optimizer:state inside of summon")
  end)
end
print(("rank %d is done"):format(rank))
