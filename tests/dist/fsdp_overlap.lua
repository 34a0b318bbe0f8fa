-- What every rank of fsdp_overlap_spec.lua runs: optimizers that step in backward or late, under
-- all strategies, against the plain loop; links that need all gradients of a pass; and statistics
-- against the ledger. how=...: what is refused.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local fails, difference, models = expect.fails, expect.difference, expect.models
local hooks, nn, optim = ms.hooks, ms.nn, ms.optim
local options = ms.config { how = "agree" }
local rank, size = ms.rank(), ms.world_size()

local shards = models.pairs_of_ranks()

-- Units "first", "seldom", "mid", "never"; the root has the rest. One bias is frozen.
local Net = nn.class "Net"
function Net:init()
  ms.seed(1)
  self.first, self.seldom, self.mid = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16)
  self.never, self.last = nn.Linear(3, 3), nn.Linear(16, 5)
  self.mid.bias:requires_grad_(false)
end
-- also: "seldom" is used; "unread": it is computed, and the loss does not depend on it;
-- "recomputed": it is not used, and backward computes "mid" again.
function Net:forward(x, also)
  x = self.first(x):gelu()
  if also == "recomputed" then
    return self.last(ms.recompute(function(h) return self.mid(h):gelu() end, x))
  elseif also then
    local y = self.seldom(x):tanh()
    if also ~= "unread" then x = x + y end
  end
  return self.last(self.mid(x):gelu())
end

local wrap = { names = { "first", "seldom", "mid", "never" } }
local function sharded(model, strategy, more)
  return models.fsdp(model, { strategy = strategy, wrap = wrap }, more)
end

local function input(step, i) return ms.randn { 4, 8, seed = 1000 * rank + 10 * step + i } end

-- Ways to use units of which backward comes to some in another order, or again.
local orders = { false, "recomputed", "unread", true }

-- The weights after some steps. prepare(model) gives the wrapped model, and the optimizer unless no
-- step() is to be called. how: micro, clip; uneven: ranks use different units ("in order": and
-- in different orders); blow: in this step the first loss is infinite; skip: no optimizer step then
local function train(prepare, how)
  local model = Net()
  local net, opt = prepare(model)
  how = how or {}
  for step in ms.steps(expect.full and 6 or 4) do
    net:accumulate(how.micro or 1, function(i)
      local turn = step + i + (how.uneven and rank or 0)
      local also = turn % 2 == 0
      if how.uneven == "in order" then also = orders[turn % 4 + 1] end
      local loss = net(input(step, i), also):square():mean()
      if how.blow == step and i == 1 then loss = loss * math.huge end
      loss:backward()
    end)
    if how.clip then net:clip_grad_norm(how.clip) end
    if how.skip == step then opt:zero_grad() elseif opt then opt:step() end
  end
  return expect.whole(net)
end

--------------------------------------------------------------------------------- moments of steps

local kinds = {
  sgd = function(params) return optim.sgd(params, { lr = 0.05, momentum = 0.9 }) end,
  adamw = function(params) return optim.adamw(params, { lr = 0.05, weight_decay = 0.1 }) end,
}

