-- Modules from and to safetensors files, with the names of other tools, and config.json.
local core = require "moonshard.core"
local options_of = require "moonshard.options"
local check = options_of.check
local module = require "moonshard.nn.module"
local Module = module.base

local files = {}

local INDEX = "model.safetensors.index.json"

-------------------------------------------------------------------------------------------- loading

-- Reads the index of a folder: a list of { path, names }. Files that it does not name are not read;
-- a log line says so.
local function by_index(folder, where)
  local text, message, code = core.file_read(where)
  if not text then return nil, message, code end
  local index, why = core.json_decode(text)
  local map = type(index) == "table" and index.weight_map
  if type(map) ~= "table" then
    return core.refuse(("'%s': %s"):format(where, why or "it has no weight_map"), "corrupt")
  end
  local names, list = {}, {}
  for name, file in pairs(map) do
    if type(name) ~= "string" or type(file) ~= "string" or file:find "/" then
      return core.refuse(("'%s': %s is in %s: files of this folder are expected")
        :format(where, tostring(name), tostring(file)), "corrupt")
    end
    names[file] = names[file] or {}
    table.insert(names[file], name)
  end
  for file, wanted in pairs(names) do
    table.sort(wanted)
    list[#list + 1] = { path = folder .. "/" .. file, names = wanted, index = where }
  end
  table.sort(list, function(a, b) return a.path < b.path end)
  for _, file in ipairs(core.list(folder) or {}) do
    if file:match "%.safetensors$" and not names[file] then
      require "moonshard.log".log("%s/%s is not read: %s does not name it", folder, file, INDEX)
    end
  end
  return list
end

-- The files to read, as a list of { path, names }. Of a folder, these are the files of its index,
-- or without an index all files whose names end in .safetensors.
local function files_of(path)
  local list = {}
  if type(path) == "table" then
    for i, file in ipairs(path) do list[i] = { path = file } end
    return list
  end
  local entries = core.exists(path) == "folder" and core.list(path)
  if not entries then return { { path = path } } end
  local folder = path:gsub("(.)/+$", "%1")
  for _, name in ipairs(entries) do
    if name == INDEX then return by_index(folder, folder .. "/" .. name) end
    if name:match "%.safetensors$" then list[#list + 1] = { path = folder .. "/" .. name } end
  end
  if #list == 0 then
    return core.refuse(path .. ": the folder holds no .safetensors file", "not_found")
  end
  return list
end

-- Adds the tensors of a file to `found`: the state, by this library's names, and for each name the
-- name in the file and the file.
local function take(self, found, file, tensors)
  for name, t in pairs(tensors) do
    local own, copy = name, nil
    if self.own_name then own, copy = self:own_name(name) end
    local other = own and found.origin[own]
    if other then
      return core.refuse(("the weight '%s' occurs twice: as '%s' in '%s' and as '%s' in '%s'")
        :format(own, other.name, other.path, name, file.path), "mismatch")
    end
    if own then found.state[own], found.origin[own] = t, { name = name, path = file.path }
    elseif copy then found.copies[name] = { of = copy, tensor = t } end
  end
  return true
end

-- Files may repeat a tied weight. If the copy differs, it is a separate weight, for which the model
-- has no parameter.
local function check_copies(found)
  for name, copy in pairs(found.copies) do
    local own = found.state[copy.of]
    if own and not core.is_sim() then
      local equal = core.no_grad(function()
        return module.same_shape(own, copy.tensor)
          and own:to("f32"):eq(copy.tensor:to "f32"):all():item()
      end)
      if not equal then
        return core.refuse(("'%s' differs from '%s', which config.json ties it to: \z
          tie_word_embeddings must be false"):format(name, copy.of), "mismatch")
      end
    end
  end
  return true
end

--- Reads files and copies their tensors into a module. Returns the tensors that were read, by the
--- module's names.
---@param self ms.Module
---@param path string|string[]
---@param options? ms.LoadOptions
---@return { origin: table, state: table, metadata: table }? found
---@return string? message
---@return string? code
function files.read(self, path, options)
  local list, message, code = files_of(path)
  if not list then return nil, message, code end
  local found = { state = {}, origin = {}, copies = {}, metadata = {} }
  for _, file in ipairs(list) do
    local tensors, metadata, kind = require "moonshard.safetensors".load(file.path, file.names)
    if not tensors then
      local why = file.index and ("'%s' names it: %s"):format(file.index, metadata) or metadata
      return core.refuse(why, kind)
    end
    local ok
    ok, message, code = take(self, found, file, tensors)
    if not ok then return nil, message, code end
    for key, value in pairs(metadata) do found.metadata[key] = value end
  end
  local same, why, kind = check_copies(found)
  if not same then return nil, why, kind end
  local ok, failure = pcall(self.load_state, self, found.state, options)
  if not ok then
    local where = type(path) == "table" and path[1] or path
    return core.refuse(("%s: %s")
      :format(where, tostring(failure):match "load_state: (.*)" or tostring(failure)), "mismatch")
  end
  return found
end

--- Loads a file, a list of files or a folder (by its model.safetensors.index.json if it has one).
--- Returns true, or nil, message, code; then nothing has changed.
---@param path string|string[]
---@param options? ms.LoadOptions
---@return true?, string?, string?
function Module:load(path, options)
  options_of.argument("load", "path", path, "string|list")
  if type(path) == "table" then options_of.items("load", "path", path, "string") end
  local found, message, code = files.read(self, path,
    check("load", options, { partial = "boolean" }))
  if not found then return nil, message, code end
  return true
end

--------------------------------------------------------------------------------------------- saving

local bytes_of = { f32 = 4, f16 = 2, bf16 = 2 }
local names_elsewhere = { f32 = "float32", f16 = "float16", bf16 = "bfloat16" }

-- Returns the tensors to write, by their names in the file; how many of them are rounded, and to
-- which dtypes; and the dtype for config.json if it changed.
local function tensors_of(self, origin, dtype)
  local tensors, rounded, changed, words = {}, { count = 0 }, false, {}
  for name, t in pairs(self:state()) do
    local own, loaded = t:dtype(), origin.names and module.loaded_dtype[t]
    local written = bytes_of[own] and (dtype or loaded) or own
    if written ~= own then
      t = core.no_grad(function() return t:detach():to(written) end)
      if bytes_of[written] == 2 then rounded.count, rounded[written] = rounded.count + 1, true end
    end
    if bytes_of[written] then words[names_elsewhere[written]] = true end
    changed = changed or bytes_of[written] and origin.dtypes and origin.dtypes[name] ~= written
    tensors[origin.names and origin.names[name]
      or self.file_name and self:file_name(name) or name] = t
  end
  local word = next(words)
  return tensors, rounded, changed and next(words, word) == nil and word or nil
end

-- The text of config.json: as it was read, but with a new dtype if the weights are written in
-- another dtype.
local function config_text(self, origin, word)
  if not origin.config then return core.json_encode(self:config(), true) .. "\n" end
  if not word then return origin.config end
  local config = core.json_decode(origin.config, true)
  for _, key in ipairs { "dtype", "torch_dtype" } do
    if config[key] ~= nil then config[key] = word end
  end
  return core.json_encode(config, true) .. "\n"
end

local function check_save(path, options)
  if type(path) ~= "string" then core.raise("save: a path is expected, not " .. type(path)) end
  local dtype = check("save", options, { dtype = "string" }).dtype
  if dtype ~= nil and not bytes_of[dtype] then
    core.raise(("save: dtype is f32, f16 or bf16, not %s"):format(tostring(dtype)))
  end
  return dtype
end

-- The file to write; makes the folder.
local function file_of(path)
  if path:match "%.safetensors$" then return path end
  local folder = path:gsub("(.)/+$", "%1")
  -- The index would still name the old weights, so readers of the folder would not read the new
  -- ones.
  if core.exists(folder .. "/" .. INDEX) then
    return core.refuse(
      ("'%s' holds a model in several files (%s): save to another folder, or remove that model")
        :format(folder, INDEX), "exists")
  end
  local ok, message, code = core.make_directory(folder)
  if not ok then return nil, message, code end
  return folder .. "/model.safetensors"
end

--- Writes the state as safetensors. All ranks call it; rank 0 writes. path: a .safetensors file, or
--- a folder, which gets model.safetensors. A model with a configuration also writes config.json. A
--- model of nn.pretrained is saved as it was read: names, dtypes, config.json, and the files of its
--- tokenizer and of generation; a log line says if numbers are rounded to these dtypes.
--- options.dtype: of all float tensors; unless given, the dtype in the file that nn.pretrained
--- read, else the tensor's own.
---@param path string
---@param options? ms.SaveOptions
---@return true?, string?, string?
function Module:save(path, options)
  local dtype = check_save(path, options)
  if core.rank() ~= 0 then return true end
  local file, message, code = file_of(path)
  if not file then return nil, message, code end
  local origin = getmetatable(self).origin or {}
  local tensors, rounded, word = tensors_of(self, origin, dtype)
  if rounded.count > 0 then
    local to = rounded.bf16 and rounded.f16 and "bf16 and f16" or rounded.bf16 and "bf16" or "f16"
    require "moonshard.log".log("%s: %d tensors are rounded to %s%s", file, rounded.count, to, dtype
      and "" or ', as in the file that they were loaded from; save(path, { dtype = "f32" }) keeps \z
        all bits')
  end
  local ok
  ok, message, code = require "moonshard.safetensors".save(file, tensors,
    origin.metadata or { format = "pt" })
  local texts = { ["config.json"] = self.config and config_text(self, origin, word) }
  for name, text in pairs(origin.files or {}) do texts[name] = text end
  local folder = file:match "^(.*)/[^/]*$" or "."
  for name, text in pairs(texts) do
    if ok then ok, message, code = core.file_write(folder .. "/" .. name, text) end
  end
  if not ok then return nil, message, code end
  return true
end

options_of.methods(Module, "a module", module.is_module, { "load", "save" })

return files
