-- A step of ms.train whose passes and ranks have different numbers of targets, against one large
-- batch on one rank, under each strategy.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")

local PASSES <const>, ROWS <const>, TIME <const>, CLASSES <const> = 3, 2, 4, 8
local ranks, rank = ms.world_size(), ms.rank()

-- The batch of (rank, pass, step): inputs, targets of which `share` count, all on the host.
local function batch(of, pass, step, masks)
  local x, y = {}, {}
  for row = 1, ROWS do
    x[row], y[row] = {}, {}
    for t = 1, TIME do
      local number = (of * 31 + pass * 17 + step * 7 + row * 5 + t * 3) % 97
      x[row][t] = number % CLASSES
      -- Pass 2 of rank 0 has no target; others have between one and all of them.
      local counts = not masks or not (of == 0 and pass == 2)
        and (row == 1 and t == 1 or (number * number + of + pass) % 3 > (of + pass) % 3)
      y[row][t] = counts and (number * 5 + 1) % CLASSES or -100
    end
  end
  return x, y
end

local function make()
  ms.seed(3)
  local net = ms.nn.Sequential(ms.nn.Embedding(CLASSES, 6), ms.nn.Linear(6, 6), ms.nn.ReLU(),
    ms.nn.Linear(6, CLASSES))
  return net
end

local STEPS <const> = 2

