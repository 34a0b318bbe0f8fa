-- A GPT on bytes whose blocks are cut into chunks: the ranks of a pipeline have some chunks each,
-- and the microbatches of a batch go through them. Other ranks have other data.
--     ./moonshard run recipes/parallel/pipeline.lua -n 4 stages=2 data=FILE_OR_FOLDER
--     ./moonshard run recipes/parallel/pipeline.lua -n 2 schedule=interleaved each=2
local ms = require "moonshard"
local nn, optim, data = ms.nn, ms.optim, ms.data

local cfg = ms.config {
  data         = { "", help = "a text file or a folder; sayings in English unless given" },
  stages       = { 2, help = "consecutive ranks of a pipeline; others have other data" },
  each         = { 1, help = "chunks of a rank: 2 or more for interleaved, 2 for zbv" },
  schedule     = {
    "1f1b", open = true, help = "gpipe, 1f1b, interleaved, zb_h1, zbv, a table of PyTorch \z
      (FILE.csv) or a Lua file, whose own options are schedule.NAME=VALUE",
  },
  microbatches = { 4, help = "parts of a batch, which go through the chunks one after the other" },
  steps        = { 300, help = "optimizer steps" },
  batch        = { 16, help = "sequences of a step, over all data ranks" },
  length       = { 128, help = "bytes of a sequence" },
  lr           = { 5e-3, help = "peak learning rate" },
  warmup       = { 50, help = "steps until the peak" },
  decay        = { 0.1, help = "weight decay" },
  clip         = { 1.0, help = "global norm of gradients, over all stages" },
  dtype        = { "f32", choices = { "f32", "bf16" }, help = "of matrix products" },
  resume       = { "never", help = "never, auto, or a checkpoint" },
  run          = { "", help = "folder of the run" },
  every        = {
    eval = { 100, help = "steps between validations; 0: none" },
    save = { 0, help = "steps between checkpoints, of which the last two stay; 0: none" },
  },
  model        = { layers = 4, width = 128, heads = 4, dropout = 0.0 },
}
local LAYERS <const> = cfg.model.layers

-- Ranks of a pipeline follow each other. Ranks at one place in their pipelines have the same
-- chunks: they see other data, and reduce gradients.
local stages, replicas = ms.world():levels(math.min(cfg.stages, ms.world_size()))
local CHUNKS <const> = stages:size() * cfg.each
if LAYERS < CHUNKS then error(("%d chunks need as many blocks"):format(CHUNKS), 0) end

local schedule = ms.scripts.resolve(cfg, "schedule")
-- The numbers of this rank's chunks, from 0, in their order.
local own = schedule:placement {
  ranks = stages:size(), each = cfg.each, microbatches = cfg.microbatches,
}[stages:rank() + 1]

--------------------------------------------------------------------------------------------- model

-- The whole model, on "meta", where it takes no memory. Chunks make the values of what they have. A
-- head that is the table again would be on two ranks: see README.md.
local whole = ms.device("meta", function()
  return nn.gpt2 {
    vocab = 256, context = cfg.length, layers = LAYERS, width = cfg.model.width, tie = false,
    heads = cfg.model.heads, dropout = cfg.model.dropout,
  }
end)
local chunks = {}
for i, number in ipairs(own) do
  chunks[i] = nn.cut(whole, number * LAYERS // CHUNKS + 1, (number + 1) * LAYERS // CHUNKS)
end

-- What this rank has of the model, under the names that it has there: for the optimizer, clipping,
-- checkpoints and `save`. These see one model, as no other rank of the pipeline has these parts.
local Own = nn.class "Own"
function Own:init()
  self.h = nn.List {}
  for _, chunk in ipairs(chunks) do
    for _, name in ipairs { "wte", "wpe", "ln_f", "lm_head" } do
      self[name] = chunk[name] or self[name]
    end
    for i = chunk.first, chunk.last do self.h[i] = chunk.h[i] end
  end
end
-- As nn.gpt2 saves them.
function Own:config() return whole:config() end
function Own:file_name(name) return whole:file_name(name) end
local model = nn.owned(Own(), stages)

for i, chunk in ipairs(chunks) do chunks[i] = ms.ddp(chunk, { group = replicas }) end
local pipe = ms.pipeline {
  chunks = chunks, group = stages, data = replicas, schedule = schedule,
  microbatches = cfg.microbatches,
}
ms.log("%s; pipelines: %d", pipe, replicas:size())

------------------------------------------------------------------------------------------ training

local optimizer = optim.adamw(model, {
  lr = cfg.lr, betas = { 0.9, 0.99 }, weight_decay = cfg.decay,
  schedule = optim.cosine { warmup = cfg.warmup, steps = cfg.steps, floor = 0.05 },
})
local text = cfg.data ~= "" and assert(data.bytes(cfg.data)) or ms.scripts.default_text()
local train, valid = text:split(0.9)
-- All ranks of a pipeline read its batch: the first chunk takes x, and the last one y.
local how = { batch = cfg.batch, length = cfg.length, group = replicas }
local function loader(set, shuffle)
  how.shuffle = shuffle
  return set:loader(how)
end
local result = ms.train {
  model = model, pipeline = pipe, optimizer = optimizer, steps = cfg.steps, clip = cfg.clip,
  dtype = cfg.dtype, data = loader(train, true), valid = loader(valid),
  eval = { every = cfg.every.eval, batches = 40 },
  save = { every = cfg.every.save, last = 2 },
  resume = cfg.resume, run = cfg.run ~= "" and cfg.run or nil,
}
-- Whole tensors: `moonshard generate RUN/model`, or nn.gpt2 { ... }:load, on one rank.
assert(model:save(result.run .. "/model"))
if result.valid then ms.log("validation loss %.4f nats per byte", result.valid.loss) end
ms.log("the model is in %s/model", result.run)