local moments = { "on_reduced", "before_next_use", "after_backward" }
local planned = 0
local mixed = ms.overlap { name = "mixed", plan = function(view)
  local plan = {}
  planned = planned + 1
  assert(view.backward_ms > 0 and #view.buckets >= 3)
  for i, b in ipairs(view.buckets) do
    plan[i] = { bucket = b.index, step = moments[(b.index + view.step) % 3 + 1] }
  end
  return plan
end }

-- The ways to step: each gives prepare(model).
local function ways(kind, strategy, more)
  local list = { mixed = mixed }
  for _, name in ipairs { "classic", "in_backward", "deferred", "early_where_hidden" } do
    list[name] = name
  end
  for name, policy in pairs(list) do
    list[name] = function(model)
      local net = sharded(model, strategy, more)
      local opt = kinds[kind](net)
      opt:overlap(net, policy)
      return net, opt
    end
  end
  for name, steps in pairs { linked = true, linked_without_step = false } do
    list[name] = function(model)
      local opt, o = kinds[kind](model), models.merged(more)
      o.comm_hook = hooks.chain { hooks.then_optimizer { optimizer = opt }, o.comm_hook }
      return sharded(model, strategy, o), steps and opt or nil
    end
  end
  function list.own(model)
    local net = sharded(model, strategy, more)
    optim.in_backward(kinds[kind], net:parameters(function(p) return p:requires_grad() end))
    return net
  end
  return list
end

local function plain(kind, strategy, more)
  return function(model)
    local net = sharded(model, strategy, more)
    return net, kinds[kind](net)
  end
end

-- Of each call some ways, or in long ranges all.
local agreed = 0
local function agree(kind, strategy, more, how)
  local want, number = train(plain(kind, strategy, more), how), 0
  agreed = agreed + 1
  for name, prepare in ms.sorted_pairs(ways(kind, strategy, more)) do
    number = number + 1
    if expect.takes(agreed + number, 5) then
      local d = difference(train(prepare, how), want)
      assert(d == 0, ("%s, %s, %s, %s: weights differ from the plain loop's by %g")
        :format(name, kind, strategy, more and more.accumulate, d))
    end
  end
end

local strategies = size == 4 and { "full_shard", "hybrid_shard" }
  or { "full_shard", "shard_grad_op", "no_shard" }
if options.how == "agree" then
  agree("adamw", "full_shard", { find_unused = true }, { uneven = true })
  agree("sgd", strategies[2], { find_unused = true }, { uneven = true, micro = 2 })
  agree("adamw", "full_shard", { layout = "rows" }, { micro = 2 })
  for i, strategy in ipairs(strategies) do
    agree(i % 2 == 0 and "sgd" or "adamw", strategy)
    agree(i % 2 == 0 and "adamw" or "sgd", strategy, { accumulate = "shard" }, { micro = 2 })
    agree("adamw", strategy, { accumulate = "local" }, { micro = 2 })
  end
  assert(planned >= (expect.full and 3 or 1) * #strategies)
end

-- Gradients that stay after the step add up, as with step { keep_grads = true }.
if options.how == "agree" then
  local function run(own)
    local net = sharded(Net(), "full_shard")
    local trained = net:parameters(function(p) return p:requires_grad() end)
    local opt = not own and optim.sgd(trained, { lr = 0.05 })
    if own then optim.in_backward(optim.sgd, trained, { lr = 0.05, keep_grads = true }) end
    for step in ms.steps(4) do
      net(input(step, 1), true):square():mean():backward()
      if opt then opt:step { keep_grads = true } end
    end
    return expect.whole(net)
  end
  assert(difference(run(true), run(false)) == 0, "keep_grads: other weights than the plain loop's")
end

-- Parameters of fewer ranks: each pair of ranks has an expert of its own.
if shards and options.how == "agree" then
  local Experts = nn.class "Experts"
  function Experts:init()
    ms.seed(1)
    self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 5)
    self["expert" .. rank // 2] = nn.Linear(8, 8)
  end
  function Experts:forward(x)
    return self.last(self["expert" .. rank // 2](self.first(x):gelu()):gelu())
  end
  local function run(policy)
    local model = Experts()
    local net = ms.fsdp(model, { wrap = { class = "Linear" }, group_of = function(name)
      return name:match "^expert" and shards or nil
    end })
    local opt = policy ~= "own" and kinds.adamw(net)
    if not opt then optim.in_backward(kinds.adamw, net:parameters())
    elseif policy then opt:overlap(net, policy) end
    for step in ms.steps(5) do
      net(input(step, 1)):square():mean():backward()
      if opt then opt:step() end
    end
    return expect.whole(net)
  end
  local want = run()
  for _, policy in ipairs { "in_backward", "deferred", "early_where_hidden", mixed, "own" } do
    assert(difference(run(policy), want) == 0, "experts: other weights than the plain loop's")
  end
end

-- Steps are taken while backward runs, bucket by bucket, and in the last pass of accumulate only.
for _, also in ipairs(options.how == "agree" and { false, "recomputed" } or {}) do
  local early = {}
  local model = Net()
  local opt = kinds.sgd(model)
  local net = sharded(model, "full_shard", { comm_hook = hooks.chain {
    hooks.then_optimizer { optimizer = opt },
    function(bucket, next)
      local count = 0
      for _, p in ipairs(opt.order) do if opt.slots[p].early then count = count + 1 end end
      early[#early + 1] = count
      return next(bucket)
    end,
  } })
  net:accumulate(2, function(i) net(input(1, i), also):square():mean():backward() end)
  assert(table.concat(early, " ") == "0 0 0 0 2 3", table.concat(early, " "))
end

----------------------------------------------------------------------------- links of a whole pass

-- 1e-5: sums of squares in another order, at most six steps.
local function near(what, prepare, how, want)
  expect.close(train(prepare, how), want, 1e-5, what)
end

local function with_hook(kind, strategy, hook, more)
  return plain(kind, strategy, models.merged({ comm_hook = hook }, more))
end

-- A chain of native links, and one that runs in Lua: in turns, or in long ranges both.
local turns = 0
local function both(link)
  turns = turns + 1
  local in_lua = hooks.chain { link(), function(bucket, next) return next(bucket) end }
  return expect.full and { link(), in_lua } or { turns % 2 == 0 and link() or in_lua }
end

if options.how == "agree" then
  local function clip(scope)
    return function() return hooks.clip { max_norm = 0.05, scope = scope } end
  end
  local function lagged_ddp(model)
    local net = ms.ddp(model, { find_unused = true, comm_hook = clip "lagged" () })
    return net, kinds.sgd(model)
  end
  local lagged, clipped = train(lagged_ddp), train(plain("sgd", "full_shard"), { clip = 0.05 })
  assert(difference(clipped, train(plain("sgd", "full_shard"))) > 1e-3, "nothing was clipped")
  for number, strategy in ipairs(strategies) do
    for _, hook in ipairs(both(clip "global")) do
      near("clip, " .. strategy, with_hook("sgd", strategy, hook), nil, clipped)
    end
    for _, hook in ipairs(both(clip "lagged")) do
      near("lagged, " .. strategy, with_hook("sgd", strategy, hook), nil, lagged)
    end
    for _, hook in ipairs(both(hooks.nan_check)) do
      local got = train(with_hook("adamw", strategy, hook), { blow = 2 })
      assert(difference(got, train(plain("adamw", strategy), { skip = 2 })) == 0, "nan_check")
    end
    for place, accumulate in ipairs { "shard", "local" } do
      -- The pass with the bad gradients is not the last one.
      local more = { accumulate = accumulate }
      if expect.takes(number + place, 2) then
        local got = train(with_hook("sgd", strategy, hooks.nan_check(), more),
          { blow = 2, micro = 2 })
        assert(difference(got, train(plain("sgd", strategy, more), { skip = 2, micro = 2 })) == 0,
          "nan_check, " .. accumulate)
      end
    end
  end

  -- A unit that ranks come to at different times is clipped with all its gradients.
  local different = { uneven = "in order", clip = 0.05 }
  for _, strategy in ipairs { "full_shard", "no_shard" } do
    local want = train(plain("sgd", strategy, { find_unused = true }), different)
    for _, hook in ipairs(both(clip "global")) do
      near("clip, ranks use different units", with_hook("sgd", strategy, hook,
        { find_unused = true }), { uneven = "in order" }, want)
    end
  end

  -- A link sees the order of reductions, and which is the last, also where units stay unused.
  local seen = {}
  local net = sharded(Net(), "full_shard", { comm_hook = function(bucket, next)
    seen[#seen + 1] = bucket:index() .. (bucket:is_last() and "!" or "")
    return next(bucket)
  end })
  net(input(1, 1)):sum():backward()
  net(input(1, 1), true):sum():backward()
  net(input(1, 1), "unread"):sum():backward()
  assert(table.concat(seen, " ") == "0 1 2! 0 1 2 3! 0 1 2!", table.concat(seen, " "))
  seen = {}
  net = sharded(Net(), "full_shard", { find_unused = true, comm_hook = function(bucket, next)
    seen[#seen + 1] = bucket:index() .. (bucket:is_last() and "!" or "")
    return next(bucket)
  end })
  net(input(1, 1), rank == 0):sum():backward()
  net(input(1, 1)):sum():backward()
  net(input(1, 1), rank == size - 1):sum():backward()
  assert(table.concat(seen, " ") == "0 1 2 3! 0 1 2! 0 1 2 3!", table.concat(seen, " "))

  -- Clipping the gradients of one pass of several is refused.
  fails(function()
    sharded(Net(), "full_shard", { comm_hook = clip "global" () }):accumulate(2, function() end)
  end, "accumulate: the model's chain clips (clip)", "accumulate = 'local'")
  near("clip of two passes", with_hook("sgd", "full_shard", clip "global" (),
    { accumulate = "local" }), { micro = 2 },
    train(plain("sgd", "full_shard", { accumulate = "local" }), { micro = 2, clip = 0.05 }))
end

---------------------------------------------------------------------------------------- statistics

-- What stats says of a pass, and what the ledger has.
local function check_counts(strategy, more, expected)
  local net = sharded(Net(), strategy, more)
  local opt = kinds.sgd(net)
  local stats
  for step in ms.steps(3) do
    local calls, payload, wire, reductions = {}, 0, 0, 0
    for _, record in ipairs(expect.records(function()
      net(input(step, 1), expected.also):square():mean():backward()
      opt:step()
    end)) do
      calls[record.op] = (calls[record.op] or 0) + 1
      if record.channel == 1 then
        reductions, payload = reductions + 1, payload + record.payload_bytes
        wire = wire + record.wire_bytes
      end
    end
    ms.synchronize()
    if step > 0 then
      stats = net:stats()
      assert(stats.step == step - 1 and stats.iteration == step, stats.step)
      local link = stats.links[1]
      assert(#stats.links == 1 and link.name == "reduce" and link.calls == expected.units)
      assert(reductions == expected.units)
      assert(stats.payload_bytes == payload and link.payload_bytes == payload)
      assert(stats.wire_bytes == wire and link.wire_bytes == wire)
      for op, count in pairs(calls) do assert(stats.collectives[op] == count, op) end
      for op, count in pairs(stats.collectives) do assert(calls[op] == count, op) end
      for _, name in ipairs { "hits", "misses", "wasted_bytes" } do
        assert(stats.prefetch[name] == (size > 1 and expected[name] or 0),
          ("%s: %s is %d"):format(strategy, name, stats.prefetch[name]))
      end
    end
  end
  assert(stats.forward_ms > 0 and stats.backward_ms > 0 and stats.reduce_ms > 0)
  assert(stats.step_ms > 0 and stats.exposed_ms >= 0 and stats.peak_bytes == ms.memory().peak)
  assert((stats.gather_ms > 0) == (expected.gathers == true and size > 1))
  assert(stats.exposed_gather_ms >= 0 and stats.prefetch.replans == 0)
  assert(#stats.buckets == 5 and stats.options.strategy == strategy)
end

if options.how == "agree" then
  -- The bytes of unit "seldom": 16 x 17 numbers, padded.
  local seldom = (272 + size - 1) // size * size * 4
  check_counts("full_shard", nil, { units = 3, hits = 2, gathers = true })
  check_counts("full_shard", { prefetch = "none" }, { units = 3, misses = 2, gathers = true })
  check_counts("full_shard", nil, { also = true, units = 4, hits = 3, gathers = true })
  check_counts("full_shard", nil,
    { also = "unread", units = 3, hits = 1, misses = 1, wasted_bytes = seldom, gathers = true })
  check_counts("full_shard", nil, { also = "recomputed", units = 3, hits = 2, gathers = true })
  check_counts("full_shard", { prefetch = "none" },
    { also = "recomputed", units = 3, misses = 2, gathers = true })
  check_counts("shard_grad_op", nil, { units = 3, gathers = true })
  check_counts("no_shard", nil, { units = 3 })
  -- Each link of a chain has its own account, and they add up.
  local net = sharded(Net(), "full_shard", { comm_hook = hooks.bf16_compress() })
  for _ in ms.steps(2) do net(input(1, 1)):sum():backward() end
  local stats, payload, wire = net:stats(), 0, 0
  assert(#stats.links == 2 and stats.links[1].name == "cast bf16")
  for _, link in ipairs(stats.links) do
    assert(size == 1 or link.calls == 3)
    payload, wire = payload + link.payload_bytes, wire + link.wire_bytes
  end
  assert(payload == stats.payload_bytes and wire == stats.wire_bytes)
end

----------------------------------------------------------------------------- join, scaler, errors

-- In a join plans step after backward, on all ranks; ranks without inputs left step as well.
local function joined(policy)
  local net = sharded(Net(), "full_shard")
  local opt = kinds.adamw(net)
  if policy then opt:overlap(net, policy) end
  local function go(count)
    for step in ms.steps(count) do
      net(input(step, 1), step % 2 == 0):square():mean():backward()
      opt:step()
    end
  end
  go(3)
  net:join({}, function() go(1 + rank) end)
  go(expect.full and 4 or 2)
  return expect.whole(net)
end

local function scaled(policy)
  local net = sharded(Net(), "full_shard")
  local opt, scaler = kinds.sgd(net), optim.scaler { init_scale = 1024 }
  if policy then opt:overlap(net, policy) end
  for step in ms.steps(4) do
    scaler:scale(net(input(step, 1)):square():mean()):backward()
    scaler:step(opt)
  end
  return expect.whole(net)
end

if options.how == "agree" then
  local want = joined()
  for _, policy in ipairs { "in_backward", "deferred", "early_where_hidden", mixed } do
    assert(difference(joined(policy), want) == 0, "join: other weights than the plain loop's")
  end
  want = scaled()
  for _, policy in ipairs { "classic", "deferred" } do
    assert(difference(scaled(policy), want) == 0, "scaler: other weights than the plain loop's")
  end

  fails(function() scaled "in_backward" end, "policy in_backward steps bucket 0 in backward",
    "of a loss scaler")

  local net = sharded(Net(), "full_shard")
  local trained = net:parameters(function(p) return p:requires_grad() end)
  optim.in_backward(optim.sgd, trained)
  fails(function() net:join({}, function() end) end, "is stepped by in_backward")
  fails(function() optim.sgd(net):overlap(net, "classic") end, "stepped by another overlapped")
  local checked = sharded(Net(), "full_shard", { comm_hook = hooks.nan_check() })
  fails(function() optim.in_backward(optim.sgd, { checked.module.first.weight }) end,
    "would be stepped before hooks.nan_check")
  fails(function() optim.sgd(checked):overlap(checked, "in_backward") end,
    "before hooks.nan_check has seen all gradients")
  local inner = Net()
  fails(function()
    sharded(inner, "full_shard", { comm_hook = hooks.chain {
      hooks.then_optimizer { optimizer = optim.sgd(inner) }, hooks.nan_check(),
    } })
  end, "then_optimizer: it would step a gradient before hooks.nan_check")
  -- The model was not changed: its parameters are whole.
  assert(#inner.first.weight:shape() == 2)
  inner = Net()
  local opt = optim.sgd(inner)
  inner(input(1, 1)):sum():backward()
  opt:step()
  fails(function()
    sharded(inner, "full_shard", { comm_hook = hooks.then_optimizer { optimizer = opt } })
  end, "was stepped already by the optimizer of then_optimizer")
  -- Clipping by hand comes too late for what is stepped in backward.
  for _, policy in ipairs { "in_backward", "deferred" } do
    net = sharded(Net(), "full_shard")
    opt = optim.sgd(net, { lr = 0.1 })
    opt:overlap(net, policy)
    for step = 1, 2 do
      net(input(step, 1)):square():mean():backward()
      if step == 1 then opt:step() end
    end
    if policy == "in_backward" then
      fails(function() net:clip_grad_norm(1) end, "was stepped in backward already, by policy",
        "scope = 'lagged'")
    else
      net:clip_grad_norm(1)
    end
    opt:step()
  end
  -- A second pass before step() would step what was stepped.
  net = sharded(Net(), "full_shard")
  opt = optim.sgd(net, { lr = 0.1 })
  opt:overlap(net, "in_backward")
  for _ = 1, 2 do
    net(input(1, 1)):sum():backward()
    if opt.steps == 0 then opt:step() end
  end
  fails(function() net(input(1, 1)) end, "a second pass that reduces, and sgd has stepped")
  -- A backward that fails after some units were stepped, and is caught.
  local armed
  for name, policy in ms.sorted_pairs { plan = "in_backward", own = false, linked = false } do
    inner = Net()
    inner.first:hook("pre_backward", function() if armed then error "planned" end end)
    opt = name == "linked" and optim.sgd(inner, { lr = 0.1 })
    net = sharded(inner, "full_shard",
      { comm_hook = opt and hooks.then_optimizer { optimizer = opt } or nil })
    if name == "own" then optim.in_backward(optim.sgd, { inner.mid.weight, inner.last.weight }) end
    opt = opt or name == "plan" and optim.sgd(net, { lr = 0.1 })
    if policy then opt:overlap(net, policy) end
    for step = 1, 4 do
      if step == 3 then
        armed = true
        fails(function() net(input(step, 1)):square():mean():backward() end, "planned")
        armed = false
        net:reset()
      end
      net(input(step, 1)):square():mean():backward()
      if opt then opt:step() end
    end
    for _, p in ipairs(net:parameters()) do assert(name == "own" or not p:grad()) end
    assert(not opt or opt.steps == 5, name)
  end
  -- A kind of optimizer whose overlap a script defines.
  local given
  local own_kind = optim.define {
    name = "with_overlap", elementwise = true,
    step_param = function(p, grad) p:sub_(grad * 0.1) end,
  }
  optim.register_overlapped("with_overlap", function(o, model, policy)
    given = { o, model }
    optim.overlap_standard(o, model, policy)
  end)
  net = sharded(Net(), "full_shard")
  opt = own_kind(net)
  opt:overlap(net, "in_backward")
  assert(given[1] == opt and given[2] == net)
  fails(function() optim.sgd(Net()):overlap(Net(), "classic") end, "ddp or fsdp model is expected")
  if size > 1 then
    local whole = optim.define { name = "whole of linked", step_param = function() end }
    inner = Net()
    local link = hooks.then_optimizer { optimizer = whole(inner) }
    fails(function() sharded(inner, "full_shard", { comm_hook = link }) end, "elementwise = true")
  end
end

-- Gradients that a loss scaler has multiplied cannot be clipped or stepped before they are divided.
if options.how == "scaler_clip" then
  local clip = hooks.clip { max_norm = 1, scope = "bucket" }
  local net = sharded(Net(), "full_shard", { comm_hook = clip })
  optim.scaler {}:scale(net(input(1, 1)):sum()):backward()
end
if options.how == "scaler" then
  local net = sharded(Net(), "full_shard")
  optim.in_backward(optim.sgd, net:parameters(function(p) return p:requires_grad() end))
  optim.scaler {}:scale(net(input(1, 1)):sum()):backward()
end

print(("rank %d is done"):format(rank))
