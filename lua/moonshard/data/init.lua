-- Data sets: the part `ms.data`. Data are read once and held in memory, but for JSON lines; a C
-- thread prepares batches ahead.
local core = require "moonshard.core"
local data_files = require "moonshard.data.files"
local jsonl = require "moonshard.data.jsonl"
local log = require "moonshard.base.log"
local options_of = require "moonshard.base.options"
local shards = require "moonshard.tokenizer.shards"
local ms = require "moonshard"
local check, argument = options_of.check, options_of.argument

-- Of token shards with a header (llm.c, dev/data/data_common.py).
local MAGIC <const> = { [20240520] = true, [20240801] = true }

---@class ms.data
local data = { to_tokens = core.to_tokens, to_text = core.to_text, jsonl = jsonl.open }

---@param path string|string[]
---@return ms.Dataset?
---@return string? message
---@return string? code
function data.bytes(path)
  argument("data.bytes", "path", path, "string|list")
  if type(path) == "table" then options_of.items("data.bytes", "path", path, "string") end
  local paths = type(path) == "table" and path or { path }
  local set, message, code = core.dataset_bytes(paths)
  if not set then return nil, message, code end
  data_files.note(set, paths)
  return set
end

-- Turns a shell pattern (* and ?) into a Lua pattern.
local function to_lua_pattern(glob)
  local text = glob:gsub("[%^%$%(%)%%%.%[%]%+%-]", "%%%0"):gsub("%*", ".*"):gsub("%?", ".")
  return "^" .. text .. "$"
end

-- Of the files of a folder, those of a part: "valid" are those that are named val*, "train" the
-- others, or all if there are no others.
local function files_of_part(files, part)
  local found = { train = {}, valid = {} }
  for _, path in ipairs(files) do
    local list = path:match "[^/]*$":find "^val" and found.valid or found.train
    list[#list + 1] = path
  end
  if part == "train" and #found.train == 0 then return files end
  return found[part]
end

-- The files that a pattern names, sorted: * and ? in the last part of the path; a folder means the
-- .bin files in it that belong to the part.
local function expand(pattern, part)
  if core.exists(pattern) == "folder" then
    local files, message, code = expand(pattern:gsub("/+$", "") .. "/*.bin", "train")
    if not files then return nil, message, code end
    files = files_of_part(files, part)
    if #files > 0 then return files end
    return core.refuse(("'%s' has no file that is named val*.bin"):format(pattern), "not_found")
  elseif part == "valid" then
    return core.refuse(("'%s' is no folder with files that are named val*.bin"):format(pattern),
      "not_found")
  end
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

-- Where a file begins with none of llm.c's magic numbers and its name does not end in .bin, a
-- message: every text of an even length would pass for tokens of two bytes.
local function why_no_shard(path)
  if path:find "%.bin$" then return nil end
  local file = io.open(path, "rb")
  local head = file and file:read(4) or nil                -- the core says what cannot be read
  if file then file:close() end
  if not head or #head == 4 and MAGIC[("<I4"):unpack(head)] then return nil end
  return ("'%s' is no token shard: it has no header, and a shard without one is named *.bin. Text \z
    is read with bytes = true (ms.data.bytes), or `moonshard tokenize` makes shards of it")
    :format(path)
end

-- Lists of files of which tell_bare has told.
local bare_told = {}

-- A line, once for the same files: nothing but a name says that these are tokens, and a large id
-- shows that they are not.
local function tell_bare(files, bare, count, largest)
  local key = ("%s\0%d %d"):format(table.concat(files, "\0"), count, largest)
  if bare_told[key] then return end
  bare_told[key] = true
  log.log("data       %d file%s without a header %s read as 16-bit tokens: %s of them, largest id \z
    %d", bare, bare == 1 and "" or "s", bare == 1 and "is" or "are", log.grouped(count), largest)
end

---@param pattern string a file, a folder, or a path with * and ? in its last part
---@param part? "train"|"valid"
---@return ms.Dataset?
---@return string? message
---@return string? code
function data.tokens(pattern, part)
  argument("data.tokens", "pattern", pattern, "string")
  if part ~= nil and part ~= "train" and part ~= "valid" then
    core.raise(("data.tokens: part must be \"train\" or \"valid\", not %s"):format(tostring(part)))
  end
  local files, message, code = expand(pattern, part or "train")
  if not files then return nil, message, code end
  for _, path in ipairs(files) do
    message = why_no_shard(path)
    if message then return core.refuse(message, "corrupt") end
  end
  local set, bare, count, largest = core.dataset_tokens(files)
  if not set then return nil, bare, count end               -- the message, and its code
  if bare > 0 then tell_bare(files, bare, count, largest) end
  shards.note(set, files)
  data_files.note(set, files)
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

---@param options ms.LoaderOptions
---@return ms.Loader
function Dataset:loader(options)
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
    own.end_of_text = shards.end_of_text(self, own.end_of_text)
  end
  local group = own.group
  options_of.check_group("loader", "group", group)
  own.group = nil
  own.rank = group and group:rank() or ms.rank()
  own.ranks = group and group:size() or ms.world_size()
  local loader = core.loader(self, own)
  data_files.inherit(loader, self)
  data_files.ranks[loader] = own.ranks
  return loader
end

local split = Dataset.split

---@param fraction number
---@return ms.Dataset
---@return ms.Dataset
function Dataset:split(fraction)
  argument("split", "fraction", fraction, "number")
  local first, rest = split(self, fraction)
  for _, part in ipairs { first, rest } do
    shards.inherit(part, self)
    data_files.inherit(part, self)
  end
  return first, rest
end

---@return ms.Tokenizer?
---@return string? message
---@return string? code
function Dataset:tokenizer()
  self:size()                                              -- raises where it was closed
  local told = shards.descriptions(self)[1]
  if not told then return nil end
  return shards.read(told)
end

local size = Dataset.size

options_of.methods(Dataset, "a data set", function(value)
  if type(value) ~= "userdata" then return false end
  local ok, message = pcall(size, value)
  return ok or tostring(message):find("was closed", 1, true) ~= nil  -- the method says so
end, { "loader", "split", "tokenizer" })

return options_of.closed(data, "ms.data")
