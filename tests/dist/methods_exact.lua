-- Run by every rank of methods_exact_spec.lua: links that send each rank its own part, on gradients
-- that every rank knows. what: bounds and sums of what was sent; layouts and kinds of buckets.
local ms = require "moonshard"
local hooks = require "moonshard.hooks"
local o = ms.config { what = "parts", source = ".", layout = "flat", hybrid = false }
local rank, ranks = ms.rank(), ms.world_size()

local function recipe(name) return dofile(o.source .. "/recipes/hooks/" .. name .. ".lua") end

local function greatest(t) return t:abs():max():item() end

-- The options of ms.fsdp that a run asks for, and those of pieces.
local groups
local function options(pieces)
  local own = {
    layout = o.layout, comm_hook = pieces.link, wrap = pieces.wrap,
    before_gather = pieces.gather and pieces.gather.before_gather,
    after_gather = pieces.gather and pieces.gather.after_gather,
  }
  if o.hybrid then
    groups = groups or { ms.world():levels(2) }
    own.strategy, own.shard_group, own.replica_group = "hybrid_shard", groups[1], groups[2]
  end
  for name, value in pairs(pieces.shard or {}) do own[name] = value end
  return own
end

-- Weights whose gradients are the inputs, so that each rank can compute all ranks' gradients.
local SIZES <const> = { { 5, 7 }, { 3 }, { 40 } }
local Probe = ms.nn.class "Probe"
function Probe:init()
  for i, shape in ipairs(SIZES) do self["w" .. i] = ms.nn.Parameter(ms.zeros(shape)) end
end
function Probe:forward(inputs)
  local sum = 0
  for i, x in ipairs(inputs) do
    if self.seen then self.seen[i] = self["w" .. i]:detach():clone():keep() end
    sum = sum + (self["w" .. i] * x):sum()
  end
  return sum
end
local function gradients(step, of)
  local list = {}
  for i, shape in ipairs(SIZES) do
    list[i] = ms.randn { shape[1], shape[2], seed = 1000 * step + 10 * of + i }
  end
  return list
end

-- Sums over the steps: what was applied (as SGD with lr 1 has changed the weights), and the mean.
-- each(step, applied, mean): of parameter i, in one step, whole on every rank.
local function train(net, steps, each)
  local optimizer, model = ms.optim.sgd(net, { lr = 1 }), net.module
  local before = {}
  for i, shape in ipairs(SIZES) do before[i] = ms.zeros(shape):keep() end
  for step in ms.steps(steps) do
    net(gradients(step, rank)):backward()
    optimizer:step()
    local now = {}
    local function read()
      for i in ipairs(SIZES) do now[i] = model["w" .. i]:detach():clone():keep() end
    end
    if o.layout == "ddp" then read() else net:summon({ writeback = false }, read) end
    for i in ipairs(SIZES) do
      local mean, list = 0, {}
      for of = 0, ranks - 1 do
        list[of + 1] = gradients(step, of)[i]
        mean = mean + list[of + 1] / ranks
      end
      each(step, before[i] - now[i], mean, i, list)
      before[i]:copy_(now[i])
    end
  end
end

local what = {}

-- A row of hooks.parts is what bucket:shard gives on that rank, and hooks.joined is the inverse.
function what.parts()
  local worst, calls = ms.zeros { 1 }:keep(), 0
  local function link(bucket, next)
    calls = calls + 1
    local buffer, count = bucket:buffer(), 0
    for _, g in ipairs(bucket:gradients()) do count = count + g:numel() end
    local t = ms.zeros { buffer:numel() }
    t:narrow(1, 1, count):copy_(ms.randn { count, seed = 3 })         -- zeros are at its end
    local parts, group = hooks.parts(bucket, t)
    worst:add_((hooks.joined(bucket, parts) - t):abs():max())
    if bucket:kind() ~= "all_reduce" then
      local all = group:all_gather(bucket:shard(t):unsqueeze(1)):value()
      assert(parts:size(1) == group:size() and parts:size(2) == all:size(2))
      worst:add_((all - parts):abs():max())
    end
    return next(bucket)
  end
  local inner = ms.nn.Sequential(ms.nn.Linear(5, 7), ms.nn.Linear(7, 3, { bias = false }))
  local net = o.layout == "ddp" and ms.ddp(inner, { comm_hook = link })
    or ms.fsdp(inner, options { link = link, wrap = { class = "Linear" } })
  for _ in ms.steps(3) do net(ms.ones { 1, 5 }):sum():backward() end
  assert(calls >= 3 and worst:item() == 0, ("%d calls, off by %g"):format(calls, worst:item()))
