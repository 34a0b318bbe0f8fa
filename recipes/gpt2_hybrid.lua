-- GPT-2 on several hosts, or as if: parameters are in shards within each block of ranks, and the
-- blocks are copies of each other. Gathers stay inside a block, where they are fast; between blocks
-- only gradients travel, of each rank's own shard, and a hook sends them in 16 bits.
--     ./moonshard run recipes/gpt2_hybrid.lua -n 4 within=2 data=FILE_OR_FOLDER
--     ./moonshard run recipes/gpt2_hybrid.lua -n 4 within=2 between=f32
local ms = require "moonshard"
local nn, optim, data, hooks = ms.nn, ms.optim, ms.data, ms.hooks

local cfg = ms.config {
  data    = { "README.md", help = "a text file or a folder" },
  within  = { 2, help = "consecutive ranks that share one copy: those of a host" },
  between = {
    "bf16", choices = { "f32", "bf16", "f16" }, help = "how gradients travel between copies",
  },
  reshard = { true, help = "drop whole parameters after forward, too: hybrid_shard_zero2 if not" },
  prefetch = {
    "backward_pre", help = "what is gathered ahead: none, both, by_budget ... or a Lua file",
  },
  steps   = { 150, help = "optimizer steps" },
  batch   = { 16, help = "sequences of a step, over all ranks" },
  length  = { 64, help = "bytes of a sequence" },
  lr      = { 2e-3, help = "peak learning rate" },
  resume  = { "never", help = "never, auto, or a checkpoint" },
  run     = { "", help = "folder of the run" },
  save    = { 0, help = "steps between checkpoints" },
  model   = { layers = 4, width = 128, heads = 4 },
}

-- One group of ranks for each block, and one for each position in the blocks.
local shards, replicas = ms.world():levels(math.min(cfg.within, ms.world_size()))
ms.log("ranks that share a copy of the parameters: %d, copies: %d", shards:size(), replicas:size())

local model = ms.fsdp(nn.gpt2 {
  vocab = 256, context = cfg.length, layers = cfg.model.layers, width = cfg.model.width,
  heads = cfg.model.heads,
}, {
  strategy = cfg.reshard and "hybrid_shard" or "hybrid_shard_zero2",
  shard_group = shards, replica_group = replicas, prefetch = cfg.prefetch,
  -- A unit's gradients are reduced to shards within a block, in f32; then `between` gets this
  -- rank's shard, and averages it over the ranks that have the same one.
  comm_hook = replicas:size() > 1 and cfg.between ~= "f32" and hooks.reduce {
    between = hooks.chain { hooks.cast { dtype = cfg.between }, hooks.all_reduce {} },
  } or nil,
})
local optimizer = optim.adamw(model, {
  lr = cfg.lr, betas = { 0.9, 0.95 }, weight_decay = 0.1,
  schedule = optim.cosine { warmup = 20, steps = cfg.steps, floor = 0.1 },
})

local train, valid = assert(data.bytes(cfg.data)):split(0.9)
local result = ms.train {
  model = model, optimizer = optimizer, steps = cfg.steps, clip = 1.0,
  data = train:loader { batch = cfg.batch, length = cfg.length, shuffle = true },
  valid = valid:loader { batch = cfg.batch, length = cfg.length },
  eval = { every = cfg.steps, batches = 10 },
  sample = { every = cfg.steps, prompt = "\n", count = 100 },
  save = { every = cfg.save, last = 2 }, resume = cfg.resume,
  run = cfg.run ~= "" and cfg.run or nil,
}

local function mib_of_step(group)
  local bytes = 0
  for _, count in pairs(group:bytes_sent()) do bytes = bytes + count end
  return bytes / cfg.steps / 2 ^ 20
end
ms.log("rank 0 sent %.3f MiB a step inside its block, and %.3f MiB to other blocks",
  mib_of_step(shards), mib_of_step(replicas))
assert(model:save(result.run .. "/model"))
ms.log("validation loss %.4f nats per byte, the model is in %s/model", result.valid.loss,
  result.run)
