-- Which parameters of a sharded model have a gradient: those that some rank has used since
-- zero_grad, as in one process that computes the losses of all ranks. The others are nil, so decay
-- and momentum leave them where they are.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")

local WIDTH <const>, STEPS <const> = 3, 4
local size, rank = ms.world_size(), ms.rank()

-- Two units, the root and Inner, each with two members, of which a forward uses some.
local Pair = ms.nn.class "Pair"
function Pair:init()
  self.one, self.two = ms.nn.Linear(WIDTH, WIDTH), ms.nn.Linear(WIDTH, WIDTH)
end
function Pair:forward(x, which)
  if which:find "1" then x = x + self.one(x):tanh() end
  if which:find "2" then x = x + self.two(x):tanh() end
  return x
end
local Inner = ms.nn.class "Inner"
function Inner:init() self.pair = Pair() end
function Inner:forward(x, which) return self.pair(x, which) end
local Net = ms.nn.class "Net"
function Net:init() self.outer, self.inner = Pair(), Inner() end
function Net:forward(x, outer, inner)
  x = self.outer(x, outer)
  return self.inner(x, inner) * 1
end

local function new_net()
  ms.seed(5)
  return Net()
end

-- What rank r uses in pass i of a step. Each unit has a backward on each rank in each pass: in some
-- of them both parts are left out, and the gradient goes through.
local patterns = {
  none = function() return "1", "1" end,
  -- Ranks fill different members.
  apart = function(_, _, r) return r == 0 and "1" or "2", r == 0 and "2" or "1" end,
  -- One member in some passes only, on the last rank.
  seldom = function(step, i, r)
    return "1", step == 2 and i == 1 and r == size - 1 and "12" or "1"
  end,
  -- Another one in each pass.
  turns = function(_, i) return i == 1 and "1" or "2", i == 1 and "2" or "1" end,
  -- A member that was used once has momentum, and stays where it is afterwards.
  once = function(step) return step == 0 and "12" or "1", "1" end,
}

local makers = {
  adamw = function(model) return ms.optim.adamw(model, { lr = 0.1, weight_decay = 0.5 }) end,
  sgd = function(model)
    return ms.optim.sgd(model, { lr = 0.1, momentum = 0.9, weight_decay = 0.1 })
  end,
}

local function input(step, i, r)
  return expect.models.input(2, WIDTH, 100 * step + 10 * i + r)
end

-- Names of the parameters that have a gradient after each step.
local function named(model)
  local names = {}
  for _, p in ipairs(model:parameters()) do if p:grad() then names[#names + 1] = p:name() end end
  return table.concat(names, " ")
end

local function reference(pattern, make, passes)
  local net, seen = new_net(), {}
  local optimizer = make(net)
  for step in ms.steps(STEPS) do
    for i = 1, passes do
      for r = 0, size - 1 do
        local out = net(input(step, i, r), pattern(step, i, r))
        if out:requires_grad() then (out:sum() * (0.1 / size)):backward() end
      end
    end
    seen[step] = named(net)
    optimizer:step()
    optimizer:zero_grad()
  end
  return net:state(), seen
end

local ways = {
  ddp = { passes = 2, ddp = true },
  full = { passes = 1 },
  two_full = { passes = 2 },
  rows = { passes = 1, layout = "rows" },
  found = { passes = 2, find_unused = true },
  late = { passes = 2, accumulate = "local", strategy = "shard_grad_op" },
  whole = { passes = 1, strategy = "no_shard" },
  all = { passes = 2, strategy = "no_shard", accumulate = "all", find_unused = true },
  early = { passes = 2, policy = "in_backward" },
  own = { passes = 2, policy = "own", find_unused = true },
  deferred = { passes = 1, policy = "deferred" },
  clips = { passes = 1, hook = "clip" },
  bf16 = { passes = 1, precision = { reduce = "bf16" } },
}
if size == 4 then
  ways.hybrid = { passes = 2, strategy = "hybrid_shard" }
  ways.hybrid_all = { passes = 2, strategy = "hybrid_shard", accumulate = "all" }
end

local function wrapped(way)
  if way.ddp then return ms.ddp(new_net(), { find_unused = true }) end
  return expect.models.fsdp(new_net(), {
    wrap = { class = "Inner" }, strategy = way.strategy, layout = way.layout,
    find_unused = way.find_unused, accumulate = way.accumulate, precision = way.precision,
    comm_hook = way.hook and ms.hooks.clip { max_norm = 1e9, scope = "global" } or nil,
  })
end

local number = 0
for how, way in ms.sorted_pairs(ways) do
  for called, pattern in ms.sorted_pairs(patterns) do
    for kind, make in ms.sorted_pairs(makers) do
      number = number + 1
      if expect.takes(number, 2) then
        local expected, seen = reference(pattern, make, way.passes)
        local what = ("%s, %s, %s"):format(how, called, kind)
        local model = wrapped(way)
        local optimizer
        if way.policy == "own" then
          local maker = kind == "adamw" and ms.optim.adamw or ms.optim.sgd
          ms.optim.in_backward(maker, model:parameters(), kind == "adamw"
            and { lr = 0.1, weight_decay = 0.5 }
            or { lr = 0.1, momentum = 0.9, weight_decay = 0.1 })
        else
          optimizer = make(model)
          if way.policy then optimizer:overlap(model, way.policy) end
        end
        for step in ms.steps(STEPS) do
          model:accumulate(way.passes, function(i)
            (model(input(step, i, rank), pattern(step, i, rank)):sum() * 0.1):backward()
          end)
          if not way.policy then
            local own = named(model)
            assert(own == seen[step], ("%s: step %d has gradients of %s, not of %s"):format(what,
              step, own, seen[step]))
          end
          if optimizer then
            optimizer:step()
            optimizer:zero_grad()
          end
        end
        -- Sums in another order; AdamW divides them by their own size, which bf16 rounds.
        expect.close(expect.whole(model), expected, way.precision and 5e-2 or 2e-5, what)
      end
    end
  end
end

-- A rank without inputs left, and the others' passes.
local model = wrapped {}
local before = expect.whole(model)
local optimizer = makers.adamw(model)
model:join({ divisor = "all" }, function()
  for step = 1, rank + 1 do
    model(input(step, 1, rank), "1", "1"):sum():backward()
    optimizer:step()
    optimizer:zero_grad()
  end
end)
local after = expect.whole(model)
for name, t in pairs(before) do
  local moved = not after[name]:eq(t):all():item()
  assert(moved == not name:find "two", name)
end

print(("rank %d is done"):format(rank))
