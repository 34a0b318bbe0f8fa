-- Checkpoint folders on disk: their manifests, the list of them, and which of them can be read.
-- Data of tensors is not read here.
local core = require "moonshard.core"
local piece = require "moonshard.parallel.shard_piece"
local region = require "moonshard.parallel.region"
local apart = require "moonshard.checkpoint.apart"
local sorted_pairs = require "moonshard.base.sorted_pairs"

---@class ms.checkpoint.store
--- The reason why the last saved checkpoint is not on disk; nil if it is, or is still being
--- written.
---@field lost? string
-- 1: without pieces; 2: without what ranks hold differently; 3: without pieces of parts (regions).
-- All are still written where there is no more.
local store = { VERSION = 4 }

local TENSORS <const> = "tensors.safetensors"
local HEAD, MIDDLE, TAIL = '{"hash":"', '","manifest":', "}\n"

--- A manifest as text, with its own hash in front.
---@param manifest table
---@return string
function store.manifest_text(manifest)
  local body = core.json_encode(manifest)
  return HEAD .. ("%016x"):format(core.hash(body)) .. MIDDLE .. body .. TAIL
end

--- nil, a message that names the file, "corrupt".
---@param path string
---@param rule string what is wrong
---@return nil, string, string
function store.corrupt(path, rule)
  return core.refuse(("'%s' is damaged: %s"):format(path, rule), "corrupt")
end

-- The hash is not a signature: anyone who can write the file can write a matching hash. So the
-- fields are checked as well.
local function is_whole(manifest)
  local random = manifest.random
  if math.type(manifest.step) ~= "integer" then return false end
  if type(manifest.tensors) ~= "table" or type(manifest.values) ~= "table"
      or type(random) ~= "table" then
    return false
  end
  for _, key in ipairs { "seed", "step", "draw" } do
    if math.type(random[key]) ~= "integer" then return false end
  end
  for _, tensor in pairs(manifest.tensors) do
    if type(tensor) ~= "table" or type(tensor.type) ~= "string" or type(tensor.hash) ~= "string"
      or not tensor.hash:match "^%x+$" then
      return false
    end
  end
  return true
end

local function is_count(value) return math.type(value) == "integer" and value >= 0 end

local function is_hash(value) return type(value) == "string" and value:match "^%x+$" ~= nil end

local function is_part(part, files)
  if type(part) ~= "table" or not files[part.file] or not is_count(part.first)
      or not is_count(part.count) or not is_hash(part.hash) then
    return false
  end
  for _, hash in ipairs(type(part.blocks) == "table" and part.blocks or {}) do
    if not is_hash(hash) then return false end
  end
  return true
end

-- What the region of a part describes takes its place. Returns whether it can be.
local function take_region(part, shape)
  if part.region == nil then return true end
  part.region = region.read(part.region, shape)
  return part.region ~= nil and part.first + part.count <= piece.elements(part.region.part)
end

-- The fields of files and pieces. Names of files come from here, so they must be names only.
local function pieces_are_whole(manifest)
  local files = {}
  if type(manifest.files) ~= "table" or type(manifest.pieces) ~= "table" then return false end
  for _, file in ipairs(manifest.files) do
    if type(file) ~= "string" or not file:match "^[%w_-]+%.safetensors$" then return false end
    files[file] = true
  end
  for _, entry in pairs(manifest.pieces) do
    if type(entry) ~= "table" or type(entry.dtype) ~= "string" or type(entry.shape) ~= "table"
        or type(entry.parts) ~= "table" then
      return false
    end
    for _, size in ipairs(entry.shape) do if not is_count(size) then return false end end
    for _, part in ipairs(entry.parts) do
      if not is_part(part, files) or not take_region(part, entry.shape) then return false end
    end
  end
  return true
end

-- Pieces of each tensor must be all of it, and none of it twice.
local function check_pieces(folder, manifest)
  for name, entry in sorted_pairs(manifest.pieces or {}) do
    local problem, file = piece.gap(entry.parts, entry.shape)
    if problem then
      return store.corrupt(folder .. "/" .. (file or "manifest.json"),
        ("tensor '%s': %s"):format(name, problem))
    end
  end
  return manifest
