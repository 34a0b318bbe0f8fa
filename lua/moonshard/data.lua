-- Data sets: the part `ms.data`. Data are read once and held in memory; a C thread
-- prepares batches ahead.
local core = require "moonshard.core"
local options_of = require "moonshard.options"
local tokenizer_files = require "moonshard.tokenizer_files"
local check, argument = options_of.check, options_of.argument

---@class ms.data
local data = { to_tokens = core.to_tokens, to_text = core.to_text }

--- The bytes of files as tokens; of a folder, all files below it in order of their paths, without
--- those whose names begin with a dot.
---@param path string|string[]
---@return ms.Dataset?
---@return string? message
---@return string? code
function data.bytes(path)
  argument("data.bytes", "path", path, "string|list")
  if type(path) == "table" then options_of.items("data.bytes", "path", path, "string") end
  return core.dataset_bytes(type(path) == "table" and path or { path })
end

-- Turns a shell pattern (* and ?) into a Lua pattern.
local function to_lua_pattern(glob)
  local text = glob:gsub("[%^%$%(%)%%%.%[%]%+%-]", "%%%0"):gsub("%*", ".*"):gsub("%?", ".")
  return "^" .. text .. "$"
end

-- The files that a pattern names, sorted: * and ? in the last part of the path; a folder means the
-- .bin files in it.
local function expand(pattern)
  if core.exists(pattern) == "folder" then pattern = pattern:gsub("/+$", "") .. "/*.bin" end
  if not pattern:find "[*?]" then return { pattern } end
  local folder, last = pattern:match "^(.*/)([^/]*)$"
  folder, last = folder or "./", last or pattern
  if folder:find "[*?]" then
    core.raise(("data.tokens: '%s': * and ? may stand only after the last /"):format(pattern))
  end
  local names, message, code = core.list(folder)
  if not names then return nil, message, code end
  local files, wanted = {}, to_lua_pattern(last)
  for _, name in ipairs(names) do
    if name:match(wanted) and name:sub(1, 1) ~= "." then
      files[#files + 1] = (folder == "./" and "" or folder) .. name
    end
  end
  if #files == 0 then return core.refuse(("no file matches '%s'"):format(pattern), "not_found") end
  return files
end

--- Token shards of llm.c or nanoGPT, one after the other.
---@param pattern string a file, a folder, or a path with * and ? in its last part
---@return ms.Dataset?
---@return string? message
---@return string? code
function data.tokens(pattern)
  argument("data.tokens", "pattern", pattern, "string")
  local files, message, code = expand(pattern)
  if not files then return nil, message, code end
  local set
  set, message, code = core.dataset_tokens(files)
  if not set then return nil, message, code end
  tokenizer_files.note_shards(set, files)
  return set
end

-- The file of a folder whose name has this ending; if there are several, the training file.
local function find_idx(folder, names, kind)
  local found = {}
  for _, name in ipairs(names) do
    local stem = name:gsub("%.gz$", "")
    if stem == "train-" .. kind then return folder .. "/" .. name end
    if stem:sub(-#kind) == kind then found[#found + 1] = name end
  end
  if #found == 1 then return folder .. "/" .. found[1] end
  local many = #found == 0 and "no" or "more than one"
  return core.refuse(("'%s' has %s file whose name ends in %s: name both files, as in \z
    data.mnist(folder, { images = ..., labels = ... })"):format(folder, many, kind), "not_found")
end

--- MNIST's idx files, plain or .gz. Batches are x f32 [batch, rows, columns] in 0 to 1, and labels
--- y i64 [batch]. files: names in the folder; unless given, the training files.
---@param folder string
---@param files? ms.MnistFiles
---@return ms.Dataset?
---@return string? message
---@return string? code
function data.mnist(folder, files)
  argument("data.mnist", "folder", folder, "string")
  check("data.mnist", files, { images = "string", labels = "string" })
  if files and not (files.images and files.labels) then
    core.raise("data.mnist: files needs both images and labels")
  end
  if files then
    return core.dataset_images(folder .. "/" .. files.images, folder .. "/" .. files.labels)
  end
  local names, message, code = core.list(folder)
  if not names then return nil, message, code end
  local images, labels
  images, message, code = find_idx(folder, names, "images-idx3-ubyte")
  if not images then return nil, message, code end
  labels, message, code = find_idx(folder, names, "labels-idx1-ubyte")
  if not labels then return nil, message, code end
  return core.dataset_images(images, labels)
end

---@class ms.Dataset
local Dataset = core.Dataset

--- batch: samples of one pass over all ranks of the group; each rank gets its slice. seed: the
--- engine's unless given. packed: batches have positions, too.
---@param options ms.LoaderOptions
---@return ms.Loader
function Dataset:loader(options)
  local ms = require "moonshard"
  local own = {}
  for key, value in pairs(check("loader", options,
      { "batch", "length", "shuffle", "seed", "group", "packed", "end_of_text" })) do
    own[key] = value
  end
  argument("loader", "packed", own.packed, "boolean?")
  argument("loader", "end_of_text", own.end_of_text, "integer?")
  if own.end_of_text and not own.packed then
    core.raise "loader: end_of_text is for packed documents: give packed = true, too"
  end
  -- Without a length these are images, or the core asks for one.
  if own.packed and own.length then
    own.end_of_text = tokenizer_files.end_of_text(self, own.end_of_text)
  end
  local group = own.group
  options_of.check_group("loader", "group", group)
  own.group = nil
  own.rank = group and group:rank() or ms.rank()
  own.ranks = group and group:size() or ms.world_size()
  return core.loader(self, own)
end

local split = Dataset.split

--- The first part, and the rest.
---@param fraction number
---@return ms.Dataset
---@return ms.Dataset
function Dataset:split(fraction)
  argument("split", "fraction", fraction, "number")
  local first, rest = split(self, fraction)
  tokenizer_files.inherit(first, self)
  tokenizer_files.inherit(rest, self)
  return first, rest
end

--- The tokenizer that `moonshard tokenize` has named beside these shards. nil: none is named; nil,
--- message, code: it cannot be read.
---@return ms.Tokenizer?
---@return string? message
---@return string? code
function Dataset:tokenizer()
  local told = tokenizer_files.descriptions(self)[1]
  if not told then return nil end
  return tokenizer_files.read(told)
end

options_of.methods(Dataset, "a data set", function(value)
  return type(value) == "userdata" and (pcall(Dataset.size, value))
end, { "loader", "split", "tokenizer" })

return options_of.closed(data, "ms.data")
