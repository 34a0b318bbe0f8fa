-- Megatron's conjugate pair of ms.custom: an MLP whose weights are cut over the ranks computes what
-- one rank computes with whole weights. Run by every rank of custom_spec.lua.
local ms = require "moonshard"
local world, rank, ranks = ms.world(), ms.rank(), ms.world_size()

local copy_to = ms.custom {
  forward = function(x) return x end,
  backward = function(d) return world:all_reduce(d):value() end,
}
local reduce_from = ms.custom {
  forward = function(x) return world:all_reduce(x):value() end,
  backward = function(d) return d end,
}

local WIDTH <const>, HIDDEN <const>, LAYERS <const> = 8, 12, 3

local function weight(seed, rows, columns)
  return (ms.randn { rows, columns, seed = seed } / math.sqrt(rows)):requires_grad_()
end

-- Columns, or rows, of a weight that are this rank's.
local function cut(w, dim)
  local size = w:size(dim) // ranks
  return ms.no_grad(function() return w:narrow(dim, rank * size + 1, size):clone() end)
    :requires_grad_()
end

-- Each layer has a residual: an addition gives both of its inputs one gradient.
local function mlp(x, weights, enter, leave)
  for i = 1, LAYERS do
    local h = enter(x):matmul(weights[2 * i - 1]):tanh()
    x = x + leave(h:matmul(weights[2 * i])) * 0.5
  end
  return x:square():mean()
end

local function same(x) return x end

local function norm(t) return math.sqrt(t:square():sum():item()) end

local function near(what, expected, actual)
  local off, size = norm(expected - actual), norm(expected)
  assert(off <= 2e-6 * size, ("%s: off by %g of %g"):format(what, off, size))
end

local whole, parts = {}, {}
for i = 1, LAYERS do
  whole[2 * i - 1] = weight(i, WIDTH, HIDDEN)
  whole[2 * i] = weight(10 + i, HIDDEN, WIDTH)
  parts[2 * i - 1], parts[2 * i] = cut(whole[2 * i - 1], 2), cut(whole[2 * i], 1)
end

local function input() return ms.randn { 4, WIDTH, seed = 20, requires_grad = true } end

local function check(what, how)
  local x, own = input(), input()
  for _, list in ipairs { whole, parts } do for _, w in ipairs(list) do w:set_grad(nil) end end
  local expected = mlp(x, whole, same, same)
  expected:backward()
  local got = how(own)
  got:backward()
  local a, b = expected:item(), got:item()
  assert(math.abs(a - b) <= 1e-6 * math.abs(a), what)
  near(what, x:grad(), own:grad())
  for i, w in ipairs(parts) do
    near(("%s, weight %d"):format(what, i), cut(whole[i]:grad(), i % 2 == 1 and 2 or 1), w:grad())
  end
end

check("plain", function(x) return mlp(x, parts, copy_to, reduce_from) end)
check("recomputed", function(x)
  return ms.recompute(function(t) return mlp(t, parts, copy_to, reduce_from) end, x)
end)
check("in a step", function(x)
  local loss
  x:keep()
  for _ in ms.steps(2) do loss = mlp(x, parts, copy_to, reduce_from):keep() end
  return loss
end)

-- Gradients that arrive in buckets: each rank has data of its own, and ddp the mean.
local Layer = ms.nn.class "Layer"
function Layer:init(times)
  self.times, self.weight = times, ms.nn.Parameter(ms.randn { WIDTH, WIDTH, seed = 1 })
end
function Layer:forward(x) return self.times(x, self.weight) end
local product = ms.custom {
  forward = function(x, w) return x:matmul(w), { x, w } end,
  backward = function(d, saved) return d:matmul(saved[2]:t()), saved[1]:t():matmul(d) end,
}
local function plain(x, w) return x:matmul(w) end
for number, wrap in ipairs {
  ms.ddp,
  function(m) return ms.fsdp(m, { wrap = { class = "Layer" } }) end,
  function(m) return ms.fsdp(m, { wrap = { class = "Layer" }, strategy = "shard_grad_op" }) end,
} do
  local losses = {}
  -- Steps in backward wait for what the function has saved.
  for i, case in ipairs { { plain }, { product }, { plain, true }, { product, true } } do
    local model = wrap(ms.nn.Sequential(Layer(case[1]), ms.nn.ReLU(), Layer(case[1])))
    local optimizer = ms.optim.sgd(model, { lr = 0.01 })
    if case[2] then optimizer:overlap(model, "in_backward") end
    local x = ms.randn({ 4, WIDTH, seed = 30 + rank }):keep()
    for step in ms.steps(3) do
      local loss = model(x):square():mean()
      loss:backward()
      optimizer:step()
      optimizer:zero_grad()
      losses[step] = losses[step] or loss:item()
      assert(losses[step] == loss:item(), ("wrapper %d, case %d"):format(number, i))
    end
  end
  assert(losses[2] < losses[0])
end

print(("rank %d is done"):format(rank))
