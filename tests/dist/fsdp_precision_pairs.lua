-- Run by every rank of fsdp_precision_spec.lua: fsdp's option precision together with everything
-- else that a sharded model does. A language model with tied weights trains in each way, and must
-- have the bits of the plainest one.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local fails, same, models = expect.fails, expect.same, expect.models
local rank, size = ms.rank(), ms.world_size()
local hooks = ms.hooks

local STEPS <const> = expect.full and 3 or 2
local tokens = models.tokens
local function new_model() return models.gpt2 { vocab = 17 } end

local low_param = { precision = { param = "bf16", output = "f32" } }
local function shard(options) return models.fsdp(new_model(), low_param, options) end

-- Returns whole weights. how: see models.train.
local function train(options, how)
  how = how or {}
  how.steps = STEPS
  local model = models.train(how, low_param, options)
  local found = expect.whole(model)
  model:unwrap()
  return found
end

------------------------------------------------------------------------- ways that keep all bits

-- What is gathered when, in which order memory is, and what runs again, changes no bit. hybrid
-- shards add in another order: 2 ranks of 2 is one order of 4.
local plain, number = train(), 0
local function one_unit() return false end
for what, options in ms.sorted_pairs {
  ["by rows"] = { layout = "rows" }, ["no shards"] = { strategy = "no_shard" },
  ["gathered ahead"] = { prefetch = "both" },
  ["kept after forward"] = { strategy = "shard_grad_op" }, ["no prefetch"] = { prefetch = "none" },
  ["find_unused"] = { find_unused = true }, ["one unit"] = { wrap = one_unit },
  ["a link in Lua"] = { comm_hook = function(bucket, next) return next(bucket) end },
  ["near"] = { reshard_after_forward = size == 4 and 2 or nil },
  ["small units"] = { wrap = { class = { "Linear", "Conv1D" } } },
  ["evaluation in full precision"] = { full_precision_eval = true },
  ["groups of blocks"] = { wrap = { groups = { { "h%.%d" } } } },
} do
  number = number + 1
  if expect.takes(number, 4) then same(train(options), plain, what) end
  if expect.takes(number + 2, 4) then
    same(train(options, { recompute = true }), plain, what .. ", recomputed")
  end
end
for _, reduce in ipairs { "f32", "bf16" } do
  local options = { precision = { param = "bf16", output = "f32", reduce = reduce } }
  local expected = reduce == "f32" and plain or train(options)
  for i, policy in ipairs { "in_backward", "deferred" } do
    local takes_shards = expect.takes(i + (reduce == "f32" and 0 or 1), 2)
    options.strategy = nil
    if takes_shards then same(train(options, { policy = policy }), expected, policy) end
    options.strategy = "no_shard"
    if expect.full or not takes_shards then
      same(train(options, { policy = policy }), expected, policy .. ", no shards")
    end
  end
end
do
  local model = new_model()
  local optimizer = ms.optim.adamw(model, { lr = 1e-2 })
  local x = tokens(0)
  model = ms.fsdp(model, {
    precision = { param = "bf16", output = "f32" },
    comm_hook = hooks.chain { hooks.then_optimizer { optimizer = optimizer } },
  })
  local classic = shard()
  local own = ms.optim.adamw(classic, { lr = 1e-2 })
  for _ = 1, 2 do
    model(x):cross_entropy(x):backward()
    optimizer:step()
    classic(x):cross_entropy(x):backward()
    own:step()
    own:zero_grad()
  end
  same(expect.whole(model), expect.whole(classic), "an optimizer in the chain")
end

-- Joined ranks with as many inputs, and passes that add up.
same(train(nil, { run = function(model, pass)
  model:join({ divisor = "live" }, pass)
end }), plain, "joined")
local twice = train({ accumulate = "local" },
  { run = function(model, pass) model:accumulate(2, pass) end })
same(train(nil, { run = function(model, pass)
  model:no_sync(function() pass(1) end)
  pass(2)
end }), twice, "no_sync")
-- Summing shards of two reductions rounds elsewhere: AdamW's first steps do not depend on sizes, so
-- a number near 0 moves by up to the rate. 0.02: two steps of 1e-2 of weights of 1.
for _, accumulate in ipairs { "shard", "all" } do
  expect.close(train({ accumulate = accumulate },
    { run = function(model, pass) model:accumulate(2, pass) end }), twice, 0.05, accumulate)
end

