-- Tensors in nested tables: what modules take and give.
local core = require "moonshard.core"

local nested = {}

--- Appends the tensors in values, which may be tables in tables; a table counts once.
---@param values table
---@param list? ms.Tensor[]
---@param seen? table<table, boolean>
---@return ms.Tensor[] list
function nested.tensors(values, list, seen)
  list, seen = list or {}, seen or {}
  for _, value in pairs(values) do
    if core.is_tensor(value) then list[#list + 1] = value
    elseif type(value) == "table" and not seen[value] then
      seen[value] = true
      nested.tensors(value, list, seen)
    end
  end
  return list
end

return nested
