-- nn.decoder: language models of blocks of attention and an MLP. A table describes what a block
-- is; gpt2, llama and the families of transformers are rows, which give names and such tables.
local core = require "moonshard.core"
local module = require "moonshard.nn.module"
local layers = require "moonshard.nn.layers"
local LanguageModel = require "moonshard.nn.language_model"
local families = require "moonshard.nn.families"
local argument = require "moonshard.base.options".argument
local sorted_pairs = require "moonshard.base.sorted_pairs"

--------------------------------------------------------------------------------------------- parts

--- What a row of the table says of a model beside its options.
---@class ms.DecoderRow
---@field name string                 begins messages
---@field names table<string, string> of the parts: embedding, places, blocks, first, attention,
--- second, mlp, third, last; and body, the module that has them, if it is not the model itself
---@field Block table                 classes
---@field Body? table
---@field attention fun(o: ms.DecoderOptions, i: integer): ms.Module
---@field mlp fun(o: ms.DecoderOptions): ms.Module
---@field embeddings? fun(holder: ms.Module, o: ms.DecoderOptions) after these are made
---@field redraw? boolean             all matrices are drawn again at the end

-- The names of Llama, which most models in transformers have.
local NAMES <const> = {
  body = "model", embedding = "embed_tokens", places = "embed_positions", blocks = "layers",
  last = "norm", attention = "self_attn", mlp = "mlp",
  first = "input_layernorm", second = "post_attention_layernorm",
  third = "post_feedforward_layernorm",
}

local function norm_of(o)
  return (o.norm == "layer" and layers.LayerNorm or layers.RMSNorm)(o.width, { eps = o.eps })
end

local MLP = module.class "DecoderMLP"
local linear_forward = layers.Linear.forward

function MLP:init(o)
  local how = { bias = o.mlp_bias or false }
  if o.mlp ~= "gelu" then self.gate_proj = layers.Linear(o.width, o.hidden, how) end
  self.up_proj = layers.Linear(o.width, o.hidden, how)
  self.down_proj = layers.Linear(o.hidden, o.width, how)
end

function MLP:forward(x)
  if not self.gate_proj then
    return module.through_gelu(self.up_proj, self.down_proj, linear_forward, "mlp", x)
  end
  return self.down_proj(self.up_proj(x):swiglu(self.gate_proj(x)))
end

-- Whether a list of booleans, if given, has true for a layer.
local function is_on(list, i) return list == nil or list[i] == true end

local function attention_of(o, i)
  return layers.Attention {
    width = o.width, heads = o.heads, kv_heads = o.kv_heads, head_dim = o.head_dim,
    rotary = o.positions ~= "learned" and is_on(o.rotary_layers, i),
    rotary_base = o.rotary_base, rotary_scaling = o.rotary_scaling,
    bias = o.bias or false, qk_norm = o.qk_norm, eps = o.eps,
    window = is_on(o.window_layers, i) and o.window or nil,
  }
end

-- A block gets the residual stream and the change that is to be added to it, so that the sum and
-- the next norm are one pass over memory.
local Block = module.class "DecoderBlock"

function Block:init(o, row, i)
  local names, after = row.names, o.norm_place == "after"
  self.names, self.p, self.after = names, o.dropout or 0, after
  if not after then self[names.first] = norm_of(o) end
  self[names.attention] = row.attention(o, i)
  self[names.second] = norm_of(o)
  self[names.mlp] = row.mlp(o)
  if after then self[names.third] = norm_of(o) end
end

function Block:forward(stream, change, positions, past)
  local names = self.names
  local attention, mlp, second = self[names.attention], self[names.mlp], self[names.second]
  local function drop(x) return self.p > 0 and self:is_training() and x:dropout(self.p) or x end
  if self.after then
    if change then stream = stream + change end
    stream = stream + drop(second(attention(stream, positions, past)))
    return stream, drop(self[names.third](mlp(stream)))
  end
  local normed
  stream, normed = layers._norm_of_sum(self[names.first], stream, change)
  stream, normed = layers._norm_of_sum(second, stream, drop(attention(normed, positions, past)))
  return stream, drop(mlp(normed))
