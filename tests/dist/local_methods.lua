-- Run by every rank of local_methods_spec.lua: methods of recipes/hooks with which each rank trains
-- weights of its own. what=train: each rank has a text of its own; prints the loss of the mean
-- weights on the held-out texts of all ranks, the payload, and the number of weights. what=exact:
-- small cases with known results. what=save and what=load, another process: a run that goes on from
-- a checkpoint has the same end, bit for bit.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local o = ms.config {
  what = "train", method = "none", optimizer = "adamw", steps = 60, seed = 1, source = ".",
  folder = "", width = 32, context = 16, batch = 16, lr = 1e-2, period = 3,
}
local rank, size, world = ms.rank(), ms.world_size(), ms.world()
local nn, optim = ms.nn, ms.optim

local function recipe(name)
  return function(options)
    return dofile(("%s/recipes/hooks/%s.lua"):format(o.source, name))(options)
  end
end
local function muon(model, given)
  given = given or {}
  given.model = model
  return dofile(o.source .. "/recipes/optim/muon.lua")(given)
end
local function schedule(steps)
  return optim.linear { warmup = steps // 10, steps = steps, floor = 0.05 }
end
local function adamw(model, steps)
  return optim.adamw(model, { lr = o.lr, schedule = schedule(steps) })
end
local optimizers = {
  adamw = adamw,
  muon = function(model, steps)
    return muon(model, { lr = 0.02, recipe = adamw(model, steps) })
  end,
}

-- A method, and an optimizer where it brings its own. period: in steps.
local methods = {
  sparta = function(model) return recipe "sparta" { model = model, fraction = 0.2 } end,
  noloco = function(model, period) return recipe "noloco" { model = model, period = period } end,
  eager_diloco = function(model, period)
    return recipe "eager_diloco" { model = model, period = period, lr = 0.7, momentum = 0 }
  end,
  muloco = function(model, period, steps)
    local parts = recipe "muloco" { period = period, lr = 0.7, momentum = 0.3 }
    return parts["local"](model), parts.optimizer(model, adamw(model, steps))
  end,
  sparseloco = function(model, period)
    return recipe "sparseloco" { model = model, period = period, k = 512 }
  end,
  des_loc = function(model, period) return recipe "des_loc" { model = model, period = period } end,
  -- For comparison: ranks that never meet.
  apart = function(model)
    nn.alone(model, { merge = "mean" })
    return { after_step = function() end }
  end,
}

-- Numbers 0 .. n - 1, the same on every machine.
local function generator(number)
  return function(n)
    number = (number * 1103515245 + 12345) % 2147483648
    return number // 65536 % n
  end
end

-- A text of a rank: each of ten letters is followed by one of a few, mostly the same one. Which
-- ones is another table on each rank.
local function text_of(own, length)
  local draw = generator(1000 * own + 7)
  local after, letters, at = {}, {}, 0
  for letter = 0, 9 do after[letter] = { draw(10), draw(10), draw(10), draw(10) } end
  for i = 1, length do
    at = after[at][1 + draw(1 + draw(4))]
    if draw(20) == 0 then at = draw(10) end
    letters[i] = at
  end
  return ms.tensor(letters):keep()
end

local function payload()
  local sum = 0
  for _, group in ipairs(require "moonshard.core".comm_groups()) do
    sum = sum + select(2, group:_traffic())
  end
  return sum
end

local function train()
  ms.seed(o.seed)
  local model = nn.gpt2 { vocab = 10, context = o.context, layers = 2, width = o.width, heads = 2 }
  local net, method, optimizer = model, nil, nil
  if o.method == "none" then net = ms.ddp(model)
  else method, optimizer = methods[o.method](model, o.period, o.steps) end
  optimizer = optimizer or optimizers[o.optimizer](model, o.steps)
  local text, held_out = text_of(rank, 20000), 4000
  local row = ms.arange(0, o.context):keep()
  -- Rows of the text that begin at random places of a part of it.
  local function batch(rows, low, high, seed)
    local first = ms.randint { rows, 1, low = low, high = high - o.context, seed = seed }
    local all = text:gather(1, (first + row):view(-1)):view(rows, o.context + 1)
    return all:narrow(2, 1, o.context), all:narrow(2, 2, o.context)
  end
  local begun = payload()
  for step in ms.steps(o.steps) do
    local x, y = batch(o.batch, held_out, #text, (o.seed * 1000 + step) * size + rank)
    net(x):cross_entropy(y):backward()
    optimizer:step()
    if method then method.after_step(step, optimizer) end
  end
  local sent = payload() - begun
  ms.no_grad(function()
    local numbers = 0
    for _, p in ipairs(model:parameters()) do
      if method then world:all_reduce(p, "avg"):value() end
      numbers = numbers + p:numel()
    end
    local x, y = batch(256, 0, held_out, 5)
    local loss = world:all_reduce(model(x):cross_entropy(y), "avg"):value():item()
    if rank == 0 then
      print(("loss %.6f sent %d numbers %d"):format(loss, sent, numbers))
    end
  end)
end

-- A model of n numbers, which tests change by hand.
local Point = nn.class "Point"
function Point:init(n) self.w = nn.Parameter(ms.zeros { n }) end

local function change(model, by) ms.no_grad(function() model.w:add_(by) end) end

-- Whether all ranks, or those of a group, have the same values of a tensor.
local function alike(t, group)
  local all = (group or world):all_gather(t:detach():reshape(1, -1)):value()
  return all:eq(all:narrow(1, 1, 1)):all():item()
end

local function near(expected, t, tolerance, what)
  local far = (t:detach() - expected):abs():max():item()
  assert(far <= tolerance, ("%s: %g away"):format(what, far))
end

local exact = {}

-- With lr 1 and no momentum, each change is added once: half of a rank's own at once, the other
-- half and half of the other rank's in the next round.
function exact.eager_diloco()
  if size ~= 2 then return end
  local model = Point(1)
  local eager = recipe "eager_diloco" { model = model, period = 1, lr = 1, momentum = 0 }
  local changes = { { 2, 4 }, { 6, 8 }, { 0, 0 }, { 0, 0 } }
  local wanted = { { 1, 2 }, { 6, 7 }, { 10, 10 }, { 10, 10 } }
  for round, by in ipairs(changes) do
    change(model, by[rank + 1])
    eager.after_step(round - 1)
    assert(model.w:item() == wanted[round][rank + 1], "round " .. round)
  end
end

function exact.sparta()
  -- What was averaged has the mean. It is half, the same on all ranks; the rest is as it was.
  local model, begin, mean = Point(10), rank == 0 and 0 or 2 * size, 2 * (size - 1)
  change(model, begin)
  recipe "sparta" { model = model, fraction = 0.5 }.after_step(0)
  local met = model.w:eq(mean)
  assert(met:to "i64":sum():item() == 5 and alike(met:to "f32"))
  assert(model.w:eq(begin):to "i64":sum():item() == 5)
  -- A fraction of 1 is the mean of all weights.
  recipe "sparta" { model = model, fraction = 1 }.after_step(0)
  assert(model.w:eq(mean):all():item())
  -- 6 of 101 weights in each step, all of them about equally often: each 24 times of 400, +- 4.7.
  model = Point(101)
  local sparta, counts = recipe "sparta" { model = model, fraction = 0.05, seed = 3 }, {}
  for step in ms.steps(400) do
    change(model, begin - model.w)
    sparta.after_step(step)
    for i, value in ipairs(model.w:detach():to_table()) do
      counts[i] = (counts[i] or 0) + (value == mean and 1 or 0)
    end
  end
  local sum = 0
  for _, count in ipairs(counts) do
    assert(count >= 5 and count <= 45, tostring(count))
    sum = sum + count
  end
  assert(sum == 6 * 400)
end

-- For each round the partners of all ranks, -1 for none, as each rank finds its own.
local function partners(noloco, rounds)
  local own = {}
  for round = 1, rounds do own[round] = noloco.partner(round) or -1 end
  return world:all_gather(ms.tensor(own):view(1, -1)):value():to_table()
end

function exact.noloco_pairs()
  local noloco = recipe "noloco" { model = Point(1), period = 1 }
  math.randomseed(5)
  local drawn = math.random()
  math.randomseed(5)
  local all, met, out = partners(noloco, 300), {}, 0
  assert(math.random() == drawn, "it changed math.random")
  for round = 1, 300 do
    for own = 0, size - 1 do
      local partner = all[own + 1][round]
      assert(partner ~= own and (partner == -1 or all[partner + 1][round] == own))
    end
    local own = all[rank + 1][round]
    if own == -1 then out = out + 1 else met[own] = (met[own] or 0) + 1 end
  end
  -- An even number of ranks has no rank without a partner; of an odd number each sits out as often.
  local often = size % 2 == 0 and 300 / (size - 1) or 300 / size
  assert(size % 2 == 0 and out == 0 or math.abs(out - often) < 0.3 * often, tostring(out))
  for other = 0, size - 1 do
    local count = met[other] or 0
    assert(other == rank or math.abs(count - often) <= 0.3 * often, tostring(count))
  end
end

function exact.noloco()
  if size ~= 2 then return end
  -- By hand, with alpha 0.5, beta 0.7 and gamma 0.7, from 0 and 2. First the momentum is 0.7 times
  -- the way to the mean 1. Then the ranks change by 1 and 3, and the momentum of rank 0 is
  -- 0.5 * 0.7 + 0.7 * 2 + 0.7 * (1 - 0.7).
  local model = Point(1)
  change(model, 2 * rank)
  local noloco = recipe "noloco" { model = model, period = 1 }
  noloco.after_step(0)
  near(rank == 0 and 0.7 or 1.3, model.w, 1e-6, "the first round")
  change(model, rank == 0 and 1 or 3)
  noloco.after_step(1)
  near(rank == 0 and 2.66 or 2.14, model.w, 1e-6, "the second round")
  -- Without momentum and pull, two ranks do what DiLoCo does with the whole step.
  local one, other = Point(50), Point(50)
  local plain = recipe "diloco" { model = one, period = 2, lr = 1, momentum = 0 }
  local pair = recipe "noloco" { model = other, period = 2, alpha = 0, beta = 1, gamma = 0 }
  for step in ms.steps(8) do
    local by = ms.randn { 50, seed = 10 * step + rank }
    change(one, by)
    change(other, by)
    plain.after_step(step)
    pair.after_step(step)
    assert(one.w:eq(other.w):all():item())
  end
end

-- Each rank is drawn to a target of its own; the mean of the targets is the least of all losses.
-- The rate falls, so the ranks come together although pairs have other means than all ranks.
-- Targets are up to 9 apart; more than two ranks come within 0.1.
function exact.noloco_quadratic()
  local model, mean = Point(3), ms.zeros { 3 }
  local function target(of) return ms.tensor { of * 1.0, 3.0 - of * of, (of % 2) * 2.0 } end
  for of = 0, size - 1 do mean = mean + target(of) / size end
  mean:keep()
  local own = target(rank):keep()
  change(model, 5 * rank)
  local noloco = recipe "noloco" { model = model, period = 2 }
  for step in ms.steps(2000) do
    change(model, (own - model.w) * (0.3 / (1 + step / 20)))
    noloco.after_step(step)
  end
  near(mean, model.w, size == 2 and 1e-3 or 0.1, "the mean of the targets")
end

function exact.sparseloco()
  -- The two largest of 16 changes travel; the others stay, as they are.
  local model, by = Point(16), ms.arange(1, 16):to "f32" * ms.where(ms.arange(1, 16):ge(9), -1, 1)
  by:keep()
  local sparse = recipe "sparseloco" {
    model = model, period = 1, chunk = 16, k = 2, codec = "int8", beta = 1,
  }
  change(model, by)
  sparse.after_step(0)
  near(-16, model.w:narrow(1, 16, 1), 0.01, "a sent change")
  near(-15, model.w:narrow(1, 15, 1), 0.07, "a sent change")
  assert(model.w:narrow(1, 1, 14):eq(0):all():item())
  local residual = sparse:state().residual:view(-1)
  assert(residual:narrow(1, 1, 14):eq(by:narrow(1, 1, 14):neg()):all():item())
  -- With beta 1 nothing is lost: what all ranks have applied and what they still have is the sum of
  -- the changes. The last chunk is padded.
  local n = 10000
  model = Point(n)
  sparse = recipe "sparseloco" { model = model, period = 1, k = 100, beta = 1 }
  local sum = ms.zeros { n }:keep()
  for step in ms.steps(10) do
    local drawn = ms.randn { n, seed = 100 * step + rank }
    change(model, drawn)
    sum:add_(drawn)
    sparse.after_step(step)
    assert(alike(model.w))
  end
  local rest = sparse:state().residual
  assert(rest:view(-1):narrow(1, n + 1, 12288 - n):eq(0):all():item())
  local kept = world:all_reduce(rest:view(-1):narrow(1, 1, n):clone(), "avg"):value()
  near(world:all_reduce(sum:clone(), "avg"):value(), model.w:detach() - kept, 1e-5, "the sum")
  assert(rest:abs():max():item() > 0.5 and model.w:abs():max():item() > 0.5)
end

function exact.des_loc()
  local model = nn.Linear(4, 3)
  local optimizer = optim.adamw(model)
  local des_loc = recipe "des_loc" { model = model, period = 2, first = 3, second = 4 }
  for step in ms.steps(12) do
    model(ms.randn { 5, 4, seed = 10 * step + rank }):square():sum():backward()
    optimizer:step()
    des_loc.after_step(step, optimizer)
    local own = optimizer:state().parameters.weight
    assert(alike(model.weight) == ((step + 1) % 2 == 0))
    assert(alike(own.exp_avg) == ((step + 1) % 3 == 0))
    assert(alike(own.exp_avg_sq) == ((step + 1) % 4 == 0))
  end
  -- The first moment of SGD; an optimizer without one is refused.
  model = nn.Linear(4, 3)
  for _, momentum in ipairs { 0.9, 0 } do
    optimizer = optim.sgd(model, { momentum = momentum })
    des_loc = recipe "des_loc" { model = model, period = 1, first = 1, second = 1 }
    model(ms.randn { 5, 4, seed = rank }):square():sum():backward()
    optimizer:step()
    if momentum > 0 then
      des_loc.after_step(0, optimizer)
      assert(alike(optimizer:state().parameters.weight.momentum_buffer))
    else
      expect.fails(function() des_loc.after_step(0, optimizer) end, "has no first moment")
    end
  end
end

function exact.muon()
  -- A gradient whose singular values are equal keeps its direction, and gets values near 1.
  for _, shape in ipairs { { 6, 8 }, { 8, 6 } } do
    local rows, columns = table.unpack(shape)
    local model = nn.Linear(columns, rows, { bias = false })
    local optimizer, before = muon(model, { lr = 1 }), model.weight:detach():clone()
    local direction = ms.randn { math.max(rows, columns), math.min(rows, columns), seed = 1 }
      :orthonormalize_()
    if rows < columns then direction = direction:t() end
    model.weight:set_grad((direction * 37):contiguous())
    optimizer:step()
    local step = (before - model.weight:detach()) / math.max(1, rows / columns) ^ 0.5
    local size_of = (step * direction):sum():item() / math.min(rows, columns)
    assert(size_of > 0.6 and size_of < 1.3, tostring(size_of))
    near(direction * size_of, step, 1e-4, "the direction")
  end
  -- What is no matrix is stepped as the recipe's AdamW does, with its schedule.
  local models, made = {}, {}
  for i = 1, 2 do
    ms.seed(4)
    models[i] = nn.gpt2 { vocab = 10, context = 8, layers = 1, width = 16, heads = 2 }
    made[i] = optim.adamw(models[i], {
      lr = 1e-2, weight_decay = 0.1, schedule = optim.linear { warmup = 3, steps = 10 },
    })
  end
  made[2] = muon(models[2], { recipe = made[2] })
  for step in ms.steps(5) do
    for i, model in ipairs(models) do
      for j, p in ipairs(model:parameters()) do
        local shape = p:shape()
        shape.seed = 100 * step + j
        p:set_grad(ms.randn(shape))
      end
      made[i]:step()
    end
  end
  local others = 0
  for j, item in ipairs(models[1]:named_parameters()) do
    local p, own = item.parameter, models[2]:parameters()[j]
    if p:dim() == 2 and not item.name:find "wte" and not item.name:find "wpe" then
      assert((p - own):abs():max():item() > 1e-3, item.name)
    else
      others = others + 1
      near(p:detach(), own, 1e-6, item.name)
    end
  end
  assert(others > 5)
end

-- Ranks of a group meet, and no others.
function exact.groups()
  if size ~= 4 then return end
  local group = world:levels(2)
  for name, options in ms.sorted_pairs {
    sparta = { fraction = 1 }, sparseloco = { period = 1 },
    noloco = { period = 1, alpha = 0, beta = 1, gamma = 0 },
    des_loc = { period = 1, first = 2, second = 2 },
  } do
    local model = Point(20)
    options.model, options.group = model, group
    local method = recipe(name)(options)
    change(model, ms.randn { 20, seed = rank })
    assert(not alike(model.w, group))
    method.after_step(0, optim.adamw(model))
    assert(alike(model.w, group) and not alike(model.w), name)
  end
end

function exact.sixteen_bits()
  for _, dtype in ipairs { "bf16", "f16" } do
    for name in ms.sorted_pairs(methods) do
      local model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)):to(dtype)
      local method, optimizer = methods[name](model, 2, 4)
      optimizer = optimizer or adamw(model, 4)
      for step in ms.steps(4) do
        model(ms.randn { 8, 16, seed = 10 * step + rank, dtype = dtype }):square():mean():backward()
        optimizer:step()
        method.after_step(step, optimizer)
      end
      for _, p in ipairs(model:parameters()) do
        assert(p:dtype() == dtype and p:is_finite():all():item(), name)
        if name == "muloco" or name == "sparseloco" or name == "des_loc" then
          assert(alike(p:to "f32"), name)
        end
      end
    end
  end
  -- Muon keeps what 16 bits cannot: many small steps add up as they do in f32.
  local ends = {}
  for i, dtype in ipairs { "f32", "bf16" } do
    local model = nn.Linear(4, 4, { bias = false })
    ms.no_grad(function() model.weight:fill_(1) end)
    model = model:to(dtype)
    local optimizer = muon(model, { lr = 1e-4 })
    for _ in ms.steps(400) do
      model.weight:set_grad(ms.ones { 4, 4, dtype = dtype })
      optimizer:step()
    end
    ends[i] = model.weight:detach():to "f32":keep()
  end
  assert((1 - ends[1]):min():item() > 6e-3)
  near(ends[1], ends[2], 4e-3, "in bf16")
