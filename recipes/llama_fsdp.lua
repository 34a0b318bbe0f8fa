-- A Llama whose parameters, gradients and optimizer states are in shards over the ranks: what the
-- units are, what each rank keeps of them, and how much memory that takes.
--     ./moonshard run recipes/llama_fsdp.lua -n 2 data=FILE_OR_FOLDER
local ms = require "moonshard"
local nn, optim, data = ms.nn, ms.optim, ms.data

local cfg = ms.config {
  data       = { "README.md", help = "a text file or a folder" },
  steps      = { 200, help = "optimizer steps" },
  batch      = { 8, help = "sequences of a pass, over all ranks" },
  accumulate = { 2, help = "passes of a step" },
  length     = { 64, help = "bytes of a sequence" },
  lr         = { 2e-3, help = "peak learning rate" },
  clip       = { 1.0, help = "global norm of gradients, over all shards" },
  recompute  = { false, help = "run blocks again in backward: less memory, more time" },
  dtype      = {
    "auto", choices = { "auto", "f32", "bf16", "f16", "fp8" },
    help = "of matrix products; auto: bf16 where the device multiplies it, else f32",
  },
  emulate    = { false, help = "with dtype=fp8: multiply the same numbers in bf16, on any GPU" },
  graph      = { false, help = "launch what each step repeats as graphs, on a GPU" },
  attention  = {
    "deterministic", choices = { "deterministic", "fast" },
    help = "how a GPU adds up its gradients; fast: in no certain order",
  },
  prefetch   = {
    "backward_pre",
    help = "what is gathered ahead: none (the least memory), both, by_budget ... or a Lua file",
  },
  resume     = { "never", help = "never, auto, or a checkpoint" },
  run        = { "", help = "folder of the run" },
  save       = { 0, help = "steps between checkpoints" },
  model      = { layers = 6, width = 128, heads = 4, kv_heads = 2 },
}

local m = cfg.model
local model = ms.fsdp(nn.llama {
  vocab = 256, context = cfg.length, layers = m.layers, width = m.width, heads = m.heads,
  kv_heads = m.kv_heads, recompute = cfg.recompute,
}, {
  strategy = "full_shard",                 -- the default, as all that follows
  wrap = { class = "LlamaBlock" },         -- each block is a unit; the root has the rest
  accumulate = "shard",                    -- gradients are reduced in each pass, and shards add up
  prefetch = cfg.prefetch,
})

local function mib(bytes) return bytes / 2 ^ 20 end
local whole, own = 0, 0
for _, unit in ipairs(model:units()) do
  ms.log("unit %d  %-16s %5.2f MiB, of which %5.2f MiB on this rank", unit.index,
    unit.name == "" and "(root)" or unit.name, mib(unit.bytes), mib(unit.shard_bytes))
  whole, own = whole + unit.bytes, own + unit.shard_bytes
end

-- Optimizers are made after wrapping. Filters see the shapes of whole parameters, so that weight
-- decay applies to matrices, although this rank's pieces are lists of numbers.
local optimizer = optim.adamw({
  { params = model:parameters(function(p) return p:dim() >= 2 end) },
  { params = model:parameters(function(p) return p:dim() < 2 end), weight_decay = 0 },
}, {
  lr = cfg.lr, betas = { 0.9, 0.95 }, weight_decay = 0.1,
  schedule = optim.cosine { warmup = 20, steps = cfg.steps, floor = 0.1 },
})

-- Bytes between two steps, when no unit is gathered: shards, gradients and states. And the most of
-- all steps.
local between, peak = 0, 0
local train, valid = assert(data.bytes(cfg.data)):split(0.9)
local result = ms.train {
  model = model, optimizer = optimizer, steps = cfg.steps, accumulate = cfg.accumulate,
  clip = cfg.clip, dtype = cfg.dtype, emulate = cfg.emulate, graph = cfg.graph,
  attention = cfg.attention,
  data = train:loader { batch = cfg.batch, length = cfg.length, shuffle = true },
  valid = valid:loader { batch = cfg.batch, length = cfg.length },
  eval = { every = cfg.steps, batches = 10 },
  before_step = function() between = ms.memory().live end,
  after_step = function() peak = ms.memory().peak end,
  save = { every = cfg.save, last = 2 }, resume = cfg.resume,
  run = cfg.run ~= "" and cfg.run or nil,
}

ms.log("parameters, gradients and states of AdamW: %.2f MiB whole, %.2f MiB of them on this rank",
  mib(4 * whole), mib(4 * own))
ms.log("memory of this rank: %.2f MiB between steps, %.2f MiB at the most", mib(between), mib(peak))
-- Rank 0 writes the whole model, one tensor after the other.
assert(model:save(result.run .. "/model"))
ms.log("validation loss %.4f nats per byte, the model is in %s/model", result.valid.loss,
  result.run)
