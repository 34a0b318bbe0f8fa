-- What `moonshard tokenize` wrote beside shards of tokens, and the tokenizer that it names.
local core = require "moonshard.core"
local log = require "moonshard.base.log"
local tokenizers = require "moonshard.tokenizer"
local tokenizer_files = require "moonshard.tokenizer.files"

local shards = {}

--- What `moonshard tokenize` wrote beside shards.
---@class ms.ShardsDescription
---@field tokenizer string its path, as it was given
---@field tokenizer_path? string from the root; nil: it was not known
---@field tokenizer_hash? string of its files; nil: an older version wrote it
---@field pattern? string
---@field vocab_size integer
---@field end_of_text? integer the id that ends each file of the shards; nil: none does
---@field where string path of the description

-- data set -> paths of its shards
local files_of = setmetatable({}, { __mode = "k" })

function shards.note(set, files) files_of[set] = files end

function shards.inherit(part, whole) files_of[part] = files_of[whole] end

local function read_description(where)
  local text = core.exists(where) == "file" and core.file_read(where)
  local told = text and core.json_decode(text)
  if type(told) ~= "table" or type(told.tokenizer) ~= "string"
      or math.type(told.vocab_size) ~= "integer" then
    return nil
  end
  local pattern = type(told.pattern) == "string" and told.pattern or nil
  local ends = math.type(told.end_of_text) == "integer" and told.end_of_text or nil
  local function text_of(key) return type(told[key]) == "string" and told[key] or nil end
  return { tokenizer = told.tokenizer, vocab_size = told.vocab_size, pattern = pattern,
    end_of_text = ends, where = where, tokenizer_path = text_of "tokenizer_path",
    tokenizer_hash = text_of "tokenizer_hash" }
end

--- The descriptions of a data set's shards, NAME.json beside NAME_00000.bin, each once.
---@param set ms.Dataset
---@return ms.ShardsDescription[]
function shards.descriptions(set)
  local list, seen = {}, {}
  for _, file in ipairs(files_of[set] or {}) do
    local name = file:match "^(.*)_%d+%.bin$"
    if name and not seen[name] then
      seen[name] = true
      list[#list + 1] = read_description(name .. ".json")
    end
  end
  return list
end

--- The id that ends documents in a data set, by the descriptions of its shards, or as given. Raises
--- if neither says one, or if two say different ones.
---@param set ms.Dataset
---@param given? integer
---@return integer
function shards.end_of_text(set, given)
  local id, whose, without = given, "the option end_of_text", nil
  for _, told in ipairs(shards.descriptions(set)) do
    local own, name = told.end_of_text, ("'%s'"):format(told.where)
    if own and id and own ~= id then
      core.raise(("loader: the end of a text is the id %d by %s, and %d by %s: they must be equal")
        :format(id, whose, own, name))
    end
    if own then id, whose = own, name else without = without or name end
  end
  -- Shards without an end of text beside others that have one may mean anything by this id.
  if id and (given or not without) then return id end
  core.raise(("loader: packed needs the id that ends a document, and %s: %s"):format(
    without and without .. " names none" or "nothing beside the data names it",
    "give the option end_of_text, or shards that `moonshard tokenize` made with an end of text"))
end

-- Where a description's tokenizer may be: where it was, or, as it was given, below the current
-- folder, or below that of the description.
local function places_of(told)
  local list = { told.tokenizer_path, told.tokenizer }
  if not told.tokenizer_path then list = { told.tokenizer } end
  if told.tokenizer:sub(1, 1) ~= "/" then
    list[#list + 1] = (told.where:match "^(.*/)[^/]*$" or "") .. told.tokenizer
  end
  return list
end

-- Descriptions without a hash of which a line has been shown.
local shown = {}

-- The tokenizer at a path, which must be the one that made the shards. name: of the path in
-- messages.
local function read_at(told, path, name)
  local tokenizer, message, code = tokenizers.load(path,
    { pattern = told.pattern })
  if not tokenizer then return nil, message, code end
  if tokenizer:vocab_size() ~= told.vocab_size then
    return core.refuse(("'%s' is of a tokenizer with %d ids, and '%s' has %d now"):format(
      told.where, told.vocab_size, name, tokenizer:vocab_size()), "mismatch")
  end
  if not told.tokenizer_hash then
    if not shown[told.where] then
      log.log("'%s' has no hash of its tokenizer: whether '%s' is the one \z
        that made the shards is not known", told.where, name)
    end
    shown[told.where] = true
    return tokenizer
  end
  local hash
  hash, message, code = tokenizer_files.hash(tokenizer)
  if not hash then return nil, message, code end
  if hash == told.tokenizer_hash then return tokenizer end
  return core.refuse(("'%s' is of another tokenizer than '%s' has now, with as many ids: its \z
    files have changed since, so the shards' ids mean other tokens (`moonshard tokenize --force` \z
    makes them anew)"):format(told.where, name), "mismatch")
end

--- The tokenizer of a description: the one that made the shards, or nil, message, code.
---@param told ms.ShardsDescription
---@return ms.Tokenizer?
---@return string? message
---@return string? code
function shards.read(told)
  local message, code
  for _, path in ipairs(places_of(told)) do
    if core.exists(path) then
      local tokenizer, why, kind =
        read_at(told, path, path == told.tokenizer_path and told.tokenizer or path)
      if tokenizer then return tokenizer end
      message, code = message or why, code or kind
    end
  end
  return core.refuse(message or ("'%s' names the tokenizer '%s', which is not there"):format(
    told.where, told.tokenizer), code or "not_found")
end

return shards
