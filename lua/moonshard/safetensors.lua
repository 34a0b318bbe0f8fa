-- Safetensors files: the part `ms.safetensors`.
local core = require "moonshard.core"
local named = require "moonshard.base.named"
local options_of = require "moonshard.base.options"
local argument = options_of.argument

---@class ms.safetensors
local safetensors = {}

---@param path string
---@param names? string[] only these; "not_found" if one is missing
---@return table<string, ms.Tensor>? tensors
---@return table<string, string>|string metadata the file's metadata; on failure the message
---@return string? code
function safetensors.load(path, names)
  argument("safetensors.load", "path", path, "string")
  options_of.items("safetensors.load", "names", names, "string?")
  local file, message, code = core.safetensors_open(path)
  if not file then return nil, message, code end
  if not names then
    names = {}
    for name in pairs(file:entries()) do names[#names + 1] = name end
    table.sort(names)
  end
  local tensors = named.table {}
  for _, name in ipairs(names) do
    local tensor, why, kind = file:load(name)
    if not tensor then
      file:close()
      return nil, ("%s: %s"):format(path, why), kind
    end
    tensors[name] = tensor
  end
  local metadata = file:metadata()
  file:close()
  return tensors, metadata
end

---@param path string
---@param tensors table<string, ms.Tensor>
---@param metadata? table<string, string>
---@return true?
---@return string? message
---@return string? code
function safetensors.save(path, tensors, metadata)
  argument("safetensors.save", "path", path, "string")
  argument("safetensors.save", "tensors", tensors, "table")
  argument("safetensors.save", "metadata", metadata, "table?")
  local names, list, pairs_of = {}, {}, {}
  for name, tensor in pairs(tensors) do
    if type(name) ~= "string" or not core.is_tensor(tensor) then
      core.raise(("safetensors.save: %s is %s; names are strings and values are tensors")
        :format(tostring(name), type(tensor)))
    end
    names[#names + 1] = name
  end
  table.sort(names)
  for i, name in ipairs(names) do list[i] = tensors[name] end
  for key, value in pairs(metadata or {}) do
    if type(key) ~= "string" or type(value) ~= "string" then
      core.raise("safetensors.save: metadata goes from strings to strings")
    end
    pairs_of[#pairs_of + 1] = key
  end
  table.sort(pairs_of)
  local flat = {}
  for _, key in ipairs(pairs_of) do
    flat[#flat + 1] = key
    flat[#flat + 1] = metadata[key]
  end
  return core.safetensors_save(path, names, list, flat)
end

---@param path string
---@return table<string, { dtype: string, shape: integer[] }>?
---@return table<string, string>|string metadata on failure the message
---@return string? code
function safetensors.header(path)
  argument("safetensors.header", "path", path, "string")
  local file, message, code = core.safetensors_open(path)
  if not file then return nil, message, code end
  local entries, metadata = named.table(file:entries()), file:metadata()
  file:close()
  return entries, metadata
end

return options_of.closed(safetensors, "ms.safetensors")
