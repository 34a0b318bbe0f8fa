-- What every rank of fp8_spec.lua runs: training in fp8 of sharded models, against ddp's. Ranks
-- gather whole weights before these are cast, so a weight's codes and scale are the same on all.
-- With dtype = "fp8" weights travel as these codes, and nothing has other bits than without.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local models, world, rank = expect.models, ms.world(), ms.rank()

-- Copies of whole gradients by name, which outlive the step.
local function gradients_of(model)
  local found = {}
  if getmetatable(model).fsdp then found = expect.parameters(model, true)
  else
    for _, item in ipairs(model:named_parameters()) do
      found[item.name] = item.parameter:grad():clone()
    end
  end
  for _, g in pairs(found) do g:keep() end
  return found
end

local function train(wrap, options, dtype)
  local inner = models.gpt2 {
    vocab = 40, context = 16, width = 32, recompute = options.recompute,
  }
  local model = wrap == "ddp" and ms.ddp(inner) or ms.fsdp(inner, wrap)
  -- Two groups, chosen by shapes: the same ones under every strategy.
  local optimizer = ms.optim.adamw({
    { params = model:parameters(function(p) return p:dim() >= 2 end) },
    { params = model:parameters(function(p) return p:dim() < 2 end), weight_decay = 0 },
  }, { lr = 1e-2 })
  local losses, passes, gradients = {}, options.passes or 1, nil
  for step in ms.steps(3) do
    local total = 0
    model:accumulate(passes, function(i)
      local x = ms.randint { 2, 16, low = 0, high = 40, seed = 100 * step + 10 * i + rank }
      local loss = ms.autocast(dtype or "fp8", function()
        return model(x):cross_entropy(x) / passes
      end)
      loss:backward()
      total = total + loss:detach()
    end)
    if step == 2 then gradients = gradients_of(model) end
    optimizer:step()
    optimizer:zero_grad()
    losses[step + 1] = world:all_reduce(total, "avg"):value():item()
  end
  return { losses = losses, gradients = gradients, weights = expect.whole(model) }
end

-- Raises unless both trained alike, to the bit.
local function check_same(own, expected, what)
  expect.same(own.weights, expected.weights, what)
  expect.same(own.gradients, expected.gradients, what .. ", gradients")
  for i, loss in ipairs(expected.losses) do
    assert(own.losses[i] == loss, ("%s: the loss of step %d is %.9g, not %.9g"):format(what, i,
      own.losses[i], loss))
  end
end

-- A copy of the options in which weights travel as codes.
local function in_codes(wrap)
  local copy = { dtype = "fp8" }
  for name, value in pairs(wrap) do copy[name] = value end
  return copy
end

-- Over the stand-in for a GPU, which is slow, fewer cases.
local on_gpu = ms.device() == "cuda"
for _, options in ipairs(on_gpu and { {} } or { {}, { recompute = true }, { passes = 2 } }) do
  local expected = train("ddp", options)
  -- Passes are added up before they are reduced, as ddp does.
  for _, wrap in ipairs {
    { strategy = "full_shard" }, { strategy = "shard_grad_op" },
    { strategy = "full_shard", offload = "cpu" },
  } do
    wrap.accumulate = "local"
    check_same(train(wrap, options), expected, wrap.strategy)
    check_same(train(in_codes(wrap), options), expected, wrap.strategy .. ", fp8")
  end
  local wide = train("ddp", options, "bf16")
  assert(wide.losses[3] ~= expected.losses[3])
  assert(math.abs(wide.losses[3] / expected.losses[3] - 1) < 0.05)
end

-- Other options, which round or add up otherwise than ddp, against the same without codes. In
-- hybrid strategies the order of a sum over passes depends on whose shard it is in, unless each
-- rank adds up its own.
local pairs_of = world:size() == 4 and { world:levels(2) } or nil
local cases = {
  { layout = "rows", accumulate = "local" },
  { precision = { param = "bf16" } },
  { precision = { param = "bf16", reduce = "bf16" }, layout = "rows", offload = "cpu" },
  { prefetch = "both", max_in_flight = 1 },
  { prefetch = "none", find_unused = true },
  { wrap = { class = { "Conv1D", "LayerNorm" } }, layout = "rows" },
  { wrap = { min_elements = 1 << 30, names = { "h.0.mlp" } } },
  pairs_of and { reshard_after_forward = 2 },
  pairs_of and {
    strategy = "hybrid_shard", shard_group = pairs_of[1], replica_group = pairs_of[2],
    accumulate = "local",
  },
  pairs_of and {
    strategy = "hybrid_shard_zero2", shard_group = pairs_of[2], replica_group = pairs_of[1],
    accumulate = "local", offload = "cpu",
  },
}
for i, wrap in pairs(cases) do
  if wrap and (not on_gpu or i < 3) then
    local options = { recompute = i % 2 == 0, passes = 1 + i % 2 }
    check_same(train(in_codes(wrap), options), train(wrap, options), "case " .. i)
  end
end
io.write(("rank %d is done\n"):format(rank))
