-- Run by every rank of fsdp_precision_spec.lua: the numbers of fsdp's option precision, against the
-- same casts written by hand, bit for bit; what has which dtype, and what travels.
local ms = require "moonshard"
local core = require "moonshard.core"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local fails, clear, mean, models = expect.fails, expect.clear, expect.models.mean, expect.models
local rank, size = ms.rank(), ms.world_size()

-- A layer that is used twice, and a scale and a buffer in the root. dtypes: what forward saw.
local Net = ms.nn.class "Net"
function Net:init()
  ms.seed(4)
  self.first, self.tied = ms.nn.Linear(8, 6), ms.nn.Linear(6, 6)
  self.scale = ms.nn.Parameter(ms.full(1.1, { 6 }))
  self:add_buffer("shift", ms.full(1 / 3, { 6 }))
end
function Net:forward(x)
  self.seen = { self.scale:dtype(), x:dtype(), self.shift:dtype() }
  local h = self.tied(self.tied(self.first(x)):tanh())
  return { h * self.scale:to(h:dtype()) + self.shift }
end

local function input(step, r) return models.input(4, 8, 300 + 10 * step + r) end

-- What `first` and `tied` have in a pass of rank r by hand: gradients as backward leaves them.
-- keep: the scale stays f32.
local function pass_by_hand(net, step, r, dtype, keep)
  local low, x = {}, input(step, r):to(dtype)
  for _, item in ipairs(net:named_parameters()) do
    local kept = keep and item.name == "scale"
    low[item.name] = item.parameter:detach():to(kept and "f32" or dtype):clone():requires_grad_()
  end
  local function tied(h) return h:linear(low["tied.weight"], low["tied.bias"]) end
  local h = tied(tied(x:linear(low["first.weight"], low["first.bias"])):tanh())
  local y = h * low.scale:to(dtype) + net.shift:to(dtype)
  y:to "f32":square():sum():backward()
  local gradients = {}
  for name, p in pairs(low) do gradients[name] = p:grad() end
  return gradients
end

-- Reduced gradients by name after passes on all ranks. sums = "sent": passes add up on their rank
-- in the dtype of the reduction; "f32": reduced passes add up.
local function by_hand(net, steps, dtype, sent, how)
  how = how or {}
  local result, passes = {}, {}
  for _, step in ipairs(steps) do
    passes[step] = {}
    for r = 1, size do passes[step][r] = pass_by_hand(net, step, r - 1, dtype, how.keep) end
  end
  for _, item in ipairs(net:named_parameters()) do
    local name = item.name
    local own = how.keep and name == "scale" and "f32" or sent
    local total
    local of_ranks = {}
    for _, step in ipairs(steps) do
      local reduced = {}
      for r = 1, size do
        local g = passes[step][r][name]:to(own)
        of_ranks[r] = of_ranks[r] and of_ranks[r] + g or g
        reduced[r] = g
      end
      local one = mean(reduced, own)
      total = total and total + one or one
    end
    result[name] = how.sums == "sent" and mean(of_ranks, own) or total
  end
  return result
end

local weights_of = expect.parameters
local function gradients_of(model) return expect.parameters(model, true) end

local function check(model, expected, what)
  for name, g in pairs(gradients_of(model)) do
    if not g:to "f32":eq(expected[name]):all():item() then
      error(("rank %d: %s: %s has other bits, by %g of %g"):format(rank, what, name,
        (g:to "f32" - expected[name]):abs():max():item(), expected[name]:abs():max():item()))
    end
  end
end

local function backward(model, step)
  model(input(step, rank))[1]:to "f32":square():sum():backward()
end

-- What a pass sends: op -> dtype, and bytes.
local function sent_by(f)
  local dtypes, bytes = {}, {}
  for _, record in ipairs(expect.records(f)) do
    dtypes[record.op] = dtypes[record.op] or {}
    dtypes[record.op][record.dtype] = true
    bytes[record.op] = (bytes[record.op] or 0) + record.payload_bytes
  end
  return dtypes, bytes
end

