-- What turns text into a model's ids and back: a tokenizer, or the bytes of the text.
local core = require "moonshard.core"
local tokenizer_files = require "moonshard.tokenizer.files"

local vocabulary = {}

--- Text of ids as they come, after a prompt.
---@class ms.TextStream
---@field add fun(id: integer): string the text that this id completes
---@field finish fun(): string the bytes that still wait

---@class ms.Vocabulary
---@field name string for messages
---@field size integer ids that it has
---@field first? integer the id that begins texts
---@field stop? integer the id that ends texts
---@field tokenizer? ms.Tokenizer nil: ids are bytes
--- Raises for text that the tokenizer refuses.
---@field encode fun(text: string, options?: ms.EncodeOptions): integer[]
---@field stream fun(prompt: integer[]): ms.TextStream

-- How many bytes at the end of a text may be the beginning of a character.
local function begun(text)
  for back = 1, math.min(3, #text) do
    local byte = text:byte(-back)
    if byte < 0x80 then return 0 end
    if byte >= 0xC0 then
      local length = byte >= 0xF0 and 4 or byte >= 0xE0 and 3 or 2
      return length > back and back or 0
    end
  end
  return 0
end

--- Bytes as ids, for models of 256 ids or more.
---@return ms.Vocabulary
function vocabulary.bytes()
  local function stream()
    local held = ""
    return {
      add = function(id)
        local text = held .. (id < 256 and string.char(id) or "\u{FFFD}")
        local count = begun(text)
        held = count > 0 and text:sub(-count) or ""
        return text:sub(1, #text - count)
      end,
      finish = function()
        local text = held
        held = ""
        return text
      end,
    }
  end
  return {
    name = "bytes", size = 256, encode = function(text) return { text:byte(1, -1) } end,
    stream = stream,
  }
end

--- The ids of a tokenizer.
---@param tokenizer ms.Tokenizer
---@return ms.Vocabulary
function vocabulary.of(tokenizer)
  -- The decoder gets the prompt's ids too: what a token's text is depends on those before it. The
  -- prompt itself is shown as it was given, so its last bytes do not come again.
  local function stream(prompt)
    local decoder = tokenizer:decoder()
    local shown = #tokenizer:decode(prompt) - #decoder:add(prompt)
    local function rest(text)
      local cut = math.min(shown, #text)
      shown = shown - cut
      return text:sub(cut + 1)
    end
    return {
      -- A model may have more rows than the vocabulary has tokens.
      add = function(id)
        return tokenizer:token(id) and rest(decoder:add(id)) or "\u{FFFD}"
      end,
      finish = function() return rest(decoder:finish()) end,
    }
  end
  return {
    name = tokenizer_files.name(tokenizer), size = tokenizer:vocab_size(), tokenizer = tokenizer,
    first = tokenizer:bos(), stop = tokenizer:eos() or tokenizer:id "<|endoftext|>",
    encode = function(text, options) return tokenizer:encode(text, options):to_table() end,
    stream = stream,
  }
end

--- What is wrong if a model has fewer rows than the vocabulary has ids; nil: it fits.
---@param self ms.Vocabulary
---@param model ms.LanguageModel
---@return string?
function vocabulary.misfit(self, model)
  local rows = model.options.vocab
  if self.size <= rows then return nil end
  return ("the tokenizer '%s' has %d ids, and the model's embedding has rows for %d: take the \z
    model's own tokenizer"):format(self.name, self.size, rows)
end

--- A prompt's ids: those of a text, or the id that begins texts, or a line break. nil: there is no
--- text, and no id represents that.
---@param self ms.Vocabulary
---@param text? string
---@param options? ms.EncodeOptions
---@return integer[]?
function vocabulary.prompt(self, text, options)
  local ids = text and self.encode(text, options) or {}
  if #ids > 0 then return ids end
  if not self.tokenizer then return { 10 } end
  local first = self.first or self.stop
  return first and { first } or nil
end

--- Text that a model writes after a prompt.
---@param self ms.Vocabulary
---@param model ms.LanguageModel
---@param prompt integer[]
---@param how ms.GenerateOptions
---@return string
function vocabulary.continue(self, model, prompt, how)
  local ids = model:generate(core.tensor(prompt, "i64"), how)
  local stream, parts = self.stream(prompt), {}
  for i, id in ipairs(ids:to_table()) do parts[i] = stream.add(id) end
  return table.concat(parts) .. stream.finish()
end

return vocabulary