-- One large batch of all ranks and passes, by hand.
local function reference(masks, first, last)
  local net = make()
  local optimizer = ms.optim.sgd(net, { lr = 0.5, momentum = 0.9 })
  local loss
  for step = 0, STEPS - 1 do
    local x, y = {}, {}
    for of = first or 0, last or ranks - 1 do
      for pass = 1, PASSES do
        local one, other = batch(of, pass, step, masks)
        table.move(one, 1, ROWS, #x + 1, x)
        table.move(other, 1, ROWS, #y + 1, y)
      end
    end
    loss = net(ms.tensor(x, "i64")):cross_entropy(ms.tensor(y, "i64"))
    optimizer:zero_grad()
    loss:backward()
    optimizer:step()
    ms.synchronize()
  end
  return net:state(), loss:item()
end

local function sum_of(m, x, y)
  return m(x):cross_entropy(y, { reduction = "sum" }), y:ne(-100):sum()
end

local losses = {
  -- The default: counted targets.
  targets = nil,
  -- Weights come with the losses.
  given = function(m, x, y)
    local sum, count = sum_of(m, x, y)
    return sum / count:to "f32":maximum(1), nil, count
  end,
  mean = function(m, x, y) return m(x):cross_entropy(y), nil, y:ne(-100):sum():to "f32" * 0.1 end,
}

local function train(name, wrap, options)
  local net = make()
  local model = wrap(net)
  local step, pass = 0, 0
  local settings = {
    model = model, steps = STEPS, accumulate = PASSES, run = "run-" .. name:gsub("%W", "-"),
    optimizer = options.optimizer and options.optimizer(model)
      or ms.optim.sgd(model, { lr = 0.5, momentum = 0.9 }),
    data = function()
      pass = pass + 1
      if pass > PASSES then pass, step = 1, step + 1 end
      local x, y = batch(rank, pass, step, options.masks)
      return ms.tensor(x, "i64"), ms.tensor(y, "i64")
    end,
    loss = losses[options.loss],
  }
  local result = ms.train(settings)
  return expect.whole(model), result.loss
end

local function with(o) return function(net) return expect.models.fsdp(net, o) end end
local units = { class = "Linear" }
local strategies = {
  ddp = function(net) return ms.ddp(net) end,
  small_buckets = function(net) return ms.ddp(net, { bucket_bytes = 128 }) end,
  full_shard = with { wrap = units },
  rows = with { wrap = units, layout = "rows" },
  shard_grad_op = with { strategy = "shard_grad_op", accumulate = "local" },
  no_shard = with { strategy = "no_shard", wrap = units, accumulate = "all" },
}
if ranks == 1 then strategies = { plain = function(net) return net end, strategies.full_shard } end
if ranks == 4 then
  strategies.hybrid = with { strategy = "hybrid_shard", wrap = units }
end

local wanted, wanted_loss = reference(true)
for name, wrap in ms.sorted_pairs(strategies) do
  for _, kind in ipairs { "targets", "given" } do
    local state, loss = train(name .. kind, wrap, { masks = true, loss = kind })
    -- f32: sums in another order.
    local most = expect.difference(state, wanted)
    assert(most < 1e-5, ("%s, %s: weights differ by %g"):format(name, kind, most))
    assert(math.abs(loss / wanted_loss - 1) < 1e-6,
      ("%s, %s: the loss is %.9g, not %.9g"):format(name, kind, loss, wanted_loss))
  end
  -- Equal weights change no bit: the same as without any. 0.1 times a count is rounded.
  losses.none = function(m, x, y) return m(x):cross_entropy(y) end
  local none, plain = train(name .. "none", wrap, { loss = "none" })
  for _, kind in ipairs { "targets", "given", "mean" } do
    local state, loss = train(name .. kind .. "equal", wrap, { loss = kind })
    if kind ~= "given" then
      expect.same(state, none, name .. ", " .. kind)
      assert(loss == plain, ("%s, %s: the loss is %.9g, not %.9g"):format(name, kind, loss, plain))
    else
      assert(expect.difference(state, none) < 1e-5, name)
    end
  end
end

-- A loop by hand.
do
  local net = make()
  local model = ranks > 1 and ms.ddp(net) or net
  local optimizer = ms.optim.sgd(model, { lr = 0.5, momentum = 0.9 })
  for step = 0, STEPS - 1 do
    local xs, ys, counts = {}, {}, {}
    for pass = 1, PASSES do
      local x, y = batch(rank, pass, step, true)
      xs[pass], ys[pass] = ms.tensor(x, "i64"), ms.tensor(y, "i64")
      counts[pass] = ys[pass]:ne(-100):sum()
    end
    local weigh = ms.loss_weight(counts)
    optimizer:zero_grad()
    model:accumulate(PASSES, function(i)
      (weigh(i, model(xs[i]):cross_entropy(ys[i])) / PASSES):backward()
    end)
    optimizer:step()
    ms.synchronize()
  end
  assert(expect.difference(expect.whole(model), wanted) < 1e-5)
  expect.fails(function() ms.loss_weight {} end, "loss_weight: weights is empty")
  expect.fails(function() ms.loss_weight { -1 } end, "a weight is a finite number of 0 or more")
  expect.fails(function() ms.loss_weight { 1 }(2, ms.ones {}) end, "pass 2: there are weights of 1")
end

-- A model whose gradients are averaged over a part of the ranks: the mean is over their targets.
if ranks == 4 then
  local parts = ms.world():levels(2)
  local state = train("parts", function(net) return ms.ddp(net, { group = parts }) end,
    { masks = true, loss = "targets" })
  local first = rank // 2 * 2
  assert(expect.difference(state, (reference(true, first, first + 1))) < 1e-5)
end

-- Optimizers that step in backward: with known weights, and under ddp with any.
local function early(model)
  local optimizer = ms.optim.sgd(model, { lr = 0.5, momentum = 0.9 })
  optimizer:overlap(model, "in_backward")
  return optimizer
end
if ranks > 1 then
  for _, kind in ipairs { "targets", "given" } do
    local state = train("early" .. kind, strategies.ddp,
      { masks = true, loss = kind, optimizer = early })
    assert(expect.difference(state, wanted) < 1e-5)
  end
  local state = train("early shards", strategies.full_shard,
    { masks = true, loss = "targets", optimizer = early })
  assert(expect.difference(state, wanted) < 1e-5)
  expect.fails(function()
    train("early refused", strategies.full_shard,
      { masks = true, loss = "given", optimizer = early })
  end, "those of 3 passes are known with the last one only", "in_backward")
end

print(("rank %d is done"):format(rank))
