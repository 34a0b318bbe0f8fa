-- What gpt2 and llama have in common: options, loading and saving with config.json, generating
-- text.
local core = require "moonshard.core"
local generate = require "moonshard.nn.generate"
local module = require "moonshard.nn.module"
local options_of = require "moonshard.base.options"
local check = options_of.check
local rope = require "moonshard.nn.rope"
local tokenizer_files = require "moonshard.tokenizer.files"
local vocabulary = require "moonshard.tokenizer.vocabulary"
local tokenizers = require "moonshard.tokenizer"

---@class ms.LanguageModel: ms.Module
local LanguageModel = module.class "LanguageModel"

-- The options that all models have: name = required (true) or optional (false).
local options = {
  vocab = true, context = true, layers = true, width = true, heads = true,
  hidden = false, tie = false, eps = false, recompute = false,
}

-- Those of the others that are integers.
local integers = { kv_heads = true, hidden = true, head_dim = true, window = true }

local ranges = {
  dropout = { 1, "of 0 or more and below 1" }, eps = { math.huge, "of 0 or more" },
  rotary_base = { math.huge, "of 0 or more" },
}

--- Checks the options of a model and returns a copy. own: names of the options that only this model
--- has. An option of another model is an unknown option.
---@param name string
---@param given ms.ModelOptions
---@param own string[]
---@return ms.ModelOptions
function LanguageModel.check(name, given, own)
  local checked, known = {}, { table.unpack(own) }
  for key in pairs(options) do known[#known + 1] = key end
  table.sort(known)
  for key, value in pairs(check(name, given, known)) do checked[key] = value end
  for _, key in ipairs(known) do
    local value = checked[key]
    if options[key] and value == nil then
      core.raise(("%s: the option %s is missing"):format(name, key))
    end
    local counts = options[key] or integers[key]
    if counts and value ~= nil and (math.type(value) ~= "integer" or value < 1) then
      core.raise(("%s: %s must be an integer of 1 or more, not %s")
        :format(name, key, tostring(value)))
    end
  end
  for key, range in pairs(ranges) do
    local value = checked[key]
    if value ~= nil and not (type(value) == "number" and value >= 0 and value < range[1]) then
      core.raise(("%s: %s must be a number %s, not %s")
        :format(name, key, range[2], tostring(value)))
    end
  end
  LanguageModel.check_recompute(name, checked.recompute)
  rope.check(name, checked.rotary_scaling)
  if not checked.head_dim and checked.width % checked.heads ~= 0 then
    core.raise(("%s: width %d does not divide by %d heads")
      :format(name, checked.width, checked.heads))
  end
  if checked.kv_heads and checked.heads % checked.kv_heads ~= 0 then
    core.raise(("%s: %d heads do not divide by %d key heads")
      :format(name, checked.heads, checked.kv_heads))
  end
  return checked
end

--- Raises unless it is a value of the option recompute.
---@param name string
---@param way any
function LanguageModel.check_recompute(name, way)
  local kind = type(way)
  if way == nil or way == "matmul" or kind == "boolean" or kind == "function" then return end
  core.raise(("%s: recompute is true, false, \"matmul\", or a function of a block that gives one \z
    of these, not %s"):format(name, tostring(way)))
end

--- Raises unless positions, if given, are i64 of the shape of the tokens. Their values are checked
--- by attention.
---@param name string
---@param tokens ms.Tensor
---@param positions? ms.Tensor
function LanguageModel.check_positions(name, tokens, positions)
  options_of.argument(name, "positions", positions, "tensor?")
  if not positions then return end
  local wanted, own = tokens:shape(), positions:shape()
  if positions:dtype() ~= "i64" or #own ~= 2 or own[1] ~= wanted[1] or own[2] ~= wanted[2] then
    core.raise(("%s: positions must be i64 [%d, %d], as many as the tokens, not %s"):format(name,
      wanted[1], wanted[2], tostring(positions)))
  end
end

---@param tokens ms.Tensor ids [length], 1 or more
---@param how ms.GenerateOptions
---@return ms.Tensor i64 [count or fewer]
function LanguageModel:generate(tokens, how) return generate(self, tokens, how) end

-- The module's own metatable, also of what ms.ddp and ms.fsdp return; and the state of these.
local function meta_of(model)
  local meta = getmetatable(model)
  local around = meta.ddp or meta.fsdp
  return around and getmetatable(around.wrapped) or meta, around
end

-- The dtype to which ms.ddp or ms.fsdp casts what the model returns, or nil.
local function output_dtype(around)
  local low = around and around.precision
  if low and low.rules then low = low.rules[0] end
  return low and low.output or nil
end

--- Whether model(tokens, positions, targets) is the loss of model(tokens, positions). It is not
--- where forward is another one than this library's, where hooks see what the model takes and
--- gives, and where its outputs are rounded to 16 bits. It may change between two calls.
---@param model ms.Module also what ms.ddp and ms.fsdp return
---@return boolean
function LanguageModel._takes_targets(model)
  local meta, around = meta_of(model)
  local own, output = meta.fields._forward_with_targets, output_dtype(around)
  return own ~= nil and meta.fields.forward == own and not meta.hooks
    and (output == nil or output == "f32")
end

---@param tokens ms.Tensor ids [batch, time]
---@param targets ms.Tensor ids [batch, time]
---@param positions? ms.Tensor i64 [batch, time] of packed documents
---@return ms.Tensor
function LanguageModel:loss(tokens, targets, positions)
  options_of.argument("loss", "targets", targets, "tensor")
  if LanguageModel._takes_targets(self) then return self(tokens, positions, targets) end
  local logits
  if positions == nil then logits = self(tokens) else logits = self(tokens, positions) end
  return logits:cross_entropy(targets)
end

---@return ms.Tokenizer?
---@return string? message
---@return string? code
function LanguageModel:tokenizer()
  local meta = meta_of(self)
  local folder = meta.origin and meta.origin.folder
  if not meta.tokenizer and folder and tokenizer_files.are_in(folder) then
    local message, code
    meta.tokenizer, message, code = tokenizers.load(folder)
    if not meta.tokenizer then return nil, message, code end
  end
  return meta.tokenizer
end

---@param tokenizer ms.Tokenizer
---@return true?
---@return string? message
---@return string? code
function LanguageModel:set_tokenizer(tokenizer)
  options_of.argument("set_tokenizer", "tokenizer", tokenizer, "tokenizer")
  local words = vocabulary.of(tokenizer)
  local misfit = vocabulary.misfit(words, self)
  if misfit then core.raise("set_tokenizer: " .. misfit) end
  local meta = meta_of(self)
  local origin = meta.origin or {}
  -- Rank 0 saves.
  if core.rank() == 0 then
    local texts, message, code = tokenizer_files.contents(tokenizer)
    if not texts then return nil, message, code end
    for name, text in pairs(origin.files or {}) do
      if not tokenizer_files.is_one(name) then texts[name] = text end
    end
    origin.files = texts
  end
  -- For a config.json that is made again: the ids that begin and end a text.
  origin.ends = {
    bos_token_id = words.first or core.json_null, eos_token_id = words.stop or core.json_null,
  }
  meta.origin, meta.tokenizer = origin, tokenizer
  return true
end

options_of.methods(LanguageModel, "a language model", function(value)
  return module.is_module(value) and value.last_logits ~= nil
end, { "generate", "loss", "tokenizer", "set_tokenizer" })

return LanguageModel
