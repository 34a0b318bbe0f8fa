-- What every rank of fsdp_experts_spec.lua runs: ranks that share some parameters with few others
-- (experts), against one model that has all experts; and what ranks must agree on when a model is
-- sharded.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local fails, models = expect.fails, expect.models
local rank, size = ms.rank(), ms.world_size()
local world = ms.world()

local WIDTH, ROWS, STEPS = 6, 4, 3

-- A residual layer whose expert is one of `own`; other experts are not there.
local Expert = ms.nn.class "Expert"
function Expert:init(number)
  ms.seed(10 + number)
  self.up, self.down = ms.nn.Linear(WIDTH, WIDTH + number), ms.nn.Linear(WIDTH + number, WIDTH)
end
function Expert:forward(x) return self.down(self.up(x):tanh()) end

local Net = ms.nn.class "Net"
function Net:init(own)
  ms.seed(1)
  self.base, self.norm = ms.nn.Linear(WIDTH, WIDTH), ms.nn.LayerNorm(WIDTH)
  ms.seed(2)
  self.head = ms.nn.Linear(WIDTH, 3)
  for _, number in ipairs(own) do self["expert" .. number] = Expert(number) end
end
function Net:forward(x, number)
  x = self.norm(self.base(x))
  return self.head(self["expert" .. number](x) + x)
end

local function input(step, r) return models.input(ROWS, WIDTH, step * 10 + r) end
local function loss_of(model, step, r, number)
  return model(input(step, r), number):square():mean()
end

-- The weights of a model with all experts that a rank's model has, too.
local function part_of(weights, own)
  local part = {}
  for name in pairs(own) do part[name] = weights[name] end
  return part
end