end

--- The manifest of a checkpoint. Codes: "corrupt", "unsupported" (of a newer version), "not_found"
--- (no manifest), "denied" ...
---@param folder string of the checkpoint
---@return table?
---@return string? message
---@return string? code
function store.read_manifest(folder)
  local path = folder .. "/manifest.json"
  if core.exists(path) == "folder" then return store.corrupt(path, "it is a folder") end
  local text, message, code = core.file_read(path)
  if not text then
    if code == "not_found" and not core.exists(folder) then
      message = ("there is no folder '%s'"):format(folder)
    elseif code == "not_found" then
      message = ("'%s' is no checkpoint: there is no manifest.json in it"):format(folder)
    end
    return core.refuse(message, code)
  end
  local start = #HEAD + 16 + #MIDDLE
  local body = text:sub(start + 1, -#TAIL - 1)
  if text:sub(1, start) ~= HEAD .. ("%016x"):format(core.hash(body)) .. MIDDLE
      or text:sub(-#TAIL) ~= TAIL then
    return store.corrupt(path, "its text does not match its hash")
  end
  local manifest
  manifest, message = core.json_decode(body)
  if not manifest then return store.corrupt(path, message) end
  if type(manifest) ~= "table" or math.type(manifest.version) ~= "integer" then
    return store.corrupt(path, "it has no version")
  end
  if manifest.version < 1 or manifest.version > store.VERSION then
    return core.refuse(("'%s' has version %d; this Moonshard reads versions up to %d")
      :format(path, manifest.version, store.VERSION), "unsupported")
  end
  if not is_whole(manifest) or manifest.version > 1 and not pieces_are_whole(manifest)
      or manifest.apart and not apart.is_whole(manifest.apart) then
    return store.corrupt(path, "a field is missing or of another kind")
  end
  return check_pieces(folder, manifest)
end

--- "f32 [2, 3]"
---@param dtype string
---@param shape integer[]
---@return string
function store.type_text(dtype, shape)
  return ("%s [%s]"):format(dtype, table.concat(shape, ", "))
end

-- A text that says how the entries of the tensors' file differ from the manifest; nil if they do
-- not.
local function difference(entries, tensors)
  for name, expected in pairs(tensors) do
    local found = entries[name]
    if not found then return ("tensor '%s' is missing"):format(name) end
    local is = store.type_text(found.dtype, found.shape)
    if is ~= expected.type then
      return ("tensor '%s' is %s, saved was %s"):format(name, is, expected.type)
    end
  end
  for name in pairs(entries) do
    if not tensors[name] then return ("tensor '%s' was never saved"):format(name) end
  end
end

-- What each file of a checkpoint has: file -> name -> { type = }.
local function contents_of(manifest)
  local files = { [TENSORS] = manifest.tensors }
  for _, file in ipairs(manifest.files or {}) do files[file] = files[file] or {} end
  for name, entry in pairs(manifest.pieces or {}) do
    for _, part in ipairs(entry.parts) do
      files[part.file][name] = { type = store.type_text(entry.dtype, { part.count }) }
    end
  end
  return files
end

-- Opens one file. Every difference from the manifest is damage, also an unknown dtype.
local function open_file(path, tensors)
  local kind = core.exists(path)
  if kind ~= "file" then
    local name                                               -- the first, so the same on all ranks
    for one in pairs(tensors) do name = name and name < one and name or one end
    return store.corrupt(path, (kind and "it is a folder"
      or "the manifest is there, but this file is not")
      .. (name and path:sub(-#TENSORS) ~= TENSORS and (" (it has pieces of '%s')"):format(name)
        or ""))
  end
  local file, message, code = core.safetensors_open(path)
  if not file then return core.refuse(message, code == "unsupported" and "corrupt" or code) end
  local differs = difference(file:entries(), tensors)
  if not differs then return file end
  file:close()
  return store.corrupt(path, differs)
end

---@param files table<string, any>
function store.close(files)
  for _, file in pairs(files) do file:close() end
end

--- Opens the files of a checkpoint's tensors, by name. Every difference from the manifest is
--- damage.
---@param folder string of the checkpoint
---@param manifest table
---@return table<string, any>? files
---@return string? message
---@return string? code
function store.open_tensors(folder, manifest)
  local files = {}
  for name, tensors in sorted_pairs(contents_of(manifest)) do
    local file, message, code = open_file(folder .. "/" .. name, tensors)
    if not file then
      store.close(files)
      return core.refuse(message, code)
    end
    files[name] = file
  end
  return files
end

-- The hashes of a tensor's bytes: of its blocks, or of all of them.
local function hashes_of(saved)
  local list = {}
  for i, hash in ipairs(saved.blocks or { saved.hash }) do list[i] = tonumber("0x" .. hash) end
  return list
end

--- A tensor of a checkpoint, as far as it is not read yet; nil if there is none of that name.
---@param folder string of the checkpoint
---@param manifest table
---@param files table<string, any> of open_tensors
---@param name string
---@return ms.Source?
function store.source(folder, manifest, files, name)
  local whole, entry = manifest.tensors[name], (manifest.pieces or {})[name]
  if whole then
    local found = files[TENSORS]:entries()[name]
    return piece.source(found.dtype, found.shape, {
      {
        file = files[TENSORS], path = folder .. "/" .. TENSORS, name = name, first = 0,
        count = piece.elements(found.shape), hashes = hashes_of(whole),
      },
    })
  end
  local parts = {}
  for i, part in ipairs(entry and entry.parts or {}) do
    parts[i] = {
      file = files[part.file], path = folder .. "/" .. part.file, name = name, first = part.first,
      count = part.count, hashes = hashes_of(part), region = part.region,
    }
  end
  return entry and piece.source(entry.dtype, entry.shape, parts) or nil
end

--- Judges a checkpoint by its manifest and by the headers and sizes of the tensors' files. It does
--- not read the data: only loading detects flipped bits there.
---@param folder string of the checkpoint
---@return table? manifest
---@return string? message
---@return string? code "corrupt" for what is damaged
function store.judge(folder)
  local manifest, message, code = store.read_manifest(folder)
  if not manifest then return core.refuse(message, code == "not_found" and "corrupt" or code) end
  local files
  files, message, code = store.open_tensors(folder, manifest)
  if not files then return core.refuse(message, code) end
  store.close(files)
  return manifest
end

--- The checkpoints of a folder, newest first, also damaged ones. An old checkpoint that a crash
--- left during its replacement comes after the new one.
---@param folder string
---@return { name: string, path: string, step: integer }[]
function store.list(folder)
  local found = {}
  for _, name in ipairs(core.list(folder) or {}) do
    local replaced, step = name:match "^(%.?o?l?d?%-?)step%-(%d+)$"
    if step and (replaced == "" or replaced == ".old-") then
      local number = math.tointeger(tonumber(step)) or 0
      found[#found + 1] = {
        name = name, path = folder .. "/" .. name, step = number, replaced = replaced ~= "",
      }
    end
  end
  table.sort(found, function(a, b)
    if a.step ~= b.step then return a.step > b.step end
    return not a.replaced and b.replaced
  end)
  return found
end

--- The newest checkpoint of a folder that is not damaged, as far as `judge` can tell. nil if there
--- is none, or if the search meets one that cannot be judged (a newer version, no permission).
---@param folder string
---@param before? string path of one of them: only those that come after it in the list count
---@return string? path
---@return string[] passed messages about checkpoints that were skipped as damaged
---@return string? message about the one that cannot be judged
---@return string? code
function store.find(folder, before)
  local passed, counts = {}, before == nil
  for _, one in ipairs(store.list(folder)) do
    if counts then
      local manifest, message, code = store.judge(one.path)
      if manifest then return one.path, passed end
      if code ~= "corrupt" then return nil, passed, message, code end
      passed[#passed + 1] = message
    end
    counts = counts or one.path == before
  end
  return nil, passed
end

--- Waits for the checkpoint that is being written.
---@return string? lost why the one that was saved last is not on disk
function store.settle()
  local ok, message = core.checkpoint_wait()
  if not ok then store.lost = message end
  return store.lost
end

return store
