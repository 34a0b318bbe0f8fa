-- A GPT on bytes whose layers are cut over the ranks of a tensor group (Megatron): each rank has
-- some heads, some columns of each MLP and some rows of the table. Other ranks have other data.
--     ./moonshard run recipes/parallel/tensor.lua -n 4 tensor=2 data=FILE_OR_FOLDER
--     ./moonshard run recipes/parallel/tensor.lua -n 4 tensor=4 sequence=true
local ms = require "moonshard"
local nn, optim, data = ms.nn, ms.optim, ms.data

local cfg = ms.config {
  data     = { "", help = "a text file or a folder; sayings in English unless given" },
  tensor   = { 2, help = "consecutive ranks that have one model together; others have other data" },
  sequence = { false, help = "outside of cut layers, activations are cut over time" },
  recompute = { false, help = "run blocks again in backward: they keep only what goes into them" },
  steps    = { 300, help = "optimizer steps" },
  batch    = { 16, help = "sequences of a step, over all data ranks" },
  length   = { 128, help = "bytes of a sequence" },
  lr       = { 5e-3, help = "peak learning rate" },
  warmup   = { 50, help = "steps until the peak" },
  decay    = { 0.1, help = "weight decay" },
  clip     = { 1.0, help = "global norm of gradients, of the whole model" },
  dropout  = { 0.0, help = "probability of zero, of what is added to the stream" },
  dtype    = {
    "auto", choices = { "auto", "f32", "bf16", "f16" },
    help = "of matrix products; auto: bf16 where the device multiplies it, else f32",
  },
  resume   = { "never", help = "never, auto, or a checkpoint" },
  run      = { "", help = "folder of the run" },
  every    = {
    eval = { 100, help = "steps between validations; 0: none" },
    save = { 0, help = "steps between checkpoints, of which the last two stay; 0: none" },
  },
  model    = { layers = 4, width = 128, heads = 4 },
}
local VOCAB <const>, WIDTH <const>, HEADS <const> = 256, cfg.model.width, cfg.model.heads

-- Ranks of a tensor group follow each other, so that they are on one host. Ranks at one place in
-- their groups have the same parts: they see other data, and reduce gradients.
local tensor, replicas = ms.world():levels(math.min(cfg.tensor, ms.world_size()))
local parts, part = tensor:size(), tensor:rank()
if HEADS % parts ~= 0 then error(("%d ranks do not divide %d heads"):format(parts, HEADS), 0) end
if cfg.sequence and cfg.length % parts ~= 0 then
  error(("%d ranks do not divide a length of %d"):format(parts, cfg.length), 0)
end

------------------------------------------------------------------------------- into cut layers, out

-- The conjugate pair. All ranks have the same x before the first cut layer, and a part of the sum
-- after the second: see README.md.
local copy_to = ms.custom {
  forward = function(x) return x end,
  backward = function(d) return tensor:all_reduce(d):value() end,
}
local reduce_from = ms.custom {
  forward = function(x) return tensor:all_reduce(x):value() end,
  backward = function(d) return d end,
}
local enter, leave = copy_to, reduce_from
-- Or each rank has x of some times. These two are conjugate already: each is the other's gradient.
-- Time is the first dimension of activations, since that is what they join and cut.
if cfg.sequence then
  enter = function(x) return tensor:all_gather(x):value() end
  leave = function(x) return tensor:reduce_scatter(x):value() end
end

-- What ranks hold alike is dropped alike; times that one rank has alone are not.
local alike = not cfg.sequence and { group = replicas } or nil

-------------------------------------------------------------------------------------------- layers

-- Columns of a weight [inputs, outputs]: each rank has some of the outputs, in each of so many
-- blocks of them (queries, keys, values).
local function cut_columns(layer, blocks)
  local size, sizes = layer.weight:size(2) // blocks, {}
  for i = 1, blocks do sizes[i] = size end
  nn.split(layer.weight, tensor, { dim = 2, blocks = sizes, whole = true })
  nn.split(layer.bias, tensor, { blocks = sizes, whole = true })
end
local function columns(layer, x) return x:linear_t(layer.weight, layer.bias) end

-- Rows: each rank has the inputs that its columns before have given. All have the bias, which is
-- added to the sum.
local function cut_rows(layer) nn.split(layer.weight, tensor, { dim = 1, whole = true }) end
local function rows(layer, x) return leave(x:linear_t(layer.weight)) + layer.bias end

