-- Run by every rank of ddp_graph_spec.lua: parameters that are not used, static graphs, uneven
-- inputs, delayed parameters. Each is compared, bit for bit, with the same sums computed by one
-- process.
local ms = require "moonshard"
local core = require "moonshard.core"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local clear = expect.clear
local world, rank, size = ms.world(), ms.rank(), ms.world_size()

local CAPS = { 64, 100 }
local names = { "a", "b", "c", "d" }

-- Four layers. forward(x, which) uses the layers whose letters are in `which`, in order. A capital
-- letter also returns the layer's output.
local Branches = ms.nn.class "Branches"
function Branches:init()
  ms.seed(1)
  for _, name in ipairs(names) do self[name] = ms.nn.Linear(4, 4) end
end
function Branches:forward(x, which)
  local extra = {}
  for letter in which:gmatch "." do
    local layer = self[letter:lower()]
    if letter == letter:lower() then x = layer(x):tanh()
    else extra[#extra + 1] = { layer(x) } end
  end
  return { main = x, more = { extra } }
end

local function input(step, r) return expect.models.input(3, 4, 1000 + 17 * step + r) end

local function pass(model, step, r, which)
  local out = model(input(step, r), which).main
  if out:requires_grad() then out:square():sum():backward() end
end

-- A number that depends on its arguments, the same on all ranks.
local function pick(n, ...)
  local x = 12345
  for _, value in ipairs { ... } do x = (x * 1103515245 + value * 69069 + 12345) % 2147483648 end
  return (x >> 8) % n
end

local function random_subset(...)
  local which = ""
  for i, name in ipairs(names) do
    local kind = pick(5, i, ...)
    if kind < 2 then which = which .. name elseif kind == 2 then which = which .. name:upper() end
  end
  -- If a rank's loss depends on no parameter, it runs no backward.
  return which:find "%l" and which or ""
end

-- Gradients of passes(r), a function for each rank: computed separately, divided, added in rank
-- order; nil if no rank has any.
local function alone(model, run, divisor)
  local sums = {}
  local parameters = model:parameters()
  for r = 0, size - 1 do
    clear(model)
    run(r)
    for i, p in ipairs(parameters) do
      local share = p:grad() and p:grad() * (1 / (divisor or size))
      if share then sums[i] = sums[i] and sums[i] + share or share end
    end
  end
  clear(model)
  return sums
end

local function check(model, expected, what)
  for i, item in ipairs(model:named_parameters()) do
    local got = item.parameter:grad()
    if (got == nil) ~= (expected[i] == nil) then
      error(("rank %d: %s: %s has %s gradient, expected is %s")
        :format(rank, what, item.name, got and "a" or "no", expected[i] and "one" or "none"), 2)
    end
    if got and not got:eq(expected[i]):all():item() then
      error(("rank %d: %s: %s has other bits"):format(rank, what, item.name), 2)
    end
  end
end

local function calls(model) return model:stats().collectives.all_reduce or 0 end

-- Unused parameters: different ones on each rank and in each step, also in passes without
-- synchronization.
do
  local plain, model = Branches(), ms.ddp(Branches(), { find_unused = true, bucket_bytes = CAPS })
  for step in ms.steps(12) do
    local windows = step % 3
    local function which(r, window) return random_subset(step, r, window, 7) end
    local expected = alone(plain, function(r)
      for window = 0, windows do pass(plain, step + window, r, which(r, window)) end
    end)
    for window = 0, windows - 1 do
      model:no_sync(function() pass(model, step + window, rank, which(rank, window)) end)
    end
    pass(model, step + windows, rank, which(rank, windows))
    check(model, expected, "find_unused, step " .. step)
    clear(model)
  end
  assert(#model:stats().buckets > 2 and calls(model) == #model:stats().buckets + 1,
    "one all_reduce more")

  -- An earlier gradient stays unchanged, bit for bit, if no rank has used the parameter.
  local old = ms.randn { 4, 4, seed = 5 }
  model.d.weight:set_grad(old:clone())
  pass(model, 50, rank, rank == 0 and "ab" or "a")
  assert(model.d.weight:grad():eq(old):all():item() and not model.d.bias:grad()
    and not model.c.weight:grad(), "untouched")
  local expected = alone(plain, function(r) pass(plain, 50, r, r == 0 and "ab" or "a") end)
  expected[7] = old
  check(model, expected, "with an old gradient")
  -- It is part of the mean if a rank has used the parameter.
  pass(model, 51, rank, rank == 0 and "d" or "a")
  local share = alone(plain, function(r) pass(plain, 51, r, r == 0 and "d" or "a") end)[7]
  assert((model.d.weight:grad() - old - share):abs():max():item() < 1e-5,
    "an old gradient and a new one")
  model:unwrap()

  -- The same with an optimizer: a parameter without a gradient is not stepped on any rank.
  model = ms.ddp(model.module, { find_unused = true })
  clear(model)
  local optimizer = ms.optim.adam(model, { lr = 0.1 })
  local before = model.c.weight:detach():clone()
  for step in ms.steps(3) do
    pass(model, step, rank, rank == size - 1 and "ab" or "a")
    optimizer:step()
  end
  assert(model.c.weight:detach():eq(before):all():item(), "an unused parameter stays")
  for _, p in ipairs(model:parameters()) do
    local all = world:all_gather(p:detach():reshape(1, -1)):value()
    for r = 1, size do assert(all[r]:eq(all[1]):all():item(), "ranks stay together") end
  end
  model:unwrap()
end

-- Static graphs: parameters used twice, in recomputed functions, on some ranks only, on no rank;
-- two backward passes after one forward.
do
  local Twice = ms.nn.class "Twice"
  function Twice:init()
    ms.seed(2)
    self.a, self.b, self.c, self.d = ms.nn.Linear(4, 4), ms.nn.Linear(4, 4), ms.nn.Linear(4, 4),
      ms.nn.Linear(4, 4)
  end
  function Twice:forward(x, r)
    x = ms.recompute(function(t) return self.a(self.a(t):tanh()):tanh() end, x)
    if r == 0 then x = self.b(x) end
    return x, self.c(x)
  end
  local function twice(model, step, r)
    local first, second = model(input(step, r), r)
    first:square():sum():backward { retain_graph = true }
    second:square():sum():backward()
  end
  local plain, model = Twice(), ms.ddp(Twice(), { static_graph = true, bucket_bytes = CAPS })
  for step in ms.steps(6) do
    local expected = alone(plain, function(r) twice(plain, step, r) end)
    twice(model, step, rank)
    if step == 0 then
      for i, p in ipairs(model:parameters()) do
        assert((p:grad() == nil) == (expected[i] == nil), "who has a gradient")
        if p:grad() then
          assert((p:grad() - expected[i]):abs():max():item()
            <= 1e-5 * expected[i]:abs():max():item(), "the first iteration")
        end
      end
    else check(model, expected, "static_graph, step " .. step) end
    clear(model)
  end
  assert(calls(model) == #model:stats().buckets and #model:stats().buckets > 2,
    "no all_reduce more")
  assert(not model.d.weight:grad() and (size == 1 or model.b.weight), "unused")
  -- Passes without synchronization do not count.
  local expected = alone(plain, function(r) twice(plain, 20, r) twice(plain, 21, r) end)
  model:no_sync(function() twice(model, 20, rank) end)
  twice(model, 21, rank)
  check(model, expected, "static_graph, accumulated")
  model:unwrap()
end

-- Uneven inputs: each rank has a number of steps. Compared with one process that adds the gradients
-- of the ranks that have inputs left.
local function uneven(options, what, join_options, steps_of, which, windows)
  local plain, model = Branches(), ms.ddp(Branches(), options)
  local mine, reference = ms.optim.sgd(model, { lr = 0.1 }), ms.optim.sgd(plain, { lr = 0.1 })
  windows = windows or 0
  local most = 0
  for r = 0, size - 1 do most = math.max(most, steps_of(r)) end
  for epoch = 0, 1 do
    local function run(m, step, r) pass(m, 100 * epoch + step, r, which(step, r)) end
    for step = 1, most do
      local live = 0
      for r = 0, size - 1 do if step <= steps_of(r) then live = live + 1 end end
      local sums = alone(plain, function(r)
        if step <= steps_of(r) then
          for window = 0, windows do run(plain, step + 50 * window, r) end
        end
      end, join_options.divisor == "live" and live or size)
      for i, p in ipairs(plain:parameters()) do p:set_grad(sums[i]) end
      reference:step()
    end
    local result = model:join(join_options, function()
      for step = 1, steps_of(rank) do
        for window = 0, windows - 1 do
          model:no_sync(function() run(model, step + 50 * window, rank) end)
        end
        run(model, step + 50 * windows, rank)
        mine:step()
      end
      return "done"
    end)
    assert(result == "done")
    for i, p in ipairs(model:parameters()) do
      if not p:detach():eq(plain:parameters()[i]:detach()):all():item() then
        error(("rank %d: join, %s, epoch %d: other weights"):format(rank, what, epoch))
      end
    end
  end
  model:unwrap()
end

local function all(_, _) return "abcd" end
local function some(seed) return function(r) return pick(5, r, seed) end end
uneven({ bucket_bytes = CAPS }, "rank 0 goes on", {}, function(r) return 4 - r end, all)
uneven({ bucket_bytes = CAPS }, "rank 0 has none", { divisor = "live" },
  function(r) return r * 2 end, all)
for seed = 1, 3 do
  local divisors = {}
  uneven({ bucket_bytes = CAPS, comm_hook = function(bucket, next)
    divisors[bucket:divisor()] = true
    return next(bucket)
  end }, "random", { divisor = seed % 2 == 0 and "all" or "live" }, some(seed), all)
  if seed % 2 == 0 then for divisor in pairs(divisors) do assert(divisor == size) end end
end
uneven({ bucket_bytes = CAPS }, "accumulated", { divisor = "live" }, some(4), all, 2)
uneven({ bucket_bytes = CAPS, find_unused = true }, "with unused parameters", {}, function(r)
  return 1 + pick(4, r, 5)
end, function(step, r) return pick(2, step, r) == 0 and "ab" or "adC" end)
uneven({ bucket_bytes = CAPS, static_graph = true }, "with a static graph", {},
  function(r) return r == 0 and 0 or 1 + r end, function() return "bd" end)
uneven(
  { bucket_bytes = CAPS, static_graph = true, comm_hook = "bf16_compress", delayed = { "a%..*" } },
  "no rank has any", {}, function() return 0 end, all)

-- Every gradient is 1; 3, 2, 2 and 1 inputs.
if size == 4 then
  local counts = { 3, 2, 2, 1 }
  for divisor, expected in ms.sorted_pairs { all = { 1, 0.75, 0.25 }, live = { 1, 1, 1 } } do
    local One = ms.nn.class "One"
    function One:init()
      self.w = ms.nn.Parameter(ms.zeros { 2 })
      self:add_buffer("mark", ms.full(rank, {}))
    end
    function One:forward() return self.w:sum() end
    local one = ms.ddp(One())
    local seen, marks, live = {}, {}, {}
    one:join({ divisor = divisor }, function()
      for i = 1, counts[rank + 1] do
        one.mark:fill_(rank)
        one():backward()
        seen[i], marks[i] = one.w:grad():to_table()[1], one.mark:item()
        one.w:set_grad(nil)
        ms.no_grad(function() one.w:fill_(10 * rank + i) end)
      end
    end)
    for i = 1, counts[rank + 1] do
      assert(seen[i] == expected[i],
        ("uneven inputs: %s, iteration %d: %g"):format(divisor, i, seen[i]))
      live[i] = #counts
      while counts[live[i]] < i do live[i] = live[i] - 1 end
      assert(marks[i] == live[i] - 1, "buffers are those of the highest rank that is live")
    end
    assert(one.w:detach():to_table()[1] == 3 and one.mark:item() == 0,
      "values of the one that went on longest")
  end
end

-- All raise when the first is done.
do
  local model = ms.ddp(Branches())
  local reached = 0
  local ok, message = pcall(model.join, model, { stop = true }, function()
    for step = 1, 2 + rank do
      pass(model, step, rank, "abcd")
      reached = step
      clear(model)
    end
  end)
  if size > 1 then
    assert(not ok and tostring(message):find("rank 0 has no inputs left", 1, true) and reached == 2,
      message)
  else
    assert(ok)
  end
  pass(model, 9, rank, "abcd")                     -- and may go on together
  model:join({ stop = true }, function() pass(model, 9, rank, "abcd") end)
  model:unwrap()
end

-- Delayed parameters: in a bucket of their own after all others, without the hook.
do
  local plain, seen, last = Branches(), {}, {}
  local model = ms.ddp(Branches(),
    { bucket_bytes = CAPS, delayed = { "a.weight", "c%..*" }, comm_hook = function(bucket, next)
      for _, p in ipairs(bucket:parameters()) do seen[p:name()] = true end
      last[#last + 1] = bucket:is_last()
      return next(bucket)
    end })
  for step in ms.steps(4) do
    last = {}
    local expected = alone(plain, function(r) pass(plain, step, r, "abcd") end)
    pass(model, step, rank, "abcd")
    check(model, expected, "delayed, step " .. step)
    for i, flag in ipairs(last) do assert(flag == (i == #last), "is_last") end
    clear(model)
  end
  assert(seen["a.bias"] and seen["b.weight"] and not seen["a.weight"] and not seen["c.bias"],
    "delayed ones pass no hook")
  local buckets = model:stats().buckets
  assert(#buckets == #last + 1 and buckets[#buckets].parameters == 3
    and buckets[#buckets].bytes == 144, "one bucket of delayed ones")
  assert(not pcall(ms.ddp, model:unwrap(), { delayed = { "no_such" } }), "a name of no parameter")
  -- All parameters, and a second wrap.
  model = ms.ddp(model.module,
    { delayed = { ".*" }, comm_hook = function() error "never called" end })
  pass(model, 1, rank, "abcd")
  check(model, alone(plain, function(r) pass(plain, 1, r, "abcd") end), "all delayed")
  model:unwrap()
end

-- Bucket plans do not change gradients, whatever the plans are and whenever they change.
do
  local plain, views = Branches(), {}
  local function planner(view)
    views[#views + 1] = view
    return expect.models.changing_plan(view)
  end
  for _, options in ipairs {
    { buckets = ms.buckets { name = "changing", plan = planner } },
    { buckets = "fitted", find_unused = true },
    { buckets = "arrival", static_graph = true, delayed = { "b%..*" } },
  } do
    local model = ms.ddp(Branches(), options)
    for step in ms.steps(5) do
      local expected = alone(plain,
        function(r) pass(plain, step, r, "dacb") pass(plain, step + 50, r, "dacb") end)
      model:no_sync(function() pass(model, step, rank, "dacb") end)
      pass(model, step + 50, rank, "dacb")
      check(model, expected, "bucket plans, step " .. step)
      clear(model)
    end
    -- A rank without inputs left plans with the others.
    model:join({}, function()
      for step = 1, rank do pass(model, step, rank, "dacb") clear(model) end
    end)
    model:unwrap()
  end
  assert(#views == (size + 3) // 2, "after a change, two passes go before the next plan")
  for _, view in ipairs(views) do
    local numbers = { view.forward_ms, view.backward_ms, view.latency_ms, view.bytes_per_ms }
    for _, p in ipairs(view.parameters) do numbers[#numbers + 1] = p.ready_ms end
    local gathered = world:all_gather(ms.tensor({ numbers }, "f32")):value()
    for r = 1, size do
      assert(gathered[r]:eq(gathered[1]):all():item(), "all ranks see the same view")
    end
  end
end

-- Optimizers that step early, or late, take the same steps where inputs are uneven.
for _, divisor in ipairs { "all", "live" } do
  local function trained(policy)
    local model = ms.ddp(Branches(), { bucket_bytes = CAPS })
    local optimizer = ms.optim.adamw(model, { lr = 0.1 })
    if policy then optimizer:overlap(model, policy) end
    local function step(i)
      pass(model, i, rank, "abcd")
      optimizer:step()
    end
    for i = 1, 2 do step(i) end
    model:join({ divisor = divisor }, function() for i = 3, 4 + 2 * rank do step(i) end end)
    return model:unwrap():parameters()
  end
  local classic = trained()
  for _, policy in ipairs { "in_backward", "deferred" } do
    expect.same(trained(policy), classic, policy)
  end
end

core.synchronize()
print(("rank %d is done"):format(rank))
