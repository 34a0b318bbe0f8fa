-- What "." and "[ ]" read of a value, in Jinja's order: the attribute before the item, or after it.
local methods = require "moonshard.chat.methods"
local text = require "moonshard.chat.text"
local values = require "moonshard.chat.values"
local work = require "moonshard.chat.work"

local access = {}

local function check(value, name)
  if values.kind(value) == "undefined" then
    work.fail("mismatch", "%s is undefined, so it has no '%s'",
      value.name and ("'%s'"):format(value.name) or "the value", name)
  end
end

-- The item of a list or a string at a place from 0, or nil.
local function at(value, kind, place)
  if kind == "list" then
    if value.sort == "generator" or value.sort == "view" then return nil end
    return value[place < 0 and place + #value + 1 or place + 1]
  end
  if place < 0 then place = place + text.length(value) end
  if place < 0 or place >= text.length(value) then return nil end
  local bytes = text.plain(value)
  return text.sub(value, utf8.offset(bytes, place + 1), utf8.offset(bytes, place + 2) - 1)
end

-- What [ ] reads, nil if there is nothing.
local function subscript(value, index)
  text.unsafe("a part", value)
  local kind, place = values.kind(value), values.number(index)
  if kind == "dict" then
    local hashable = values.kind(index)
    if hashable == "dict" or hashable == "list" and index.sort == "list" then return nil end
    return values.get(value, index)
  end
  if (kind == "list" or kind == "string") and math.type(place) == "integer" then
    return at(value, kind, place)
  end
end

-- What a loop or a namespace has, or the method of another value.
local function own(value, name)
  local kind = values.kind(value)
  if kind == "namespace" then return value.fields[name] end
  if kind == "loop" then return value.read(name) end
  if kind == "function" then work.refuse("attribute of a function", name) end
  return methods.find(value, name)
end

--- value.name
---@param value any
---@param name string
---@return any
function access.attribute(value, name)
  check(value, name)
  local found = own(value, name)
  if found == nil then found = subscript(value, name) end
  return found == nil and values.undefined(name) or found
end

--- value[index]
---@param value any
---@param index any
---@return any
function access.item(value, index)
  local name = text.is(index) and text.plain(index)
  check(value, name or tostring(values.number(index)))
  local found = subscript(value, index)
  if found == nil and name then found = own(value, name) end
  return found == nil and values.undefined(name or tostring(values.number(index))) or found
end

--- What a path such as "function.name" or "0.text" reads of a value, as filters with `attribute`
--- do.
---@param value any
---@param path any
---@return any
function access.path(value, path)
  if math.type(path) == "integer" then return access.item(value, path) end
  if not text.is(path) then
    work.fail("mismatch", "an attribute is a string or an integer, not a %s", values.name(path))
  end
  for part in (text.plain(path) .. "."):gmatch "([^.]*)%." do
    value = access.item(value, part:find "^%d+$" and math.tointeger(tonumber(part)) or part)
  end
  return value
end

return access