local ways = {
  { strategy = "full_shard", layout = "flat" }, { strategy = "shard_grad_op", layout = "rows" },
  { strategy = "no_shard" }, { strategy = "full_shard", layout = "rows", find_unused = true },
  { strategy = "full_shard", reshard_after_forward = size == 4 and 2 or nil, prefetch = "none" },
}
local function shard(way, precision, more, net)
  local o = { wrap = { names = { "first", "tied" } }, precision = precision }
  return models.fsdp(net or Net(), o, way, more)
end

-- Each dtype of computing with each of reducing. Two steps: shards are cast again after a step.
local reference = Net()
local combinations = {
  { "bf16" }, { "bf16", "bf16" }, { "f16", "bf16" }, { "bf16", "f16" }, { "f32", "bf16" },
  { nil, "f16" },
}
local function check_dtypes(number, way, pair)
  local dtype, sent = pair[1], pair[2] or "f32"
  local what = ("way %d, %s sent in %s"):format(number, tostring(dtype), sent)
  local model = shard(way, { param = dtype, reduce = pair[2], buffer = dtype, output = "f32" })
  local computes = dtype or "f32"
  for step in ms.steps(2) do
    backward(model, step)
    local own = way.strategy == "no_shard" and "f32" or computes
    assert(table.concat(model.module.seen, " ") == (computes .. " "):rep(3):sub(1, -2),
      what .. ": " .. table.concat(model.module.seen, " ") .. own)
    for _, p in ipairs(model:parameters()) do
      assert(p:dtype() == "f32" and p:grad():dtype() == "f32", what)
    end
    reference:load_state(weights_of(model), { partial = true })
    check(model, by_hand(reference, { step }, computes, sent), what)
    -- The step of an optimizer, by hand: with other weights the cast shards are others.
    for _, p in ipairs(model:parameters()) do
      core.no_grad(function() p:add_(p:grad(), -0.01) end)
    end
    clear(model)
  end
  local inner = model:unwrap()
  assert(inner.scale:dtype() == "f32" and inner.shift:dtype() == "f32", "unwrapped")
  inner(input(0, 0))
  assert(inner.seen[1] == "f32", "unwrapped, it computes as before")
end
for number, way in ipairs(ways) do
  for i, pair in ipairs(combinations) do
    if expect.takes(number + i, 5) then check_dtypes(number, way, pair) end
  end
end
reference = Net()

-- Passes add up in the dtype of the reduction where nothing travels, as f32 shards elsewhere.
local function check_sums(way, accumulate, sent)
  local model = shard(way, { param = "bf16", buffer = "bf16", reduce = sent },
    { accumulate = accumulate })
  model:accumulate(3, function(i) backward(model, i) end)
  check(model, by_hand(reference, { 1, 2, 3 }, "bf16", sent,
    { sums = accumulate == "local" and "sent" or "f32" }),
    ("accumulate = %s, %s in %s"):format(accumulate, way.strategy, sent))
  model:unwrap()
end
for number, way in ipairs(ways) do
  for i, accumulate in ipairs { "local", "shard", "all" } do
    for k, sent in ipairs { "bf16", "f32" } do
      if expect.takes(number + i + k, 5) then check_sums(way, accumulate, sent) end
    end
  end
end

-- Low-precision gradients of shards: in the dtype of the reduction, and the same numbers.
for _, way in ipairs(ways) do
  local model = shard(way, { param = "bf16", buffer = "bf16", reduce = "bf16" },
    { keep_low_precision_grads = true })
  backward(model, 1)
  for _, p in ipairs(model:parameters()) do assert(p:grad():dtype() == "bf16") end
  local expected = by_hand(reference, { 1 }, "bf16", "bf16")
  check(model, expected, "low gradients")
  -- An optimizer computes in f32 from them.
  local optimizer = ms.optim.sgd(model, { lr = 0.5 })
  local norm = model:clip_grad_norm(math.huge):item()
  local before = weights_of(model)
  optimizer:step()
  local squares = 0
  for name, t in pairs(weights_of(model)) do
    local g = expected[name]
    if g then
      squares = squares + g:square():sum():item()
      -- 1e-6: the optimizer rounds the product and the difference once.
      local stepped = before[name] - g * 0.5
      assert((t - stepped):abs():max():item() <= 1e-6 * stepped:abs():max():item(), name)
    end
  end
  assert(math.abs(norm / math.sqrt(squares) - 1) <= 1e-6)
  -- What a second pass adds is rounded to bf16.
  optimizer:zero_grad()
  backward(model, 1)
  for _, p in ipairs(model:parameters()) do assert(p:grad():dtype() == "bf16") end
  optimizer:step()
  model:unwrap()
