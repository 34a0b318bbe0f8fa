-- Llama, with the parameter names and layouts of Hugging Face.
local core = require "moonshard.core"
local module = require "moonshard.nn.module"
local layers = require "moonshard.nn.layers"
local LanguageModel = require "moonshard.nn.language_model"
local argument = require "moonshard.base.options".argument
local rope = require "moonshard.nn.rope"

local MLP = module.class "LlamaMLP"

function MLP:init(width, hidden)
  self.gate_proj = layers.Linear(width, hidden, { bias = false })
  self.up_proj = layers.Linear(width, hidden, { bias = false })
  self.down_proj = layers.Linear(hidden, width, { bias = false })
end

function MLP:forward(x) return self.down_proj(self.up_proj(x):swiglu(self.gate_proj(x))) end

local Block = module.class "LlamaBlock"

function Block:init(options)
  local o = options
  self.input_layernorm = layers.RMSNorm(o.width, { eps = o.eps })
  self.self_attn = layers.Attention {
    width = o.width, heads = o.heads, kv_heads = o.kv_heads, rotary = true,
    rotary_base = o.rotary_base, rotary_scaling = o.rotary_scaling,
    bias = false,
  }
  self.post_attention_layernorm = layers.RMSNorm(o.width, { eps = o.eps })
  self.mlp = MLP(o.width, o.hidden)
end

local function norm_of_sum(norm, stream, change)
  if change and layers._is_kept(norm, stream) then stream, change = stream + change, nil end
  if not change then return stream, norm(stream) end
  return change:add_rms_norm(stream, norm.weight, norm.eps)
end

function Block:forward(stream, change, positions, past)
  local normed
  stream, normed = norm_of_sum(self.input_layernorm, stream, change)
  stream, normed = norm_of_sum(self.post_attention_layernorm, stream,
    self.self_attn(normed, positions, past))
  return stream, self.mlp(normed)
end

local Body = module.class "LlamaModel"

function Body:init(options)
  self.embed_tokens = layers.Embedding(options.vocab, options.width)
  local blocks = {}
  for i = 1, options.layers do blocks[i] = Block(options) end
  self.layers = layers.List(blocks)
  self.norm = layers.RMSNorm(options.width, { eps = options.eps })
end

function Body:forward(tokens, positions, recompute, cache)
  local stream, change = self.embed_tokens(tokens), nil
  for i = 1, #self.layers do
    local block = self.layers[i]
    if recompute and core.is_recording() then
      stream, change = core.recompute(block, stream, change, positions)
    else
      stream, change = block(stream, change, positions, cache and cache:block(i))
    end
  end
  local _, normed = norm_of_sum(self.norm, stream, change)
  return normed
end

---@class ms.Llama: ms.LanguageModel
local Llama = module.class("Llama", LanguageModel)
Llama.lora_names = { "q_proj", "v_proj" }  -- what nn.lora adapts unless told; as peft

---@param options ms.ModelOptions
function Llama:init(options)
  options = LanguageModel.check("nn.llama", options,
    { "kv_heads", "rotary_base", "rotary_scaling" })
  -- Unless given, two thirds of four times the width, rounded up to a multiple of 64.
  options.hidden = options.hidden or (8 * options.width // 3 + 63) // 64 * 64
  self.options = options
  self.model = Body(options)
  if not options.tie then
    self.lm_head = layers.Linear(options.width, options.vocab, { bias = false })
  end
  core.no_grad(function()
    for _, p in ipairs(self:parameters()) do
      if p:dim() == 2 then p:copy_(core.randn { p:size(1), p:size(2), std = 0.02 }) end
    end
  end)
end

local function features(self, tokens, positions, cache)
  argument("llama", "tokens", tokens, "tensor")
  local shape = tokens:shape()
  if #shape ~= 2 then
    core.raise("llama: tokens must be [batch, time], not " .. tostring(tokens))
  end
  LanguageModel.check_positions("llama", tokens, positions)
  local length = shape[2] + (cache and cache.length or 0)
  if length > self.options.context then
    core.raise(("llama: %d tokens are more than the context of %d")
      :format(length, self.options.context))
  end
  return self.model(tokens, positions, self.options.recompute, cache)
end

local function head(self, x)
  return self.lm_head and self.lm_head(x) or x:linear(self.model.embed_tokens.weight)
end

---@param tokens ms.Tensor ids [batch, time]
---@param positions? ms.Tensor i64 [batch, time] of packed documents, as a loader gives them
---@return ms.Tensor logits [batch, time, vocab]
function Llama:forward(tokens, positions) return head(self, features(self, tokens, positions)) end

---@param tokens ms.Tensor ids [batch, time]
---@param cache? ms.KeyCache of the positions before these; gets theirs
---@return ms.Tensor logits of the last position [batch, 1, vocab]
function Llama:last_logits(tokens, cache)
  local x = features(self, tokens, nil, cache)
  return head(self, x:narrow(2, x:size(2), 1))
end

--- The contents of config.json for this model.
---@return table
function Llama:config()
  local o = self.options
  local theta, scaling = rope.write(o.rotary_base, o.rotary_scaling)
  return {
    model_type = "llama", architectures = { "LlamaForCausalLM" }, vocab_size = o.vocab,
    max_position_embeddings = o.context, hidden_size = o.width,
    num_hidden_layers = o.layers, num_attention_heads = o.heads,
    num_key_value_heads = o.kv_heads or o.heads, intermediate_size = o.hidden,
    rms_norm_eps = o.eps or 1e-5, rope_theta = theta, rope_scaling = scaling, hidden_act = "silu",
    tie_word_embeddings = o.tie == true, attention_bias = false,
    -- Null, because the ids that begin and end a text are not known here; without the keys,
    -- transformers would assume 1 and 2.
    bos_token_id = core.json_null, eos_token_id = core.json_null,
  }
end

--- Options from a config.json of this kind. A missing key has the default of transformers
--- (LlamaConfig).
---@param config table
---@return ms.ModelOptions?
---@return string? message
---@return string? code
function Llama.from_config(config)
  local positions, message, code = rope.read(config)
  if not positions then return nil, message, code end
  local heads = config.num_attention_heads or 32
  return {
    vocab = config.vocab_size or 32000,
    context = config.max_position_embeddings or 2048,
    layers = config.num_hidden_layers or 32,
    width = config.hidden_size or 4096, heads = heads,
    kv_heads = config.num_key_value_heads or heads,
    hidden = config.intermediate_size or 11008, eps = config.rms_norm_eps or 1e-6,
    rotary_base = positions.base,
    rotary_scaling = positions.scaling, tie = config.tie_word_embeddings,
  }
end

--- The name in this library of a weight in a file; nil for inv_freq and a tied head.
---@param name string
---@return string? own nil: it is no weight of this model
---@return string? copy where own is nil: the weight here that it must be a copy of
function Llama:own_name(name)
  if name:match "%.rotary_emb%.inv_freq$" then return nil end
  if name == "lm_head.weight" and not self.lm_head then return nil, "model.embed_tokens.weight" end
  return name
end

return Llama