end
module.tidy(MLP.forward)
module.tidy(Block.forward, function(_, _, _, _, past) return not past end)

---------------------------------------------------------------------------------------------- body

local function make_body(holder, o, row)
  local names, blocks = row.names, {}
  holder[names.embedding] = layers.Embedding(o.vocab, o.width)
  if o.positions == "learned" then holder[names.places] = layers.Embedding(o.context, o.width) end
  if row.embeddings then row.embeddings(holder, o) end
  for i = 1, o.layers do blocks[i] = row.Block(o, row, i) end
  -- What the embeddings go into is kept out of fp8, as the head is: errors there are not averaged.
  local first = blocks[1][names.attention]
  for _, name in ipairs(first.first_products or {}) do first[name].fp8 = false end
  holder[names.blocks] = layers.List(blocks)
  holder[names.last] = norm_of(o)
end

-- The embeddings of tokens and, where these are learned, of their places in the text.
local function embed(holder, names, tokens, positions, cache)
  local stream, places = holder[names.embedding](tokens), holder[names.places]
  if not places then return stream end
  -- A document that begins in the middle of a row has the embeddings of a row's first positions.
  if positions then return stream + places(positions) end
  local first, length = cache and cache.length or 0, tokens:size(2)
  if module.plain_forward(places) == layers.Embedding.forward then
    return stream + places.weight:narrow(1, first + 1, length)
  end
  return stream + places(core.arange(first, first + length - 1))
end

-- The stream that the first block gets.
local function begin_stream(holder, names, tokens, positions, how, cache)
  local stream, dropout = embed(holder, names, tokens, positions, cache), how.dropout or 0
  return dropout > 0 and holder:is_training() and stream:dropout(dropout) or stream
end

-- How backward runs a block again, or nil. way: the option recompute of a model.
local function recompute_by(way, block)
  if type(way) == "function" then way = way(block) end
  if way == "matmul" then return core.recompute_rest end
  if way == true then return core.recompute end
  if not way then return nil end
  core.raise(("recompute: the function gave %s for a block: true, false or \"matmul\" is expected")
    :format(tostring(way)))
end

-- Some of the blocks. The stream, the change that is to be added to it, and whether the caller
-- alone has both, which were made by a block.
local function run_blocks(holder, names, first, last, stream, change, positions, how, cache)
  local blocks, own = holder[names.blocks], false
  for i = first, last do
    local block = blocks[i]
    local again = how.recompute and core.is_recording() and recompute_by(how.recompute, block)
    if again then
      stream, change = again(block, stream, change, positions)
    else
      -- Asked before the call: a hook may remove itself.
      local is_tidy = not cache and module.is_tidy(block)
      local next_stream, next_change = block(stream, change, positions, cache and cache:block(i))
      if own and is_tidy then core.release(stream, change) end
      stream, change, own = next_stream, next_change, is_tidy
    end
  end
  return stream, change, own
end

-- The last norm's output [batch, time, width].
local function run_body(holder, names, tokens, positions, how, cache)
  local stream = begin_stream(holder, names, tokens, positions, how, cache)
  local change, own
  stream, change, own = run_blocks(holder, names, 1, #holder[names.blocks], stream, nil, positions,
    how, cache)
  -- The norm of the sum gets neither.
  local _, normed = layers._norm_of_sum(holder[names.last], stream, change)
  if own then core.release(stream, change) end
  return normed
end

local Body = module.class "DecoderModel"

function Body:init(o, row)
  self.names, self.p = row.names, o.dropout or 0
  make_body(self, o, row)
end

function Body:forward(tokens, positions, recompute, cache)
  local how = { dropout = self.p, recompute = recompute }
  return run_body(self, self.names, tokens, positions, how, cache)
end

------------------------------------------------------------------------------------------- options

