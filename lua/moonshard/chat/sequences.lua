-- The filters of lists, dicts and what else has items.
local access = require "moonshard.chat.access"
local arguments = require "moonshard.chat.arguments"
local methods = require "moonshard.chat.methods"
local numbers = require "moonshard.chat.numbers"
local print = require "moonshard.chat.print"
local tests = require "moonshard.chat.tests"
local text = require "moonshard.chat.text"
local values = require "moonshard.chat.values"
local work = require "moonshard.chat.work"

local sequences = {}

--- name -> { names of parameters, function of a value and these }, or { whole = function of a
--- value, arguments, named arguments and filters.apply }
local known = {}
sequences.known = known

local function generator(items) return values.list(items, "generator") end

local function given(value) return value ~= nil and value ~= values.none end

-- Flags such as reverse, which are false unless given.
local function flag(value) return value ~= nil and values.truth(value) end

known.length = { {}, function(value)
  return values.length(value)
    or work.fail("mismatch", "length: a %s has none", values.name(value))
end }
known.count = known.length

known.list = { {}, function(value)
  local items = values.iterate(value, "list")
  return values.list(table.move(items, 1, #items, 1, {}))
end }

known.first = { {}, function(value)
  local item = values.iterate(value, "first")[1]
  return item == nil and values.undefined "first" or item
end }

known.last = { {}, function(value)
  if values.kind(value) == "list" and value.sort == "generator" then
    work.fail("mismatch", "last: a generator has none: put the filter 'list' before it")
  end
  local items = values.iterate(value, "last")
  local item = items[#items]
  return item == nil and values.undefined "last" or item
end }

known.reverse = { {}, function(value)
  local list = {}
  if values.kind(value) == "list" and value.sort == "generator" then
    work.refuse("of a generator the filter", "reverse")
  end
  local items = values.iterate(value, "reverse")
  for i = #items, 1, -1 do list[#list + 1] = items[i] end
  if text.is(value) then return text.concat(list) end
  return generator(list)
end }

known.join = { { "d", "attribute" }, function(value, separator, attribute)
  local parts = {}
  for i, item in ipairs(values.iterate(value, "join")) do
    if given(attribute) then item = access.path(item, attribute) end
    parts[i] = print.str(item)
    text.unsafe("the filter 'join'", parts[i])
  end
  return text.concat(parts, separator == nil and "" or print.str(separator))
end }

known.items = { {}, function(value)
  if values.kind(value) == "undefined" then return generator {} end
  if values.kind(value) ~= "dict" then
    work.fail("mismatch", "items: a %s is no dict", values.name(value))
  end
  return generator(methods.pairs(value))
end }

-- What values are ordered by: an attribute, and strings without regard to case unless told.
local function key_of(value, attribute, case)
  if given(attribute) then
    if text.is(attribute) and text.plain(attribute):find(",", 1, true) then
      work.refuse("an attribute with a comma", text.plain(attribute))
    end
    value = access.path(value, attribute)
  end
  if text.is(value) and not case then return methods.letters(value, "lower", string.lower) end
  return value
end

-- Sorts items by their keys, and keeps the order of equal ones.
local function sorted(items, keys, reverse)
  local list = {}
  if reverse ~= nil and type(values.number(reverse)) ~= "number" then
    work.fail("mismatch", "sort: reverse is true or false, not a %s", values.name(reverse))
  end
  reverse = flag(reverse)
  for i, item in ipairs(items) do list[i] = { item, keys[i], i } end
  -- Lua's sort may call the function with an item and itself.
  table.sort(list, function(a, b)
    if a == b then return false end
    if reverse then
      if values.less(b[2], a[2]) then return true end
      return not values.less(a[2], b[2]) and a[3] < b[3]
    end
    if values.less(a[2], b[2]) then return true end
    return not values.less(b[2], a[2]) and a[3] < b[3]
  end)
  for i, entry in ipairs(list) do list[i] = entry[1] end
  return list
end

known.sort = { { "reverse", "case_sensitive", "attribute" },
  function(value, reverse, case, attribute)
    local items, keys = values.iterate(value, "sort"), {}
    for i, item in ipairs(items) do keys[i] = key_of(item, attribute, flag(case)) end
    return values.list(sorted(items, keys, reverse))
  end }

known.dictsort = { { "case_sensitive", "by", "reverse" }, function(value, case, by, reverse)
  if values.kind(value) ~= "dict" then
    work.fail("mismatch", "dictsort: a %s is no dict", values.name(value))
  end
  by = by and text.plain(by) or "key"
  if by ~= "key" and by ~= "value" then work.fail("mismatch", "dictsort: by is key or value") end
  local items, keys = methods.pairs(value), {}
  local place = by == "key" and 1 or 2
  for i, item in ipairs(items) do keys[i] = key_of(item[place], nil, flag(case)) end
  return values.list(sorted(items, keys, reverse))
end }

known.unique = { { "case_sensitive", "attribute" }, function(value, case, attribute)
  local list, seen = {}, {}
  for _, item in ipairs(values.iterate(value, "unique")) do
    local id = values.identity(key_of(item, attribute, flag(case)))
    if not seen[id] then
      seen[id] = true
      list[#list + 1] = item
    end
  end
  return generator(list)
end }

local function extreme(name, better)
  known[name] = { { "case_sensitive", "attribute" }, function(value, case, attribute)
    local best, best_key
    for _, item in ipairs(values.iterate(value, name)) do
      local key = key_of(item, attribute, flag(case))
      if best == nil or better(key, best_key) then best, best_key = item, key end
    end
    return best == nil and values.undefined(name) or best
  end }
end
extreme("min", function(a, b) return values.less(a, b) end)
extreme("max", function(a, b) return values.less(b, a) end)

known.sum = { { "attribute", "start" }, function(value, attribute, start)
  local total = start == nil and 0 or start
  if text.is(total) then work.fail("mismatch", "sum: strings have none") end
  for _, item in ipairs(values.iterate(value, "sum")) do
    if given(attribute) then item = access.path(item, attribute) end
    total = numbers.binary("+", total, item)
  end
  -- Newer versions of Python add up floats with more digits than others.
  if math.type(total) == "float" then work.refuse("of floats the filter", "sum") end
  return total
end }

known.map = { whole = function(value, args, named, apply)
  local list, name = {}, args[1]
  -- What is false, such as None, has no items here.
  if not values.truth(value) then return generator {} end
  local items = values.iterate(value, "map")
  if #args == 0 then
    local path, default = arguments.bind("the filter map", { "attribute", "default" }, {}, named)
    if path == nil then work.fail("mismatch", "map: the name of a filter is missing") end
    for i, item in ipairs(items) do
      list[i] = access.path(item, path)
      if default ~= nil and values.kind(list[i]) == "undefined" then list[i] = default end
    end
    return generator(list)
  end
  local rest = table.move(args, 2, #args, 1, {})
  name = text.plain(arguments.needed("map", name))
  for i, item in ipairs(items) do list[i] = apply(name, item, rest, named) end
  return generator(list)
end }

-- Items of which a test says `wanted`. by: whether the first argument is an attribute.
local function chosen(name, wanted, by)
  known[name] = { whole = function(value, args, named)
    local list, place = {}, by and 2 or 1
    if not values.truth(value) then return generator {} end
    if by and args[1] == nil then work.fail("mismatch", "%s: the attribute is missing", name) end
    local test = args[place] ~= nil
      and text.plain(arguments.needed(name .. ": the test", args[place]))
    local rest = table.move(args, place + 1, #args, 1, {})
    for _, item in ipairs(values.iterate(value, name)) do
      local subject = by and access.path(item, args[1]) or item
      local found
      if test then found = tests.apply(test, subject, rest, named)
      else found = values.truth(subject) end
      if found == wanted then list[#list + 1] = item end
    end
    return generator(list)
  end }
end
chosen("select", true, false)
chosen("reject", false, false)
chosen("selectattr", true, true)
chosen("rejectattr", false, true)

return sequences
