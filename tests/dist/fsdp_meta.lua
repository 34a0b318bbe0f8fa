-- What every rank of fsdp_meta_spec.lua runs: models that are made on "meta" and sharded unit by
-- unit have the bits that they have without it, and no rank holds more than its shards and a unit.
local ms = require "moonshard"
local core = require "moonshard.core"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local nn, fails = ms.nn, expect.fails
local rank, size = ms.rank(), ms.world_size()

-- Computes a parameter and a buffer in init: only reset can make them again.
local Scaled = nn.class "Scaled"
function Scaled:init(width)
  self.lin = nn.Linear(width, width)
  self.scale = nn.Parameter(ms.empty { width })
  self.offset = ms.empty { width }
  self:reset()
end
function Scaled:reset()
  ms.no_grad(function()
    self.scale:copy_(ms.rand { self.scale:size(1) }:cumsum(1))
    self.offset:copy_(self.scale:cumsum(1))
  end)
end
function Scaled:forward(x) return self.lin(x) * self.scale + self.offset end

-- Computes in init without reset being called there: it draws what comes first in init.
local Early = nn.class "Early"
function Early:init(width)
  self.scale = nn.Parameter(ms.rand { width }:cumsum(1))
end
function Early:reset() self.scale:copy_(ms.rand { self.scale:size(1) }:cumsum(1)) end
function Early:forward(x) return x * self.scale end

local makers = {
  function()
    local net = nn.Sequential(nn.Linear(7, 5), Scaled(5), nn.LayerNorm(5), Early(5), Scaled(5))
    net[1].weight:requires_grad_(false)
    return net
  end,
  function()
    local half = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3))
    half[1].bias = nn.Parameter(ms.randn { 3, std = 0.5 } * 3 - 1)
    return half
  end,
  function() return nn.gpt2 { vocab = 37, context = 8, layers = 2, width = 16, heads = 2 } end,
  function()
    return nn.llama { vocab = 37, context = 8, layers = 2, width = 16, heads = 2 }:to "bf16"
  end,
}

local function build(make, seed)
  ms.seed(seed)
  return make()
end
local function on_meta(make, seed)
  return build(function() return ms.device("meta", make) end, seed)
end

local strategies = { "full_shard", "shard_grad_op", "no_shard" }
if size ~= 3 then strategies[4] = "hybrid_shard" end

for number, make in ipairs(makers) do
  local whole = build(make, 3)
  local drawn, state = ms.rand { 4 }, whole:state()
  for _, strategy in ipairs(strategies) do
    for _, layout in ipairs { "flat", "rows" } do
      local what = ("model %d, %s, %s"):format(number, strategy, layout)
      local model = on_meta(make, 3)
      for _, p in ipairs(model:parameters()) do assert(p:device() == "meta") end
      assert(ms.rand { 4 }:eq(drawn):all():item(), what)
      -- The last two are of blocks, the others of classes.
      local wrap = number <= 2 and { class = { "Scaled", "Early", "Linear" } } or nil
      model = ms.fsdp(model, { strategy = strategy, layout = layout, wrap = wrap,
        init_sync = layout == "rows" })
      for _, p in ipairs(model:parameters()) do assert(p:device() ~= "meta") end
      expect.same(expect.whole(model), state, what)
    end
  end
end

-- Steps of a model that was on "meta" are those of one that was not.
do
  local losses = {}
  for i, f in ipairs { build, on_meta } do
    local model = ms.fsdp(f(makers[3], 5))
    local optimizer, list = ms.optim.adamw(model, { lr = 1e-2 }), {}
    local tokens = ms.randint { 4, 8, high = 37, seed = rank + 3 }
    for step = 1, 4 do
      local loss = model(tokens):cross_entropy(tokens)
      loss:backward()
      optimizer:step()
      optimizer:zero_grad()
      list[step] = loss:item()
    end
    losses[i] = list
  end
  for step = 1, 4 do assert(losses[1][step] == losses[2][step], "step " .. step) end
end

-- Ranks draw other numbers, and have rank 0's after wrapping; without init_sync each its own. Some
-- parameters of a unit are on "meta" and others are not.
for _, sync in ipairs { true, false } do
  local model = on_meta(makers[1], 10 + rank)
  model[1].bias = nn.Parameter(ms.full(rank + 1, { 5 }))
  model[2].lin.weight = nn.Parameter(ms.full(rank + 1, { 5, 5 }))
  model = ms.fsdp(model, { wrap = { class = "Scaled" }, init_sync = sync })
  local state = expect.whole(model)
  local expected = build(makers[1], 10)
  if sync then
    expected[1].bias:requires_grad_(false):fill_(1)
    expected[2].lin.weight:requires_grad_(false):fill_(1)
    expect.same(state, expected:state(), "init_sync")
  end
  for _, piece in ipairs(model:pieces()) do
    if piece.name == "0.bias" and piece.count > 0 and not sync then
      assert(state["0.bias"][piece.first + 1]:item() == rank + 1, "init_sync = false")
    end
  end
end

