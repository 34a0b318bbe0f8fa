-- Modules from and to safetensors files, with the names of other tools, and config.json.
local core = require "moonshard.core"
local Module = require "moonshard.nn.module".base

-- The files: of a folder all whose names end in .safetensors.
local function files_of(path)
  if type(path) == "table" then return path end
  local entries = core.list(path)
  if not entries then return { path } end
  local files = {}
  for _, name in ipairs(entries) do
    if name:match "%.safetensors$" then files[#files + 1] = path .. "/" .. name end
  end
  if #files == 0 then return core.refuse(path .. ": the folder holds no .safetensors file", "not_found") end
  return files
end

--- A file, a list of files or a folder. Returns true, or nil, message, code; nothing is changed then.
---@param path string|string[]
---@param options? { partial?: boolean }
---@return true?, string?, string?
function Module:load(path, options)
  local files, message, code = files_of(path)
  if not files then return nil, message, code end
  local safetensors, state = require "moonshard.safetensors", {}
  for _, file in ipairs(files) do
    local tensors, why, kind = safetensors.load(file)
    if not tensors then return nil, why, kind end
    for name, t in pairs(tensors) do
      local own = name
      if self.own_name then own = self:own_name(name) end
      if own then state[own] = t end
    end
  end
  local ok, failure = pcall(self.load_state, self, state, options)
  if not ok then
    local where = type(path) == "table" and path[1] or path
    return core.refuse(("%s: %s"):format(where, tostring(failure):match "load_state: (.*)" or tostring(failure)), "mismatch")
  end
  return true
end

--- As safetensors. All ranks call it; rank 0 writes. A model with a configuration puts config.json beside it; a path that is a folder (or ends in /) gets model.safetensors.
---@param path string
---@return true?, string?, string?
function Module:save(path)
  if type(path) ~= "string" then core.raise("save: a path is expected, not " .. type(path)) end
  if core.rank() ~= 0 then return true end
  if not path:match "%.safetensors$" then
    local ok, message, code = core.make_directory(path)
    if not ok then return nil, message, code end
    path = path:gsub("/+$", "") .. "/model.safetensors"
  end
  local ok, message, code = require "moonshard.safetensors".save(path, self:state(), { format = "pt" })
  if not ok then return nil, message, code end
  if not self.config then return true end
  local folder = path:match "^(.*)/[^/]*$" or "."
  return core.file_write(folder .. "/config.json", core.json_encode(self:config()) .. "\n")
end

return Module
