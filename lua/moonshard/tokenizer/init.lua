-- Tokenizers: the part `ms.tokenizer`. Files of Hugging Face, GPT-2, SentencePiece and tiktoken
-- become text to ids and back.
local core = require "moonshard.core"
local options_of = require "moonshard.base.options"
local tokenizer_files = require "moonshard.tokenizer.files"
local check, argument = options_of.check, options_of.argument

---@class ms.tokenizer
local tokenizer = {}

-- Special tokens as { text, id } in order of ids; those of a list have no id yet.
local function special_list(special)
  if special == nil then return nil end
  local list = {}
  for key, value in pairs(special) do
    if type(key) == "string" then
      argument("tokenizer.load", ("special[%q]"):format(key), value, "integer")
      list[#list + 1] = { key, value }
    elseif math.type(key) ~= "integer" or #special == 0 then
      core.raise "tokenizer.load: special has names with ids, or is a list of names"
    end
  end
  if #special > 0 then
    if #list > 0 then
      core.raise "tokenizer.load: special has names with ids, or is a list of names, not both"
    end
    options_of.items("tokenizer.load", "special", special, "string")
    for i, name in ipairs(special) do list[i] = { name } end
    return list
  end
  table.sort(list, function(a, b)
    if a[2] ~= b[2] then return a[2] < b[2] end
    return a[1] < b[1]
  end)
  return list
end

---@param path string
---@param options? ms.TokenizerOptions
---@return ms.Tokenizer?
---@return string? message
---@return string? code
function tokenizer.load(path, options)
  argument("tokenizer.load", "path", path, "string")
  local o = check("tokenizer.load", options, { pattern = "string", special = "table" })
  local pattern = o.pattern or tokenizer_files.pattern_in(path)
  local made, message, code = core.tokenizer(path, pattern, special_list(o.special))
  if not made then return nil, message, code end
  tokenizer_files.note(made, path, pattern)
  return made
end

---@class ms.Tokenizer
local Tokenizer = core.Tokenizer
local encode = Tokenizer.encode

---@param text string
---@param options? ms.EncodeOptions
---@return ms.Tensor
function Tokenizer:encode(text, options)
  argument("encode", "text", text, "string")
  check("encode", options, { bos = "boolean", eos = "boolean", special = "string" })
  return encode(self, text, options)
end

-- Whether special tokens give their names.
local function shows_special(what, options)
  local o = check(what, options, { special = "string" })
  if o.special ~= nil and o.special ~= "skip" and o.special ~= "text" then
    core.raise(("%s: special is \"skip\" or \"text\", not \"%s\""):format(what, o.special))
  end
  return o.special == "text"
end

---@param ids integer|integer[]|ms.Tensor
---@param options? ms.DecodeOptions
---@return string
function Tokenizer:decode(ids, options)
  local stream <close> = core.token_decoder(self, shows_special("decode", options))
  local text = stream:add(ids)
  return text .. stream:finish()
end

---@param options? ms.DecodeOptions
---@return ms.TokenDecoder
function Tokenizer:decoder(options)
  return core.token_decoder(self, shows_special("decoder", options))
end

options_of.methods(Tokenizer, "a tokenizer", function(value)
  if type(value) ~= "userdata" then return false end
  local ok, message = pcall(Tokenizer.vocab_size, value)
  return ok or tostring(message):find("was closed", 1, true) ~= nil  -- the method says so
end, { "encode", "decode", "decoder" })

return options_of.closed(tokenizer, "ms.tokenizer")
