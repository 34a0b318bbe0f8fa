-- GPT-2 over tensor x pipeline x data ranks: each block is cut over the ranks of a tensor group,
-- the blocks are on the stages of a pipeline, and the other ranks have other data. From scratch or
-- from given weights, of which each rank reads its parts.
--     ./moonshard run recipes/parallel/gpt2_3d.lua -n 8 tensor=2 stages=2
--     ./moonshard run recipes/parallel/gpt2_3d.lua -n 4 weights=FOLDER data=shards lr=3e-5
local ms = require "moonshard"
local nn, optim = ms.nn, ms.optim

local cfg = ms.config {
  data         = { "", help = "token shards, as of recipes/gpt2.lua; bytes of sayings otherwise" },
  valid        = { "", help = "held-out shards; val*.bin or the last part of data unless given" },
  bytes        = { false, help = "data are text files, and their bytes the tokens" },
  weights      = { "", help = "start from this folder of a GPT-2, which decides the model" },
  tensor       = { 0, help = "consecutive ranks that share each block; 0: 2, or 1 of odd ranks" },
  stages       = { 0, help = "of a pipeline of such groups; 0: 2, or 1 if these are odd" },
  each         = { 1, help = "chunks of a rank: 2 or more for interleaved, 2 for zbv" },
  schedule     = {
    "1f1b", help = "gpipe, 1f1b, interleaved, zb_h1, zbv, or a table of PyTorch: FILE.csv",
  },
  microbatches = { 4, help = "parts of a batch, which go through the chunks one after the other" },
  sequence     = { false, help = "outside of cut layers, activations are cut over time" },
  recompute    = { false, help = "run blocks again in backward, which keep only their input" },
  steps        = { 300, help = "optimizer steps" },
  batch        = { 16, help = "sequences of a step, over all data ranks" },
  length       = { 128, help = "tokens of a sequence" },
  lr           = { 3e-3, help = "peak learning rate" },
  warmup       = { 50, help = "steps until the peak" },
  decay        = { 0.1, help = "weight decay of matrices" },
  clip         = { 1.0, help = "global norm of gradients, over all parts" },
  dropout      = { 0.0, help = "probability of zero, of what is added to the stream" },
  dtype        = { "f32", choices = { "f32", "bf16" }, help = "of matrix products" },
  resume       = { "never", help = "never, auto, or a checkpoint" },
  run          = { "", help = "folder of the run" },
  every        = {
    eval = { 100, help = "steps between validations; 0: none" },
    save = { 0, help = "steps between checkpoints, of which the last two stay; 0: none" },
  },
  vocab        = { 0, help = "rows of the table; what the data say unless given" },
  tie          = { true, help = "the head is the table again" },
  model        = { layers = 4, width = 128, heads = 4 },
}
local function check(yes, text, ...) if not yes then error(text:format(...), 0) end end

------------------------------------------------------------------------------------------- groups

-- The ranks of a tensor group follow each other, since they exchange most. `rest` are those at one
-- place in their groups. Of these, each so many that follow each other are a pipeline; and
-- `replicas` have the same part of the model, and other data.
local RANKS <const> = ms.world_size()
local function two_of(given, ranks)
  if given > 0 then return given end
  return ranks % 2 == 0 and 2 or 1