end

-- Kept parameters: their dtype in forward, in what is gathered and reduced, and in gradients.
for _, way in ipairs(ways) do
  local model = shard(way, { param = "bf16", buffer = "bf16", reduce = "bf16", keep = { "sc.*" } })
  backward(model, 2)
  assert(table.concat(model.module.seen, " ") == "f32 bf16 bf16")
  check(model, by_hand(reference, { 2 }, "bf16", "bf16", { keep = true }), "kept")
  model:unwrap()
end

-- Gathers send half the bytes, and reductions as many as precision.reduce has.
if size > 1 then
  for _, layout in ipairs { "flat", "rows" } do
    local bytes = {}
    for _, reduce in ipairs { "none", "f32", "bf16" } do
      local model = shard({ layout = layout },
        reduce ~= "none" and { param = "bf16", buffer = "bf16", reduce = reduce } or nil)
      local dtypes, found = sent_by(function() backward(model, 1) end)
      bytes[reduce] = found
      local low = reduce ~= "none" and "bf16" or "f32"
      assert(dtypes.all_gather[low] and not dtypes.all_gather[low == "f32" and "bf16" or "f32"])
      assert(dtypes.reduce_scatter[reduce == "bf16" and "bf16" or "f32"])
      for _, unit in ipairs(model:units()) do
        assert(unit.bytes == unit.shard_bytes * size // (low == "bf16" and 2 or 1))
      end
      model:unwrap()
    end
    assert(bytes.none.all_gather == 2 * bytes.f32.all_gather)
    assert(bytes.f32.all_gather == bytes.bf16.all_gather)
    assert(bytes.none.reduce_scatter == bytes.f32.reduce_scatter
      and bytes.f32.reduce_scatter == 2 * bytes.bf16.reduce_scatter)
  end
end

-- Summon has whole parameters as the shards have them, between passes and inside one; buffers as
-- forward has them. What it writes is kept; state has buffers in their former dtype, rank 0's.
for _, way in ipairs(ways) do
  local model = shard(way, { param = "bf16", buffer = "bf16" })
  local whole, out = Net():state(), nil
  if not way.find_unused then out = model(input(1, rank))[1] end
  model:summon({}, function()
    for _, item in ipairs(model:named_parameters()) do
      assert(item.parameter:eq(whole[item.name]):all():item(), "summon has the shards' bits")
    end
    assert(model.module.shift:dtype() == "bf16")
  end)
  if out then
    out:to "f32":square():sum():backward()
    check(model, by_hand(reference, { 1 }, "bf16", "f32"), "a summon inside of a pass")
    clear(model)
  end
  model.module.shift:fill_(0.5 + rank)
  local state = model:state()
  assert(rank > 0 or state.shift:dtype() == "f32" and state.shift:eq(0.5):all():item())
  assert(model:state { kind = "sharded" }.shift:dtype() == "f32")
  assert(model.module.shift:dtype() == "bf16"
    and model.module.shift:eq(0.5 + rank):all():item(), "forward's buffer stays")
  if rank == 0 then state.scale, state.shift = ms.full(1 / 7, { 6 }), ms.full(1 / 9, { 6 }) end
  model:load_state(state)
  assert(weights_of(model).scale:eq(ms.full(1 / 7, { 6 })):all():item(), "loaded f32 bits")
  assert(model.module.shift:eq(ms.full(1 / 9, { 6 }):to "bf16"):all():item(), "rounded")
  model:unwrap()
end

-- Evaluation in full precision: the bits of the model without shards, and bf16 after it.
for _, way in ipairs(ways) do
  local model = shard(way, { param = "bf16", buffer = "bf16" }, { full_precision_eval = true })
  local alone, x = Net(), input(5, 0)
  local function evaluate()
    return ms.no_grad(function() return model(x)[1] end)
  end
  -- The buffer was rounded.
  alone.shift:copy_(alone.shift:to "bf16")
  local low = evaluate()
  assert(low:dtype() == "bf16")
  model:eval()
  local full = evaluate()
  assert(full:dtype() == "f32" and full:eq(alone(x)[1]):all():item(),
    ("%s: %g"):format(full:dtype(), (full:to "f32" - alone(x)[1]):abs():max():item()))
  assert(table.concat(model.module.seen, " ") == "f32 f32 f32")
  -- Backward of a recorded evaluation, too; then training goes on in bf16.
  model(input(3, rank))[1]:sum():backward()
  clear(model)
  model:train()
  assert(evaluate():eq(low):all():item())
  -- An evaluation between a forward and its backward.
  if not way.find_unused then
    local out = model(input(1, rank))[1]
    model:eval()
    assert(evaluate():eq(full):all():item())
    model:train()
    out:to "f32":square():sum():backward()
    local shifted = Net()
    check(model, by_hand(shifted, { 1 }, "bf16", "f32"), "evaluated inside of a pass")
  end
  -- Two recorded forwards in two precisions have no backward in common.
  if rank == 0 and size == 1 then
    model(x)
    model:eval()
    fails(function() model(x) end, "in evaluation mode", "run that backward first")
    model:train()
    model:reset()
  end
  model:unwrap()
end

-- A model on "meta" is made in the dtype of its shards, and computes in the other.
for _, way in ipairs(ways) do
  local results = {}
  local function on_meta() return ms.device("meta", function() return Net() end) end
  for i, make in ipairs { Net, on_meta } do
    local model = shard(way, { param = "bf16", buffer = "bf16" }, nil, make())
    backward(model, 1)
    results[i] = { state = weights_of(model), gradients = gradients_of(model) }
    model:unwrap()
  end
  for _, kind in ipairs { "state", "gradients" } do
    for name, t in pairs(results[1][kind]) do
      assert(t:dtype() == "f32" and t:eq(results[2][kind][name]):all():item(), name)
    end
  end
end

-- Errors are the same on every rank, and nothing has changed.
for _, case in ipairs {
  { { param = "i64" }, "precision.param must be f32, f16 or bf16, not i64" },
  { { reduce = "u8" }, "precision.reduce must be f32, f16 or bf16, not u8" },
  { { keep = { "scal" }, param = "bf16" }, "'scal'", "did you mean 'scale'?" },
  { { keep = { "(" }, param = "bf16" }, "precision.keep[1]", "is no pattern" },
  { { keep = { 1 }, param = "bf16" }, "precision.keep[1] must be a name or a pattern" },
  { { keep = "scale" }, "precision.keep" }, { { cast_inputs = true }, "precision.cast_inputs" },
  { { params = "bf16" }, "params" }, { "bf16", "precision is a table", "keep" },
} do
  fails(function() ms.fsdp(Net(), { precision = case[1] }) end, "fsdp", table.unpack(case, 2))
end
-- Integers have no precision: no parameter holds them, and buffers of them are never cast.
do
  local net = Net()
  fails(function() net.counts = ms.nn.Parameter(ms.zeros { 4, dtype = "i64" }) end,
    "nn.Parameter: parameters are f32, f16 or bf16, not i64")
  fails(function() net:to "i64" end, "to: ", "not i64")
  net:add_buffer("counts", ms.tensor({ 1 << 60, 2 }, "i64"))
  fails(function() ms.fsdp(net, { precision = { param = "bf16", keep = { "counts" } } }) end,
    "precision.keep[1]: no parameter is called 'counts'")
  local model = ms.fsdp(net, { precision = { param = "bf16", buffer = "bf16" } })
  assert(model.counts:dtype() == "i64" and model.counts:max():item() == 1 << 60)
end
for _, name in ipairs { "keep_low_precision_grads", "full_precision_eval" } do
  fails(function() ms.fsdp(Net(), { [name] = true }) end, name, "precision, which is not given")
end
if size > 1 then
  fails(function() ms.fsdp(Net(), { precision = { param = rank == 0 and "bf16" or "f16" } }) end,
    "ranks have different models", "precision = param bf16", "precision = param f16")
end

print(("rank %d is done"):format(rank))
