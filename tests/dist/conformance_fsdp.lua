-- Run by every rank of conformance_fsdp_spec.lua: cases from PyTorch's own tests of sharded
-- training. A case is named after the file and what it tests. Values are compared with ddp's, with
-- sums made by hand, or with the model without shards.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local core = require "moonshard.core"
local case, equal, raises, models = expect.case, expect.equal, expect.fails, expect.models
local hooks, nn = ms.hooks, ms.nn
local world, rank, size = ms.world(), ms.rank(), ms.world_size()

io.stdout:setvbuf "line"                                    -- lines of several ranks stay whole

-------------------------------------------------------------------------------------------- helpers

local function input(step, width)
  return models.input(3, width or 6, 10 * (step or 1) + rank)
end

local function same_state(a, b, tolerance)
  for name, t in pairs(b) do equal(a[name]:detach(), t:detach(), name, tolerance) end
end

-- A unit: 7 x 6 and 6 x 7 numbers and biases divide by no number of ranks.
local Block = nn.class "Block"
function Block:init() self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6) end
function Block:forward(x) return x + self.down(self.up(x):gelu()) end

local function blocks(count, seed)
  ms.seed(seed or 1)
  local list = {}
  for i = 1, count or 3 do list[i] = Block() end
  list[#list + 1] = nn.Linear(6, 2)
  return nn.Sequential(table.unpack(list))
end

local function shard(inner, options)
  return models.fsdp(inner, { wrap = { class = "Block" } }, options)
end

-- Steps of SGD with momentum; pass(net, step) runs forward and backward. Returns the weights.
local function steps(net, pass, clip)
  local optimizer = ms.optim.sgd(net, { lr = 0.1, momentum = 0.9 })
  local norms = {}
  for step = 1, 3 do
    pass(net, step)
    norms[step] = clip and net:clip_grad_norm(clip[1], clip[2]):item()
    optimizer:step()
    optimizer:zero_grad()
  end
  return expect.whole(net), norms
end

local function plain_pass(net, step) net(input(step)):square():mean():backward() end

-- The collectives of f in the order of enqueueing: operation, label, and the size of the group.
local sizes = {}
local function calls(f)
  local list = {}
  for _, record in ipairs(expect.records(f)) do
    -- Hosts tell each other who has a gradient.
    if record.label ~= "which parameters have a gradient" then
      list[#list + 1] = {
        op = record.op, label = record.label, group = record.group, size = sizes[record.group],
        wire_bytes = record.wire_bytes,
      }
    end
  end
  return list
end

local function count(list, op, label)
  local found = 0
  for _, one in ipairs(list) do
    if one.op == op and (not label or one.label == label) then found = found + 1 end
  end
  return found
end

-- Marks what is gathered as old, as a step does.
local function touch(net)
  ms.no_grad(function() for _, p in ipairs(net:parameters()) do p:mul_(1) end end)
end

local strategies = { "full_shard", "shard_grad_op", "no_shard", "hybrid_shard" }

-- Two levels where there are four ranks.
local within, across = models.pairs_of_ranks()

--------------------------------------------------------------------------------------------- FSDP1

case("test_fsdp_core.py: parity with DDP", function()
  local expected = steps(ms.ddp(blocks()), plain_pass)
  for _, strategy in ipairs(strategies) do
    same_state(steps(shard(blocks(), { strategy = strategy }), plain_pass), expected, 1e-6)
  end
end)

case("test_fsdp_comm.py: communication of a pass", function()
  if size == 1 then return end
  for strategy, each in ms.sorted_pairs { full_shard = 2, shard_grad_op = 1 } do
    local net = shard(blocks(), { strategy = strategy })
    plain_pass(net, 1)
    touch(net)
    local list = calls(function() plain_pass(net, 1) end)
    for unit = 0, 2 do assert(count(list, "all_gather", tostring(unit)) == each) end
    assert(count(list, "all_gather", "root") == 1 and count(list, "reduce_scatter") == 4)
    assert(#list == 3 * each + 1 + 4)
    touch(net)
    -- Nothing but gathers; and where units stay whole, nothing at all the second time.
    local silent = calls(function() net:no_sync(function() plain_pass(net, 1) end) end)
    assert(#silent == count(silent, "all_gather") and #silent == 3 * each + 1)
    local again = #calls(function() net:no_sync(function() plain_pass(net, 1) end) end)
    assert(again == (strategy == "full_shard" and 6 or 0), again)
  end
end)

case("test_fsdp_hybrid_shard.py: groups and their collectives", function()
  if not within then return end
  local net = shard(blocks(), { strategy = "hybrid_shard" })
  plain_pass(net, 1)
  touch(net)
  sizes = { [within:name()] = 2, [across:name()] = 2, world = 4 }
  local list = calls(function() plain_pass(net, 1) end)
  for _, one in ipairs(list) do
    local group = one.op == "all_reduce" and across or within
    assert(one.group == group:name(), one.op .. " over " .. one.group)
    assert(one.size == 2)
  end
  assert(count(list, "reduce_scatter") == 4 and count(list, "all_reduce") == 4)
  assert(count(list, "all_gather") == 7)
  touch(net)
  local silent = calls(function() net:no_sync(function() plain_pass(net, 1) end) end)
  assert(#silent == 7 and count(silent, "all_gather") == 7)
  raises(function() shard(blocks(), { strategy = "hybrid_shard", shard_group = within }) end,
    "given together")
  raises(function() shard(blocks(), { shard_group = within, replica_group = across }) end,
    "belong to hybrid_shard")
end)

case("test_fsdp_backward_prefetch.py: order of gathers and reductions", function()
  if size == 1 then return end
  for _, prefetch in ipairs { "none", "backward_pre" } do
    local net = shard(blocks(), { prefetch = prefetch })
    plain_pass(net, 1)
    local loss = net(input(1)):square():mean()
    local at, list = {}, calls(function() loss:backward() end)
    for i, one in ipairs(list) do at[one.op .. " " .. one.label:match "^%w+"] = i end
    assert(#list == 3 + 4)
    -- The next unit is gathered before this one's gradients are computed, or after their reduction.
    for unit = 2, 1, -1 do
      local gather, reduction = at["all_gather " .. unit - 1], at["reduce_scatter " .. unit]
      assert((gather < reduction) == (prefetch == "backward_pre"), prefetch)
    end
  end
end)

case("test_fsdp_comm_hooks.py: default_communication_hook_behavior", function()
  -- The gradient of each weight is rank + 1, and its average is exact.
  local inner = nn.Linear(5, 1, { bias = false })
  local net = ms.fsdp(inner)
  net(ms.full(rank + 1, { 1, 5 })):sum():backward()
  local g = inner.weight:grad()
  if g and g:numel() > 0 then equal(g, ms.full((size + 1) / 2, g:shape())) end
end)

case("test_fsdp_comm_hooks.py: fp16_hook and bf16_hook", function()
  for _, name in ipairs { "fp16_compress", "bf16_compress" } do
    local expected = steps(ms.ddp(blocks(), { comm_hook = hooks[name]() }), plain_pass)
    for _, strategy in ipairs { "full_shard", "shard_grad_op" } do
      local own = shard(blocks(), { strategy = strategy, comm_hook = hooks[name]() })
      same_state(steps(own, plain_pass), expected, 2e-3)
    end
  end
end)

case("test_fsdp_grad_acc.py: with and without no_sync", function()
  local function two(net, step)
    net:accumulate(2, function(i) net(input(step + i)):square():mean():backward() end)
  end
  local function by_hand(net, step)
    net:no_sync(function() net(input(step + 1)):square():mean():backward() end)
    net(input(step + 2)):square():mean():backward()
  end
  local expected = steps(ms.ddp(blocks()), two)
  for _, strategy in ipairs(strategies) do
    for _, accumulate in ipairs { "local", "shard" } do
      local net = shard(blocks(), { strategy = strategy, accumulate = accumulate })
      same_state(steps(net, two), expected, 1e-6)
    end
    same_state(steps(shard(blocks(), { strategy = strategy }), by_hand), expected, 1e-6)
  end
end)

case("test_fsdp_clip_grad_norm.py: norms 1, 2 and inf", function()
  for _, p in ipairs { 1, 2, math.huge } do
    local expected, norms = steps(ms.ddp(blocks()), plain_pass, { 0.05, p })
    for _, strategy in ipairs(strategies) do
      local own, found = steps(shard(blocks(), { strategy = strategy }), plain_pass, { 0.05, p })
      same_state(own, expected, 1e-5)
      for i, norm in ipairs(norms) do
        assert(norm > 0.05 and math.abs(found[i] - norm) < 1e-5 * norm, strategy)
      end
    end
  end
end)

case("test_fsdp_summon_full_params.py: writeback, and reading in evaluation", function()
  local inner = blocks()
  local before = {}
  for name, t in pairs(inner:state()) do before[name] = t:detach():clone() end
  local net = shard(inner)
  net:summon({ writeback = false }, function(parameters)
    for _, p in ipairs(parameters) do
      assert(core.json_encode(p:shape()) == core.json_encode(p:full_shape()))
      p:fill_(9)
    end
  end)
  same_state(expect.whole(net), before)
  net:summon({ names = { "0.up.bias" } }, function(parameters)
    assert(#parameters == 1)
    parameters[1]:fill_(3)
  end)
  equal(expect.whole(net)["0.up.bias"], ms.full(3, { 7 }))
  raises(function() net:summon({ names = { "0.up.bais" } }, function() end) end, "0.up.bais")
  plain_pass(net, 1)
end)

case("test_fsdp_use_orig_params.py: parameter groups and nil gradients", function()
  local function run(wrap)
    local inner = blocks()
    local net = wrap(inner)
    local biases = net:parameters(function(p) return p:dim() < 2 end)
    local matrices = net:parameters(function(p) return p:dim() >= 2 end)
    assert(#biases == 7 and #matrices == 7)
    local optimizer = ms.optim.adamw({
      { params = matrices, weight_decay = 0.5 }, { params = biases, weight_decay = 0, lr = 1e-3 },
    }, { lr = 1e-2 })
    for step = 1, 2 do
      plain_pass(net, step)
      optimizer:step()
      optimizer:zero_grad()
      for _, p in ipairs(net:parameters()) do
        assert(not p:grad() or p:grad():abs():sum():item() == 0)
      end
    end
    return expect.whole(net)
  end
  same_state(run(shard), run(ms.ddp), 1e-5)
end)

case("test_fsdp_ignored_modules.py: ignored parameters stay as they are", function()
  local inner = blocks()
  local net = shard(inner, { ignored = { "3%..*" } })
  local head = inner[4]
  assert(head.weight:dim() == 2 and #net:units()[1].parameters == 0 or size == 1)
  for _, piece in ipairs(net:pieces()) do assert(not piece.name:find "^3") end
  -- Their gradients are this rank's own.
  plain_pass(net, 1)
  assert(head.weight:grad():numel() == 12)
end)

case("test_wrap.py: policies", function()
  local function names(wrap)
    local list = {}
    for i, unit in ipairs(ms.fsdp(blocks(), { wrap = wrap }):units()) do list[i] = unit.name end
    return table.concat(list, " ")
  end
  assert(names { class = "Block" } == " 0 1 2")
  assert(names { class = { "Block", "Linear" }, names = {} }:find("0.up", 1, true))
  assert(names { names = { "1", "2%.up" } } == " 1 2.up")
  assert(names { min_elements = 43 }:find("0.up", 1, true))
  assert(names(function(object, name) return name == "2" and #object:parameters() == 4 end) == " 2")
  raises(function() names { class = "Blok" } end, "matches no module", "Block")
end)

case("test_fsdp_traversal.py: roots in order", function()
  local one, two = shard(blocks()), shard(blocks(2))
  local both = nn.Sequential(one.module, two.module)
  local found = ms.fsdp.roots(both)
  assert(#found == 2 and rawequal(found[1], one) and rawequal(found[2], two))
  assert(#ms.fsdp.roots(blocks()) == 0)
end)

case("test_fsdp_misc.py: all ranks begin with rank 0's values", function()
  local net = shard(blocks(3, 100 + rank))
  local first = {}
  for name, t in pairs(blocks(3, 100):state()) do first[name] = t end
  same_state(expect.whole(net), first)
  raises(function() shard(net.module) end, "already")
  raises(function() ms.ddp(net) end, "fsdp")
end)

case("test_fsdp_input.py: nested inputs and outputs", function()
  local Nested = nn.class "Nested"
  function Nested:init() self.lin = nn.Linear(6, 6) end
  function Nested:forward(x)
    return { first = self.lin(x.in_a), more = { self.lin(x.list[1]):relu() } }
  end
  local function run(wrap)
    ms.seed(2)
    local net = wrap(nn.Sequential(Nested()))
    return steps(net, function(_, step)
      local y = net({ in_a = input(step), list = { input(step + 1) } });
      (y.first:square():sum() + y.more[1]:sum()):backward()
    end)
  end
  same_state(run(function(m) return ms.fsdp(m, { wrap = { class = "Nested" } }) end), run(ms.ddp),
    1e-6)
end)

case("test_fsdp_uneven.py and vector V3: pieces where numbers do not divide", function()
  -- Numbers, and what four ranks have of them.
  local known = {
    [10] = { 3, 3, 3, 1 }, [5] = { 2, 2, 1, 0 }, [3] = { 1, 1, 1, 0 }, [8] = { 2, 2, 2, 2 },
  }
  for numbers, pieces in ms.sorted_pairs(known) do
    local inner = nn.Linear(numbers, 1, { bias = false })
    local net = ms.fsdp(inner)
    local chunk = (numbers + size - 1) // size
    assert(net:units()[1].shard_bytes == 4 * chunk and net:units()[1].bytes == 4 * chunk * size)
    if size == 4 then assert(net:pieces()[1].count == pieces[rank + 1]) end
    net(ms.full(rank, { 1, numbers })):sum():backward()
    local g = inner.weight:grad()
    if g:numel() > 0 then equal(g, ms.full((size - 1) / 2, g:shape())) end
  end
end)

case("test_fsdp_multiple_forward.py: two forwards before one backward", function()
  local function twice(net, step)
    (net(input(step)):square():mean() + net(input(step + 5)):mean()):backward()
  end
  same_state(steps(shard(blocks()), twice), steps(ms.ddp(blocks()), twice), 1e-6)
end)

case("test_fsdp_multiple_wrapping.py: a second wrap is refused", function()
  local inner = blocks()
  shard(inner)
  raises(function() shard(inner) end, "wrap the whole model once")
end)

case("test_fsdp_freezing_weights.py and test_fsdp_fine_tune.py", function()
  local function frozen(inner)
    for _, item in ipairs(inner:named_parameters()) do
      if item.name:find "^[01]" then item.parameter:requires_grad_(false) end
    end
    return inner
  end
  local function trained(net)
    return net:parameters(function(p) return p:requires_grad() end)
  end
  local function run(net)
    local optimizer = ms.optim.sgd(trained(net), { lr = 0.1 })
    for step = 1, 3 do
      plain_pass(net, step)
      optimizer:step()
      optimizer:zero_grad()
    end
    return expect.whole(net)
  end
  local expected = run(ms.ddp(frozen(blocks())))
  for _, strategy in ipairs(strategies) do
    local net = shard(frozen(blocks()), { strategy = strategy })
    same_state(run(net), expected, 1e-6)
    if strategy == "full_shard" and size > 1 then
      for _, unit in ipairs(net:units()) do assert(not unit.gathered, unit.name) end
    end
  end
end)

case("test_fsdp_checkpoint.py: recompute inside nested units", function()
  local Outer = nn.class "Outer"
  function Outer:init() self.first, self.second = Block(), Block() end
  function Outer:forward(x)
    return self.second(ms.recompute(function(y) return self.first(y) end, x))
  end
  local function model(again)
    ms.seed(3)
    local outer = Outer()
    local Whole = nn.class "Whole"
    function Whole:init() self.outer, self.last = outer, nn.Linear(6, 2) end
    function Whole:forward(x)
      return self.last(again and ms.recompute(function(y) return self.outer(y) end, x)
        or self.outer(x))
    end
    return Whole()
  end
  local expected = steps(ms.ddp(model(false)), plain_pass)
  for _, strategy in ipairs(strategies) do
    for _, again in ipairs { false, true } do
      local o = { strategy = strategy, wrap = { class = { "Outer", "Block" } } }
      same_state(steps(models.fsdp(model(again), o), plain_pass), expected, 1e-6)
    end
  end
end)

case("test_fsdp_exec_order.py: another order is right where all ranks have it", function()
  local function through(inner)
    function inner:forward(x, step) -- luacheck: ignore self
      for _, i in ipairs(step % 2 == 0 and { 1, 2, 3, 4 } or { 3, 1, 2, 4 }) do x = inner[i](x) end
      return x
    end
    return inner
  end
  local function ordered(net, step) net(input(step), step):square():mean():backward() end
  same_state(steps(shard(through(blocks())), ordered), steps(ms.ddp(through(blocks())), ordered),
    1e-6)
end)

--------------------------------------------------------------------------------------------- FSDP2

case("test_fully_shard_comm.py: unshard and reshard by hand", function()
  local net = shard(blocks())
  for index = 0, 3 do net:unshard(index) end
  for _, unit in ipairs(net:units()) do assert(unit.gathered) end
  local list = calls(function() ms.no_grad(function() net(input(1)) end) end)
  assert(count(list, "all_gather") == 0)
  for index = 0, 3 do net:reshard(index) end
  for _, unit in ipairs(net:units()) do assert(not unit.gathered or size == 1) end
end)

case("test_fully_shard_comm.py: set_reshard_after_forward and after_backward", function()
  if size == 1 then return end
  local net = shard(blocks())
  net:set_reshard { forward = false, units = { 1, 2 } }
  plain_pass(net, 1)
  touch(net)
  local list = calls(function() plain_pass(net, 1) end)
  assert(count(list, "all_gather", "0") == 1 and count(list, "all_gather", "1") == 1)
  assert(count(list, "all_gather", "2") == 2)
  raises(function() net:set_reshard { forward = false, units = { 9 } } end, "there is no unit 9")
end)

case("test_fully_shard_comm.py: divide factor", function()
  local function gradient(factor)
    local inner = nn.Linear(4, 1, { bias = false })
    local net = ms.fsdp(inner, { divide_factor = factor })
    net(ms.full(rank + 1, { 1, 4 })):sum():backward()
    return inner.weight:grad()
  end
  local sum = size * (size + 1) / 2
  for _, factor in ipairs { 2, 3, 5 } do
    local g = gradient(factor)
    if g:numel() > 0 then equal(g, ms.full(sum / factor, g:shape()), "factor", 1e-6) end
  end
end)

case("test_fully_shard_training.py: a method beside forward", function()
  local inner = blocks()
  function inner:score(x) return self(x):sum(2) end
  function inner:unwrapped(x) return x end
  local net = shard(inner)
  net:forward_method "score"
  net:score(input(1)):sum():backward()
  for _, p in ipairs(net:parameters()) do assert(p:grad() and p:grad():numel() == p:numel()) end
  raises(function() net:forward_method "scroe" end, "has no method 'scroe'")
end)

case("test_fully_shard_training.py: world size 1", function()
  local parts = {}
  for r = 0, size - 1 do parts[r + 1] = { r } end
  local alone = world:split(parts)
  local net = shard(blocks(), { group = alone })
  local list = calls(function()
    same_state(steps(net, plain_pass), (steps(blocks(), plain_pass)))
  end)
  for _, one in ipairs(list) do assert(one.wire_bytes == 0) end
end)

case("test_fully_shard_autograd.py: unused outputs, and inputs that need gradients", function()
  local Two = nn.class "Two"
  function Two:init() self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6) end
  function Two:forward(x) return self.a(x), self.b(x) end
  local function run(wrap)
    ms.seed(4)
    local net = wrap(nn.Sequential(Two()))
    local x = input(1):requires_grad_()
    local used = net(x)
    used:square():sum():backward()
    return x:grad(), net
  end
  local expected = run(function(m) return m end)
  local own, net = run(function(m) return ms.fsdp(m, { wrap = { class = "Two" } }) end)
  equal(own, expected, "input", 1e-6)
  for _, p in ipairs(net:parameters()) do
    local g = p:grad()
    if p:name():find "b%." and g and g:numel() > 0 then assert(g:abs():sum():item() == 0) end
  end
end)

case("test_fully_shard_grad_scaler.py: overflow on one rank skips the step on all", function()
  local net = shard(blocks())
  local before = expect.whole(net)
  local optimizer, scaler = ms.optim.sgd(net, { lr = 0.1 }), ms.optim.scaler { init_scale = 1024 }
  for step = 1, 2 do
    local loss = net(input(step)):square():mean()
    if step == 1 and rank == size - 1 then loss = loss * math.huge end
    scaler:scale(loss):backward()
    scaler:step(optimizer)
    optimizer:zero_grad()
    if step == 1 then same_state(expect.whole(net), before) end
  end
  local moved = 0
  for name, t in pairs(expect.whole(net)) do
    moved = moved + (t - before[name]):abs():sum():item()
  end
  assert(moved > 0 and moved < math.huge)
end)

case("test_fully_shard_mixed_precision.py: autocast around a sharded model", function()
  local function pass(net, step)
    ms.autocast("bf16", function() return net(input(step)):to("f32"):square():mean() end):backward()
  end
  same_state(steps(shard(blocks()), pass), steps(ms.ddp(blocks()), pass), 1e-6)
end)

case("test_fully_shard_state.py: evaluation between a forward and its backward's step", function()
  local function pass(net, step)
    local loss = net(input(step)):square():mean()
    net:eval()
    ms.no_grad(function() net(input(50)) end)
    net:train()
    loss:backward()
    ms.no_grad(function() net(input(51)) end)
  end
  same_state(steps(shard(blocks()), pass), steps(ms.ddp(blocks()), plain_pass), 1e-6)
end)

case("test_fully_shard_training.py: generation between steps, on all ranks", function()
  ms.seed(5)
  local gpt = nn.gpt2 { vocab = 17, context = 8, layers = 2, width = 12, heads = 2 }
  local ids = ms.randint { 4, low = 0, high = 17, seed = 3, per_rank = false }
  local expected = gpt:generate(ids, { count = 6, temperature = 0 })
  local net = ms.fsdp(gpt)
  equal(net:generate(ids, { count = 6, temperature = 0 }):to "f32", expected:to "f32")
  local x = ids:view(1, 4)
  net(x):cross_entropy(x):backward()
  equal(net:generate(ids, { count = 6, temperature = 0 }):to "f32", expected:to "f32")
  assert(net:is_training())
end)