-- blocks: how many ranks share an expert.
local function expected_of(blocks, clip)
  local all = {}
  for number = 1, size // blocks do all[number] = number end
  local model, norms = Net(all), {}
  local optimizer = ms.optim.sgd(model, { lr = 0.2, momentum = 0.9 })
  for step = 1, STEPS do
    for r = 0, size - 1 do (loss_of(model, step, r, r // blocks + 1) / size):backward() end
    norms[step] = model:clip_grad_norm(clip):item()
    optimizer:step()
    optimizer:zero_grad()
  end
  return expect.whole(model), norms
end

local function train(model, number, clip, scale)
  local norms = {}
  local optimizer = ms.optim.sgd(model, { lr = 0.2, momentum = 0.9 })
  local scaler = scale and ms.optim.scaler { init_scale = 4 }
  for step = 1, STEPS do
    local loss = loss_of(model, step, rank, number)
    if scaler then loss = scaler:scale(loss) end
    loss:backward()
    norms[step] = models.finish(model, optimizer, { scaler = scaler, clip = clip })
  end
  return expect.whole(model), norms
end

local cases = {
  {}, { layout = "rows" }, { strategy = "shard_grad_op" }, { strategy = "no_shard" },
  { strategy = "hybrid_shard" }, { scale = true }, { find_unused = true },
  { wrap = { class = "Expert" } }, { wrap = { class = "Linear" }, layout = "rows" },
}
for _, blocks in ipairs(size == 4 and { 2, 1 } or { 1 }) do
  local experts = world:levels(blocks)
  local number = rank // blocks + 1
  local clip = 0.5
  local weights, norms = expected_of(blocks, clip)
  for i, case in ipairs(cases) do
    local function group_of(name) return name:find "expert" and experts or nil end
    local options = models.merged({ group_of = group_of }, case)
    options.scale = nil
    local model = models.fsdp(Net { number }, options)
    local own, own_norms = train(model, number, clip, case.scale)
    -- Sums over ranks are added in another order.
    expect.close(own, part_of(weights, own), 2e-6, ("case %d, blocks of %d"):format(i, blocks))
    local count = 0
    for _ in pairs(own) do count = count + 1 end
    assert(count == 10, "the shared parameters, and those of one expert")
    for step, norm in ipairs(own_norms) do
      assert(math.abs(norm - norms[step]) <= 2e-6 * norm, ("case %d: norm %g, not %g"):format(i,
        norm, norms[step]))
    end
    -- Handles are pieces of the expert's group.
    local held = 0
    for _, piece in ipairs(model:pieces()) do
      if piece.name:find "expert" then held = held + piece.count end
    end
    local elements = 2 * WIDTH * (WIDTH + number) + WIDTH + WIDTH + number
    assert(experts:all_reduce(ms.full(held, {}), "sum"):value():item() == elements)
  end
end

-- Ranks with unequal numbers of inputs: those without take part with zeros, in their expert's group
-- too. Rank r has r % 3 + 1 inputs.
for _, layout in ipairs { "flat", "rows" } do
  local function sgd(model) return ms.optim.sgd(model, { lr = 0.2, momentum = 0.9 }) end
  local blocks = size == 4 and 2 or 1
  local experts, all = world:levels(blocks), {}
  for number = 1, size // blocks do all[number] = number end
  local whole = Net(all)
  local reference = sgd(whole)
  for step = 1, math.min(size, 3) do
    reference:zero_grad()
    for r = 0, size - 1 do
      if step <= r % 3 + 1 then (loss_of(whole, step, r, r // blocks + 1) / size):backward() end
    end
    reference:step()
  end
  local number = rank // blocks + 1
  local model = ms.fsdp(Net { number }, {
    layout = layout, wrap = { class = "Expert" },
    group_of = function(name) return name:find "expert" and experts or nil end,
  })
  local optimizer = sgd(model)
  model:join({ divisor = "all" }, function()
    for step = 1, rank % 3 + 1 do
      loss_of(model, step, rank, number):backward()
      optimizer:step()
      optimizer:zero_grad()
    end
  end)
  local own = expect.whole(model)
  expect.close(own, part_of(whole:state(), own), 2e-6, "join, " .. layout)
end

-- What travels for experts travels between their ranks only, in the order of all gathers.
if size == 4 then
  local experts = world:levels(2)
  local model = ms.fsdp(Net { rank // 2 + 1 }, {
    wrap = { class = "Expert" },
    group_of = function(name) return name:find "expert" and experts or nil end,
  })
  local of_experts, group_of_hosts = 0, {}
  local function pass() loss_of(model, 1, rank, rank // 2 + 1):backward() end
  for _, record in ipairs(expect.records(pass)) do
    local hosts = record.label == "which parameters have a gradient"
    if hosts then
      group_of_hosts[record.group] = true
    elseif record.label:find "expert" then
      assert(record.group == experts:name(), record.op)
      of_experts = of_experts + 1
    else assert(record.group == world:name(), record.op) end
  end
  assert(of_experts == 3, "two gathers and a reduction: " .. of_experts)
  assert(group_of_hosts[experts:name()] and group_of_hosts[world:name()])
end

-- Names in precision are patterns where ranks have other experts: which parameters of experts are
-- kept is compared by their kinds.
if size == 4 then
  local experts, number = world:levels(2), rank // 2 + 1
  local function sharded(precision)
    return ms.fsdp(Net { number }, {
      wrap = { class = "Expert" }, precision = precision,
      group_of = function(name) return name:find "expert" and experts or nil end,
    })
  end
  local function bytes_of_expert(precision)
    local model = sharded(precision)
    local unit = model:units()[2]
    model:unwrap()
    return unit.bytes
  end
  local weights, biases = 2 * WIDTH * (WIDTH + number), WIDTH + WIDTH + number
  local function padded(n) return (n + 1) // 2 * 2 end
  assert(bytes_of_expert { param = "bf16", keep = { "expert.*bias" } }
    == 2 * weights + 4 * padded(biases))
  assert(bytes_of_expert { units = { ["expert%d"] = { param = "bf16", keep = { ".*bias" } } } }
    == 2 * weights + 4 * padded(biases))
  local model = sharded { units = { ["expert%d"] = { param = "bf16", output = "f32" } } }
  assert(model:units()[2].bytes == 2 * padded(weights + biases))
  local own, expected = train(model, number, 0.5), expected_of(2, 0.5)
  expect.close(own, part_of(expected, own), 2e-2, "bf16")
  fails(function()
    local keep = { rank < 2 and "expert.*bias" or "expert.*weight", "norm.*" }
    sharded { units = { ["expert%d"] = { param = "bf16", keep = { keep[1] } },
      [""] = { param = rank < 2 and "f16" or "bf16", keep = { keep[2] } } } }
  end, "ranks have different models", "precision param f16", "precision param bf16")
end

-- Groups that do not partition the ranks, or hold parameters of the same names.
if size == 4 then
  local pairs_of, alone = world:levels(2), world:levels(1)
  local uneven = world:split { { 0, 1, 2 }, { 3 } }
  local function sharded(own, group_of)
    return function() ms.fsdp(Net(own), { group_of = group_of }) end
  end
  local function all(group)
    return function(name) return name:find "expert" and group or nil end
  end
  fails(sharded({ 1 }, all(pairs_of)), "'expert1.down.weight' is a parameter of the ranks 0, 1",
    "names must differ")
  fails(sharded({ rank // 2 + 1 }, all(rank < 2 and pairs_of or uneven)), "overlap", "0, 1, 2")
  fails(sharded({ rank // 2 + 1 }, all(rank < 3 and pairs_of or nil)), "rank 3 no group")
  fails(sharded({ 2 * rank + 1, 2 * rank + 2 }, function(name)
    return name:find "up" and pairs_of or name:find "down" and alone or nil
  end), "overlap", ".weight' the ranks")
  local judges = { ms.hooks.clip { max_norm = 1, scope = "lagged" }, ms.hooks.nan_check() }
  for _, link in ipairs(judges) do
    fails(function()
      ms.fsdp(Net { rank // 2 + 1 }, { group_of = all(pairs_of), comm_hook = link })
    end, "judges all gradients", "clip_grad_norm")
  end
  fails(sharded({ 1 }, function() return 1 end), "' a number, not a group")
  fails(sharded({ 1 }, function() error "oh" end), "group_of('", "oh")
end

-- Groups of hybrid shards that are no grid.
if size == 4 then
  local rows, columns = world:levels(2)
  local crossed = world:split { { 0, 3 }, { 1, 2 } }
  local function hybrid(shard_group, replica_group)
    return function()
      ms.fsdp(Net { 1 }, {
        strategy = "hybrid_shard", shard_group = shard_group, replica_group = replica_group,
      })
    end
  end
  fails(hybrid(rows, rows), "shard_group 0, 1 and the replica_group 0, 1", "alone in common")
  fails(hybrid(rank < 2 and rows or crossed, columns), "shard_group: rank 2 gives the ranks 1, 2",
    "must not overlap")
  fails(hybrid(rows, rank % 2 == 0 and columns or crossed), "replica_group", "must not overlap")
  local turned = world:split { { 3, 0 }, { 2, 1 } }
  fails(hybrid(turned, world:split { { 0, 2 }, { 1, 3 } }), "replicas have the same shard")
  fails(hybrid(rows, nil), "together")
  fails(hybrid(rows, world), "(2 ranks) times replica_group (4)")
end

-- Ranks that have different models, or ask for different things, are told the first difference, on
-- every rank, before anything travels.
if size > 1 then
  local odd = rank == size - 1
  local function sharded(options, change)
    return function()
      local net = Net { 1 }
      if odd and change then change(net) end
      ms.fsdp(net, options)
    end
  end
  local silent, list = true, expect.records(function()
    fails(sharded({ layout = odd and "rows" or "flat" }), "option layout = flat on rank 0",
      "option layout = rows on rank " .. size - 1)
    fails(sharded({ strategy = odd and "shard_grad_op" or nil }), "strategy = full_shard on rank 0")
    fails(sharded({ max_in_flight = odd and 3 or nil }), "max_in_flight = nil on rank 0")
    fails(sharded({ comm_hook = odd and ms.hooks.bf16_compress() or nil }),
      "comm_hook = nil on rank 0", "cast bf16")
    fails(sharded({}, function(net) net.head = ms.nn.Linear(WIDTH, 4) end),
      "unit 0 \"root\": 'head.weight' [3, 6] f32, trained on rank 0",
      "'head.weight' [4, 6] f32, trained on rank " .. size - 1)
    fails(sharded({}, function(net) net.base.bias:requires_grad_(false) end),
      "'base.bias' [6] f32, trained on rank 0", "frozen on rank " .. size - 1)
    fails(sharded({ wrap = { names = { odd and "head" or "base" } } }),
      "'head.weight'", "'base.weight'", "have different models")
    fails(sharded({ wrap = odd and { class = "Linear" } or { names = { "base" } } }),
      "'head.weight'", "no further parameter")
  end)
  for _, record in ipairs(list) do silent = silent and record.channel ~= 1 end
  assert(silent)
end
print(("rank %d is done"):format(rank))
