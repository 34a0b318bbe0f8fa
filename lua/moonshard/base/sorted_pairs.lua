-- ms.sorted_pairs.
local core = require "moonshard.core"

---@param t table
---@return fun(): any, any
return function(t)
  if type(t) ~= "table" then core.raise("sorted_pairs: t must be a table, not a " .. type(t)) end
  local keys = {}
  for key in pairs(t) do keys[#keys + 1] = key end
  table.sort(keys, function(a, b)
    if type(a) ~= type(b) then return type(a) < type(b) end
    return a < b
  end)
  local i = 0
  return function()
    i = i + 1
    if keys[i] ~= nil then return keys[i], t[keys[i]] end
  end
end