end
local TENSOR <const> = two_of(cfg.tensor, RANKS)
local STAGES <const> = two_of(cfg.stages, RANKS // TENSOR)
check(RANKS % (TENSOR * STAGES) == 0, "tensor = %d times stages = %d does not divide %d ranks",
  TENSOR, STAGES, RANKS)
local tensor, rest = ms.world():levels(TENSOR)
local stages, replicas = rest:levels(STAGES)
local part = tensor:rank()

local is_text = cfg.bytes or cfg.data == ""
local train, valid
if cfg.data ~= "" then train, valid = ms.scripts.texts(cfg)
else train, valid = ms.scripts.default_text():split(0.9) end

-- The whole model, on "meta", where it takes no memory. Each rank makes, or reads, the values of
-- its parts only.
local whole = ms.device("meta", function()
  if cfg.weights ~= "" then return assert(nn.pretrained(cfg.weights)) end
  return nn.gpt2 {
    vocab = ms.scripts.vocab({ vocab = cfg.vocab, bytes = is_text }, train, 50257),
    context = cfg.length, layers = cfg.model.layers, width = cfg.model.width,
    heads = cfg.model.heads, tie = cfg.tie,
  }
end)
check(whole.class_name == "GPT2", "%s is no GPT-2: blocks of other models are cut otherwise",
  cfg.weights)
local LAYERS <const>, WIDTH <const> = whole.options.layers, whole.options.width
local VOCAB <const>, HEADS <const> = whole.options.vocab, whole.options.heads
local CHUNKS <const>, TIED <const> = STAGES * cfg.each, whole.lm_head == nil
check(HEADS % TENSOR == 0, "%d tensor ranks do not divide %d heads", TENSOR, HEADS)
check(LAYERS >= CHUNKS, "%d chunks need as many blocks, not %d", CHUNKS, LAYERS)
check(cfg.length <= whole.options.context, "length = %d: the weights have %d positions",
  cfg.length, whole.options.context)
check(not cfg.sequence or cfg.length % TENSOR == 0,
  "sequence: %d tensor ranks do not divide a length of %d", TENSOR, cfg.length)

-- The numbers of a stage's chunks, from 0, in their order: those that its row of a table has; in a
-- V the last stages have the middle; else chunks go round.
local function chunks_of(stage)
  local own = {}
  if cfg.schedule:match "%.csv$" then
    local lines, seen = {}, {}
    for line in assert(io.lines(cfg.schedule)) do
      if line:find "%S" then lines[#lines + 1] = line end
    end
    for chunk in (lines[stage + 1] or ""):gmatch "(%d+)[FBIW]" do
      if not seen[chunk] then seen[chunk], own[#own + 1] = true, math.tointeger(chunk) end
    end
    table.sort(own)
  elseif cfg.schedule == "zbv" then own = { stage, CHUNKS - 1 - stage }
  else for round = 1, cfg.each do own[round] = (round - 1) * STAGES + stage end end
  return own
end
local stage_of = {}
for stage = 0, STAGES - 1 do
  for _, chunk in ipairs(chunks_of(stage)) do stage_of[chunk] = stage end
end

------------------------------------------------------------------------------------------- layers

-- The conjugate pair around layers that are cut, or with `sequence` the other one: see README.md.
-- Time is the first dimension of activations, since that is what these join and cut.
local copy_to = ms.custom {
  forward = function(x) return x end,
  backward = function(d) return tensor:all_reduce(d):value() end,
}
local reduce_from = ms.custom {
  forward = function(x) return tensor:all_reduce(x):value() end,
  backward = function(d) return d end,
}
local enter, leave = copy_to, reduce_from
if cfg.sequence then
  enter = function(x) return tensor:all_gather(x):value() end
  leave = function(x) return tensor:reduce_scatter(x):value() end
end
-- What ranks hold alike is dropped alike; times that one rank has alone are not.
local alike = not cfg.sequence and { group = rest } or nil

-- GPT-2's weights are [inputs, outputs]. Columns: each rank has some of the outputs, in each of so
-- many blocks of them (queries, keys, values). Rows: each rank has the inputs that its columns
-- before have given, and all have the bias, which is added to the sum.
local function cut_columns(layer, blocks)
  local size, sizes = layer.weight:size(2) // blocks, {}
  for i = 1, blocks do sizes[i] = size end
  nn.split(layer.weight, tensor, { dim = 2, blocks = sizes, whole = true })
  nn.split(layer.bias, tensor, { blocks = sizes, whole = true })
end
local function cut_rows(layer) nn.split(layer.weight, tensor, { dim = 1, whole = true }) end
local function columns(layer, x) return x:linear_t(layer.weight, layer.bias) end
local function rows(layer, x) return leave(x:linear_t(layer.weight)) + layer.bias end

-- A block with the parts of one of nn.gpt2, which it cuts.
local Block = nn.class "Block"
function Block:init(one)
  for _, name in ipairs { "ln_1", "attn", "ln_2", "mlp" } do
    self[name], one[name] = one[name], nil
  end
  cut_columns(self.attn.c_attn, 3)
  cut_rows(self.attn.c_proj)
  cut_columns(self.mlp.c_fc, 1)
  cut_rows(self.mlp.c_proj)
  self.drop = nn.Dropout(cfg.dropout, alike)
end

function Block:attention(x)
  local time, batch = x:size(1), x:size(2)
  local qkv = columns(self.attn.c_attn, x):chunk(3, 3)
  for i = 1, 3 do qkv[i] = qkv[i]:view(time, batch, -1, WIDTH // HEADS):permute(2, 3, 1, 4) end
  local joined = qkv[1]:attention(qkv[2], qkv[3]):permute(3, 1, 2, 4)
  return rows(self.attn.c_proj, joined:reshape(time, batch, -1))
end

function Block:forward(x) -- [time, batch, width]
  x = x + self.drop(self:attention(enter(self.ln_1(x))))
  return x + self.drop(rows(self.mlp.c_proj, columns(self.mlp.c_fc, enter(self.ln_2(x))):gelu()))
end

-- Each rank of a tensor group has the rows of some tokens, in the table as in the head, and gives
-- the logits of these. Padding is at the end.
local SHARE <const> = -(-VOCAB // TENSOR)
local FIRST <const> = part * SHARE
local function cut_table(weight)
  return nn.split(weight, tensor, { whole = true, pad = SHARE * TENSOR - VOCAB })
end
local function own_row(ids)
  local row = ids - FIRST
  local inside = row:clamp(0, SHARE - 1)
  return inside, inside:eq(row)
end

local function embed(weight, tokens)
  local row, is_own = own_row(tokens)
  return leave(ms.where(is_own:unsqueeze(3), row:embedding(weight), 0))
end

local function cross_entropy(logits, targets) -- see tensor.lua
  logits, targets = logits:to "f32", targets:t()
  local real = math.max(0, math.min(SHARE, VOCAB - FIRST))
  if real < SHARE then logits = logits:masked_fill(ms.arange(0, SHARE - 1):ge(real), -math.huge) end
  local top = ms.no_grad(function()
    return tensor:all_reduce(logits:max(3, true), "max"):value()
  end)
  logits = logits - top
  local sum = reduce_from(logits:exp():sum(3))
  local column, is_own = own_row(targets)
  local own = logits:gather(3, column:unsqueeze(3)):squeeze(3)
  return (sum:log() - reduce_from(ms.where(is_own, own, 0))):mean()
end

------------------------------------------------------------------------------------------- chunks

local function forward(chunk, x)
  if chunk.is_first then
    x = embed(chunk.wte.weight, x:t())
    local times = x:size(1)
    local first = cfg.sequence and part * times or 0
    x = chunk.drop(x + chunk.wpe.weight:narrow(1, first + 1, times):unsqueeze(2))
  end
  for i = chunk.first, chunk.last do
    if cfg.recompute then x = ms.recompute(chunk.h[i], x) else x = chunk.h[i](x) end
  end
  if not chunk.is_last then return x end
  return enter(chunk.ln_f(x)):linear((chunk.lm_head or chunk.wte).weight)
end

-- This rank's chunks; and what it has of the model, under the names that it has there, for the
-- optimizer, clipping, checkpoints and `save`. These see one model.
local chunks, has = {}, {}
for _, number in ipairs(chunks_of(stages:rank())) do
  local first, last = number * LAYERS // CHUNKS + 1, (number + 1) * LAYERS // CHUNKS
  for i = first, last do
    whole.h[i], has[i] = Block(whole.h[i]), true
  end
  local chunk = nn.cut(whole, first, last)
  if chunk.is_first then chunk.drop = nn.Dropout(cfg.dropout, alike) end
  chunk.forward = forward
  for _, name in ipairs { "wte", "wpe", "ln_f", "lm_head" } do
    has[name] = has[name] or chunk[name] ~= nil
  end
  chunks[#chunks + 1] = chunk
end
if has.wte then cut_table(whole.wte.weight) end
if has.lm_head then cut_table(whole.lm_head.weight) end
local model = nn.cut(whole, 1, LAYERS)
for _, name in ipairs { "wte", "wpe", "ln_f", "lm_head" } do
  if not has[name] then model[name] = nil end
end
for i = 1, LAYERS do if not has[i] then model.h[i] = nil end end

-- Where each rank has some times, it has a part of the gradients of what tensor ranks have alike.
if cfg.sequence then
  for _, item in ipairs(model:named_parameters()) do
    if item.name:match "ln_" or item.name:match "wpe" or item.name:match "c_proj%.bias" then
      nn.shared(item.parameter, tensor)
    end
  end
end

-- A head that is the table again is on the first and on the last stage, which share it: each has
-- a part of its gradient.
if TIED and CHUNKS > 1 then
  local first, last = stage_of[0], stage_of[CHUNKS - 1]
  check(first ~= last, "%s has the first and the last chunk on one rank: it needs tie=false",
    cfg.schedule)
  local ends = stages:split { { first, last } }
  if ends then nn.shared(model.wte.weight, ends) end
end
nn.owned(model, stages)

for i, chunk in ipairs(chunks) do chunks[i] = ms.ddp(chunk, { group = replicas }) end
-- With this forward, chunks pass the stream alone: `check` needs to know.
local pipe = ms.pipeline {
  chunks = chunks, group = stages, data = replicas, schedule = cfg.schedule,
  microbatches = cfg.microbatches, loss = cross_entropy,
  passes = {
    {
      dtype = "f32", cfg.length // (cfg.sequence and TENSOR or 1),
      cfg.batch // replicas:size() // cfg.microbatches, WIDTH,
    },
  },
}
ms.log("tensor %d x %s x data %d", TENSOR, pipe, replicas:size())

----------------------------------------------------------------------------------------- training

local function of_dim(from, to)
  return model:parameters(function(p) return p:dim() >= from and p:dim() <= to end)
end
local optimizer = optim.adamw({
  { params = of_dim(2, 8) }, { params = of_dim(0, 1), weight_decay = 0 },
}, {
  lr = cfg.lr, betas = { 0.9, 0.95 }, weight_decay = cfg.decay,
  schedule = optim.cosine {
    warmup = math.min(cfg.warmup, cfg.steps), steps = cfg.steps, floor = 0.1,
  },
})
-- All ranks with one copy of the model read its batch: the first chunk takes x, the last one y.
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
-- Whole tensors, under the names of Hugging Face; with what else was in the folder of the weights.
assert(model:save(result.run .. "/model"))
if result.valid then
  ms.log("validation loss %.4f nats per %s", result.valid.loss, is_text and "byte" or "token")
end
ms.log("the model is in %s/model", result.run)