end

function exact.refusals()
  local function refuses(name, options, text)
    options.model = nn.Linear(2, 2)
    expect.fails(function() recipe(name)(options) end, name .. ": " .. text)
  end
  for _, fraction in ipairs { 0, 1.5, -1, "much" } do
    refuses("sparta", { fraction = fraction }, "fraction must be above 0, and 1 or less")
  end
  for _, period in ipairs { 0, -2, 1.5, "often" } do
    for _, name in ipairs { "noloco", "eager_diloco", "sparseloco", "des_loc" } do
      refuses(name, { period = period }, "period must be a positive integer")
    end
    refuses("des_loc", { first = period }, "first must be a positive integer")
    refuses("des_loc", { second = period }, "second must be a positive integer")
  end
  refuses("noloco", { gamma = -1 }, "gamma must be 0 or more")
  refuses("sparseloco", { chunk = 65537 }, "chunk must be an integer from 1 to 65536")
  refuses("sparseloco", { chunk = 8, k = 9 }, "k must be an integer from 1 to chunk")
  refuses("sparseloco", { beta = 2 }, "beta must be 0 to 1")
  for _, name in ipairs { "sparta", "noloco", "eager_diloco", "sparseloco", "des_loc" } do
    expect.fails(function() recipe(name) {} end, name .. ": model is missing")
  end
  expect.fails(function() muon(nil) end, "muon: model is missing")
  expect.fails(function()
    recipe "des_loc" { model = nn.Linear(2, 2), period = 1 }.after_step(0)
  end, "needs the optimizer")