-- Experts: each rank has its own, under other names.
if size > 1 then
  local own = ms.world():split { table.unpack((function()
    local list = {}
    for r = 0, size - 1 do list[r + 1] = { r } end
    return list
  end)()) }
  local Experts = nn.class "Experts"
  function Experts:init()
    self.router = nn.Linear(4, 4)
    self["expert" .. rank] = nn.Linear(4, 6 + rank)
  end
  function Experts:forward(x) return self["expert" .. rank](self.router(x)) end
  local function make() return nn.Sequential(nn.Linear(4, 4), Experts()) end
  local state = build(make, 8):state()
  local model = ms.fsdp(on_meta(make, 8), {
    wrap = { class = "Experts" },
    group_of = function(name) return name:find "expert" and own or nil end,
  })
  expect.same(expect.whole(model), state, "group_of")
end

-- Memory: the shards, one element after the end of each, and one unit.
for _, layout in ipairs { "flat", "rows" } do
  local width <const>, units <const> = 64, 6
  local function make()
    local list = {}
    for i = 1, units do list[i] = nn.Linear(width, width) end
    return nn.Sequential(table.unpack(list))
  end
  core.collect()
  local before = ms.memory().live
  local model = on_meta(make, 4)
  assert(ms.memory().live == before)
  ms.reset_peak()
  model = ms.fsdp(model, { wrap = { class = "Linear" }, layout = layout })
  local shards, whole = 0, 0
  for _, unit in ipairs(model:units()) do
    shards = shards + unit.shard_bytes + (size > 1 and 4 or 0)
    whole = math.max(whole, unit.bytes)
  end
  local peak = ms.memory().peak - before
  local most = shards + whole
  assert(peak <= most, ("%s: peak of %d bytes, at most %d"):format(layout, peak, most))
  assert(ms.memory().live - before <= shards + 4 * units)
end

-------------------------------------------------------------------------------------- ddp, one rank

expect.same(on_meta(makers[1], 3):materialize():state(), build(makers[1], 3):state(), "one rank")
do
  local model = ms.ddp(on_meta(makers[3], 10 + rank))
  expect.same(expect.whole(model), build(makers[3], 10):state(), "ddp")
  model(ms.zeros { 1, 4, dtype = "i64" }):sum():backward()
  local one = build(makers[1], 3)
  assert(one:materialize() == one)
end

------------------------------------------------------------------------------------------ bad input

local Computes = nn.class "Computes"
function Computes:init() self.table = nn.Parameter(ms.rand { 3 }:cumsum(1)) end
local Forgets = nn.class("Forgets", Computes)
function Forgets:reset() return self end

local function sequence(class)
  return on_meta(function() return nn.Sequential(nn.Linear(3, 3), class()) end, 1)
end
for _, wrap in ipairs { ms.fsdp, ms.ddp, function(model) model:materialize() end } do
  fails(function() wrap(sequence(Computes)) end, "nothing records how '1.table' on \"meta\" gets",
    "give Computes a method reset(self)")
  fails(function() wrap(sequence(Forgets)) end, "reset of Forgets did not write '1.table'")
end
fails(function() ms.optim.sgd(on_meta(makers[2], 1), { lr = 1 }) end, "is on \"meta\"",
  "materialize()")
if size > 1 then
  fails(function() ms.fsdp((rank == 0 and build or on_meta)(makers[2], 1)) end,
    "ranks have different models", "on meta")
end

-------------------------------------------------------------------------------------------- ignored

-- Ignored parameters and buffers are neither copied nor sharded, and optimizers step them whole.
do
  local function make()
    ms.seed(20 + rank)
    return nn.Sequential(nn.Linear(4, 4), Scaled(4), nn.Linear(4, 4))
  end
  for _, meta in ipairs { false, true } do
    local own = make():state()
    local model = meta and ms.device("meta", make) or make()
    model = ms.fsdp(model, { ignored = { "2%..*", "1.offset" }, wrap = { class = "Linear" } })
    local optimizer = ms.optim.sgd(model, { lr = 0.1 })
    for name, t in pairs(expect.whole(model)) do
      local is_own = name:find "^2%." ~= nil or name == "1.offset"
      assert(t:eq(own[name]):all():item() == (is_own or rank == 0), name)
    end
    for _, piece in ipairs(model:pieces()) do assert(not piece.name:find "^2%.") end
    assert(model[3].weight:dim() == 2 and #model[3].weight:full_shape() == 2)
    optimizer:overlap(model, "in_backward")
    local before = model[3].weight:detach():clone()
    model(ms.ones { 2, 4 } * (rank + 1)):square():sum():backward()
    local gradient = model[3].weight:grad():clone()
    optimizer:step()
    local wrong = (model[3].weight:detach() - (before - gradient * 0.1)):abs():max():item()
    -- A fused multiply-add rounds once, the two operators twice.
    local largest = gradient:abs():max():item()
    assert(largest > 0 and wrong <= 1e-7 * largest, "own gradient")
  end
  local one = function(options) return function() ms.fsdp(make(), options) end end
  fails(one { ignored = { "2.wieght" } }, "fsdp: ignored", "'2.wieght'")
  fails(one { ignored = { 3 } }, "fsdp: ignored[1]", "not a number")
  fails(one { ignored = { "[" } }, "fsdp: ignored[1]", "is no pattern")
end

print(("rank %d is done"):format(rank))
