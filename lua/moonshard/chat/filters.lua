-- The filters of one value: of strings and numbers. Those of lists are in sequences.lua.
local arguments = require "moonshard.chat.arguments"
local json = require "moonshard.chat.json"
local methods = require "moonshard.chat.methods"
local numbers = require "moonshard.chat.numbers"
local print = require "moonshard.chat.print"
local sequences = require "moonshard.chat.sequences"
local text = require "moonshard.chat.text"
local values = require "moonshard.chat.values"
local work = require "moonshard.chat.work"

local filters = {}

-- Filters that take a string that the filter "safe" made for any other.
local PLAIN <const> = { safe = true, string = true, length = true, count = true, tojson = true,
  default = true, d = true }

--- name -> { names of parameters, function of a value and these }
---@type table<string, { [1]: string[], [2]: function }>
local known = {}
filters.known = known

known.safe = { {}, function(value) return text.safe(print.str(value)) end }
known.string = { {}, print.str }

known.trim = { { "chars" }, function(value, characters)
  characters = arguments.string("trim", characters)
  return text.strip(print.str(value), characters and text.plain(characters), true, true)
end }

for name, f in pairs(methods.cases) do
  if name == "upper" or name == "lower" or name == "capitalize" then
    known[name] = { {}, function(value) return methods.letters(print.str(value), name, f) end }
  end
end

-- Words begin after white space, "-" and opening brackets, unlike those of Python's title.
known.title = { {}, function(value)
  return methods.letters(print.str(value), "title", function(bytes)
    return (bytes:lower():gsub("^%l", string.upper):gsub("[-%s({%[<]%l", string.upper))
  end)
end }

known.replace = { { "old", "new", "count" }, function(value, old, new, count)
  if old == nil or new == nil then work.fail("mismatch", "replace takes two strings") end
  return methods.replace(print.str(value), print.str(old), print.str(new), count)
end }

known.default = { { "default_value", "boolean" }, function(value, default, boolean)
  if default == nil then default = "" end
  local missing = values.kind(value) == "undefined"
    or boolean ~= nil and values.truth(boolean) and not values.truth(value)
  if missing then return default end
  return value
end }
known.d = known.default

-- A string as Python's float reads it; nil: it does not.
local function float_of(value)
  if values.kind(value) == "undefined" then
    work.fail("mismatch", "%s is no number", values.name(value))
  end
  if not text.is(value) then
    value = values.number(value)
    return type(value) == "number" and value * 1.0 or nil
  end
  local bytes = text.plain(text.strip(value, nil, true, true))
  local word = bytes:lower():match "^[-+]?(%l+)$"
  local digits = not bytes:find "[^%d+%-._eE\x80-\xff]" and bytes:find "[_\x80-\xff]"
  if word == "nan" or word == "inf" or word == "infinity" or digits then
    work.fail("unsupported", "'%s' as a number is not built", bytes)
  end
  if not (bytes:find "^[-+]?%d+%.?%d*[eE]?[-+]?%d*$" or bytes:find "^[-+]?%.%d+[eE]?[-+]?%d*$") then
    return nil
  end
  local number = tonumber((bytes:gsub("^%+", "")))
  return number and number * 1.0
end

local function truncated(number)
  if math.abs(number) >= 0x1p63 then
    work.fail("unsupported", "an integer beyond 64 bits is not built")
  end
  return math.tointeger(number < 0 and math.ceil(number) or math.floor(number))
end

known.int = { { "default", "base" }, function(value, default, base)
  if base ~= nil then work.refuse("of the filter int the argument", "base") end
  if math.type(value) == "integer" then return value end
  local digits = text.is(value)
    and text.plain(text.strip(value, nil, true, true)):match "^[+-]?%d+$"
  if digits then
    local number = tonumber((digits:gsub("^%+", "")))
    if math.type(number) ~= "integer" then
      work.fail("unsupported", "an integer beyond 64 bits is not built")
    end
    return number
  end
  local number = float_of(value)
  if number then return truncated(number) end
  return default == nil and 0 or default
end }