-- A block with the parts of one of nn.gpt2, which it cuts. They are taken out there, since a
-- parameter has its name from the first place that has it.
local Block = nn.class "Block"
function Block:init(whole)
  for _, name in ipairs { "ln_1", "attn", "ln_2", "mlp" } do
    self[name], whole[name] = whole[name], nil
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

----------------------------------------------------------------------------------- table, and loss

-- Each rank has the rows of some bytes, and gives the logits of these. Padding is at the end.
local SHARE <const> = -(-VOCAB // parts)
local FIRST <const> = part * SHARE
local function own_row(ids)
  local row = ids - FIRST
  local inside = row:clamp(0, SHARE - 1)
  return inside, inside:eq(row)
end

local function embed(weight, tokens)
  local row, is_own = own_row(tokens)
  return leave(ms.where(is_own:unsqueeze(3), row:embedding(weight), 0))
end

-- The mean of log(sum(exp(logits))) less the target's logit. Only the greatest logit, the sum and
-- the target's logit of each place travel, and the gradient of a rank's logits needs no more.
local function cross_entropy(logits, targets)
  logits = logits:to "f32"
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

--------------------------------------------------------------------------------------------- model

-- nn.gpt2 with another forward, made whole on "meta", where it takes no memory, and cut there. Each
-- rank then makes the values of its parts only: those that they have in the whole model.
local gpt = ms.device("meta", function()
  return nn.gpt2 {
    vocab = VOCAB, context = cfg.length, layers = cfg.model.layers, width = WIDTH, heads = HEADS,
  }
end)
nn.split(gpt.wte.weight, tensor, { whole = true, pad = SHARE * parts - VOCAB })
for i = 1, #gpt.h do gpt.h[i] = Block(gpt.h[i]) end
gpt.drop = nn.Dropout(cfg.dropout, alike)

-- Where each rank has some times, it has a part of the gradients of what all ranks have.
if cfg.sequence then
  for _, item in ipairs(gpt:named_parameters()) do
    if item.name:match "ln_" or item.name:match "wpe" or item.name:match "c_proj%.bias" then
      nn.shared(item.parameter, tensor)
    end
  end
end

function gpt:forward(tokens, targets)
  tokens, targets = tokens:t(), targets:t()
  local x = embed(self.wte.weight, tokens)
  local times = x:size(1)
  local first = cfg.sequence and part * times or 0
  x = self.drop(x + self.wpe.weight:narrow(1, first + 1, times):unsqueeze(2))
  for i = 1, #self.h do
    if cfg.recompute then x = ms.recompute(self.h[i], x) else x = self.h[i](x) end
  end
  return cross_entropy(enter(self.ln_f(x)):linear(self.wte.weight), targets)
end

-- Wrapped also where no other rank has the same parts: ddp makes the values, and ms.train sees that
-- gradients are reduced.
local model = ms.ddp(gpt, { group = replicas })
ms.log("ranks of a tensor group: %d, tensor groups: %d", parts, replicas:size())

local text = cfg.data ~= "" and assert(data.bytes(cfg.data)) or ms.scripts.default_text()
local train, valid = text:split(0.9)
local result = ms.train {
  model  = model, steps = cfg.steps, clip = cfg.clip, dtype = cfg.dtype,
  loss = function(net, x, y) return net(x, y) end,
  optimizer = optim.adamw(model, {
    lr = cfg.lr, betas = { 0.9, 0.99 }, weight_decay = cfg.decay,
    schedule = optim.cosine { warmup = cfg.warmup, steps = cfg.steps, floor = 0.05 },
  }),
  data = train:loader { batch = cfg.batch, length = cfg.length, shuffle = true, group = replicas },
  valid = valid:loader { batch = cfg.batch, length = cfg.length, group = replicas },
  eval = { every = cfg.every.eval, batches = 40 },
  save = { every = cfg.every.save, last = 2 },
  resume = cfg.resume, run = cfg.run ~= "" and cfg.run or nil,
}
-- Whole tensors: `moonshard generate RUN`, or nn.gpt2 { ... }:load(RUN .. "/model"), on one rank.
ms.scripts.save(result, model)
