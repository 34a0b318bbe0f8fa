-- A penalty on the weights, beside the loss or in a backward of its own, gives the steps that it
-- gives under ddp, whatever this rank holds of the weights.
local ms = require "moonshard"
local expect = dofile(os.getenv "MOONSHARD_SOURCE" .. "/tests/dist/expect.lua")

local STEPS <const>, PASSES <const> = 3, 2
local size, rank = ms.world_size(), ms.rank()
local within, across
if size == 4 then within, across = ms.world():levels(2) end

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
  local x = ms.randn { 2, 3, seed = step * 100 + i * 10 + rank, per_rank = false }
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
    if scaler then scaler:unscale(optimizer) end
    if o.clip then model:clip_grad_norm(o.clip) end
    if scaler then scaler:step(optimizer) else optimizer:step() end
    optimizer:zero_grad()
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
    if o.clip then net:clip_grad_norm(o.clip) end
    optimizer:step()
    optimizer:zero_grad()
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
  ways.hybrid = { strategy = "hybrid_shard", shard_group = within, replica_group = across }
  ways.hybrid_all = {
    strategy = "hybrid_shard", shard_group = within, replica_group = across, accumulate = "all",
  }
end
local options <const> = { "layout", "strategy", "accumulate", "find_unused", "offload",
  "divide_factor", "comm_hook", "precision", "shard_group", "replica_group" }

local function wrap(way)
  local o = { wrap = { class = "Linear" } }
  for _, name in ipairs(options) do o[name] = way[name] end
  return ms.fsdp(new_net(), o)
end

local number = 0
for name, way in ms.sorted_pairs(ways) do
  local expected
  for called, order in ms.sorted_pairs(orders) do
    number = number + 1
    if (not way.only or way.only[called]) and expect.takes(number, 2) then
      expected = expected or by_hand(way)
      local most = expect.difference(train(wrap(way), order, way), expected)
      -- Sums in another order; bf16 has 2^-9 of each number.
      assert(most <= (way.tolerance or 2e-5), ("%s, %s: %g"):format(name, called, most))
    end
  end
end

print(("rank %d is done"):format(rank))
