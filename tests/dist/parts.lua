-- Run by every rank of parts_spec.lua: models of which ranks have parts, against the whole model,
-- made of plain modules on each rank. The ranks are a grid of tensor, stage and data ranks.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local cfg = ms.config { what = "values", tensor = 2, stages = 1 }
local nn, world = ms.nn, ms.world()
local tensor, rest = world:levels(cfg.tensor)
local stage, data = rest:levels(cfg.stages)
local WIDTH <const>, HIDDEN <const> = 8, 16

local function equal(a, b, what)
  assert(a:eq(b):all():item(), ("rank %d: %s"):format(ms.rank(), what))
end

-- This rank's part of a whole tensor.
local function part(t, dim, index, count)
  local size = t:shape()[dim] // count
  return t:detach():narrow(dim, index * size + 1, size):contiguous()
end

-- Identity, whose gradient is summed; and a sum, whose gradient is passed on.
local function enter(x)
  x = x:view(table.unpack(x:shape()))
  if tensor:size() > 1 and x:requires_grad() then
    x:on_grad(function(g) return tensor:all_reduce(g:clone()):value() end)
  end
  return x
end
local function leave(x)
  if tensor:size() == 1 then return x end
  local sum = ms.no_grad(function() return tensor:all_reduce(x:detach():clone()):value() end)
  return sum + (x - x:detach())
end

local function whole_mlp()
  return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.GELU(),
    nn.Linear(HIDDEN, WIDTH))
end

-- The same with parts of its layers.
local Split = nn.class "Split"
function Split:init()
  self.norm = nn.LayerNorm(WIDTH)
  self.up = nn.Linear(WIDTH, HIDDEN)
  self.down = nn.Linear(HIDDEN, WIDTH)
  for _, one in ipairs { { "up", "weight", 1 }, { "up", "bias", 1 }, { "down", "weight", 2 } } do
    nn.split(self[one[1]][one[2]], tensor, { dim = one[3], whole = true })
  end
  self.drop = nn.Dropout(0.3, { group = data })
end
function Split:forward(x)
  x = enter(self.norm(x))
  x = leave(self.up(x):gelu():linear(self.down.weight)) + self.down.bias
  return self.drop(x)
end

local tests = {}

