-- Modules, layers and models: the part `ms.nn`.
local module = require "moonshard.nn.module"
local layers = require "moonshard.nn.layers"
local options_of = require "moonshard.base.options"
require "moonshard.nn.files"
require "moonshard.nn.adapter_files"
local lora = require "moonshard.nn.lora"
local alone = require "moonshard.nn.alone"
local parts = require "moonshard.nn.parts"
local cut = require "moonshard.nn.cut"
local Decoder = require "moonshard.nn.decoder"
local gpt2 = require "moonshard.nn.gpt2"
local llama = require "moonshard.nn.llama"
local pretrained = require "moonshard.nn.pretrained"
require "moonshard.optim"                         -- Module:clip_grad_norm and clip_grad_value

---@class ms.nn
local nn = { class = module.class, Parameter = module.Parameter, is_module = module.is_module }
for name, class in pairs(layers) do nn[name] = class end

---@param options ms.ModelOptions
---@return ms.LanguageModel
function nn.gpt2(options) return gpt2(options) end

---@param options ms.ModelOptions
---@return ms.LanguageModel
function nn.llama(options) return llama(options) end

---@param options ms.DecoderOptions
---@return ms.LanguageModel
function nn.decoder(options) return Decoder(options) end

---@param path string
---@param options? { dropout?: number, recompute?: ms.Recompute }
---@return ms.LanguageModel?
---@return string? message
---@return string? code
function nn.pretrained(path, options) return pretrained(path, options) end

---@param model ms.Module
---@param options? ms.LoraOptions
---@return ms.Module
function nn.lora(model, options) return lora.lora(model, options) end

---@param object ms.Module
---@param options { merge: "mean"|"rank0" }
---@return ms.Module
function nn.alone(object, options) return alone.alone(object, options) end

---@param parameter ms.Parameter
---@param group ms.Group
---@param how ms.SplitOptions
---@return ms.Parameter
function nn.split(parameter, group, how) return parts.split(parameter, group, how) end

---@param object ms.Module
---@param group ms.Group
---@param options? { values?: "kept" }
---@return ms.Module
function nn.owned(object, group, options) return parts.owned(object, group, options) end

---@param parameter ms.Parameter
---@param group ms.Group
---@return ms.Parameter
function nn.shared(parameter, group) return parts.shared(parameter, group) end

---@param model ms.LanguageModel
---@param first integer
---@param last integer
---@return ms.Module
function nn.cut(model, first, last) return cut.cut(model, first, last) end

return options_of.closed(nn, "ms.nn")
