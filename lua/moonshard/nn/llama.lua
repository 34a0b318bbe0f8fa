-- Llama: a row of nn.decoder, with the parameter names and layouts of Hugging Face.
local module = require "moonshard.nn.module"
local Decoder = require "moonshard.nn.decoder"
local families = require "moonshard.nn.families"
local LanguageModel = require "moonshard.nn.language_model"

---@class ms.Llama: ms.Decoder
local Llama = module.class("Llama", Decoder)

---@type ms.DecoderRow
Llama.row = {
  name = "llama", names = Decoder.NAMES, redraw = true, attention = Decoder.attention_of,
  Block = module.class("LlamaBlock", Decoder.Block), mlp = module.class("LlamaMLP", Decoder.MLP),
  Body = module.class("LlamaModel", Decoder.Body),
}

---@param options ms.ModelOptions
function Llama:init(options)
  options = LanguageModel.check("nn.llama", options,
    { "kv_heads", "head_dim", "bias", "mlp_bias", "rotary_base", "rotary_scaling" })
  self:make(options, {})
end

--- The contents of config.json for this model.
---@return table
function Llama:config() return families.llama.write(self.options) end

return Llama