known.float = { { "default" }, function(value, default)
  return float_of(value) or default == nil and 0.0 or default
end }

local function a_number(name, value)
  value = values.number(value)
  if type(value) ~= "number" then
    work.fail("mismatch", "%s of a %s has no result", name, values.name(value))
  end
  return value
end

known.abs = { {}, function(value)
  value = a_number("abs", value)
  if math.type(value) == "float" then return math.abs(value) end
  return value < 0 and numbers.negative(value) or value
end }

known.round = { { "precision", "method" }, function(value, precision, method)
  value, precision = a_number("round", value), arguments.integer("round", precision) or 0
  if method ~= nil and text.plain(method) ~= "common" then
    work.refuse("of the filter round the method", text.plain(method))
  end
  if precision < 0 or precision > 15 then work.refuse("round to places", tostring(precision)) end
  if math.type(value) == "integer" then return value end
  -- The C library rounds the exact value, and halves to even digits, as Python does.
  local shown = (("%%.%df"):format(precision)):format(value):gsub(",", ".")
  return tonumber(shown .. (precision == 0 and ".0" or ""))
end }

-- The text of an indentation: a number of spaces, or a string.
local function indentation(what, value)
  if value == nil or text.is(value) then return value and text.plain(value) end
  local width = arguments.integer(what, value) or 0
  work.text(width)
  return (" "):rep(width)
end

known.indent = { { "width", "first", "blank" }, function(value, width, first, blank)
  value = arguments.needed("indent", value)
  local by = indentation("indent", width) or "    "
  local lines = text.lines(text.concat { value, "\n" })
  local parts = {}
  for i, line in ipairs(lines) do
    local skipped = i == 1 or text.plain(line) == "" and not (blank and values.truth(blank))
    parts[i] = skipped and line or text.concat { by, line }
  end
  local result = text.concat(parts, "\n")
  return first and values.truth(first) and text.concat { by, result } or result
end }

-- The two separators of tojson.
local function separators(value, indent)
  if value == nil or value == values.none then return indent and "," or ", ", ": " end
  if values.kind(value) ~= "list" or #value ~= 2 or not text.is(value[1]) or not text.is(value[2])
  then
    work.fail("mismatch", "tojson: separators are two strings")
  end
  return text.plain(value[1]), text.plain(value[2])
end

-- The first parameter is ensure_ascii in transformers and indent in Jinja, so all are named.
known.tojson = { { "ensure_ascii", "indent", "separators", "sort_keys" },
  function(value, ascii, indent, given, sort_keys)
    if ascii ~= nil and values.truth(ascii) then
      work.refuse("of the filter tojson the argument", "ensure_ascii")
    end
    if indent == values.none then indent = nil end
    local comma, colon = separators(given, indent)
    return json(value, { comma = comma, colon = colon, indent = indentation("tojson", indent),
      sort_keys = sort_keys ~= nil and values.truth(sort_keys) })
  end }

for name, entry in pairs(sequences.known) do known[name] = entry end

known.format = { {}, false }

--- The result of a filter.
---@param name string
---@param value any
---@param args any[]
---@param named table<string, any>
---@return any
function filters.apply(name, value, args, named)
  local entry = known[name] or work.refuse("filter", name, known)
  if not PLAIN[name] then text.unsafe(("the filter '%s'"):format(name), value) end
  if name == "format" then
    if next(named) then work.refuse("of the filter format", "a named argument") end
    return numbers.format(print.str(value), args)
  end
  if name == "tojson" and #args > 0 then
    work.fail("unsupported", "tojson: an argument without a name is not built")
  end
  if entry.whole then return entry.whole(value, args, named, filters.apply) end
  return entry[2](value, arguments.bind("the filter " .. name, entry[1], args, named))
end

return filters
