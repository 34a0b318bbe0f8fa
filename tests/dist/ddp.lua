-- Run by every rank of ddp_spec.lua: ddp compared with the same sums computed by one process,
-- native hooks compared with their versions in Lua, buffers, counts. It ends with a hash of the
-- weights, which must not depend on whether ranks are processes or threads, nor on the number of
-- threads.
local ms = require "moonshard"
local core = require "moonshard.core"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local gradients, models = expect.gradients, expect.models
local hooks = ms.hooks
local world, rank, size = ms.world(), ms.rank(), ms.world_size()
-- hash_only: only the training that the hash is of.
local cfg = ms.config { hash_only = false }

local SMALL = { 3000, 9000 }

local function new_model(seed) return models.gpt2({}, seed) end

-- A pass with the rows of step `step` that rank r takes (nil: all).
local function backward(model, step, r)
  local x, y = models.batch(step, r)
  model(x):cross_entropy(y):backward()
end

local function differ(a, b)
  local most = 0
  for i = 1, #a do
    most = math.max(most, (a[i]:to "f32" - b[i]:to "f32"):abs():max():item()
      / math.max(b[i]:to "f32":abs():max():item(), 1e-30))
  end
  return most
end

local function same(a, b, what)
  local by = differ(a, b)
  if by ~= 0 then
    error(("rank %d: %s: not the same bits (%g relative)"):format(rank, what, by), 2)
  end
end

-- The reference by one process: each rank's gradient separately, divided, added in rank order.
local function alone(model, step, dtype)
  local sums
  for r = 0, size - 1 do
    backward(model, step, r)
    for i, p in ipairs(model:parameters()) do
      local share = dtype and p:grad():to(dtype):to "f32" or p:grad()
      sums = sums or {}
      sums[i] = sums[i] and sums[i] + share * (1 / size) or share * (1 / size)
      p:set_grad(nil)
    end
  end
  if dtype then for i, sum in ipairs(sums) do sums[i] = sum:to(dtype):to "f32" end end
  return sums
end

-- Training: in each step, bitwise equal to one process.
local plain, model = new_model(), ms.ddp(new_model(1 + rank), { bucket_bytes = SMALL })
local mine, reference = ms.optim.adamw(model, { lr = 1e-2 }), ms.optim.adamw(plain, { lr = 1e-2 })
same(model:parameters(), plain:parameters(), "rank 0's values are everyone's")
for step in ms.steps(4) do
  backward(plain, step)
  local whole = gradients(plain)
  expect.clear(plain)
  local sums = alone(plain, step)
  backward(model, step, rank)
  same(gradients(model), sums, "gradients of step " .. step)
  if differ(gradients(model), whole) > 1e-5 then
    error("the whole batch gives other gradients: " .. differ(gradients(model), whole))
  end
  for i, p in ipairs(plain:parameters()) do p:set_grad(sums[i]) end
  mine:step()
  reference:step()
end
same(model:parameters(), plain:parameters(), "weights")

-- A hash of the weights after the training.
local hash = 0
for _, p in ipairs(model:parameters()) do
  for i, value in ipairs(p:detach():reshape(-1):to_table()) do
    hash = (hash * 31 + string.unpack("<I4", string.pack("<f", value)) + i) % (1 << 48)
  end
end
if cfg.hash_only then
  io.stdout:write(("rank %d is done, weights %012x\n"):format(rank, hash))
  return
end