end

-- LoCo without reset, where the average is the last error: the sum of what was sent and the mean of
-- what is left are the sum of the means.
function what.loco()
  local link, left = recipe "loco" { beta = 1, reset = 0, block = 32 }, {}
  local state
  for i = 1, 20 do
    local name, value = debug.getupvalue(link, i)
    if name == "state" then state = value end
  end
  local function watched(bucket, next)
    local result = link(bucket, next)
    -- The link has added its error to the average when it returns.
    left[bucket:index()] = state:flat(bucket, "average"):clone():keep()
    return result
  end
  local net = o.layout == "ddp" and ms.ddp(Probe(), { comm_hook = watched })
    or ms.fsdp(Probe(), options { link = watched })
  local sum, wanted = 0, 0
  local worst, largest = 0, 0
  train(net, 30, function(_, applied, mean, _, list)
    sum, wanted = sum + applied:sum():item(), wanted + mean:sum():item()
    worst = math.max(worst, (applied - mean):abs():max():item())
    for _, g in ipairs(list) do largest = math.max(largest, g:abs():max():item()) end
  end)
  local rest = 0
  for _, t in pairs(left) do
    local all = ms.world():all_reduce(t:sum():view(1), "avg"):value()
    rest = rest + all:item()
  end
  assert(worst > 0.01, "nothing was rounded")
  -- 78 numbers of 30 steps; under ddp each mean is rounded to 8 bits once more.
  local limit = o.layout == "ddp" and 30 * 78 * largest * 2 / 254 / 8 or 1e-3
  assert(math.abs(sum + rest - wanted) < limit, ("%g + %g, wanted %g"):format(sum, rest, wanted))
end