-- Looking at whole parameters, or evaluating, inside of a pass changes nothing.
local function looking(model, _, step)
  local x = tokens(step)
  local loss = model(x):cross_entropy(x)
  model:summon({ writeback = false }, function(list)
    for _, p in ipairs(list) do assert(p:dtype() == "f32") end
  end)
  model:eval()
  local out = ms.no_grad(function() return model(x) end)
  assert(out:dtype() == "f32")
  model:train()
  loss:backward()
end
for i, options in ipairs { {}, { full_precision_eval = true }, { strategy = "shard_grad_op" },
    { prefetch = "both", full_precision_eval = true }, { prefetch = "forward" },
    { strategy = "no_shard", full_precision_eval = true },
    { layout = "rows", full_precision_eval = true, keep_low_precision_grads = true } } do
  if expect.takes(i, 2) then same(train(options, { run = looking }), plain, "looked at") end
end

-- A power of two as loss scale changes no bit of bf16.
same(train(nil, { scale = 8 }), plain, "scaled")
same(train { keep_low_precision_grads = true }, plain, "low gradients in f32")

------------------------------------------------------------------------------------------- chains

-- Links see gradients in the dtype of the reduction; a bucket's gradients are in one dtype.
local function seen_by(precision, link)
  local seen = {}
  local model = shard { precision = precision, comm_hook = hooks.chain { function(bucket, next)
    seen[bucket:dtype() .. " " .. bucket:buffer():dtype()] = true
    return next(bucket)
  end, link } }
  local x = tokens(0)
  model(x):cross_entropy(x):backward()
  local found = {}
  for _, p in ipairs(model:parameters()) do found[#found + 1] = p:grad():to "f32" end
  model:unwrap()
  local text
  for one in pairs(seen) do
    assert(not text)
    text = one
  end
  return text, found
end
local low = { param = "bf16", reduce = "bf16", output = "f32" }
assert(seen_by(low) == "bf16 bf16")
assert(seen_by { param = "bf16", output = "f32" } == "f32 f32")
assert(seen_by { param = "bf16", output = "f32", reduce = "f16" } == "f16 f16")
assert(seen_by(low, hooks.fp16_compress()) == "bf16 bf16")
-- A chain that begins with a cast to 16 bits rounds once, to that: not to precision.reduce, too.
do
  local function gradients(precision)
    local model = shard { precision = precision, comm_hook = hooks.fp16_compress() }
    local x = tokens(0)
    model(x):cross_entropy(x):backward()
    local found = expect.gradients(model)
    model:unwrap()
    return found
  end
  same(gradients { output = "f32", reduce = "bf16" }, gradients { output = "f32" }, "f32 gradients")
  same(gradients(low), gradients { param = "bf16", output = "f32" }, "bf16 gradients")
end

-- Clipping in the chain, where results are held to the end, scales what clip_grad_norm would: the
-- reduced numbers in f32. 1e-5: the norm is added up in another order.
for _, strategy in ipairs { "full_shard", "no_shard" } do
  for _, keep in ipairs { false, true } do
    local function gradients(hook)
      local model = shard {
        strategy = strategy, precision = low, comm_hook = hook, keep_low_precision_grads = keep,
      }
      local x = tokens(0)
      model(x):cross_entropy(x):backward()
      if not hook then model:clip_grad_norm(0.1) end
      local found = {}
      for i, p in ipairs(model:parameters()) do
        assert(p:grad():dtype() == (keep and "bf16" or "f32"))
        found[tostring(i)] = p:grad():to "f32"
      end
      local norm = model:clip_grad_norm(math.huge):item()
      model:unwrap()
      return found, norm
    end
    local _, norm = gradients()
    local _, clipped = gradients(hooks.clip { max_norm = 0.1, scope = "global" })
    -- bf16 rounds what is scaled: 2^-9 of each number.
    local tolerance = keep and 0.004 or 1e-5
    assert(math.abs(norm / 0.1 - 1) <= tolerance and math.abs(clipped / 0.1 - 1) <= tolerance,
      ("%s: %g %g"):format(strategy, norm, clipped))
  end
end
-- Methods that keep state get the same numbers from 16-bit buckets as from f32 ones, but for the
-- rounding: 2^-9 of what comes and of what goes, in two passes. Factors of PowerSGD and scales of
-- int8 carry it on to other numbers; 0.03 of the largest of all.
for name, make in ms.sorted_pairs {
  powersgd = function() return hooks.powersgd { rank = 4, start_step = 1 } end,
  int8 = function()
    return hooks.chain { hooks.error_feedback(), hooks.int8 { per = "tensor" } }
  end,
} do
  local function gradients(reduce)
    local model = shard {
      precision = { param = "bf16", output = "f32", reduce = reduce }, comm_hook = make(),
      strategy = "no_shard",
    }
    local found = {}
    for step = 1, 2 do
      local x = tokens(step)
      model(x):cross_entropy(x):backward()
      for i, g in ipairs(expect.gradients(model)) do found[step .. " " .. i] = g end
      expect.clear(model)
    end
    model:unwrap()
    return found
  end
  local most, largest, other = 0, 0, gradients "f32"
  for key, g in pairs(gradients "bf16") do
    most = math.max(most, (g - other[key]):abs():max():item())
    largest = math.max(largest, g:abs():max():item())
  end
  assert(most <= 0.03 * largest, ("%s: %g of %g"):format(name, most, largest))
end

-------------------------------------------------------------------------------------- ranks differ

-- Rank r has r + 1 batches; the others take part with zeros, and step as many times.
do
  for _, options in ipairs { {}, { layout = "rows", keep_low_precision_grads = true },
      { precision = low, strategy = "shard_grad_op" } } do
    local model = shard(options)
    local optimizer = ms.optim.sgd(model, { lr = 0.1 })
    model:join({}, function()
      for step = 0, rank do
        local x = tokens(step)
        model(x):cross_entropy(x):backward()
        optimizer:step()
        optimizer:zero_grad()
      end
    end)
    local whole = expect.whole(model)
    for _, t in pairs(whole) do assert(t:is_finite():all():item()) end
    model:unwrap()
  end
end

-- Some ranks evaluate units that others leave out: all gather them in the precision of the rank
-- that uses them.
do
  local Net = ms.nn.class "Net"
  function Net:init()
    ms.seed(2)
    self.first, self.second = ms.nn.Linear(6, 6), ms.nn.Linear(6, 6)
  end
  function Net:forward(x, both) return both and self.second(self.first(x)) or self.first(x) end
  local alone = Net()
  local model = ms.fsdp(Net(), {
    find_unused = true, full_precision_eval = true, precision = { param = "bf16" },
    wrap = { class = "Linear" },
  })
  local x = ms.randn { 3, 6, seed = 4, per_rank = false }
  for round = 1, 4 do
    local both = rank == round % size
    model:train(round % 2 == 0)
    local out = ms.no_grad(function() return model(x, both) end)
    assert(out:dtype() == (round % 2 == 0 and "bf16" or "f32"))
    if round % 2 == 1 then assert(out:eq(alone(x, both)):all():item()) end
    -- The forwards of all ranks end together only in backward.
    model:train()
    model(x, both):to "f32":sum():backward()
  end
  model:unwrap()
end

------------------------------------------------------------------------------- text, and its files

do
  local alone, model = new_model(), shard { full_precision_eval = true }
  local ids = ms.tensor({ 1, 2, 3 }, "i64")
  local how = { count = 5, temperature = 0 }
  local low_text = model:generate(ids, how)
  assert(low_text:numel() == 5)
  model:eval()
  alone:eval()
  assert(model:generate(ids, how):eq(alone:generate(ids, how)):all():item())
  model:train()
  assert(model:generate(ids, how):eq(low_text):all():item())
  -- Parameters of a pass keep their handles' dtype in optimizers and hooks outside of it.
  for _, p in ipairs(model:parameters()) do assert(p:dtype() == "f32") end
  model:unwrap()
end

-- What a script writes to a gathered parameter would be lost, also where each rank has all of it:
-- an error, here of one rank, since it ends the job.
if size == 1 then
  local Writer = ms.nn.class "Writer"
  function Writer:init() self.scale = ms.nn.Parameter(ms.ones { 2 }) end
  function Writer:forward(x)
    if not self:is_training() then ms.no_grad(function() self.scale:fill_(2) end) end
    return x * self.scale
  end
  local model = ms.fsdp(Writer(), { precision = { param = "bf16" }, strategy = "no_shard" })
  model(ms.ones { 2 })
  model:eval()
  fails(function() ms.no_grad(function() return model(ms.ones { 2 }) end) end,
    "'scale' was written while its unit", "gathered")
end

print(("rank %d is done"):format(rank))
