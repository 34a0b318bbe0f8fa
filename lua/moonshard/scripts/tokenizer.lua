-- The tokenizer of a recipe: of its model, of its shards, and whether they are the same.
local core = require "moonshard.core"
require "moonshard.parallel.group"                -- methods of the world
local launch = require "moonshard.base.launch"
local log = require "moonshard.base.log"
local options_of = require "moonshard.base.options"
local shards = require "moonshard.tokenizer.shards"
local tokenizer_files = require "moonshard.tokenizer.files"
local vocabulary = require "moonshard.tokenizer.vocabulary"

local function refuse(format, ...) launch.exit(3, format:format(...)) end

-- The tokenizer that the shards of these data sets name, and the description that names it; nil:
-- none does, or, with the reason, none can be read. All must be the same.
local function tokenizer_of_shards(sets, rows)
  local found, by, reason
  for _, set in ipairs(sets) do
    for _, told in ipairs(shards.descriptions(set)) do
      if told.vocab_size > rows then
        refuse("'%s' is of the tokenizer '%s' with %d ids, and the model's embedding has rows for \z
          %d: give vocab=%d, or make the shards with the model's own tokenizer", told.where,
          told.tokenizer, told.vocab_size, rows, told.vocab_size)
      end
      local tokenizer, message = shards.read(told)
      reason = reason or message
      local differs = by and by.vocab_size ~= told.vocab_size
        or found and tokenizer and not tokenizer_files.same(found, tokenizer)
      if differs then
        refuse("'%s' is of the tokenizer '%s', and '%s' of '%s': such shards do not fit together",
          by.where, by.tokenizer, told.where, told.tokenizer)
      end
      by, found = by or told, found or tokenizer
    end
  end
  return found, by, reason
end

---@param model ms.LanguageModel
---@param ... ms.Dataset
---@return ms.Tokenizer?
return function(model, ...)
  options_of.argument("scripts.tokenizer", "model", model, "module")
  local rows = model.options.vocab
  local own, reason = model:tokenizer()
  local shared, told, why = tokenizer_of_shards({ ... }, rows)
  if own and told and (own:vocab_size() ~= told.vocab_size
      or shared and not tokenizer_files.same(own, shared)) then
    refuse("the model's tokenizer is '%s', and '%s' is of '%s': tokenize the text with the model's",
      tokenizer_files.name(own), told.where, told.tokenizer)
  end
  local tokenizer = own or shared
  local misfit = tokenizer and vocabulary.misfit(vocabulary.of(tokenizer), model)
  if misfit then refuse("%s", misfit) end
  -- Samples are forwards, which ranks make together.
  local have = core.world():_share("sum", "i64", { tokenizer and 1 or 0 }, "tokenizer")[1]
  if tokenizer and have < core.world():size() then
    tokenizer, reason = nil, "other hosts do not have the tokenizer"
  end
  if tokenizer and not own then
    local set, message = model:set_tokenizer(tokenizer)
    if not set then log.log("the tokenizer is not saved with the model: %s", message) end
  end
  reason = reason or why
  if not tokenizer and reason then log.log("no samples are shown: %s", reason) end
  return tokenizer
end