function tests.values()
  local at, count = tensor:rank(), tensor:size()
  ms.seed(5)
  local whole = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Embedding(5, 4))
  local after = ms.randn { 3 }
  local function check(make, what)
    ms.seed(5)
    local own = make()
    equal(own[1].weight, part(whole[1].weight, 1, at, count), what .. ": columns")
    equal(own[1].bias, part(whole[1].bias, 1, at, count), what .. ": bias")
    equal(own[2].weight, part(whole[2].weight, 2, at, count), what .. ": rows")
    equal(own[2].bias, whole[2].bias, what .. ": replicated")
    equal(ms.randn { 3 }, after, what .. ": what is drawn next")
    return own
  end
  local function split_whole(m)
    nn.split(m[1].weight, tensor, { dim = 1, whole = true })
    nn.split(m[1].bias, tensor, { dim = 1, whole = true })
    nn.split(m[2].weight, tensor, { dim = -1, whole = true })
    local size = 5 + (-5) % count
    local table_part = nn.split(m[3].weight, tensor, { whole = true, pad = size - 5 })
    assert(table_part == m[3].weight and table_part:shape()[1] == size // count)
    return m
  end
  local function make()
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Embedding(5, 4))
  end
  local own = check(function() return split_whole(make()) end, "whole")
  local rows = math.max(0, math.min(own[3].weight:shape()[1], 5 - at * own[3].weight:shape()[1]))
  for r = 1, own[3].weight:shape()[1] do
    local row = own[3].weight:detach():narrow(1, r, 1)
    local there = at * own[3].weight:shape()[1] + r
    if r <= rows then equal(row, whole[3].weight:detach():narrow(1, there, 1), "row")
    else equal(row, row:zeros_like(), "padding") end
  end
  check(function()
    local m = ms.device("meta", make)
    return split_whole(m):materialize()
  end, "meta")
  -- Parts of layers that are made small, where the numbers do not depend on the size.
  ms.seed(5)
  local small = nn.Linear(8, 8 // count)
  nn.split(small.weight, tensor, { dim = 1 })
  nn.split(small.bias, tensor, {})
  equal(small.weight, part(whole[1].weight, 1, at, count), "small")
  equal(small.bias, part(whole[1].bias, 1, at, count), "small bias")
  -- Blocks, and parts that repeat.
  ms.seed(5)
  local fused = nn.Linear(8, 24)
  ms.seed(5)
  local own_fused = nn.Linear(8, 24 // count)
  nn.split(own_fused.weight, tensor, { dim = 1, blocks = { 8, 8, 8 } })
  for b = 0, 2 do
    local block = fused.weight:detach():narrow(1, 8 * b + 1, 8)
    equal(own_fused.weight:detach():narrow(1, 8 // count * b + 1, 8 // count),
      part(block, 1, at, count), "block")
  end
  if count % 2 == 0 then
    ms.seed(5)
    local few = nn.Linear(8, 8 // (count // 2))
    nn.split(few.weight, tensor, { dim = 1, repeats = 2 })
    equal(few.weight, part(whole[1].weight, 1, at // 2, count // 2), "repeats")
  end
end

-- Experts and stages that each rank makes for itself have the numbers of one model.
function tests.owned()
  ms.seed(9)
  local all = {}
  for i = 1, 2 * stage:size() do all[i] = nn.Linear(3, 2) end
  local after = nn.Linear(2, 2)
  local first = 2 * stage:rank()
  for _, device in ipairs { "cpu", "meta" } do
    ms.seed(9)
    local own, last = ms.device(device, function()
      local list = nn.List {}
      for i = first + 1, first + 2 do list[i] = nn.Linear(3, 2) end
      return nn.owned(list, stage), nn.Linear(2, 2)
    end)
    for i = first + 1, first + 2 do
      own:materialize()
      equal(own[i].weight, all[i].weight, device .. " expert")
      equal(own[i].bias, all[i].bias, device .. " expert's bias")
    end
    equal(last:materialize().weight, after.weight, device .. " after experts")
  end
  -- Taken out of a whole model: nothing moves.
  ms.seed(9)
  local list = nn.List {}
  for i = 1, 2 * stage:size() do
    local one = ms.device("meta", function() return nn.Linear(3, 2) end)
    if i > first and i <= first + 2 then list[i] = one end
  end
  nn.owned(list, stage):materialize()
  equal(list[first + 1].weight, all[first + 1].weight, "taken out")
  assert(list:named_parameters()[1].name == first .. ".weight")
  -- Both: parts of experts, in either order.
  for _, order in ipairs { "split first", "owned first" } do
    ms.seed(9)
    local expert = nn.List {}
    for i = first + 1, first + 2 do expert[i] = nn.Linear(3, 2 // tensor:size()) end
    local function split()
      for i = first + 1, first + 2 do
        nn.split(expert[i].weight, tensor, {})
        nn.split(expert[i].bias, tensor, {})
      end
    end
    if order == "split first" then split() end
    nn.owned(expert, stage)
    if order ~= "split first" then split() end
    equal(expert[first + 2].weight,
      part(all[first + 2].weight, 1, tensor:rank(), tensor:size()), order)
  end
end

-- Steps with clipping and dropout: losses and norms of the whole model, equal replicas.
function tests.steps()
  ms.seed(2)
  local whole = whole_mlp()
  ms.seed(2)
  local own = Split()
  local wrapped = data:size() > 1 and ms.ddp(own, { group = data }) or own
  local a, b = ms.optim.sgd(whole, { lr = 0.2 }), ms.optim.sgd(own, { lr = 0.2 })
  own:eval()
  for step in ms.steps(20) do
    local inputs = {}
    for d = 1, data:size() do inputs[d] = ms.randn { 4, WIDTH, seed = 100 * step + d } end
    local all, mine = ms.cat(inputs, 1), inputs[data:rank() + 1]
    local x, y = whole(all):square():mean(), wrapped(mine):square():mean()
    x:backward()
    y:backward()
    local mean = data:all_reduce(y:detach():clone(), "avg"):value():item()
    assert(math.abs(mean / x:item() - 1) < 1e-6, ("loss %.9g, %.9g"):format(mean, x:item()))
    local p = ({ 2, 1, math.huge })[step % 3 + 1]
    local n, m = whole:clip_grad_norm(0.1, p):item(), wrapped:clip_grad_norm(0.1, p):item()
    assert(math.abs(m / n - 1) < 2e-6, ("norm %.9g, %.9g"):format(m, n))
    a:step()
    b:step()
  end
  -- With dropout nothing can be compared with the whole; but what is held by all is equal.
  own:train()
  for step in ms.steps(20) do
    wrapped(ms.randn { 4, WIDTH, seed = 100 * step + data:rank() }):square():mean():backward()
    wrapped:clip_grad_norm(0.1)
    b:step()
  end
  for _, name in ipairs { "norm.weight", "norm.bias", "down.bias" } do
    local t = own:state { live = true }[name]
    local first = world:broadcast(t:detach():clone(), 0):value()
    equal(t, first, name)
  end
end

-- A shared parameter: its gradient is the sum over its group, once.
-- What is shared over ranks that have no other parts counts on each of them: the norm of a model
-- that is cut over tensor ranks, and whose gradients are summed over data ranks.
function tests.beyond()
  local model = nn.Sequential(nn.Linear(4, 4, { bias = false }), nn.Linear(4, 4, { bias = false }))
  nn.split(model[1].weight, tensor, { dim = 1, whole = true })
  for _, p in ipairs(model:parameters()) do
    nn.shared(p, data)
    p:set_grad(ms.full(data:rank() + 1, p:shape()))
  end
  local each = data:size() * (data:size() + 1) / 2
  local norm = model:clip_grad_norm(1):item()
  assert(math.abs(norm - each * math.sqrt(32)) < 1e-4, tostring(norm))
  for _, p in ipairs(model:parameters()) do
    assert((p:grad() - 1 / math.sqrt(32)):abs():max():item() < 1e-5)
  end
end

-- A look at the gradients of a sharded model keeps that they are summed.
function tests.summon()
  local net = nn.Linear(3, 1, { bias = false })
  nn.shared(net.weight, tensor)
  local model = ms.fsdp(net, { group = data })
  local optimizer = ms.optim.sgd(model, { lr = 1 })
  local before = expect.parameters(model).weight
  local sum = tensor:size() * (tensor:size() + 1) / 2
  model(ms.full(tensor:rank() + 1, { 1, 3 })):sum():backward()
  local function see(expected)
    model:summon({ grads = true, writeback = false }, function()
      equal(net.weight:grad(), ms.full(expected, { 1, 3 }), "the gradient in summon")
    end)
  end
  see(tensor:rank() + 1)
  assert(math.abs(model:clip_grad_norm(math.huge):item() - sum * math.sqrt(3)) < 1e-4)
  see(sum)
  see(sum)
  optimizer:step()
  equal(expect.parameters(model).weight, before - sum, "a step")
end

function tests.shared()
  local group = tensor
  local model = nn.Linear(3, 1, { bias = false })
  nn.shared(model.weight, group)
  local optimizer = ms.optim.sgd(model, { lr = 1 })
  local function backward() model(ms.full(group:rank() + 1, { 1, 3 })):sum():backward() end
  local sum = group:size() * (group:size() + 1) / 2
  local before = model.weight:detach():clone()
  backward()
  backward()
  local norm = model:clip_grad_norm(math.huge):item()
  assert(math.abs(norm - 2 * sum * math.sqrt(3)) < 1e-4, norm)
  assert(math.abs(model:clip_grad_norm(math.huge):item() - norm) < 1e-4)
  if group:size() > 1 then
    expect.fails(backward, "the gradient of a shared parameter", "call zero_grad() before")
    optimizer:zero_grad()
    backward()
    backward()
  end
  optimizer:step()
  equal(model.weight, before - 2 * sum, "step")
  backward()
  optimizer:step()
  equal(model.weight, before - 2 * sum - sum, "second step")
  if group:size() == 1 then return end
  -- Copies are drawn alike, and must be loaded alike.
  if group:rank() == 1 then ms.randn { 2 } end
  local embedding = nn.Embedding(3, 2)
  nn.shared(embedding.weight, group)
  equal(embedding.weight, group:broadcast(embedding.weight:detach():clone(), 0):value(), "copies")
  ms.no_grad(function() embedding.weight:add_(group:rank()) end)
  local steps = ms.optim.sgd(embedding)
  embedding(ms.tensor { 1 }):sum():backward()
  expect.fails(function() steps:step() end, "nn.shared: 'weight' of rank", "differs from that of")
end

-- A loss that overflows on one rank only: all ranks skip the step.
function tests.scaler()
  local model = nn.Linear(4, 2, { bias = false })
  nn.split(model.weight, tensor, {})
  local optimizer, scaler = ms.optim.sgd(model, { lr = 1 }), ms.optim.scaler()
  local before = model.weight:detach():clone()
  local x = ms.full(tensor:rank() == tensor:size() - 1 and math.huge or 1.0, { 1, 4 })
  scaler:scale(model(x):sum()):backward()
  scaler:step(optimizer)
  equal(model.weight, before, "skipped")
end

function tests.refused()
  local function linear() return nn.Linear(8, 8) end
  local m = linear()
  nn.split(m.weight, tensor, {})
  expect.fails(function() nn.split(m.weight, world, {}) end, "nn.split: 'weight' is split already")
  expect.fails(function() nn.owned(m, tensor) end, "'weight' is declared with this group already")
  expect.fails(function() ms.ddp(m) end, "ddp: 'weight' is split over ranks that are among these",
    "give ddp the group")
  expect.fails(function() ms.fsdp(m) end, "fsdp: 'weight' is split over ranks")
  expect.fails(function() nn.alone(m, { merge = "mean" }) end, "nn.alone: 'weight' is declared by")
  local kind = ms.optim.define { name = "whole", step_param = function() end }
  expect.fails(function() kind(m) end, "'weight' is a part of a tensor (ms.nn.split)")
  expect.fails(function() nn.split(linear().weight, tensor, { dim = 3 }) end, "dim 3 of 'weight'")
  expect.fails(function() nn.split(linear().weight, tensor, { blocks = { 3, 13 } }) end,
    "block 1 has 3 indices")
  expect.fails(function() nn.split(linear().weight, tensor, { blocks = { 8 } }) end,
    "the blocks have 8 indices, the whole with its padding 16")
  expect.fails(function() nn.split(linear().weight, tensor, { repeats = 3 }) end, "repeats = 3")
  expect.fails(function() nn.split(nn.Linear(8, 5).weight, tensor, { whole = true }) end,
    "has 5 indices, which 2 parts do not divide: pad = 1 makes it 6")
  expect.fails(function() nn.split(linear().weight, tensor, { pad = 16 }) end, "pad = 16")
  expect.fails(function() nn.split(ms.ones { 2 }, tensor, {}) end, "a parameter is expected")
  expect.fails(function() nn.split(nn.Parameter(ms.ones { 2 }), tensor, {}) end,
    "nothing records how", "values = \"kept\"")
  nn.split(nn.Parameter(ms.ones { 2 }), tensor, { values = "kept" })
  expect.fails(function() nn.owned(nn.GELU(), tensor) end, "the module has no parameter")
  local late = linear()
  ms.randn { 2 }
  expect.fails(function() nn.owned(late, tensor) end,
    "numbers were drawn after the module was made")
  expect.fails(function() nn.lora(nn.Sequential(m), { names = { "0" } }) end,
    "nn.lora: '0.weight' is a part of a tensor")
  local seen = linear()
  seen.weight:on_grad(function() end)
  expect.fails(function() nn.split(seen.weight, tensor, { whole = true }) end,
    "'weight' has functions of on_grad")
  local elsewhere, again = linear(), linear()
  ms.device("meta", function()
    nn.split(elsewhere.weight, tensor, { whole = true })
    nn.split(again.bias, tensor, { values = nil })
  end)
  assert(elsewhere.weight:device() == "cpu" and elsewhere.weight:sum():item())
  local wrapped = linear()
  ms.ddp(wrapped)
  expect.fails(function() nn.split(wrapped.weight, tensor, {}) end,
    "wrapped by ddp: declare it before")
  local frozen = ms.device("meta", linear)
  nn.split(frozen.weight, tensor, { whole = true })
  ms.no_grad(function() frozen.weight:mul_(2) end)
  expect.fails(function() frozen:materialize() end, "was written on \"meta\" after it was declared")
end

tests[cfg.what]()
print(("rank %d is done"):format(ms.rank()))
