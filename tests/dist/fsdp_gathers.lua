-- Run by every rank of fsdp_gathers_spec.lua: before_gather and after_gather, against the same
-- rounding by hand, bit for bit; what travels; and mistakes.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local fails = expect.fails
local rank, size = ms.rank(), ms.world_size()
local recipes = (os.getenv "MOONSHARD_SOURCE" or ".") .. "/recipes/gathers/"
local CODECS = { "int8", "fp8" }

local function new_model()
  ms.seed(5)
  return ms.nn.Sequential(ms.nn.Linear(24, 40), ms.nn.GELU(), ms.nn.Linear(40, 24),
    ms.nn.LayerNorm(24))
end

local function input(step, r) return expect.models.input(3, 24, 900 + 10 * step + r) end

-- The values of a flat parameter, each rank's shard rounded by itself.
local function round_shards(codec, flat, ranks)
  local length = (flat:numel() + ranks - 1) // ranks
  local padded = ms.cat({ flat, ms.zeros { length * ranks - flat:numel() } })
  local rows = padded:view(ranks, length)
  local out = {}
  for r = 1, ranks do
    local payload = codec:encode(rows[r])
    out[r] = codec:decode(payload:view(1, -1), length):flatten()
  end
  return ms.cat(out):narrow(1, 1, flat:numel())
end

-- Gradients and outputs of a pass of all ranks' inputs through one model with rounded weights.
-- units: lists of names.
local function by_hand(codec, units, step)
  local model, ranks = new_model(), size
  local gradients, outputs = {}, {}
  local named = {}
  for _, item in ipairs(model:named_parameters()) do named[item.name] = item.parameter end
  for _, names in ipairs(units) do
    local list = {}
    for i, name in ipairs(names) do list[i] = named[name]:detach():flatten() end
    local rounded, at = round_shards(codec, ms.cat(list), ranks), 1
    for _, name in ipairs(names) do
      local p = named[name]
      ms.no_grad(function()
        p:copy_(rounded:narrow(1, at, p:numel()):view(table.unpack(p:shape())))
      end)
      at = at + p:numel()
    end
  end
  for r = 0, size - 1 do
    local y = model(input(step, r))
    outputs[r] = y:detach()
    y:square():mean():backward()
    for name, p in pairs(named) do
      local g = p:grad() / size
      gradients[name] = gradients[name] and gradients[name] + g or g
      p:set_grad(nil)
    end
  end
  return gradients, outputs
end

local UNITS = { { "0.weight", "0.bias" }, { "2.weight", "2.bias" }, { "3.weight", "3.bias" } }

-- What each unit computes with, its gradients and what travels.
local function check_codec(name, strategy, prefetch)
  local how = dofile(recipes .. name .. ".lua")
  local model = ms.fsdp(new_model(), {
    wrap = { class = { "Linear", "LayerNorm" } }, strategy = strategy, prefetch = prefetch,
    before_gather = how.before_gather, after_gather = how.after_gather,
  })
  expect.same(expect.whole(model), new_model():state(), "summon is exact")
  local gradients, outputs = by_hand(ms.codec(name), UNITS, 1)
  local y = model(input(1, rank))
  local plain = ms.no_grad(function() return new_model()(input(1, rank)) end)
  if size > 1 then
    assert((y:detach() - outputs[rank]):abs():max():item() == 0, name .. ": outputs")
    assert((y:detach() - plain):abs():max():item() > 1e-3, name .. ": nothing was rounded")
  else
    assert((y:detach() - plain):abs():max():item() == 0, "one rank gathers nothing")
  end
  y:square():mean():backward()
  model:summon({ grads = true, writeback = false }, function()
    for _, item in ipairs(model.module:named_parameters()) do
      local want = gradients[item.name]
      local apart = (item.parameter:grad() - want):abs():max():item() / want:abs():max():item()
      -- Sums over ranks in another order.
      assert(size == 1 or apart <= 1e-6, ("%s: %s: %g"):format(name, item.name, apart))
    end
  end)
  return model
end

-- What all gathers of a forward and a backward send.
local function gathered_bytes(options)
  local model = ms.fsdp(new_model(), options)
  local step = function() model(input(2, rank)):sum():backward() end
  step()
  local bytes = 0
  for _, record in ipairs(expect.records(step)) do
    if record.op == "all_gather" then bytes = bytes + record.payload_bytes end
  end
  return bytes