-- Counts: as many reductions as buckets; two broadcasts for the rebuild, in the second iteration
-- only.
local function counts() return model:stats().collectives end
assert(#model:stats().buckets > 2, "several buckets")
assert(counts().all_reduce == #model:stats().buckets and not counts().broadcast,
  "one all-reduce for each bucket")
model:rebuild_buckets()
for step in ms.steps(7, 4) do
  backward(model, step, rank)
  mine:step()
  if step == 5 then break end
end
assert(counts().broadcast == 2 and counts().all_reduce == #model:stats().buckets,
  "buckets are rebuilt once")

-- Accumulated passes: one reduction, of the sum.
local accumulated = {}
for r = 0, size - 1 do
  for step = 20, 22 do backward(plain, step, r) end
  for i, p in ipairs(plain:parameters()) do
    accumulated[i] = accumulated[i] and accumulated[i] + p:grad() * (1 / size)
      or p:grad() * (1 / size)
    p:set_grad(nil)
  end
end
model.module:load_state(plain:state())
model:accumulate(3, function(i) backward(model, 19 + i, rank) end)
same(gradients(model), accumulated, "accumulated gradients")
mine:zero_grad()

-- Every link and its version in Lua: bitwise equal, and equal to the computed result.
local function reduced_by(hook, step, passes)
  local own = ms.ddp(new_model(), { bucket_bytes = SMALL, comm_hook = hook })
  local result
  for pass = 1, passes or 2 do                    -- the second one has its buckets rebuilt
    expect.clear(own)
    backward(own, step + pass, rank)
    result = gradients(own)
  end
  own:unwrap()
  return result
end
local average = alone(new_model(), 32)
for _, name in ipairs { "reduce", "all_reduce", "noop", "fp16_compress", "bf16_compress" } do
  local native = reduced_by(name, 30)
  local mixed = reduced_by(
    hooks.chain { function(bucket, next) return next(bucket) end, hooks[name]() }, 30)
  same(mixed, native, name .. " after a link in Lua")
  if name ~= "reduce" then
    same(reduced_by(require("moonshard.hooks." .. name) {}, 30), native, "the twin of " .. name)
  end
  if name == "fp16_compress" then same(native, alone(new_model(), 32, "f16"), name)
  elseif name == "bf16_compress" then same(native, alone(new_model(), 32, "bf16"), name)
  elseif name ~= "noop" then same(native, average, name) end
end
local group = world:split {
  { 0 }, size > 1 and { 1 } or nil, size > 2 and { 2 } or nil, size > 3 and { 3 } or nil,
}
same(reduced_by(hooks.all_reduce { group = group }, 30), reduced_by("noop", 30), "a group of one")
same(reduced_by(require "moonshard.hooks.fp16_compress" { group = group }, 30),
  reduced_by(hooks.fp16_compress { group = group }, 30), "fp16 in a group of one")

-- noop and a reduction by hand give the same as no hook; facts about the bucket; is_last is true
-- for the last bucket only.
local by_hand, flags, indices = reduced_by("noop", 30), {}, {}
for i, gradient in ipairs(by_hand) do
  by_hand[i] = world:all_reduce(gradient, { premul_sum = 1 / size }):value()
end
same(by_hand, average, "noop and a reduction by hand")
same(reduced_by(function(bucket, next)
  flags[#flags + 1], indices[#indices + 1] = bucket:is_last(), bucket:index()
  assert(bucket:kind() == "all_reduce" and bucket:dtype() == "f32" and bucket:divisor() == size
    and bucket:group() == world)
  local count = 0
  for i, gradient in ipairs(bucket:gradients()) do
    assert(table.concat(gradient:shape(), "x") == table.concat(bucket:parameters()[i]:shape(), "x"))
    count = count + gradient:numel()
  end
  assert(count == bucket:buffer():numel() and bucket:shard(bucket:buffer()) == bucket:buffer())
  -- A tensor of its own is copied back.
  return next(bucket):and_then(function(t) return t:clone() end)
end, 30), average, "a link that observes")
for i, index in ipairs(indices) do
  assert(index == (i == 1 and 0 or i - 2), "index")
  assert(flags[i] == (i == 1 or i == #indices), "is_last")
end

-- A future that comes from several collectives, one after another.
same(reduced_by(function(bucket)
  local flat = bucket:buffer()
  return bucket:group():reduce_scatter(flat:pad_to(size), "sum"):and_then(function(part)
    return bucket:group():all_gather(part)
  end):and_then(function(whole) return whole:narrow(1, 1, flat:numel()) / size end)
end, 30), (function()
  local sums
  local other = new_model()
  for r = 0, size - 1 do
    backward(other, 32, r)
    for i, p in ipairs(other:parameters()) do
      sums = sums or {}
      sums[i] = sums[i] and sums[i] + p:grad() or p:grad():clone()
      p:set_grad(nil)
    end
  end
  for i, sum in ipairs(sums) do sums[i] = sum / size end
  return sums
end)(), "reduce_scatter and all_gather by hand")

-- The callback for early steps is called for each bucket, as in a hook. The gradients are the
-- reduced ones; the callback may consume them.
do
  local steppers = { ddp = ms.ddp(new_model(), { bucket_bytes = SMALL }), weights = {}, calls = 0 }
  local parameters = steppers.ddp:parameters()
  local reducer = getmetatable(steppers.ddp).ddp.reducer
  local own = ms.stream "early"
  reducer:on_reduced(function(index, positions)
    assert(core.in_hook() and index == steppers.calls)
    steppers.calls = steppers.calls + 1
    own:run(function()
      for _, position in ipairs(positions) do
        steppers.weights[position] = parameters[position]:grad():clone():keep()
        core.consume_grad(parameters[position])
      end
    end)
  end, function() steppers.ended = steppers.calls end)
  for pass = 1, 2 do
    steppers.calls = 0
    backward(steppers.ddp, 30 + pass, rank)
  end
  for i, item in ipairs(reducer:bucket_times()) do
    assert(item.index == i - 1 and item.bytes > 0 and #item.positions > 0)
  end
  assert(steppers.ended == #steppers.ddp:stats().buckets and not parameters[1]:grad())
  same(steppers.weights, average, "the gradients that early steps get")
  steppers.ddp:unwrap()
end

-- Buffers: rank 0's at each synchronized forward, but not after a pass without synchronization.
local Counter = ms.nn.class "Counter"
function Counter:init()
  self.weight = ms.nn.Parameter(ms.ones { 3 })
  self:add_buffer("seen", ms.full(rank + 1, { 2 }))
end
function Counter:forward(x) return x * self.weight end
local counter = ms.ddp(Counter())
local function seen() return counter.seen:to_table()[1] end
assert(seen() == 1, "buffers at first are rank 0's")
local function pass() counter(ms.ones { 3 }):sum():backward() end
counter.seen = ms.full(rank + 5, { 2 })
counter:no_sync(pass)
assert(seen() == rank + 5, "no_sync leaves buffers alone")
pass()
assert(seen() == rank + 5, "and so does the pass after it")
pass()
assert(seen() == 5, "buffers are rank 0's")
local called
counter:unwrap()
counter = ms.ddp(counter.module, {
  buffer_hook = function(buffers)
    called = buffers.seen
    return world:all_reduce(buffers.seen, "sum")
  end,
})
pass()
assert(called == counter.seen and seen() == 5 * size, "buffer_hook")

-- Frozen and ignored parameters are left out.
local part = new_model()
part.wpe.weight:requires_grad_(false)
local left_out = ms.ddp(part, { ignored = { "h%.0%..*" } })
backward(left_out, 40, rank)
local other = new_model()
local expected = alone(other, 40)
for i, item in ipairs(part:named_parameters()) do
  local gradient = item.parameter:grad()
  if item.name == "wpe.weight" then
    assert(not gradient)
  elseif item.name:match "^h%.0%." then
    assert(size == 1 or differ({ gradient }, { expected[i] }) > 0)
  else
    same({ gradient }, { expected[i] }, item.name)
  end
end

core.synchronize()
io.stdout:write(("rank %d is done, weights %012x\n"):format(rank, hash))
