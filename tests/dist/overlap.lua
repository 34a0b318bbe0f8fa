-- Run by every rank of overlap_spec.lua: all plans compared with the plain loop, with links; and
-- the views of planners. how=differ: planners that disagree; how=sharded: a plan that a sharded
-- optimizer cannot follow.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local hooks, nn, optim = ms.hooks, ms.nn, ms.optim
local options = ms.config { how = "agree" }
local rank, size = ms.rank(), ms.world_size()

local make_model = expect.models.layers

local function train(prepare, link)
  local model = make_model()
  local net, opt = prepare(model, link)
  for step in ms.steps(expect.full and 7 or 5) do
    net:accumulate(2, function(i)
      net(ms.randn { 4, 8, seed = 1000 * rank + 10 * step + i }):square():mean():backward()
    end)
    if opt then opt:step() end
  end
  return expect.bits(model:parameters())
end

local function policy(name)
  return function(model, link)
    local net, opt = ms.ddp(model, { bucket_bytes = 256, comm_hook = link }),
      optim.adamw(model, { lr = 0.05 })
    if name then opt:overlap(net, name) end
    return net, opt
  end
end

local function linked(model, link)
  local opt = optim.adamw(model, { lr = 0.05 })
  return ms.ddp(model, {
    bucket_bytes = 256, comm_hook = hooks.chain { hooks.then_optimizer { optimizer = opt }, link },
  }), opt
end

local function in_backward(model, link)
  optim.in_backward(optim.adamw, model:parameters(), { lr = 0.05 })
  return ms.ddp(model, { bucket_bytes = 256, comm_hook = link })
end

