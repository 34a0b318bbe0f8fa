-- Files that hold a table: Lua files that return one, and .json.
local core = require "moonshard.core"

local table_file = {}

--- The table in a file; or nil and a message. A Lua file gets no globals.
---@param path string
---@return table?, string?
function table_file.read(path)
  if path:match "%.json$" then
    local text, message = core.file_read(path)
    local values
    if text then values, message = core.json_decode(text) end
    if type(values) == "table" then return values end
    return nil, message or "the file has no object"
  end
  local chunk, message = loadfile(path, "t", {})
  if not chunk then return nil, message end
  local ok, result = pcall(chunk)
  if not ok then return nil, tostring(result) end
  if type(result) ~= "table" then return nil, "the file returns no table" end
  return result
end

return table_file