end

for _, name in ipairs(CODECS) do
  for _, strategy in ipairs { "full_shard", "shard_grad_op" } do
    check_codec(name, strategy, "backward_pre")
    check_codec(name, strategy, "none")
  end
end

-- A quarter of the bytes, and a scale for each 256 numbers.
if size > 1 then
  local how = dofile(recipes .. "int8.lua")
  local wrap = { class = "Linear" }
  local exact = gathered_bytes { wrap = wrap }
  local low = gathered_bytes {
    wrap = wrap, before_gather = how.before_gather, after_gather = how.after_gather,
  }
  assert(low < exact * 0.3 and low > exact * 0.25, ("%d of %d"):format(low, exact))
end

-- By rows, each row of a weight with a scale of its own; biases as they are. The same numbers as
-- rounding each row by hand, whatever the number of ranks.
local function by_row(rows)
  local scale = rows:detach():abs():max(2, true)
  return (rows:detach() / scale):to "bf16":to "f32" * scale
end
local function rows_model()
  local seen = {}
  return ms.fsdp(new_model(), {
    layout = "rows", wrap = { class = "Linear" },
    before_gather = function(shard, unit, part)
      seen[unit.name] = (seen[unit.name] or 0) + 1
      assert(shard:numel() == part.length and #part.spans == #unit.parameters)
      local sent = shard:clone()
      for _, span in ipairs(part.spans) do
        if #span.shape == 2 and span.count > 0 then
          assert(span.count % span.shape[2] == 0, "whole rows")
          local rows = sent:narrow(1, span.at + 1, span.count):view(-1, span.shape[2])
          rows:copy_(by_row(rows))
        end
      end
      return sent
    end,
  }), seen
end
do
  local model, seen = rows_model()
  local hand = new_model()
  ms.no_grad(function()
    for _, item in ipairs(hand:named_parameters()) do
      if item.parameter:dim() == 2 then item.parameter:copy_(by_row(item.parameter)) end
    end
  end)
  local y = model(input(3, rank))
  if size > 1 then
    assert((y:detach() - hand(input(3, rank)):detach()):abs():max():item() == 0, "rows")
    assert(seen["0"] == 1 and seen["2"] == 1)
    y:sum():backward()
    assert(seen["0"] == 2 and seen["2"] == 2 and seen[""] == 1, "gathered again for backward")
  end
end

-- With the other options that change what is gathered, and when.
local function trains(options, micro)
  local how = dofile(recipes .. "int8.lua")
  options.before_gather, options.after_gather = how.before_gather, how.after_gather
  options.wrap = { class = "Linear" }
  local model = ms.fsdp(new_model(), options)
  local optimizer = ms.optim.adamw(model, { lr = 1e-2 })
  local first, last
  for step in ms.steps(12) do
    local loss
    model:accumulate(micro or 1, function(i)
      loss = (model(input(i, rank)):to "f32" - 0.5):square():mean()
      loss:backward()
    end)
    model:clip_grad_norm(1)
    optimizer:step()
    optimizer:zero_grad()
    last = ms.world():all_reduce(loss:detach(), "avg"):value():item()
    first = first or last
  end
  assert(last < first * 0.9, ("%g, then %g"):format(first, last))
  local before = expect.whole(model)
  ms.no_grad(function() model(input(9, rank)) end)
  model:reset()
  expect.close(before, expect.whole(model), 0, "an evaluation changes nothing")
end
trains { precision = { param = "bf16" } }
trains { precision = { param = "bf16" }, full_precision_eval = true, layout = "rows" }
trains({ accumulate = "local" }, 2)
trains({ find_unused = true }, 2)
trains { prefetch = "none", max_in_flight = 1 }

-- Mistakes before anything travels.
if size > 1 then
  local function identity(t) return t end
  fails(function() ms.fsdp(new_model(), { before_gather = 1 }) end, "before_gather", "function")
  fails(function()
    ms.fsdp(new_model(), { before_gather = rank == 0 and identity or nil })
  end, "before_gather")
  -- What a function has made ends with it.
  local kept
  local model = ms.fsdp(new_model(), { before_gather = function(t)
    kept = t + 1
    return t
  end })
  model(input(1, rank))
  fails(function() return kept + 1 end, "before_gather or after_gather, which has returned")
end
io.write(("rank %d is done\n"):format(rank))
