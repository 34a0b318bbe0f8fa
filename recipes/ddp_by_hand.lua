-- Data parallelism without ms.train: forward, backward, clipping, step, metrics, validation, on any
-- number of ranks.
--     ./moonshard run recipes/ddp_by_hand.lua -n 2 data=FILE_OR_FOLDER
local ms = require "moonshard"
local nn, optim, data = ms.nn, ms.optim, ms.data

local cfg = ms.config(ms.scripts.options {
  data       = { "README.md", help = "a text file or a folder" },
  steps      = { 300, help = "optimizer steps" },
  batch      = { 16, help = "sequences of a step, over all ranks" },
  accumulate = { 2, help = "passes of a step; gradients are reduced in the last one only" },
  length     = { 64, help = "bytes of a sequence" },
  lr         = { 2e-3, help = "peak learning rate" },
  run        = { "runs/ddp_by_hand", help = "folder of metrics.jsonl" },
})

local train, valid = assert(data.bytes(cfg.data)):split(0.9)
local batches = train:loader {
  batch = cfg.batch // cfg.accumulate, length = cfg.length, shuffle = true,
}
local held_out = valid:loader { batch = cfg.batch, length = cfg.length }

-- A link gets each bucket of gradients, on every rank. This one measures, and leaves the reduction
-- to the links after it.
local buckets, bytes = ms.metric("buckets", "sum"), ms.metric("bucket_bytes", "sum")
local function count(bucket, next)
  buckets:push(1)
  bytes:push(bucket:buffer():numel() * 4)
  return next(bucket)
end

-- clip is nil if overlap= allows steps during backward: then the chain clips.
local gpt = nn.gpt2 { vocab = 256, context = cfg.length, layers = 4, width = 128, heads = 4 }
local model, optimizer, clip = ms.scripts.apply(cfg, gpt, function(net)
  local schedule = optim.cosine { warmup = 20, steps = cfg.steps, floor = 0.1 }
  return optim.adamw(net, { lr = cfg.lr, schedule = schedule })
end, { clip = 1.0, links = { count } })
local report = ms.report { run = cfg.run, tokens = cfg.batch * cfg.length, total = cfg.steps }

local function validation_loss()
  model:eval()
  local sum, count_of = ms.zeros {}, 0
  ms.no_grad(function()
    for x, y in held_out:batches(10) do
      sum:add_(model(x):cross_entropy(y))
      count_of = count_of + 1
    end
  end)
  model:train()
  return ms.world():all_reduce(sum / count_of, "avg"):value():item()
end

for _ in ms.steps(cfg.steps) do
  local loss = ms.zeros {}
  model:accumulate(cfg.accumulate, function()
    local x, y = batches:next()
    local part = model(x):cross_entropy(y) / cfg.accumulate
    part:backward()
    loss:add_(part:detach())
  end)
  local norm = clip and model:clip_grad_norm(clip)
  local lr = optimizer:lr()
  optimizer:step { only_if = norm and norm:is_finite() }
  report:step { loss = ms.world():all_reduce(loss, "avg"):value(), grad_norm = norm, lr = lr }
end
report:close()
ms.log("validation loss %.4f nats per byte", validation_loss())
