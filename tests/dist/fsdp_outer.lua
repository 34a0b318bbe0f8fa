-- A penalty on the weights, beside the loss or in a backward of its own, gives the steps that it
-- gives under ddp, whatever this rank holds of the weights.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")

local STEPS <const>, PASSES <const> = 3, 2
local size, rank = ms.world_size(), ms.rank()
local models = expect.models

-- The scale has one number, which one rank has alone; `aside` is used by penalties only.
local Net = ms.nn.class "Net"
function Net:init()
  self.one, self.two = ms.nn.Linear(3, 5), ms.nn.Linear(5, 2)
  self.scale, self.aside = ms.nn.Parameter(ms.ones { 1 }), ms.nn.Parameter(ms.ones { 3 })
end
function Net:forward(x) return self.two(self.one(x):tanh()) * self.scale end

local function new_net()
  ms.seed(11)
  return Net()
end

local function penalty(model)
  local sum
  for _, p in ipairs(model:parameters()) do
    local one = p:to "f32":square():sum()
    sum = sum and sum + one or one
  end
  return sum * (0.3 / PASSES)
end

local function loss_of(model, step, i)
  local x = models.input(2, 3, step * 100 + i * 10 + rank)
  return model(x):to "f32":square():mean() / PASSES
end

-- One pass. `scaled` multiplies what goes into backward.
local orders = {
  after = function(model, step, i, scaled)
    local loss = loss_of(model, step, i)
    scaled(loss + penalty(model)):backward()
  end,
  before = function(model, step, i, scaled)
    local own = penalty(model)
    scaled(loss_of(model, step, i) + own):backward()
  end,
  separate = function(model, step, i, scaled)
    scaled(loss_of(model, step, i)):backward()
    scaled(penalty(model)):backward()
  end,
  first = function(model, step, i, scaled)
    scaled(penalty(model)):backward()
    scaled(loss_of(model, step, i)):backward()
  end,
  between = function(model, step, i, scaled)
    local loss = loss_of(model, step, i)
    scaled(penalty(model)):backward()
    scaled(loss):backward()
  end,
}

local function train(model, order, o)
  local optimizer = ms.optim.sgd(model, { lr = 0.1, momentum = 0.9 })
  if o.policy then optimizer:overlap(model, o.policy) end
  local scaler = o.scaler and ms.optim.scaler { init_scale = 1024 }
  local function scaled(loss) return scaler and scaler:scale(loss) or loss end
  for step in ms.steps(STEPS) do
    model:accumulate(PASSES, function(i) order(model, step, i, scaled) end)
    models.finish(model, optimizer, { scaler = scaler, clip = o.clip })
  end
  return expect.whole(model)
end

-- What one rank computes that has the inputs of all.
local function by_hand(o)
  local net = new_net()
  if o.param then net:to(o.param) end
  local optimizer = ms.optim.sgd(net, { lr = 0.1, momentum = 0.9 })
  local own = rank
  for step in ms.steps(STEPS) do
    for i = 1, PASSES do
      for r = 0, size - 1 do
        rank = r
        local loss = loss_of(net, step, i) + penalty(net)
        loss:div(o.sums and 1 or size):backward()
      end
    end
    rank = own
    models.finish(net, optimizer, { clip = o.clip })
  end
  return net:state()
end

local ways = {
  flat = {}, rows = { layout = "rows" }, grad_op = { strategy = "shard_grad_op" },
  whole = { strategy = "no_shard" }, late = { accumulate = "local" },
  whole_late = { strategy = "no_shard", accumulate = "local" },
  all = { accumulate = "all" }, found = { find_unused = true },
  found_whole = { find_unused = true, strategy = "no_shard" },
  offload = { offload = "cpu" },
  divided = { divide_factor = 1, sums = true },
  divided_whole = { divide_factor = 1, sums = true, strategy = "no_shard" },
  sum = { comm_hook = ms.hooks.chain { ms.hooks.reduce { op = "sum" } }, sums = true },
  script = { comm_hook = function(b, next) return next(b) end },
  clip = { clip = 0.5 }, scaler = { scaler = true },
  early = { policy = "in_backward", only = { after = true } },
  deferred = { policy = "deferred" },
  low = { precision = { param = "bf16", reduce = "f32" }, tolerance = 3e-2 },
  low_whole = { precision = { param = "bf16" }, strategy = "no_shard", tolerance = 3e-2 },
}
if size == 4 then
  ways.hybrid = { strategy = "hybrid_shard" }
  ways.hybrid_all = { strategy = "hybrid_shard", accumulate = "all" }
end
local options <const> = { "layout", "strategy", "accumulate", "find_unused", "offload",
  "divide_factor", "comm_hook", "precision" }

local function wrap(way)
  local o = { wrap = { class = "Linear" } }
  for _, name in ipairs(options) do o[name] = way[name] end
  return models.fsdp(new_net(), o)
end

local number = 0
for name, way in ms.sorted_pairs(ways) do
  local expected
  for called, order in ms.sorted_pairs(orders) do
    number = number + 1
    if (not way.only or way.only[called]) and expect.takes(number, 2) then
      expected = expected or by_hand(way)
      -- Sums in another order; bf16 has 2^-9 of each number.
      expect.close(train(wrap(way), order, way), expected, way.tolerance or 2e-5,
        name .. ", " .. called)
    end
  end
end

print(("rank %d is done"):format(rank))
