-- Tutorial: a communication hook, step by step, each step measured. A link sees each bucket of
-- gradients on every rank; next(bucket) runs the rest of the chain, which ends with the mean.
--     ./moonshard run recipes/tutorials/hook.lua -n 2
--     ./moonshard run recipes/tutorials/hook.lua -n 2 --link 100Mbit,1ms    # over a slow network
local ms = require "moonshard"
local hooks, nn, optim = ms.hooks, ms.nn, ms.optim

local cfg = ms.config {
  steps = { 300, help = "optimizer steps for each hook" },
  width = { 128, help = "width of the model" },
}

-- 1. Does nothing: gradients go on as they are.
local function plain(bucket, next) return next(bucket) end

-- 2. Half the bytes: the reduction sees bf16. The future's value is written back into the bucket,
-- so the step needs no further memory.
local function halved(bucket, next)
  local full = bucket:buffer()
  bucket:set_buffer(full:to "bf16")
  return next(bucket):and_then(function(mean) return full:copy_(mean) end)
end

-- 3. A sixteenth of the numbers, the same random ones on all ranks. What is not sent is lost: the
-- model learns slowly.
local function thinned(bucket, next)
  local full = bucket:buffer()
  local draws = ms.rand { full:numel(), seed = ms.step() * 1009 + bucket:index() }
  local _, places = draws:topk(math.max(1, full:numel() // 16))
  bucket:set_buffer(full:gather(1, places))
  if bucket:wants_sent() then
    bucket:set_sent(full:zeros_like():scatter_(1, places, bucket:buffer())) -- for step 4
  end
  return next(bucket):and_then(function(mean) return full:zero_():scatter_(1, places, mean) end)
end

-- 4. The engine keeps what a link does not send, and adds it in the next step.
local chains = {
  { "plain", { plain } },
  { "halved", { halved } },
  { "thinned", { thinned } },
  { "thinned, errors kept", { "error_feedback", thinned } },
}

local secret = ms.randn { 32, 1, seed = 7 } -- what is to be learned

-- Trains a small model, and says what the chain costs in a step: the bytes that a rank hands to
-- reductions, and how long the model waits for them (the mean of all steps); and what is learned.
local function measure(name, links)
  ms.seed(1)
  local inner = nn.Sequential(nn.Linear(32, cfg.width), nn.GELU(), nn.Linear(cfg.width, cfg.width),
    nn.GELU(), nn.Linear(cfg.width, 1))
  local model = ms.ddp(inner, { comm_hook = hooks.chain(links) })
  local optimizer = optim.sgd(model, { lr = 0.1 })
  local waits, stats, loss = 0, nil, nil
  for step in ms.steps(cfg.steps) do
    local x = ms.randn { 64, 32, seed = step * ms.world():size() + ms.rank() }
    loss = model(x):mse_loss(x:matmul(secret):tanh())
    loss:backward()
    optimizer:step()
    loss = loss:item() -- waits, so that the times are those of this step
    stats = model:stats()
    waits = waits + stats.exposed_ms / cfg.steps
  end
  ms.log("%-21s %6d bytes, waits %6.3f ms   loss %.4f", name, stats.payload_bytes, waits, loss)
end

for _, one in ipairs(chains) do measure(one[1], one[2]) end
