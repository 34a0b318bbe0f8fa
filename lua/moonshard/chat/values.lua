-- Values of a template beside strings: Lua's booleans and numbers, and tables with a `kind`:
-- "none", "undefined", "list", "dict", "namespace", "function". What Python says of them: truth,
-- equality, order, length, items.
local text = require "moonshard.chat.text"
local work = require "moonshard.chat.work"

local values = {}

--- A list; `sort` is "list", "tuple", or what Python has for lists that are made on demand:
--- "range", "view" (of a dict), "generator", which is read once. origin: the message that it is of.
---@class ms.ChatList
---@field kind "list"
---@field sort string
---@field origin? integer
---@field read? boolean of a generator: it was read

--- A dict in the order of its keys. map: value by the identity of its key (values.identity).
---@class ms.ChatDict
---@field kind "dict"
---@field keys any[]
---@field map table
---@field origin? integer

values.none = { kind = "none" }

---@param name? string for messages
---@return table
function values.undefined(name) return { kind = "undefined", name = name } end

---@param items any[]
---@param sort? string
---@return ms.ChatList
function values.list(items, sort)
  items.kind, items.sort = "list", sort or "list"
  work.spend(#items)
  return items
end

---@return ms.ChatDict
function values.dict() return { kind = "dict", keys = {}, map = {} } end

---@param name string
---@param call fun(args: any[], named: table<string, any>): any
---@return table
function values.callable(name, call) return { kind = "function", name = name, call = call } end

--- "string", "boolean", "integer", "float", or the kind of a table.
---@param value any
---@return string
function values.kind(value)
  local kind = type(value)
  if kind == "table" then return value.kind == "text" and "string" or value.kind end
  return kind == "number" and math.type(value) or kind
end
local kind_of = values.kind

--- The name of Python's type, for messages.
---@param value any
---@return string
function values.name(value)
  local kind = kind_of(value)
  if kind == "undefined" and value.name then return ("undefined ('%s')"):format(value.name) end
  return kind == "list" and value.sort or kind
end

--- A boolean as the number that Python takes it for; other values as they are.
---@param value any
---@return any
function values.number(value)
  if type(value) == "boolean" then return value and 1 or 0 end
  return value
end
local number = values.number

--- What represents a key in a dict's map. Only strings, integers, booleans and None are keys.
---@param key any
---@return string|integer|table
function values.identity(key)
  local kind = kind_of(key)
  if kind == "string" then return text.plain(key) end
  if kind == "integer" or kind == "boolean" then return number(key) end
  if kind == "none" then return values.none end
  return work.fail("unsupported", "a %s as a key of a dict is not built", values.name(key))
end

---@param dict ms.ChatDict
---@param key any
---@param value any
function values.set(dict, key, value)
  local id = values.identity(key)
  if dict.map[id] == nil then dict.keys[#dict.keys + 1] = key end
  dict.map[id] = value
end

---@param dict ms.ChatDict
---@param key any
---@return any nil: there is none
function values.get(dict, key) return dict.map[values.identity(key)] end

---@param value any
---@return boolean
function values.truth(value)
  local kind = kind_of(value)
  if kind == "boolean" then return value end
  if kind == "integer" or kind == "float" then return value ~= 0 end
  if kind == "string" then return text.plain(value) ~= "" end
  if kind == "list" then return value.sort == "generator" or #value > 0 end
  if kind == "dict" then return #value.keys > 0 end
  return kind ~= "none" and kind ~= "undefined"
end

local function same_dicts(a, b)
  if #a.keys ~= #b.keys then return false end
  for id, value in pairs(a.map) do
    if b.map[id] == nil or not values.equal(value, b.map[id]) then return false end
  end
  return true
end

local function same_lists(a, b)
  if a.sort ~= b.sort or #a ~= #b then return false end
  if a.sort == "generator" or a.sort == "view" then
    work.fail("unsupported", "comparing a %s is not built", a.sort)
  end
  for i = 1, #a do if not values.equal(a[i], b[i]) then return false end end
  return true
end

--- Python's ==.
---@param a any
---@param b any
---@return boolean
function values.equal(a, b)
  work.spend(1)
  a, b = number(a), number(b)
  local kind, other = kind_of(a), kind_of(b)
  if type(a) == "number" and type(b) == "number" then return a == b end
  if kind ~= other then return false end
  if kind == "string" then
    work.read(#text.plain(a))
    return text.plain(a) == text.plain(b)
  end
  if rawequal(a, b) or kind == "undefined" then return true end
  if kind == "list" then return same_lists(a, b) end
  return kind == "dict" and same_dicts(a, b)
end

-- Texts in the order of their bytes, which is that of their characters. Lua's < is the locale's.
local function less_bytes(a, b)
  if a == b then return false end
  work.read(math.min(#a, #b))
  for at = 1, math.min(#a, #b), 64 do
    if a:sub(at, at + 63) ~= b:sub(at, at + 63) then
      for i = at, at + 63 do
        local x, y = a:byte(i) or -1, b:byte(i) or -1
        if x ~= y then return x < y end
      end
    end
  end
  return #a < #b
end

--- Python's <.
---@param a any
---@param b any
---@return boolean
function values.less(a, b)
  work.spend(1)
  local x, y = number(a), number(b)
  if type(x) == "number" and type(y) == "number" then return x < y end
  if text.is(a) and text.is(b) then return less_bytes(text.plain(a), text.plain(b)) end
  if kind_of(a) == "list" and kind_of(b) == "list" and a.sort == b.sort
      and (a.sort == "list" or a.sort == "tuple") then
    for i = 1, math.min(#a, #b) do
      if not values.equal(a[i], b[i]) then return values.less(a[i], b[i]) end
    end
    return #a < #b
  end
  return work.fail("mismatch", "a %s and a %s have no order", values.name(a), values.name(b))
end

--- The items of what can be iterated as a list of Lua, nil for what cannot: characters, keys.
---@param value any
---@return any[]?
function values.items(value)
  local kind = kind_of(value)
  if kind == "list" then
    if value.sort == "generator" then
      if value.read then
        work.fail("unsupported", "reading a result of a filter such as map or select twice is not \z
          built: put the filter 'list' behind it")
      end
      value.read = true
    end
    return value
  end
  if kind == "dict" then return value.keys end
  if kind == "string" then
    text.unsafe("a part", value)
    return text.characters(value)
  end
  return kind == "undefined" and {} or nil
end

--- The same, for what must be iterated.
---@param value any
---@param what string
---@return any[]
function values.iterate(value, what)
  return values.items(value)
    or work.fail("mismatch", "%s: a %s has no items", what, values.name(value))
end

--- Python's len, nil for what has none.
---@param value any
---@return integer?
function values.length(value)
  local kind = kind_of(value)
  if kind == "string" then return text.length(value) end
  if kind == "list" and value.sort ~= "generator" then return #value end
  if kind == "dict" then return #value.keys end
  return kind == "undefined" and 0 or nil
end

--- Python's `in`.
---@param item any
---@param whole any
---@return boolean
function values.contains(whole, item)
  local kind = kind_of(whole)
  if kind == "string" then
    if not text.is(item) then
      work.fail("mismatch", "'in' a string takes a string, not a %s", values.name(item))
    end
    work.read(#text.plain(whole))
    return text.plain(whole):find(text.plain(item), 1, true) ~= nil
  end
  if kind == "dict" then return values.get(whole, item) ~= nil end
  for _, one in ipairs(values.iterate(whole, "'in'")) do
    if values.equal(one, item) then return true end
  end
  return false
end

-- The places of a slice as Python has them: first, after the last, step; from 0.
local function places(length, first, last, step)
  local low, high = step > 0 and 0 or -1, step > 0 and length or length - 1
  local function clamp(place, default)
    if place == nil then return default end
    if place < 0 then place = place + length end
    return math.max(low, math.min(high, place))
  end
  return clamp(first, step > 0 and low or high), clamp(last, step > 0 and high or low)
end

--- Python's value[first:last:step] of a string or a list; nil for other values.
---@param value any
---@param first? integer
---@param last? integer
---@param step? integer
---@return any
function values.slice(value, first, last, step)
  step = step or 1
  if step == 0 then work.fail("mismatch", "a slice has the step 0") end
  local kind = kind_of(value)
  if kind == "list" and value.sort ~= "generator" and value.sort ~= "view" then
    local made = {}
    first, last = places(#value, first, last, step)
    for i = first, last + (step > 0 and -1 or 1), step do made[#made + 1] = value[i + 1] end
    local sliced = values.list(made, value.sort)
    sliced.origin = value.origin
    return sliced
  end
  if kind ~= "string" then return nil end
  text.unsafe("a part", value)
  local bytes = text.plain(value)
  first, last = places(text.length(value), first, last, step)
  if step == 1 then
    if last < first then last = first end
    return text.sub(value, utf8.offset(bytes, first + 1), utf8.offset(bytes, last + 1) - 1)
  end
  local characters, made = text.characters(value), {}
  for i = first, last + (step > 0 and -1 or 1), step do made[#made + 1] = characters[i + 1] end
  return text.concat(made)
end

return values