-- ZeRO++: each number is off by half a level of its block of each rank, at most.
function what.zeropp()
  local options_of = ranks == 4 and not o.hybrid and { ranks = 2 } or {}
  local pieces = recipe "zeropp" (options_of)
  if o.layout == "ddp" then pieces = { link = pieces.link } else pieces.shard = nil end
  local net = o.layout == "ddp" and ms.ddp(Probe(), { comm_hook = pieces.link })
    or ms.fsdp(Probe(), options { link = pieces.link, gather = pieces.gather })
  local worst = 0
  train(net, 5, function(_, applied, mean, _, list)
    local limit = 0
    for _, g in ipairs(list) do limit = limit + 5 / ranks end
    local off = (applied - mean):abs():max():item()
    worst = math.max(worst, off)
    -- 4 bits have 7 levels above zero, 8 bits 127; no number here is above 5.
    limit = limit / 14 + limit / 254 * 2
    assert(off < limit, ("off by %g, limit %g"):format(off, limit))
  end)
  assert(worst > 0.001, "nothing was rounded")
  -- All blocks are of fewer than 256 numbers.
  local function codes(n, bits) return 4 + (n * bits + 7) // 8 end
  local n = -(-78 // ranks)
  local wanted = ranks * codes(n, 4)
  if options_of.ranks then wanted = 2 * codes(2 * n, 8) + 2 * codes(n, 4) end
  if o.layout == "ddp" then wanted = wanted + codes(n, 8) end
  if o.layout == "rows" or o.hybrid then return end
  local sent = net:stats().payload_bytes
  assert(sent == wanted, ("%d bytes, wanted %d"):format(sent, wanted))
end

-- SDP4Bit: units compute with weights that are off by half a level of the last change, at most; the
-- first time they are exact. Gradients are off by less than half a level of the smoothed numbers.
function what.sdp4bit()
  local pieces = recipe "sdp4bit" (ranks == 4 and not o.hybrid and { ranks = 2 } or {})
  local model = Probe()
  model.seen = {}
  local net = ms.fsdp(model, options(pieces))
  local exact, last, changes = {}, {}, {}
  local off, whole = 0, 0
  train(net, 8, function(step, applied, mean, i)
    local seen = model.seen[i]
    exact[i] = exact[i] or ms.zeros(SIZES[i]):keep()
    local far, limit = greatest(seen - exact[i]), 1.001 * (changes[step] or 0) / 14
    assert(far <= limit, ("step %d: off by %g, limit %g"):format(step, far, limit))
    last[i] = seen
    exact[i]:sub_(applied)
    off = off + (applied - mean):square():sum():item()
    whole = whole + mean:square():sum():item()
    -- What the next gather sends: the new weights minus those that ranks know.
    changes[step + 1] = math.max(changes[step + 1] or 0, greatest(exact[i] - last[i]))
  end)
  assert(off > 0 and off < 0.05 * whole, ("%g of %g"):format(off, whole))
  -- A state that is loaded in the middle of a run: ranks go on from what they know of each other.
  local saved = net:state { kind = "sharded" }
  train(net, 3, function() end)
  local known, most = { table.unpack(model.seen) }, 0
  net:load_state(saved)
  for i in ipairs(SIZES) do most = math.max(most, greatest(exact[i] - known[i])) end
  net(gradients(99, rank))
  for i in ipairs(SIZES) do
    local far = greatest(model.seen[i] - exact[i])
    assert(far <= 1.001 * most / 14, ("off by %g of %g after a load"):format(far, most))
  end
end
-- With error_feedback before the links, what they lose in a step is sent later: the sums differ by
-- what is left, about half a level. Without it they differ by a level and more after 200 steps.
function what.feedback()
  for _, case in ipairs {
    { "zeropp", ranks == 4 and { ranks = 2, inside = "int4", across = "int8" } or {} },
    { "sdp4bit", ranks == 2 and {} },
  } do
    local made = case[2] and recipe(case[1])(case[2])
    if made then
      local net = ms.fsdp(Probe(), options { link = hooks.chain { "error_feedback", made.link } })
      local sums = {}
      train(net, 200, function(_, applied, mean, i)
        sums[i] = sums[i] or ms.zeros(SIZES[i]):keep()
        sums[i]:add_(applied - mean)
      end)
      for i in ipairs(SIZES) do
        local far = greatest(sums[i])
        assert(far > 0 and far < 0.5, ("%s: the sums differ by %g"):format(case[1], far))
      end
      net:unwrap()
    end
  end
end

-- Any model, in any dtype.
function what.odd()
  local Odd = ms.nn.class "Odd"
  function Odd:init()
    self.first, self.inner, self.scale = ms.nn.Parameter(ms.zeros { 0 }), ms.nn.Linear(16, 16),
      ms.nn.Parameter(ms.ones {})
    self.last = ms.nn.Parameter(ms.zeros { 0, 3 })
  end
  function Odd:forward(x)
    return self.inner(x + self.last:sum()) * self.scale + self.first:sum()
  end
  for _, dtype in ipairs { "f32", "bf16", "f16" } do
    for _, name in ipairs { "zeropp", "loco", "sdp4bit" } do
      local made = recipe(name)()
      if type(made) == "function" then made = { link = made } end
      local net = ms.fsdp(Odd():to(dtype), options {
        link = hooks.chain { hooks.error_feedback(), made.link }, gather = made.gather,
        shard = made.shard, wrap = { class = "Linear" },
      })
      local optimizer = ms.optim.sgd(net, { lr = 0.01 })
      for _ in ms.steps(3) do
        net(ms.ones { 2, 16, dtype = dtype }):sum():backward()
        for _, p in ipairs(net:parameters()) do
          assert(not p:grad() or p:grad():is_finite():all():item() and p:grad():dtype() == dtype)
        end
        optimizer:step()
        optimizer:zero_grad()
      end
      net:unwrap()
    end
  end
end

what[o.what]()
print(("rank %d is done"):format(rank))
