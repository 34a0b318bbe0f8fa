-- A GPT on bytes: trains on any text for a few minutes, and prints samples of the text that it
-- generates. ./moonshard run recipes/gpt_bytes.lua data=FILE_OR_FOLDER
local ms = require "moonshard"
local nn, optim, data = ms.nn, ms.optim, ms.data

local cfg = ms.config(ms.scripts.options {
  data    = { "", help = "a text file or a folder; sayings in English unless given" },
  minutes = {
    3.0, help = "about how long to train",
    check = function(value) if value <= 0 then return "it must be above 0" end end,
  },
  steps   = { 0, replaces = "minutes", help = "optimizer steps, instead of minutes" },
  batch   = { 16, help = "sequences of a step" },
  length  = { 128, help = "bytes of a sequence" },
  lr      = { 5e-3, help = "peak learning rate" },
  warmup  = { 50, help = "steps until the peak" },
  decay   = { 0.1, help = "weight decay" },
  clip    = { 1.0, help = "global norm of gradients" },
  dtype   = {
    "auto", choices = { "auto", "f32", "bf16", "f16", "fp8" },
    help = "of matrix products; auto: bf16 where the device multiplies it, else f32",
  },
  emulate = { false, help = "with dtype=fp8: multiply the same numbers in bf16, on any GPU" },
  graph   = { false, help = "launch what each step repeats as graphs, on a GPU" },
  ema     = { 0.0, help = "decay of averaged weights, which are validated and saved; 0: none" },
  resume  = { "never", help = "never, auto, or a checkpoint" },
  run     = { "", help = "folder of the run" },
  sample  = { 30.0, help = "seconds until a sample of text; the next take twice as long each" },
  every   = {
    eval = { 250, help = "steps between validations; 0: none" },
    save = { 500, help = "steps between checkpoints, of which the last two stay; 0: none" },
    sample = { 0, replaces = "sample", help = "steps between samples, instead; 0: none" },
  },
  model   = {
    layers = { 4, help = "number of blocks" },
    width = { 128, help = "of a byte's vector" },
    heads = { 4, help = "of attention" },
    dropout = 0.0,
  },
})

local text = cfg.data ~= "" and assert(data.bytes(cfg.data)) or ms.scripts.default_text()
local train, valid = text:split(0.9)
local function make()
  return nn.gpt2 {
    vocab = 256, context = cfg.length, layers = cfg.model.layers, width = cfg.model.width,
    heads = cfg.model.heads, dropout = cfg.model.dropout,
  }
end
local model, optimizer, clip = ms.scripts.apply(cfg, make, function(net)
  return optim.adamw(net, {
    lr = cfg.lr, betas = { 0.9, 0.99 }, weight_decay = cfg.decay,
    schedule = optim.cosine { warmup = cfg.warmup, floor = 0.05 },
  })
end, { clip = cfg.clip })

local result = ms.train {
  model   = model, optimizer = optimizer, minutes = cfg.minutes, steps = cfg.steps, clip = clip,
  dtype   = cfg.dtype, emulate = cfg.emulate, graph = cfg.graph,
  data = train:loader { batch = cfg.batch, length = cfg.length, shuffle = true },
  valid = valid:loader { batch = cfg.batch, length = cfg.length },
  eval = { every = cfg.every.eval, batches = 40 },
  sample = { every = cfg.every.sample, seconds = cfg.sample, count = 300, temperature = 0.8 },
  save = { every = cfg.every.save, last = 2 },
  ema     = cfg.ema ~= 0 and cfg.ema or nil,
  resume  = cfg.resume, run = cfg.run ~= "" and cfg.run or nil,
}
ms.scripts.save(result, model)
