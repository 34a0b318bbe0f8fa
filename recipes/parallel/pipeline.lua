-- A GPT on bytes whose blocks are cut into chunks: the ranks of a pipeline have some chunks each,
-- and the microbatches of a batch go through them. Other ranks have other data.
--     ./moonshard run recipes/parallel/pipeline.lua -n 4 stages=2 data=FILE_OR_FOLDER
--     ./moonshard run recipes/parallel/pipeline.lua -n 2 schedule=interleaved each=2
-- A run whose folder has a checkpoint goes on from there.
local ms = require "moonshard"
local nn, optim, data, checkpoint = ms.nn, ms.optim, ms.data, ms.checkpoint

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
  save         = { 0, help = "steps between checkpoints; 0: none but when the run is stopped" },
  run          = { "runs/pipeline", help = "folder of metrics, checkpoints and the model" },
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
local model = nn.owned(Own(), stages, { values = "kept" }) -- those of the whole model

for i, chunk in ipairs(chunks) do chunks[i] = ms.ddp(chunk, { group = replicas }) end
-- Chunks pass the stream and the change of it that the last block has made: `check` needs to know.
local rows = cfg.batch // replicas:size() // cfg.microbatches
local pipe = ms.pipeline {
  chunks = chunks, group = stages, data = replicas, schedule = schedule,
  microbatches = cfg.microbatches,
  passes = {
    { dtype = "f32", rows, cfg.length, cfg.model.width },
    { dtype = cfg.dtype, rows, cfg.length, cfg.model.width },
  },
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
local batches = train:loader {
  batch = cfg.batch, length = cfg.length, shuffle = true, group = replicas,
}
local held_out = valid:loader { batch = cfg.batch, length = cfg.length, group = replicas }

local things = { model = model, optimizer = optimizer, batches = batches, step = 0 }
local newest, message, code = checkpoint.latest(cfg.run)
if code then error(message, 0) end -- there are checkpoints, and none can be read
if newest then
  things.step = assert(checkpoint.load(newest, things)).step
  ms.log("goes on from %s", newest)
end
local function save(step)
  things.step = step
  assert(checkpoint.save(cfg.run, things))
end

local function in_dtype(f)
  if cfg.dtype == "f32" then return f() end
  return ms.autocast(cfg.dtype, f)
end

local report = ms.report { run = cfg.run, tokens = cfg.batch * cfg.length, total = cfg.steps }
local last = things.step
for step in ms.steps(cfg.steps, things.step) do
  local x, y = batches:next()
  local loss = in_dtype(function() return pipe:step(x, y) end)
  local norm, lr = model:clip_grad_norm(cfg.clip), optimizer:lr()
  optimizer:step { only_if = norm:is_finite() }
  report:step { loss = loss, grad_norm = norm, lr = lr }
  last = step + 1
  if cfg.save > 0 and last % cfg.save == 0 then save(last) end
end
report:close()
-- Stopped on request: the checkpoint ends the run with code 75, and the same command goes on.
if last < cfg.steps then
  save(last)
  assert(checkpoint.wait())
  return
end
assert(checkpoint.wait()) -- checkpoints are written in the background

for _, chunk in ipairs(chunks) do chunk:eval() end
local sum, count = 0, 0
for x, y in held_out:batches(40) do
  if #x == cfg.batch // replicas:size() then -- the last batch may have fewer rows
    sum, count = sum + in_dtype(function() return pipe:eval(x, y) end):item(), count + 1
  end
end
if count > 0 then ms.log("validation loss %.4f nats per byte", sum / count) end
-- Whole tensors: `moonshard generate RUN/model`, or nn.gpt2 { ... }:load, on one rank.
assert(model:save(cfg.run .. "/model"))
ms.log("the model is in %s/model", cfg.run)
