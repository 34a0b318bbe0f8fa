-- A GPT on bytes: trains on any text, by default on this repository's own files, and prints samples
-- of the text that it generates. ./moonshard run recipes/gpt_bytes.lua data=FILE_OR_FOLDER
local ms = require "moonshard"
local nn, optim, data = ms.nn, ms.optim, ms.data

local cfg = ms.config(ms.scripts.options {
  data   = { "", help = "a text file or a folder; this repository's texts unless given" },
  steps  = { 1500, help = "optimizer steps" },
  batch  = { 16, help = "sequences of a step" },
  length = { 128, help = "bytes of a sequence" },
  lr     = { 2e-3, help = "peak learning rate" },
  warmup = { 50, help = "steps until the peak" },
  decay  = { 0.1, help = "weight decay" },
  clip   = { 1.0, help = "global norm of gradients" },
  dtype  = { "bf16", choices = { "f32", "bf16", "f16" }, help = "of matrix products" },
  graph  = { false, help = "launch what each step repeats as graphs, on a GPU" },
  resume = { "never", help = "never, auto, or a checkpoint" },
  run    = { "", help = "folder of the run" },
  every  = { eval = 250, sample = 500, save = 500 },
  model  = { layers = 4, width = 256, heads = 4, dropout = 0.0 },
})

local function own_texts()
  local root = debug.getinfo(1, "S").source:match "^@(.*)/?recipes/[^/]*$" or "."
  if root == "" then root = "." end
  return {
    root .. "/README.md", root .. "/engine", root .. "/lua", root .. "/bindings",
    root .. "/recipes",
  }
end

local train, valid = assert(data.bytes(cfg.data ~= "" and cfg.data or own_texts())):split(0.9)
local function make()
  return nn.gpt2 {
    vocab = 256, context = cfg.length, layers = cfg.model.layers, width = cfg.model.width,
    heads = cfg.model.heads, dropout = cfg.model.dropout,
  }
end
local model, optimizer, clip = ms.scripts.apply(cfg, make, function(net)
  return optim.adamw(net, {
    lr = cfg.lr, betas = { 0.9, 0.99 }, weight_decay = cfg.decay,
    schedule = optim.cosine { warmup = cfg.warmup, steps = cfg.steps, floor = 0.05 },
  })
end, { clip = cfg.clip })

local result = ms.train {
  model = model, optimizer = optimizer, steps = cfg.steps, clip = clip,
  dtype = cfg.dtype, graph = cfg.graph,
  data = train:loader { batch = cfg.batch, length = cfg.length, shuffle = true },
  valid = valid:loader { batch = cfg.batch, length = cfg.length },
  eval = { every = cfg.every.eval },
  sample = { every = cfg.every.sample, prompt = "\n", count = 300, temperature = 0.8 },
  save = { every = cfg.every.save, last = 2 },
  resume = cfg.resume, run = cfg.run ~= "" and cfg.run or nil,
}
assert(model:save(result.run .. "/model"))
if result.valid then ms.log("validation loss %.4f nats per byte", result.valid.loss) end
ms.log("the model is in %s/model", result.run)
