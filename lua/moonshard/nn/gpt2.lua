-- GPT-2, with the parameter names and layouts of Hugging Face (weights of linear layers are [in,
-- out]).
local core = require "moonshard.core"
local module = require "moonshard.nn.module"
local layers = require "moonshard.nn.layers"
local LanguageModel = require "moonshard.nn.language_model"
local argument = require "moonshard.base.options".argument

-- The linear layer of this architecture: weight [in, out].
local Conv1D = module.class "Conv1D"
Conv1D.lora_layout = "columns"

function Conv1D:init(inputs, outputs, std)
  self.weight = module.Parameter(core.randn { inputs, outputs, std = std })
  self.bias = module.Parameter(core.zeros { outputs })
end

function Conv1D:forward(x, activation) return x:linear_t(self.weight, self.bias, activation) end

local Attention = module.class "GPT2Attention"

function Attention:init(options, std)
  self.head, self.dropout = options.width // options.heads, options.dropout or 0
  self.c_attn = Conv1D(options.width, 3 * options.width, 0.02)
  self.c_proj = Conv1D(options.width, options.width, std)
end

function Attention:forward(x, positions, past)
  local shape = x:shape()
  local batch, time, width = shape[1], shape[2], shape[3]
  local parts = self.c_attn(x):split(width, 3)
  for i = 1, 3 do parts[i] = parts[i]:view(batch, time, -1, self.head):transpose(2, 3) end
  local q, k, v = parts[1], parts[2], parts[3]
  if past then k, v = past.extend(k, v) end
  local joined = q:attention(k, v, { positions = positions }):transpose(2, 3)
  return self.c_proj(joined:reshape(batch, time, width))
end

local MLP = module.class "GPT2MLP"

function MLP:init(options, std)
  local hidden = options.hidden or 4 * options.width
  self.c_fc = Conv1D(options.width, hidden, 0.02)
  self.c_proj = Conv1D(hidden, options.width, std)
end

function MLP:forward(x) return self.c_proj(self.c_fc(x, "gelu")) end

-- A block gets the residual stream and the change that is to be added to it, so that the sum and
-- the next norm are one pass over memory.
local Block = module.class "GPT2Block"

function Block:init(options, std)
  self.p = options.dropout or 0
  self.ln_1 = layers.LayerNorm(options.width, { eps = options.eps })
  self.attn = Attention(options, std)
  self.ln_2 = layers.LayerNorm(options.width, { eps = options.eps })
  self.mlp = MLP(options, std)
end

local function norm_of_sum(norm, stream, change)
  if change and layers._is_kept(norm, stream) then stream, change = stream + change, nil end
  if not change then return stream, norm(stream) end
  return change:add_layer_norm(stream, norm.weight, norm.bias, norm.eps)
end

function Block:forward(stream, change, positions, past)
  local normed
  local function drop(x) return self.p > 0 and self:is_training() and x:dropout(self.p) or x end
  stream, normed = norm_of_sum(self.ln_1, stream, change)
  stream, normed = norm_of_sum(self.ln_2, stream, drop(self.attn(normed, positions, past)))
  return stream, drop(self.mlp(normed))
end

---@class ms.GPT2: ms.LanguageModel
local GPT2 = module.class("GPT2", LanguageModel)
GPT2.lora_names = { "c_attn" }             -- what nn.lora adapts unless told; as peft

---@param options ms.ModelOptions
function GPT2:init(options)
  options = LanguageModel.check("nn.gpt2", options, { "dropout" })
  self.options = options
  -- Weights of layers that write into the residual stream get a smaller standard deviation, by the
  -- number of such layers.
  local std = 0.02 / math.sqrt(2 * options.layers)
  self.wte = layers.Embedding(options.vocab, options.width)
  self.wpe = layers.Embedding(options.context, options.width)
  core.no_grad(function()
    self.wte.weight:mul_(0.02)
    self.wpe.weight:mul_(0.02)
  end)
  local blocks = {}
  for i = 1, options.layers do blocks[i] = Block(options, std) end
  self.h = layers.List(blocks)
  self.ln_f = layers.LayerNorm(options.width, { eps = options.eps })
  if options.tie == false then
    self.lm_head = layers.Linear(options.width, options.vocab, { bias = false })
  end
end

