-- Tables whose keys are names, such as states: `pairs` goes in the order of names, which is the
-- same on all ranks. (The order of a plain table follows from the Lua state's seed.) For all other
-- uses they are plain tables.
local named = {}

-- Numbers, then names. Keys of other types, which scripts may have added, have no order.
local function is_before(a, b)
  local one, other = type(a), type(b)
  if one ~= other then return one < other end
  return (one == "string" or one == "number") and a < b
end

-- As with `next`, a loop may remove items and write those that are there.
local Named = {
  __pairs = function(t)
    local keys, i = {}, 0
    for key in next, t do keys[#keys + 1] = key end
    table.sort(keys, is_before)
    return function()
      local value
      repeat
        i = i + 1
        value = keys[i] ~= nil and rawget(t, keys[i])
      until value ~= nil
      if keys[i] ~= nil then return keys[i], value end
    end, t
  end,
}

--- Makes `pairs` go in the order of names.
---@generic T: table
---@param t T without a metatable
---@return T t
function named.table(t) return setmetatable(t, Named) end

--- Whether a value is a table of no class.
---@param value any
---@return boolean
function named.is_plain(value)
  if type(value) ~= "table" then return false end
  local meta = getmetatable(value)
  return meta == nil or meta == Named
end

return named
