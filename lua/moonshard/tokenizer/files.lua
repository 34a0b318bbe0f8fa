-- Which tokenizer belongs to what: the files that one was read from, the one that shards of tokens
-- name, and whether two are the same.
local core = require "moonshard.core"

local tokenizer_files = {}

-- tokenizer -> { path, pattern } that it was read from
local origins = setmetatable({}, { __mode = "k" })

--- The key of tokenizer_config.json that says where ranks of tiktoken cut text.
local PATTERN <const> = "moonshard_pattern"

function tokenizer_files.note(tokenizer, path, pattern)
  origins[tokenizer] = { path = path, pattern = pattern }
end

--- The path that a tokenizer was read from, for messages.
---@param tokenizer ms.Tokenizer
---@return string
function tokenizer_files.name(tokenizer) return origins[tokenizer].path end

--- Whether a file of a folder belongs to its tokenizer.
---@param name string
---@return boolean
function tokenizer_files.is_one(name)
  return name == "special_tokens_map.json" or name == "added_tokens.json" or name == "merges.txt"
    or name == "encoder.json" or name == "spiece.model" or name:match "^vocab%.%w+$" ~= nil
    or name:match "^tokenizer[%w._-]*$" ~= nil or name:match "^chat_template%.%w+$" ~= nil
end

--- Whether a folder seems to have a tokenizer, so that a damaged one is not taken for none.
---@param folder string
---@return boolean
function tokenizer_files.are_in(folder)
  for _, name in ipairs { "tokenizer.json", "tokenizer.model", "vocab.json", "encoder.json" } do
    if core.exists(folder .. "/" .. name) == "file" then return true end
  end
  return false
end

--- The pattern that a folder which `contents` wrote gives its ranks; nil: it is none of these.
---@param path string
---@return string?
function tokenizer_files.pattern_in(path)
  local text = core.exists(path) == "folder" and core.file_read(path .. "/tokenizer_config.json")
  local config = text and core.json_decode(text)
  local pattern = type(config) == "table" and config[PATTERN]
  return type(pattern) == "string" and pattern or nil
end

-- The files of a tokenizer that is a single file, or vocab.json with its merges: name in a folder
-- -> path.
local function files_of_file(path)
  local folder, name = path:match "^(.*/)([^/]*)$"
  folder, name = folder or "", name or path
  local other = ({ ["vocab.json"] = "merges.txt", ["encoder.json"] = "vocab.bpe" })[name]
  if other then return { [name] = path, [other] = folder .. other } end
  local text = core.file_read(path) or ""
  return { [text:match "^%s*{" and "tokenizer.json" or "tokenizer.model"] = path }
end

--- The files from which a folder's tokenizer is this one: name -> text. nil, message, code if one
--- cannot be read.
---@param tokenizer ms.Tokenizer
---@return table<string, string>?
---@return string? message
---@return string? code
function tokenizer_files.contents(tokenizer)
  local origin, paths, texts = origins[tokenizer], {}, {}
  if core.exists(origin.path) == "folder" then
    for _, name in ipairs(core.list(origin.path) or {}) do
      local path = origin.path .. "/" .. name
      if tokenizer_files.is_one(name) and core.exists(path) == "file" then paths[name] = path end
    end
  else paths = files_of_file(origin.path) end
  for name, path in pairs(paths) do
    local text, message, code = core.file_read(path)
    if not text then return nil, message, code end
    texts[name] = text
  end
  if origin.pattern then
    local config = texts["tokenizer_config.json"]
    config = config and core.json_decode(config, true) or {}
    config[PATTERN] = origin.pattern
    texts["tokenizer_config.json"] = core.json_encode(config, true) .. "\n"
  end
  return texts
end

--- A hash of the files that a tokenizer was read from, without those that say how chats are
--- written. It is another one where the same names and as many tokens mean other ids. nil, message,
--- code if one cannot be read.
---@param tokenizer ms.Tokenizer
---@return string?
---@return string? message
---@return string? code
function tokenizer_files.hash(tokenizer)
  local texts, message, code = tokenizer_files.contents(tokenizer)
  if not texts then return nil, message, code end
  local parts = {}
  for name, text in require "moonshard".sorted_pairs(texts) do
    if not name:match "^chat_template" then
      parts[#parts + 1] = ("%s %d %016x"):format(name, #text, core.hash(text))
    end
  end
  return ("%016x"):format(core.hash(table.concat(parts, "\n")))
end

-- What shows how text is cut, and what becomes of spaces, digits and other alphabets.
local PROBE <const> = " It's 1234567 \u{e9}t\u{e9}s,  \u{4f60}\u{597d}\n\n\tif (x[0]) {}  DON'T \z
  \u{1F600} "

--- Whether two tokenizers give the same ids and texts, as far as their tokens and a text show.
---@param a ms.Tokenizer
---@param b ms.Tokenizer
---@return boolean
function tokenizer_files.same(a, b)
  if a:vocab_size() ~= b:vocab_size() then return false end
  for id = 0, a:vocab_size() - 1 do if a:token(id) ~= b:token(id) then return false end end
  local how = { bos = false, eos = false }
  return table.concat(a:encode(PROBE, how):to_table(), " ")
    == table.concat(b:encode(PROBE, how):to_table(), " ")
end

--------------------------------------------------------------------------------------------- shards

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
local shards = setmetatable({}, { __mode = "k" })

function tokenizer_files.note_shards(set, files) shards[set] = files end

function tokenizer_files.inherit(part, whole) shards[part] = shards[whole] end

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
function tokenizer_files.descriptions(set)
  local list, seen = {}, {}
  for _, file in ipairs(shards[set] or {}) do
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
function tokenizer_files.end_of_text(set, given)
  local id, whose, without = given, "the option end_of_text", nil
  for _, told in ipairs(tokenizer_files.descriptions(set)) do
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
  local tokenizer, message, code = require "moonshard.tokenizer".load(path,
    { pattern = told.pattern })
  if not tokenizer then return nil, message, code end
  if tokenizer:vocab_size() ~= told.vocab_size then
    return core.refuse(("'%s' is of a tokenizer with %d ids, and '%s' has %d now"):format(
      told.where, told.vocab_size, name, tokenizer:vocab_size()), "mismatch")
  end
  if not told.tokenizer_hash then
    if not shown[told.where] then
      require "moonshard.base.log".log("'%s' has no hash of its tokenizer: whether '%s' is the one \z
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
function tokenizer_files.read(told)
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

return tokenizer_files
