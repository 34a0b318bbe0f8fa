-- What every rank of planes_spec.lua runs: a convolutional net under ddp and fsdp, whose weights
-- must be those of one rank on the whole batch.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local nn = ms.nn
local rank, size = ms.rank(), ms.world_size()
local ROWS <const> = 8

local Net = nn.class "Net"
function Net:init(recompute)
  self.recompute = recompute
  self.first = nn.Conv2d(1, 6, 3, { padding = 1 })
  self.second = nn.Conv2d(6, 8, { 3, 2 }, { groups = 2, stride = { 2, 1 } })
  self.pool, self.average = nn.MaxPool2d(2), nn.AvgPool2d(2, { stride = 1, padding = 1 })
  self.out = nn.Linear(8 * 3 * 5, 4)
end
function Net:forward(x)
  local function body(t)
    return self.average(self.second(self.pool(self.first(t):relu())):tanh())
  end
  x = self.recompute and ms.recompute(body, x) or body(x)
  return self.out(x:flatten(2))
end

local function train(wrap, options)
  options = options or {}
  ms.seed(4)
  local model = wrap(Net(options.recompute))
  local optimizer = ms.optim.sgd(model, { lr = 0.1, momentum = 0.9 })
  local first, count = options.whole and 1 or rank * ROWS // size + 1,
    options.whole and ROWS or ROWS // size
  for step in ms.steps(3) do
    local images = ms.randn { ROWS, 1, 10, 10, seed = 10 + step, per_rank = false }
    local labels = ms.randint { ROWS, low = 0, high = 4, seed = 20 + step, per_rank = false }
    local x, y = images:narrow(1, first, count), labels:narrow(1, first, count)
    local function pass() return model(x):cross_entropy(y) end
    local loss = options.dtype and ms.autocast(options.dtype, pass) or pass()
    loss:backward()
    optimizer:step()
    optimizer:zero_grad()
  end
  return expect.whole(model)
end

local function sharded(model)
  return ms.fsdp(model, { wrap = { class = { "Conv2d", "Linear" } } })
end
local function alone(model) return model end

-- Sums over ranks come in another order than those of one rank; in bf16, that rounds some operand
-- to the next number.
for _, options in ipairs { {}, { recompute = true }, { dtype = "bf16" } } do
  local copied, shards = train(ms.ddp, options), train(sharded, options)
  if size == 2 then expect.same(shards, copied, "fsdp") end
  expect.close(shards, copied, options.dtype and 1e-3 or 2e-6, "fsdp")
  options.whole = true
  expect.close(train(alone, options), copied, options.dtype and 1e-3 or 2e-6, "one rank")
end
print(("rank %d is done"):format(rank))
