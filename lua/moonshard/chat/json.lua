-- The filter tojson: JSON as Python's json.dumps writes it, without escapes of what is not ASCII.
local print = require "moonshard.chat.print"
local text = require "moonshard.chat.text"
local values = require "moonshard.chat.values"
local work = require "moonshard.chat.work"

local ESCAPES <const> = {
  ["\\"] = "\\\\", ['"'] = '\\"', ["\n"] = "\\n", ["\r"] = "\\r", ["\t"] = "\\t", ["\b"] = "\\b",
  ["\f"] = "\\f",
}

local function quoted(value)
  local origin = text.origin(value, 1)
  local shown = text.each(value, function(part)
    return (part:gsub('[\0-\31\\"]', function(c)
      return ESCAPES[c] or ("\\u%04x"):format(c:byte())
    end))
  end)
  return text.concat { text.mark('"', origin), shown, text.mark('"', origin) }
end

local function number(value)
  if value ~= value then return "NaN" end
  if value == math.huge then return "Infinity" end
  if value == -math.huge then return "-Infinity" end
  return print.number(value)
end

local encode

-- A key of an object: JSON has strings only.
local function name_of(key)
  local kind = values.kind(key)
  return quoted(kind == "string" and key or kind == "none" and "null"
    or kind == "boolean" and tostring(key) or number(key))
end

local function sorted(keys)
  local list = table.move(keys, 1, #keys, 1, {})
  table.sort(list, values.less)
  return list
end

-- The items between brackets. depth: how far they are indented.
local function bracket(value, open, parts, close, how, depth)
  local function own(bytes) return text.mark(bytes, value.origin) end
  if #parts == 0 then return own(open .. close) end
  local list = { own(open) }
  for i, part in ipairs(parts) do
    if i > 1 then list[#list + 1] = own(how.comma) end
    if how.indent then list[#list + 1] = own("\n" .. how.indent:rep(depth + 1)) end
    list[#list + 1] = part
  end
  if how.indent then list[#list + 1] = own("\n" .. how.indent:rep(depth)) end
  list[#list + 1] = own(close)
  return text.concat(list)
end

local function compound(value, kind, how, depth)
  local parts = {}
  if kind == "list" then
    for i, item in ipairs(value) do parts[i] = encode(item, how, depth + 1) end
    return bracket(value, "[", parts, "]", how, depth)
  end
  for i, key in ipairs(how.sort_keys and sorted(value.keys) or value.keys) do
    parts[i] = text.concat({ name_of(key), encode(values.get(value, key), how, depth + 1) },
      text.mark(how.colon, value.origin))
  end
  return bracket(value, "{", parts, "}", how, depth)
end

function encode(value, how, depth)
  local kind = values.kind(value)
  work.spend(1)
  if kind == "string" then return quoted(value) end
  if kind == "none" then return "null" end
  if kind == "boolean" then return tostring(value) end
  if kind == "integer" or kind == "float" then return number(value) end
  if kind ~= "dict" and (kind ~= "list" or value.sort ~= "list" and value.sort ~= "tuple") then
    work.fail("mismatch", "tojson: a %s has no JSON", values.name(value))
  end
  work.enter()
  local result = compound(value, kind, how, depth)
  work.leave()
  return result
end

--- A value as JSON.
---@param value any
---@param how { comma: string, colon: string, indent?: string, sort_keys?: boolean }
---@return string|ms.ChatText
return function(value, how) return encode(value, how, 0) end