-- The options that only some models have, with their values where these are few words.
local CHOICES <const> = {
  norm = { "rms", "layer" }, norm_place = { "before", "after" },
  positions = { "rotary", "learned" }, mlp = { "swiglu", "gelu" },
  qk_norm = { false, "head", "all" }, bias = { false, true, "qkv" }, mlp_bias = { false, true },
}
local OWN <const> = {
  "kv_heads", "head_dim", "dropout", "rotary_base", "rotary_scaling", "rotary_layers", "window",
  "window_layers", "family",
}
for name in pairs(CHOICES) do OWN[#OWN + 1] = name end

local function check_choice(name, value)
  for _, one in ipairs(CHOICES[name]) do if value == one then return end end
  local shown = {}
  for i, one in ipairs(CHOICES[name]) do shown[i] = tostring(one) end
  core.raise(("nn.decoder: %s must be %s, not %s")
    :format(name, table.concat(shown, " or "), tostring(value)))
end

local function check_list(o, name)
  local list = o[name]
  if list == nil then return end
  argument("nn.decoder", name, list, "list")
  for i = 1, o.layers do argument("nn.decoder", ("%s[%d]"):format(name, i), list[i], "boolean") end
  if #list ~= o.layers then
    core.raise(("nn.decoder: %s has %d items, and the model %d layers")
      :format(name, #list, o.layers))
  end
end

local function find_family(name)
  local family = type(name) == "string" and families[name]
  if family and not family.only then return family end
  local known = {}
  for key, one in sorted_pairs(families) do if not one.only then known[#known + 1] = key end end
  core.raise(("nn.decoder: family is %s; known are %s%s"):format(tostring(name),
    table.concat(known, ", "), family and (" (%s makes a %s)"):format(family.only, name) or ""))
end

-- Gives a description what its family fixes. Raises for what config.json of the family cannot say.
local function fill_in(o, family)
  for name, value in sorted_pairs(family.fixed or {}) do
    if o[name] == nil then o[name] = value end
    if o[name] ~= value then
      core.raise(("nn.decoder: %s is %s; models of the family %s have %s"):format(name,
        tostring(o[name]), o.family, tostring(value)))
    end
  end
  for _, name in ipairs { "window", "window_layers", "rotary_layers" } do
    if o[name] ~= nil and family.allowed and not family.allowed[name] then
      core.raise(("nn.decoder: models of the family %s have no %s"):format(o.family, name))
    end
  end
  if family.fixed and family.fixed.bias == nil and o.bias == "qkv" then
    core.raise(("nn.decoder: bias is qkv; models of the family %s have true or false")
      :format(o.family))
  end
  if family.tie and o.tie == nil then o.tie = true end
end

-- The checked options of nn.decoder; what a family fixes is filled in.
local function check(given)
  local o = LanguageModel.check("nn.decoder", given, OWN)
  for name in pairs(CHOICES) do if o[name] ~= nil then check_choice(name, o[name]) end end
  if o.family ~= nil then argument("nn.decoder", "family", o.family, "string") end
  check_list(o, "rotary_layers")
  check_list(o, "window_layers")
  if o.window_layers and not o.window then
    core.raise "nn.decoder: window_layers needs a window"
  end
  if o.positions == "learned" and (o.rotary_base or o.rotary_scaling or o.rotary_layers) then
    core.raise "nn.decoder: rotary options are of rotary positions, and positions are learned"
  end
  if o.family ~= nil then fill_in(o, find_family(o.family)) end
  return o
end

--------------------------------------------------------------------------------------------- model

---@class ms.Decoder: ms.LanguageModel
local Decoder = module.class("Decoder", LanguageModel)
Decoder.lora_names = { "q_proj", "v_proj" }  -- what nn.lora adapts unless told; as peft
Decoder.NAMES, Decoder.Block, Decoder.Body, Decoder.MLP = NAMES, Block, Body, MLP

---@type ms.DecoderRow
Decoder.row = {
  name = "decoder", names = NAMES, Block = Block, Body = Body, attention = attention_of,
  mlp = MLP, redraw = true,
}
Decoder.attention_of = attention_of

--- Makes the parts of a model. options: what the user sees of the description.
---@param options ms.DecoderOptions checked
---@param description table<string, any> of options that the row fixes
function Decoder:make(options, description)
  local row, o = self.row, setmetatable({}, { __index = options })
  for name, value in pairs(description) do o[name] = value end
  -- Unless given, two thirds of four times the width, rounded up to a multiple of 64.
  options.hidden = options.hidden or row.redraw and (8 * o.width // 3 + 63) // 64 * 64 or nil
  self.options = options
  if row.Body then self[row.names.body] = row.Body(o, row) else make_body(self, o, row) end
  if not o.tie then
    self.lm_head = layers.Linear(o.width, o.vocab, { bias = false })
    self.lm_head.fp8 = false
  end
  if not row.redraw then return end
  core.no_grad(function()
    for _, item in ipairs(self:named_parameters()) do
      local p = item.parameter
      if p:dim() == 2 then p:copy_(core.randn { p:size(1), p:size(2), std = 0.02 })
      elseif item.name:match "proj%.bias$" then p:zero_() end
    end
  end)
end

---@param options ms.DecoderOptions
function Decoder:init(options) self:make(check(options), {}) end

local function features(self, tokens, positions, cache)
  local name, names = self.row.name, self.row.names
  argument(name, "tokens", tokens, "tensor")
  local shape = tokens:shape()
  if #shape ~= 2 then
    core.raise(("%s: tokens must be [batch, time], not %s"):format(name, tostring(tokens)))
  end
  LanguageModel.check_positions(name, tokens, positions)
  local length = shape[2] + (cache and cache.length or 0)
  if length > self.options.context then
    core.raise(("%s: %d tokens are more than the context of %d")
      :format(name, length, self.options.context))
  end
  if names.body then
    return self[names.body](tokens, positions, self.options.recompute, cache)
  end
  return run_body(self, names, tokens, positions, self.options, cache)
end

--- For nn/cut.lua, which runs some of a model's blocks.
Decoder._begin_stream, Decoder._run_blocks = begin_stream, run_blocks

local function embedding_weight(self)
  local names = self.row.names
  local holder = names.body and self[names.body] or self
  return holder[names.embedding].weight
end

local function head(self, x)
  if self.lm_head then return self.lm_head(x) end
  return core.without_fp8(function() return x:linear(embedding_weight(self)) end)
end

-- What head multiplies with, if it is a product and nothing else; nil: it is more.
local function head_weight(self)
  local last = self.lm_head
  if not last then return embedding_weight(self) end
  local is_product = module.is_module(last) and module.plain_forward(last) == linear_forward
    and last.bias == nil
  return is_product and last.weight or nil
end

---@param tokens ms.Tensor ids [batch, time]
---@param positions? ms.Tensor i64 [batch, time] of packed documents, as a loader gives them
---@param targets? ms.Tensor ids [batch, time]
---@return ms.Tensor logits [batch, time, vocab]; with targets the loss, [], without logits
function Decoder:forward(tokens, positions, targets)
  local x = features(self, tokens, positions)
  if targets == nil then return head(self, x) end
  local weight = head_weight(self)
  return weight and x:linear_cross_entropy(weight, targets) or head(self, x):cross_entropy(targets)
end
-- The forward that takes targets. Another one in its place need not.
Decoder._forward_with_targets = Decoder.forward

---@param tokens ms.Tensor ids [batch, time]
---@param cache? ms.KeyCache of the positions before these; gets theirs
---@return ms.Tensor logits of the last position [batch, 1, vocab]
function Decoder:last_logits(tokens, cache)
  local x = features(self, tokens, nil, cache)
  return head(self, x:narrow(2, x:size(2), 1))
end

--- The contents of config.json for this model.
---@return table
function Decoder:config()
  return families[self.options.family or "moonshard"].write(self.options)
end

--- The name in this library of a weight in a file; nil for inv_freq and a tied head.
---@param name string
---@return string? own nil: it is no weight of this model
---@return string? copy where own is nil: the weight here that it must be a copy of
function Decoder:own_name(name)
  if name:match "%.rotary_emb%.inv_freq$" then return nil end
  if name == "lm_head.weight" and not self.lm_head then return nil, "model.embed_tokens.weight" end
  return name
end

return Decoder
