-- GPT-2, from scratch or from given weights, on token shards (`.bin` files of llm.c or nanoGPT).
--     ./moonshard tokenize --tokenizer FOLDER --out shards/train TEXT...
--     ./moonshard run recipes/gpt2.lua data='shards/train_*.bin' valid='shards/val_*.bin'
--     ./moonshard run recipes/gpt2.lua data=shards weights=FOLDER_WITH_CONFIG_JSON lr=3e-5
--     ./moonshard run recipes/gpt2.lua data=shards weights=FOLDER_WITH_CONFIG_JSON lora=8 lr=3e-4
local ms = require "moonshard"
local nn, optim = ms.nn, ms.optim

local cfg = ms.config(ms.scripts.options {
  data       = { "data", help = "token shards: a folder, a file, or a pattern with *" },
  valid      = {
    "", help = "held-out shards; unless given, val*.bin of the folder, or the last part of data",
  },
  bytes      = { false, help = "data are text files, and their bytes the tokens" },
  packed     = {
    false, help = "documents that lie one after the other in a sequence do not see each other",
  },
  end_of_text = {
    -1, help = "the token that ends a document, with packed=true; that of the shards unless given",
  },
  size       = { "124M", choices = { "124M", "350M", "774M", "1558M" }, help = "of the model" },
  weights    = {
    "",
    help = "start from these .safetensors (a file or a folder, with config.json); \z
      they decide the size",
  },
  lora       = { 0, help = "rank of adapters that are trained instead of the weights; 0: none" },
  adapters   = { "", help = "start from these adapters (a folder of peft or of such a run)" },
  adapt      = {
    alpha = { 0.0, help = "adapters add alpha / rank times their product; the rank unless given" },
    dropout = { 0.0, help = "of the adapters' inputs" },
    base = {
      "", choices = { "", "int4" }, open = true,
      help = "int4: keep the weights of the blocks in 4 bits",
    },
    names = { "", help = "layers with an adapter, with commas between; c_attn unless given" },
  },
  vocab      = {
    0, help = "rows of the embedding; unless given 256 with bytes=true, else the tokens of the \z
      shards' tokenizer, or 50257, padded to a multiple of 128",
  },
  steps      = { 20000, help = "optimizer steps" },
  batch      = { 4, help = "sequences of a pass" },
  accumulate = { 8, help = "passes of a step" },
  global_batch = {
    0, replaces = "accumulate", help = "sequences of a step, instead of accumulate",
  },
  length     = { 1024, help = "tokens of a sequence" },
  lr         = { 6e-4, help = "peak learning rate" },
  warmup     = { 700, help = "steps until the peak" },
  decay      = { 0.1, help = "weight decay of matrices" },
  clip       = { 1.0, help = "global norm of gradients" },
  dropout    = 0.0,
  recompute  = {
    "false", choices = { "false", "true", "matmul" },
    help = "run blocks again in backward, not to keep activations; matmul: but for products",
  },
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
  ema        = { 0.0, help = "decay of averaged weights, which are validated and saved; 0: none" },
  resume     = { "never", help = "never, auto, or a checkpoint" },
  run        = { "", help = "folder of the run" },
  every      = {
    eval = { 250, help = "steps between validations; 0: none" },
    save = { 1000, help = "steps between checkpoints, of which the last two stay; 0: none" },
    sample = { 1000, help = "steps between samples; 0: none" },
  },
  model      = {
    layers = { 0, help = "number of blocks, instead of what the size says" },
    width = { 0, help = "of a token's vector, instead of what the size says" },
    heads = { 0, help = "of attention, instead of what the size says" },
  },
})

local sizes = {
  ["124M"] = { layers = 12, width = 768, heads = 12 },
  ["350M"] = { layers = 24, width = 1024, heads = 16 },
  ["774M"] = { layers = 36, width = 1280, heads = 20 },
  ["1558M"] = { layers = 48, width = 1600, heads = 25 },
}

local train, valid = ms.scripts.texts(cfg)

local recompute = ({ ["true"] = true, matmul = "matmul" })[cfg.recompute]

-- The weights, or adapters beside them, are trained.
local adapts, adapt = ms.scripts.adapters(cfg)

local function make()
  if cfg.weights ~= "" then
    return adapt(assert(nn.pretrained(cfg.weights,
      { dropout = cfg.dropout, recompute = recompute })))
  end
  local size = sizes[cfg.size]
  for name, value in pairs(cfg.model) do if value > 0 then size[name] = value end end
  return adapt(nn.gpt2 {
    vocab = cfg.vocab > 0 and cfg.vocab or -(-ms.scripts.vocab(cfg, train, 50257) // 128) * 128,
    context = cfg.length, layers = size.layers, width = size.width,
    heads = size.heads, dropout = cfg.dropout, recompute = recompute,
  })
end

-- Weight decay applies to matrices, not to biases and norms.
local model, optimizer, clip = ms.scripts.apply(cfg, make, function(net)
  return optim.adamw({
    { params = net:parameters(function(p) return p:dim() >= 2 end) },
    { params = net:parameters(function(p) return p:dim() < 2 end), weight_decay = 0 },
  }, {
    lr = cfg.lr, betas = { 0.9, 0.95 }, weight_decay = cfg.decay,
    schedule = optim.cosine {
      warmup = math.min(cfg.warmup, cfg.steps), steps = cfg.steps, floor = 0.1,
    },
  })
end, { clip = cfg.clip, meta = adapts and cfg.adapt.base ~= "" })

-- Samples are text if the folder of the weights has a tokenizer, or if the shards name theirs. It
-- is saved with the model, for `moonshard generate`.
local tokenizer = not cfg.bytes and ms.scripts.tokenizer(model, train, valid) or nil

-- With packed=true, batches say where documents begin.
local function loader(set, shuffle)
  return set:loader {
    batch = cfg.batch, length = cfg.length, shuffle = shuffle, packed = cfg.packed,
    end_of_text = cfg.end_of_text >= 0 and cfg.end_of_text or nil,
  }
end

local result = ms.train {
  model = model, optimizer = optimizer, steps = cfg.steps, accumulate = ms.scripts.passes(cfg),
  clip = clip, dtype = cfg.dtype, emulate = cfg.emulate, graph = cfg.graph,
  attention = cfg.attention,
  data = loader(train, true), valid = loader(valid, false),
  eval = { every = cfg.every.eval, batches = 20 },
  sample = (tokenizer or cfg.bytes)
    and { every = cfg.every.sample, count = 300, tokenizer = tokenizer } or nil,
  save = { every = cfg.every.save, last = 2 },
  ema = cfg.ema ~= 0 and cfg.ema or nil,
  resume = cfg.resume, run = cfg.run ~= "" and cfg.run or nil,
}
ms.scripts.save(result, model, adapts)
