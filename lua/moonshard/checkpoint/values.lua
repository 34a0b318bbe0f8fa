-- Values of states as JSON: {"$tensor": name} represents a tensor, which is kept elsewhere. What
-- JSON cannot hold exactly becomes a marked object.
local core = require "moonshard.core"
local named = require "moonshard.base.named"
local piece = require "moonshard.parallel.shard_piece"

local values = {}

local DEEPEST = 30               -- of nested tables; JSON needs up to three levels for each

-- A part of a tensor's name. Different keys give different parts: integers get a #; characters with
-- a meaning here, and all that are not printable ASCII, are escaped.
function values.name_part(key)
  if math.type(key) == "integer" then return "#" .. key end
  return (key:gsub("[%c/%%#\127-\255]", function(c) return ("%%%02x"):format(c:byte()) end))
end

function values.is_text(s) return utf8.len(s) ~= nil and not s:find("\0", 1, true) end

local encode

-- JSON objects have text as keys; tables with other keys become lists of pairs.
local function encode_table(value, path, depth, out)
  if depth > DEEPEST then
    core.raise(("checkpoint: %s: tables are nested more than %d deep, or refer to themselves")
      :format(path, DEEPEST))
  end
  local keys, plain, count = {}, true, 0
  for key in pairs(value) do
    local kind = math.type(key) or type(key)
    if kind ~= "string" and kind ~= "integer" then
      core.raise(("checkpoint: %s: a key is a %s; keys are strings and integers")
        :format(path, kind))
    end
    count = count + 1
    keys[count] = key
    plain = plain and kind == "string" and values.is_text(key) and key:sub(1, 1) ~= "$"
  end
  if count > 0 and #value == count then
    local list = {}
    for i = 1, count do
      list[i] = encode(value[i], path .. "/" .. values.name_part(i), depth + 1, out)
    end
    return list
  end
  table.sort(keys, function(a, b)
    if type(a) ~= type(b) then return type(a) < type(b) end
    return a < b
  end)
  local made = {}
  for i, key in ipairs(keys) do
    local item = encode(value[key], path .. "/" .. values.name_part(key), depth + 1, out)
    if plain then made[key] = item else made[i] = { encode(key, path, depth, out), item } end
  end
  return plain and made or { ["$table"] = made }
end

-- Values that JSON can hold exactly stay as they are; others become marked objects. out collects
-- the tensors.
function encode(value, path, depth, out)
  local kind = math.type(value) or type(value)
  if kind == "integer" or kind == "boolean" then return value end
  if kind == "float" then
    if value - value == 0 then return value end
    return { ["$float"] = value ~= value and "nan" or value > 0 and "inf" or "-inf" }
  end
  if kind == "string" then
    if values.is_text(value) then return value end
    return { ["$bytes"] = (value:gsub(".", function(c) return ("%02x"):format(c:byte()) end)) }
  end
  if kind == "table" and not piece.is(value) then
    return encode_table(value, path, depth, out)
  end
  if core.is_tensor(value) or piece.is(value) then
    out.names[#out.names + 1] = path
    out.tensors[#out.tensors + 1] = value
    return { ["$tensor"] = path }
  end
  return core.raise(
    ("checkpoint: %s is a %s; what can be saved: tensors, numbers, strings, booleans, tables")
      :format(path, kind))
end

local FLOATS = { nan = 0 / 0, inf = math.huge, ["-inf"] = -math.huge }

local decode

-- The inverse of encode; tensor(name) gives a tensor.
function decode(value, tensor)
  if type(value) ~= "table" then return value end
  if value["$tensor"] then return tensor(value["$tensor"]) end
  if value["$float"] then return FLOATS[value["$float"]] end
  if value["$bytes"] then
    return (value["$bytes"]:gsub("%x%x", function(hex) return string.char(tonumber(hex, 16)) end))
  end
  local made = #value == 0 and named.table {} or {}
  if value["$table"] then
    for _, pair in ipairs(value["$table"]) do
      made[decode(pair[1], tensor)] = decode(pair[2], tensor)
    end
  else
    for key, item in pairs(value) do made[key] = decode(item, tensor) end
  end
  return made
end

--- Whether an encoded value has a tensor in it.
---@param value any
---@return boolean
function values.holds_tensor(value)
  if type(value) ~= "table" then return false end
  if value["$tensor"] then return true end
  for _, item in pairs(value) do
    if values.holds_tensor(item) then return true end
  end
  return false
end

values.encode, values.decode = encode, decode

return values
