-- What every rank of fp8_spec.lua runs: training in fp8 of sharded models, against ddp's. Ranks
-- gather whole weights before these are cast, so a weight's codes and scale are the same on all.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local models, world, rank = expect.models, ms.world(), ms.rank()

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
  local losses, passes = {}, options.passes or 1
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
    optimizer:step()
    optimizer:zero_grad()
    losses[step + 1] = world:all_reduce(total, "avg"):value():item()
  end
  return { losses = losses, weights = expect.whole(model) }
end

for _, options in ipairs { {}, { recompute = true }, { passes = 2 } } do
  local expected = train("ddp", options)
  -- Passes are added up before they are reduced, as ddp does.
  for _, wrap in ipairs {
    { strategy = "full_shard" }, { strategy = "shard_grad_op" },
    { strategy = "full_shard", offload = "cpu" },
  } do
    wrap.accumulate = "local"
    local own = train(wrap, options)
    local most, where = expect.difference(own.weights, expected.weights)
    assert(most == 0, ("%s: %s differs by %g"):format(wrap.strategy, where, most))
    for i, loss in ipairs(expected.losses) do assert(own.losses[i] == loss, wrap.strategy) end
  end
  local wide = train("ddp", options, "bf16")
  assert(wide.losses[3] ~= expected.losses[3])
  assert(math.abs(wide.losses[3] / expected.losses[3] - 1) < 0.05)
end
io.write(("rank %d is done\n"):format(rank))
