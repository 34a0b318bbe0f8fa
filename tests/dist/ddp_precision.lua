-- Run by every rank of ddp_precision_spec.lua: ddp's option precision, compared with casts written
-- by hand, with hooks, recomputation and all other features that can be combined with it.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local clear, models = expect.clear, expect.models
local hooks = ms.hooks
local rank, size = ms.rank(), ms.world_size()

local function input(step, r) return models.input(6, 8, 300 + 10 * step + r) end

-- Two layers and a buffer; by hand: the same with casts.
local Net = ms.nn.class "Net"
function Net:init()
  ms.seed(4)
  self.first, self.second = ms.nn.Linear(8, 16), ms.nn.Linear(16, 4)
  self:add_buffer("scale", ms.full(1 / 3, { 16 }))
end
function Net:forward(x)
  self.seen = { self.first.weight:dtype(), x:dtype(), self.scale:dtype() }
  return { self.second(self.first(x):tanh() * self.scale) }
end

local function by_hand(net, x, dtype)
  local function low(t) return t:to(dtype) end
  local hidden = low(x):linear(low(net.first.weight), low(net.first.bias)):tanh() * low(net.scale)
  return hidden:linear(low(net.second.weight), low(net.second.bias)):to "f32"
end

-- Gradients of all ranks by hand, sent in `sent`.
local function alone(net, step, dtype, sent)
  local sums = {}
  for r = 0, size - 1 do
    clear(net)
    by_hand(net, input(step, r), dtype):square():sum():backward()
    for i, p in ipairs(net:parameters()) do
      local share = p:grad():to(sent):to "f32" * (1 / size)
      sums[i] = sums[i] and sums[i] + share or share
    end
  end
  clear(net)
  for i, sum in ipairs(sums) do sums[i] = sum:to(sent):to "f32" end
  return sums
end

local function check(model, expected, what)
  for i, p in ipairs(model:parameters()) do
    assert(p:dtype() == "f32" and p:grad():dtype() == "f32", what)
    if not p:grad():eq(expected[i]):all():item() then
      error(("rank %d: %s: parameter %d has other bits"):format(rank, what, i))
    end
  end
end

local elements = 8 * 16 + 16 + 16 * 4 + 4
for _, dtype in ipairs { "bf16", "f16" } do
  for _, sent in ipairs { "bf16", "f16", "f32" } do
    local seen
    local reference = Net()
    local model = ms.ddp(Net(), {
      bucket_bytes = 300,
      delayed = dtype == "f16" and { "second%..*" } or nil,
      precision = { param = dtype, reduce = sent, buffer = dtype, output = "f32" },
      comm_hook = function(bucket, next)
        seen = { bucket:dtype(), bucket:buffer():dtype() }
        return next(bucket)
      end,
    })
    for step in ms.steps(3) do
      local out = model(input(step, rank))[1]
      assert(out:dtype() == "f32"
        and table.concat(model.module.seen, " ") == (dtype .. " "):rep(3):sub(1, -2))
      out:square():sum():backward()
      check(model, alone(reference, step, dtype, sent), dtype .. " sent in " .. sent)
      clear(model)
    end
    assert(seen[1] == "f32" and seen[2] == sent, "the user's hook sees the dtype that is sent")
    assert(model:stats().payload_bytes == elements * (sent == "f32" and 4 or 2), "bytes")
    local inner = model:unwrap()
    assert(inner.scale:dtype() == "f32" and inner.first.weight:dtype() == "f32")
    inner(input(0, 0))
    assert(inner.seen[1] == "f32", "unwrapped, it computes as before")
  end
end

-- reduce is param unless given; inputs and outputs may keep their dtypes.
local model = ms.ddp(Net(), { precision = { param = "bf16", buffer = "bf16" } })
assert(model(input(0, 0))[1]:dtype() == "bf16")
model(input(0, rank))[1]:sum():backward()
assert(model.first.weight:grad():dtype() == "f32")
ms.no_grad(function() assert(model(input(0, 0))[1]:dtype() == "bf16") end)
model:unwrap()
model = ms.ddp(model.module, { precision = { reduce = "bf16" } })
assert(model(input(0, 0))[1]:dtype() == "f32")
assert(
  not pcall(ms.ddp(Net(), { precision = { param = "bf16", buffer = "bf16", cast_inputs = false } }),
    input(0, 0)), "inputs are left alone")

-- A language model: recomputed blocks give the same bits, tied weights are cast once; with hooks in
-- a chain, unused parameters, joined ranks, accumulated passes, and early steps.
local function gradients(options, recompute, more)
  options.precision = { param = "bf16", output = "f32" }
  local own = ms.ddp(models.gpt2 { recompute = recompute }, options)
  local x = ms.randint { 4, 8, low = 0, high = 16, seed = 50 + rank, per_rank = false }
  local function pass() own(x):cross_entropy(x):backward() end
  more = more or function(run) run() end
  for _ = 1, 2 do
    clear(own)
    more(pass, own)
  end
  local result = expect.gradients(own)
  own:unwrap()
  return result
end
local plain = gradients({ bucket_bytes = { 3000, 9000 } }, false)
local function same(other, what) expect.same(other, plain, what) end
same(gradients({ bucket_bytes = { 3000, 9000 } }, true), "recomputed")
same(gradients({ find_unused = true, comm_hook = function(bucket, next) return next(bucket) end },
  true), "find_unused and a hook")
same(gradients({
  static_graph = true,
  comm_hook = hooks.chain { hooks.cast { dtype = "f32" }, hooks.cast { dtype = "bf16" } },
}, true), "a static graph and casts")
same(gradients { comm_hook = hooks.clip { max_norm = 1e9, scope = "global" } },
  "clipping by the norm of all, which comes first")
same(gradients({}, true, function(run, own) own:join({ divisor = "live" }, run) end), "joined")
-- An optimizer that steps in backward takes the same steps (and so does one in the chain).
local function trained(policy)
  local own = ms.ddp(models.gpt2(),
    { bucket_bytes = { 3000, 9000 }, precision = { param = "bf16", output = "f32" } })
  local optimizer = ms.optim.adamw(own, { lr = 1e-2 })
  if policy then optimizer:overlap(own, policy) end
  for step in ms.steps(4) do
    local x = ms.randint { 4, 8, low = 0, high = 16, seed = 60 + 8 * step + rank, per_rank = false }
    own(x):cross_entropy(x):backward()
    optimizer:step()
  end
  return own:unwrap():parameters()
end
local classic = trained()
for _, policy in ipairs { "in_backward", "deferred" } do
  expect.same(trained(policy), classic, policy)
end

local stepped
same(gradients({}, false, function(run, own)
  local reducer = getmetatable(own).ddp.reducer
  reducer:on_reduced(function() stepped = true end)
  run()
end), "told of buckets")
assert(stepped)
local twice = gradients({}, true, function(run, own) own:accumulate(2, run) end)
for i, gradient in ipairs(twice) do
  assert((gradient - plain[i] * 2):abs():max():item() <= 0.02 * plain[i]:abs():max():item() + 1e-6,
    "accumulated")
end

ms.synchronize()
print(("rank %d is done"):format(rank))
