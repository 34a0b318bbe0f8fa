-- Llama, small enough for a laptop unless told otherwise, on token shards or bytes; from scratch or
-- from given weights, also those of Qwen 2 and 3, Mistral, SmolLM 2 and 3 and OLMo 2.
--     ./moonshard run recipes/llama.lua data=shards
--     ./moonshard run recipes/llama.lua data=FILE_OR_FOLDER bytes=true
--     ./moonshard run recipes/llama.lua data=shards weights=FOLDER_WITH_CONFIG_JSON lr=1e-5
--     ./moonshard run recipes/llama.lua data=shards weights=FOLDER_WITH_CONFIG_JSON lora=8 lr=2e-4
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
  weights    = {
    "",
    help = "start from these .safetensors (a file or a folder, with config.json) of Llama, \z
      Qwen 2 or 3, Mistral, SmolLM 2 or 3, OLMo 2 or ms.nn.decoder; they decide the model",
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
    names = {
      "", help = "layers with an adapter, with commas between; q_proj,v_proj unless given",
    },
  },
  vocab      = {
    0, help = "number of different tokens; unless given 256 with bytes=true, else that of the \z
      tokenizer of the shards, else 32000",
  },
  steps      = { 2000, help = "optimizer steps" },
  batch      = { 8, help = "sequences of a pass" },
  accumulate = { 1, help = "passes of a step" },
  global_batch = {
    0, replaces = "accumulate", help = "sequences of a step, instead of accumulate",
  },
  length     = { 256, help = "tokens of a sequence" },
  lr         = { 1e-3, help = "peak learning rate" },
  warmup     = { 100, help = "steps until the peak" },
  decay      = { 0.1, help = "weight decay of matrices" },
  clip       = { 1.0, help = "global norm of gradients" },
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
    eval = { 200, help = "steps between validations; 0: none" },
    save = { 500, help = "steps between checkpoints, of which the last two stay; 0: none" },
    sample = { 500, help = "steps between samples; 0: none" },
  },
  model      = {
    layers = { 6, help = "number of blocks" },
    width = { 256, help = "of a token's vector" },
    heads = { 8, help = "of attention" },
    kv_heads = { 4, help = "heads of keys and values, shared by groups of query heads" },
    rotary_base = { 10000.0, help = "of rotary positions" },
  },
})

local train, valid = ms.scripts.texts(cfg)

local recompute = ({ ["true"] = true, matmul = "matmul" })[cfg.recompute]

-- The weights, or adapters beside them, are trained.
local adapts, adapt = ms.scripts.adapters(cfg)

local function make()
  if cfg.weights ~= "" then
    return adapt(assert(nn.pretrained(cfg.weights, { recompute = recompute })))
  end
  local m = cfg.model
  return adapt(nn.llama {
    vocab = ms.scripts.vocab(cfg, train, 32000), context = cfg.length,
    layers = m.layers, width = m.width, heads = m.heads,
    kv_heads = m.kv_heads, rotary_base = m.rotary_base,
    recompute = recompute,
  })
end

-- Weight decay applies to matrices, not to norms.
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