end

local STEPS <const>, MIDDLE <const> = 11, 5                        -- periods are 3

local function make(name)
  local model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
  local method, optimizer = methods[name](model, 3, STEPS)
  optimizer = optimizer or adamw(model, STEPS)
  return { model = model, optimizer = optimizer, method = method.state and method or nil }, method
end

local function go_on(things, method, from, to)
  for step = from, to - 1 do
    local x = ms.full(1 + 0.1 * step * (rank + 1), { 2, 4 }) + ms.tensor { 0, 0.1, 0.2, 0.3 }
    things.model(x):square():sum():backward()
    things.optimizer:step()
    method.after_step(step, things.optimizer)
  end
end

-- What a rank has: weights, and the states of the optimizer and of the method.
local function values_of(things)
  local found = {}
  local function add(prefix, value)
    if type(value) == "table" then
      for key, item in ms.sorted_pairs(value) do add(("%s.%s"):format(prefix, key), item) end
    elseif type(value) == "userdata" then found[prefix] = value:detach():clone() end
  end
  for i, p in ipairs(things.model:parameters()) do add("w" .. i, p) end
  add("optimizer", things.optimizer:state().parameters)
  if things.method then add("method", things.method:state()) end
  return found
end

local function resumed(what)
  for name in ms.sorted_pairs(methods) do
    ms.seed(what == "save" and 3 or 99)
    local things, method = make(name)
    local folder = ("%s/%s"):format(o.folder, name)
    local file = ("%s/%s-%d.safetensors"):format(o.folder, name, rank)
    if what == "save" then
      go_on(things, method, 0, MIDDLE)
      assert(not alike(things.model[1].weight))
      things.step = MIDDLE
      assert(ms.checkpoint.save(folder, things))
      assert(ms.checkpoint.wait())
      go_on(things, method, MIDDLE, STEPS)
      assert(ms.safetensors.save(file, values_of(things)))
    else
      assert(ms.checkpoint.load(assert(ms.checkpoint.latest(folder)), things))
      go_on(things, method, MIDDLE, STEPS)
      expect.same(values_of(things), assert(ms.safetensors.load(file)), name)
    end
  end
end

if o.what == "train" then train()
elseif o.what == "exact" then for _, test in ms.sorted_pairs(exact) do test() end
else resumed(o.what) end
print(("rank %d is done"):format(rank))