-- The last norm's output [batch, time, width].
local function features(self, tokens, positions, cache)
  argument("gpt2", "tokens", tokens, "tensor")
  local shape = tokens:shape()
  if #shape ~= 2 then core.raise("gpt2: tokens must be [batch, time], not " .. tostring(tokens)) end
  LanguageModel.check_positions("gpt2", tokens, positions)
  local first = cache and cache.length or 0
  if first + shape[2] > self.options.context then
    core.raise(("gpt2: %d tokens are more than the context of %d")
      :format(first + shape[2], self.options.context))
  end
  -- A document that begins in the middle of a row has the embeddings of a row's first positions.
  local places = positions and positions:embedding(self.wpe.weight)
    or self.wpe.weight:narrow(1, first + 1, shape[2])
  local stream, change = self.wte(tokens) + places, nil
  if (self.options.dropout or 0) > 0 and self:is_training() then
    stream = stream:dropout(self.options.dropout)
  end
  for i = 1, #self.h do
    local block = self.h[i]
    if self.options.recompute and core.is_recording() then
      stream, change = core.recompute(block, stream, change, positions)
    else
      stream, change = block(stream, change, positions, cache and cache:block(i))
    end
  end
  local _, normed = norm_of_sum(self.ln_f, stream, change)
  return normed
end

local function head(self, x)
  return self.lm_head and self.lm_head(x) or x:linear(self.wte.weight)
end

---@param tokens ms.Tensor ids [batch, time]
---@param positions? ms.Tensor i64 [batch, time] of packed documents, as a loader gives them
---@return ms.Tensor logits [batch, time, vocab]
function GPT2:forward(tokens, positions) return head(self, features(self, tokens, positions)) end

---@param tokens ms.Tensor ids [batch, time]
---@param cache? ms.KeyCache of the positions before these; gets theirs
---@return ms.Tensor logits of the last position [batch, 1, vocab]
function GPT2:last_logits(tokens, cache)
  local x = features(self, tokens, nil, cache)
  return head(self, x:narrow(2, x:size(2), 1))
end

--- The contents of config.json for this model.
---@return table
function GPT2:config()
  local o = self.options
  return {
    model_type = "gpt2", architectures = { "GPT2LMHeadModel" }, vocab_size = o.vocab,
    n_positions = o.context, n_ctx = o.context, n_embd = o.width,
    n_layer = o.layers, n_head = o.heads, n_inner = o.hidden, layer_norm_epsilon = o.eps or 1e-5,
    activation_function = "gelu_new",
    tie_word_embeddings = o.tie ~= false, resid_pdrop = o.dropout or 0, embd_pdrop = o.dropout or 0,
    attn_pdrop = 0,
    -- Null, because the ids that begin and end a text are not known here; without the keys,
    -- transformers would assume 50256.
    bos_token_id = core.json_null, eos_token_id = core.json_null,
  }
end

--- Options from a config.json of this kind. A missing key has the default of transformers
--- (GPT2Config).
---@param config table
---@return ms.ModelOptions
function GPT2.from_config(config)
  return {
    vocab = config.vocab_size or 50257,
    context = config.n_positions or config.n_ctx or 1024,
    layers = config.n_layer or 12,
    width = config.n_embd or 768,
    heads = config.n_head or 12,
    hidden = config.n_inner,
    eps = config.layer_norm_epsilon or 1e-5,
    tie = config.tie_word_embeddings,
  }
end

--- The name in this library of a weight in a file; nil for masks and a tied head. The prefix
--- `transformer.` is removed.
---@param name string
---@return string? own nil: it is no weight of this model
---@return string? copy where own is nil: the weight here that it must be a copy of
function GPT2:own_name(name)
  name = name:gsub("^transformer%.", "")
  if name:match "^h%.%d+%.attn%.bias$" or name:match "^h%.%d+%.attn%.masked_bias$" then
    return nil
  end
  if name == "lm_head.weight" and not self.lm_head then return nil, "wte.weight" end
  return name
end

--- The name in a file of a weight of this model. transformers reads names without the prefix, but
--- not if the file also has a head.
---@param name string
---@return string
function GPT2:file_name(name)
  if not self.lm_head or name == "lm_head.weight" then return name end
  return "transformer." .. name
end

--- The name of a module of this model in transformers' GPT2LMHeadModel.
---@param name string
---@return string
function GPT2:peer_name(name) return name == "lm_head" and name or "transformer." .. name end

return GPT2
