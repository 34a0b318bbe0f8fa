-- GPT-2: a row of nn.decoder, with the parameter names and layouts of Hugging Face (weights of
-- linear layers are [in, out]).
local core = require "moonshard.core"
local module = require "moonshard.nn.module"
local Decoder = require "moonshard.nn.decoder"
local families = require "moonshard.nn.families"
local LanguageModel = require "moonshard.nn.language_model"

-- The linear layer of this architecture: weight [in, out].
local Conv1D = module.class "Conv1D"
Conv1D.lora_layout = "columns"

function Conv1D:init(inputs, outputs, std)
  self.weight = module.Parameter(core.randn { inputs, outputs, std = std })
  self.bias = module.Parameter(core.zeros { outputs })
end

function Conv1D:forward(x, activation)
  if self.fp8 ~= false then return x:linear_t(self.weight, self.bias, activation) end
  return core.without_fp8(function() return x:linear_t(self.weight, self.bias, activation) end)
end
local linear_forward = Conv1D.forward

-- Weights of layers that write into the residual stream get a smaller standard deviation, by the
-- number of such layers.
local function last_std(o) return 0.02 / math.sqrt(2 * o.layers) end

local Attention = module.class "GPT2Attention"
Attention.first_products = { "c_attn" }

function Attention:init(o)
  self.head, self.dropout = o.width // o.heads, o.dropout or 0
  self.c_attn = Conv1D(o.width, 3 * o.width, 0.02)
  self.c_proj = Conv1D(o.width, o.width, last_std(o))
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

function MLP:init(o)
  local hidden = o.hidden or 4 * o.width
  self.c_fc = Conv1D(o.width, hidden, 0.02)
  self.c_proj = Conv1D(hidden, o.width, last_std(o))
end

function MLP:forward(x)
  return module.through_gelu(self.c_fc, self.c_proj, linear_forward, "mlp_t", x)
end

for _, class in ipairs { Conv1D, MLP, Attention } do module.tidy(class.forward) end

---@class ms.GPT2: ms.Decoder
local GPT2 = module.class("GPT2", Decoder)
GPT2.lora_names = { "c_attn" }             -- what nn.lora adapts unless told; as peft

---@type ms.DecoderRow
GPT2.row = {
  name = "gpt2", Block = module.class("GPT2Block", Decoder.Block), attention = Attention, mlp = MLP,
  names = {
    embedding = "wte", places = "wpe", blocks = "h", last = "ln_f", first = "ln_1",
    attention = "attn", second = "ln_2", mlp = "mlp",
  },
  embeddings = function(holder)
    core.no_grad(function()
      holder.wte.weight:mul_(0.02)
      holder.wpe.weight:mul_(0.02)
    end)
  end,
}

---@param options ms.ModelOptions
function GPT2:init(options)
  options = LanguageModel.check("nn.gpt2", options, { "dropout" })
  self:make(options, { norm = "layer", positions = "learned", tie = options.tie ~= false })
end

--- The contents of config.json for this model.
---@return table
function GPT2:config() return families.gpt2.write(self.options) end

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