local views = {}
local mixed = ms.overlap { name = "mixed", plan = function(view)
  local plan, moments = {}, { "on_reduced", "before_next_use", "after_backward" }
  local numbers = { view.forward_ms, view.backward_ms, view.world_size }
  for i, b in ipairs(view.buckets) do
    plan[i] = { bucket = b.index, step = moments[(b.index + view.step) % 3 + 1] }
    table.move({ b.index, b.bytes, b.ready_ms, b.reduce_ms, b.step_ms, b.first_use_ms }, 1, 6,
      #numbers + 1, numbers)
  end
  views[#views + 1] = numbers
  return plan
end }

if options.how == "differ" then
  train(policy(ms.overlap { name = "by_rank", plan = function(view)
    local plan = {}
    for i, b in ipairs(view.buckets) do
      plan[i] = {
        bucket = b.index, step = rank == 1 and b.index == 2 and "on_reduced" or "after_backward",
      }
    end
    return plan
  end }))
end

local links = {
  "all_reduce",
  "bf16_compress",
  function(bucket, next) return next(bucket):and_then(function(t) return t * 0.5 end) end,
}
-- Of each link the ranks of one job try some ways, and those of the other one the rest.
for at, link in ipairs(options.how == "agree" and links or {}) do
  local want, number = train(policy(nil), link), at
  for name, prepare in ms.sorted_pairs {
    classic = policy "classic", in_backward = policy "in_backward", deferred = policy "deferred",
    hidden = policy "early_where_hidden", mixed = policy(mixed), linked = linked, own = in_backward,
  } do
    number = number + 1
    if expect.takes(number, 2) and train(prepare, link) ~= want then
      error(("%s with %s: other weights than the plain loop's"):format(name, tostring(link)))
    end
  end
end

-- A weight that is also used detached: its gradient is complete, and its step is due, while
-- backward still reads its values. Every moment of the step gives the same bits as the plain loop.
do
  local Twice = nn.class "Twice"
  function Twice:init()
    ms.seed(1)
    self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, { bias = false })
  end
  function Twice:forward(x, recomputed)
    local function frozen(h) return h:linear(self.second.weight:detach()):tanh() end
    x = self.first(x)
    return self.second(recomputed and ms.recompute(frozen, x) or frozen(x))
  end
  local function run(prepare, recomputed, link)
    local model = Twice()
    local net, opt = prepare(model, link)
    for step in ms.steps(6) do
      net(ms.randn { 4, 8, seed = 1000 * rank + step }, recomputed):square():mean():backward()
      if opt then opt:step() end
    end
    return table.concat(ms.pack(model:parameters()):to_table(), " ")
  end
  local function by_hand(model, link)
    local opt = optim.adamw(model, { lr = 0.05 })
    local function step(bucket, next)
      return next(bucket):and_then(function(mean)
        local at = 0
        for _, p in ipairs(bucket:parameters()) do
          opt:step_param(p, mean:narrow(1, at + 1, p:numel()):view(table.unpack(p:shape())))
          at = at + p:numel()
        end
        mean:zero_()  -- after the call the gradient is the script's again
      end)
    end
    return ms.ddp(model, { bucket_bytes = 256, comm_hook = hooks.chain { step, link } })
  end
  for recomputed = 0, options.how == "agree" and 1 or -1 do
    local want = run(policy(nil), recomputed == 1, "all_reduce")
    for name, prepare in ms.sorted_pairs {
      in_backward = policy "in_backward", deferred = policy "deferred", mixed = policy(mixed),
      linked = linked, own = in_backward, by_hand = by_hand,
    } do
      if run(prepare, recomputed == 1, "all_reduce") ~= want then
        error(name .. ", a weight used detached: other weights than the plain loop's")
      end
    end
  end
  local function sharded(name)
    return function(model, link)
      local net, opt = ms.ddp(model, { bucket_bytes = 256, comm_hook = link }),
        optim.adamw(model, { lr = 0.05, shard = ms.world() })
      opt:overlap(net, name)
      return net, opt
    end
  end
  local want = run(policy(nil), false, "all_reduce")
  assert(run(sharded "deferred", false, "all_reduce") == want,
    "sharded, deferred, a weight used detached: other weights than the plain loop's")
  if options.how == "sharded" then run(sharded "in_backward", false, "all_reduce") end
end

-- All ranks have seen the same numbers.
assert(#views > 0)
for _, numbers in ipairs(views) do
  assert(numbers[2] > 0 and numbers[3] == size)
  local all = ms.world():all_gather(ms.tensor({ numbers }, "f32")):sync():to_table()
  for _, row in ipairs(all) do
    for i, x in ipairs(row) do assert(x == all[1][i], "views differ") end
  end
end
-- Uneven inputs: a rank that takes part with zeros does not step, and all ranks end with the
-- weights of a rank that had inputs longest.
for _, prepare in ipairs {
  policy "in_backward", policy "deferred", policy(mixed), linked, in_backward,
} do
  local model = make_model()
  local net, opt = prepare(model, "all_reduce")
  local steps = 0
  net:join({}, function()
    for step = 1, 3 + rank do
      net(ms.randn { 4, 8, seed = 1000 * rank + step }):square():mean():backward()
      if opt then
        opt:step()
        steps = steps + 1
      end
    end
  end)
  assert(not opt or steps == 3 + rank)
  local flat = ms.pack(model:parameters())
  local sums = ms.world():all_gather(flat:view(1, -1)):sync()
  for r = 2, size do assert(sums[r]:eq(sums[1]):all():item(), "weights differ after join") end
end
-- Planners run inside join and after it, on all ranks in the same passes, also if buckets are
-- rebuilt in a pass for which some ranks have no inputs.
for _, kind in ipairs { "moments", "buckets" } do
  for before = 1, 2 do
    for first = 0, 1 do
      local model, steps, net, opt = make_model(), {}, nil, nil
      local function told(view) steps[#steps + 1] = view.step end
      if kind == "moments" then
        net, opt = policy(ms.overlap { name = "told", plan = function(view)
          local plan = {}
          told(view)
          for i, b in ipairs(view.buckets) do
            plan[i] = { bucket = b.index, step = "on_reduced" }
          end
          return plan
        end })(model)
      else
        net, opt = ms.ddp(model, { buckets = ms.buckets { name = "told", plan = function(view)
          told(view)
          return { caps_bytes = { view.step % 2 == 0 and 256 or 1024 } }
        end } }), optim.adamw(model, { lr = 0.05 })
      end
      local function go(count)
        for step in ms.steps(count) do
          net(ms.randn { 4, 8, seed = 1000 * rank + step }):square():mean():backward()
          opt:step()
        end
      end
      go(before)
      net:join({}, function() go(first + rank) end)
      go(5)
      assert(#steps >= 2)
      local all = ms.world():all_gather(ms.tensor({ steps }, "i64")):sync():to_table()
      for _, row in ipairs(all) do
        assert(table.concat(row, " ") == table.concat(steps, " "),
          "ranks have planned in different passes")
      end
    end
  end
end

-- Parameters that this rank has not used and other ranks have: optimizers of single parameters, and
-- the collectives of a sharded optimizer.
local Switch = nn.class "Switch"
function Switch:init()
  ms.seed(1)
  for _, name in ipairs { "a", "b", "c", "seldom", "never" } do self[name] = nn.Linear(2, 2) end
end
function Switch:forward(x, all, seldom)
  x = self.c((all and self.b(self.a(x)) or self.a(x)):tanh())
  return seldom and self.seldom(x) or x
end

local function switched(ddp_options, prepare)
  local model = Switch()
  ddp_options.bucket_bytes = 16
  local net, opt = prepare(model, ddp_options)
  for step in ms.steps(4) do
    local turn = ddp_options.static_graph and 0 or step % size
    net(ms.randn { 3, 2, seed = step }, rank == turn,
      rank == turn and not ddp_options.static_graph and step % 2 == 0):square():mean():backward()
    if opt then opt:step() end
  end
  return table.concat(ms.pack(model:parameters()):to_table(), " ")
end

for _, name in ipairs { "find_unused", "static_graph" } do
  local function run(prepare) return switched({ [name] = true }, prepare) end
  local function plain(shard, how)
    return function(model, ddp_options)
      local opt, net = optim.adamw(model, { lr = 0.1, shard = shard }), ms.ddp(model, ddp_options)
      if how then opt:overlap(net, how) end
      return net, opt
    end
  end
  local want, number = run(plain()), name == "find_unused" and 0 or 1
  local function same(what, prepare)
    number = number + 1
    if not expect.takes(number, 2) then return end
    assert(run(prepare) == want, ("%s, %s: other weights than the plain loop's"):format(name, what))
  end
  same("in_backward", function(model, ddp_options)
    optim.in_backward(optim.adamw, model:parameters(), { lr = 0.1 })
    return ms.ddp(model, ddp_options)
  end)
  for _, how in ipairs { "in_backward", "deferred" } do
    same(how, plain(nil, how))
    same("sharded, " .. how, plain(ms.world(), how))
  end
  local function in_chain(shard, before, stepless)
    return function(model, ddp_options)
      local opt = optim.adamw(model, { lr = 0.1, shard = shard })
      local stepping = hooks.then_optimizer { optimizer = opt }
      ddp_options.comm_hook = hooks.chain(before and { before, stepping } or { stepping })
      return ms.ddp(model, ddp_options), not stepless and opt or nil
    end
  end
  local looks = hooks.stage { name = "looks", observe = function(buffer) buffer:norm() end }
  for what, shard in ms.sorted_pairs { linked = false, ["sharded, linked"] = ms.world() } do
    same(what, in_chain(shard or nil))
    same(what .. ", without step()", in_chain(shard or nil, nil, true))
    same(what .. ", after a stage that only looks", in_chain(shard or nil, looks))
  end
end
-- A static graph whose first iteration has two backwards: each parameter's own optimizer steps
-- once.
do
  local Heads = nn.class "Heads"
  function Heads:init()
    ms.seed(1)
    self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
  end
  function Heads:forward(x) return self.a(x), self.b(x) end
  local function run(own)
    local model = Heads()
    local opt = not own and optim.adamw(model, { lr = 0.1 })
    if own then optim.in_backward(optim.adamw, model:parameters(), { lr = 0.1 }) end
    local net = ms.ddp(model, { static_graph = true })
    for step = 1, 3 do
      local a, b = net(ms.randn { 2, 4, seed = 10 * rank + step })
      a:square():sum():backward()
      b:square():sum():backward()
      if opt then opt:step() end
    end
    return ms.pack(model:parameters()):detach()
  end
  -- The plain loop takes a mean of means, which rounds once more.
  assert((run(true) - run(false)):abs():max():item() < 1e-4,
    "two backwards of a static graph: other weights than the plain loop's")
end
io.write(("rank %d is done, weights %x\n"):format(rank,
  require "moonshard.core".hash(train(policy "deferred"))))
