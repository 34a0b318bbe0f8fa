-- The files that a tokenizer was read from, and whether two tokenizers are the same.
local core = require "moonshard.core"
local sorted_pairs = require "moonshard.base.sorted_pairs"

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
  for name, text in sorted_pairs(texts) do
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

return tokenizer_files
