-- Attributes of values that a template reads or calls: methods of strings, of lists and of dicts.
local arguments = require "moonshard.chat.arguments"
local text = require "moonshard.chat.text"
local values = require "moonshard.chat.values"
local work = require "moonshard.chat.work"

local methods = {}
local plain, bind = text.plain, arguments.bind
local NO_LIMIT <const> = math.maxinteger

-- Attributes that Python's types have. Those that are not built are refused; other names are
-- undefined.
local NAMES <const> = {
  string = "capitalize casefold center count encode endswith expandtabs find format format_map \z
    index isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable \z
    isspace istitle isupper join ljust lower lstrip maketrans partition removeprefix removesuffix \z
    replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip \z
    swapcase title translate upper zfill",
  list = "append clear copy count extend index insert pop remove reverse sort",
  dict = "clear copy fromkeys get items keys pop popitem setdefault update values",
  integer = "as_integer_ratio bit_count bit_length conjugate denominator from_bytes imag \z
    numerator real to_bytes is_integer",
  float = "as_integer_ratio conjugate fromhex hex imag is_integer real",
}
NAMES.boolean = NAMES.integer
local exists = {}
for kind, names in pairs(NAMES) do
  exists[kind] = {}
  for name in names:gmatch "%S+" do exists[kind][name] = true end
end

local strings, dicts, lists = {}, {}, {}
local built = { string = strings, dict = dicts, list = lists }

-- The characters of an argument, nil for white space.
local function characters(what, value)
  value = arguments.string(what, value)
  return value and plain(value)
end

function strings.strip(s, args, named)
  return text.strip(s, characters("strip", bind("strip", { "chars" }, args, named)), true, true)
end

function strings.lstrip(s, args, named)
  return text.strip(s, characters("lstrip", bind("lstrip", { "chars" }, args, named)), true, false)
end

function strings.rstrip(s, args, named)
  return text.strip(s, characters("rstrip", bind("rstrip", { "chars" }, args, named)), false, true)
end

local function split(name, right)
  return function(s, args, named)
    local separator, most = bind(name, { "sep", "maxsplit" }, args, named)
    separator, most = arguments.string(name, separator), arguments.integer(name, most)
    if not most or most < 0 then most = NO_LIMIT end
    if not separator then
      if right and most ~= NO_LIMIT then work.refuse("at white space the method", name) end
      return values.list(text.words(s, most))
    end
    if plain(separator) == "" then work.fail("mismatch", "%s: the separator is empty", name) end
    return values.list(text.split(s, plain(separator), most, right))
  end
end
strings.split, strings.rsplit = split("split", false), split("rsplit", true)

function strings.splitlines(s, args, named)
  local keep = bind("splitlines", { "keepends" }, args, named)
  if keep ~= nil and type(values.number(keep)) ~= "number" then
    work.fail("mismatch", "splitlines takes true or false")
  end
  return values.list(text.lines(s, keep ~= nil and values.truth(keep)))
end

-- Whether a string begins or ends with one of several; has compares with one.
local function affix(name, has)
  return function(s, args, named)
    local given = bind(name, { "prefix" }, args, named)
    local list = values.kind(given) == "list" and given.sort == "tuple" and given or { given }
    for _, one in ipairs(list) do
      if has(plain(s), plain(arguments.needed(name, one))) then return true end
    end
    if given == nil then work.fail("mismatch", "%s takes a string", name) end
    return false
  end
end
strings.startswith = affix("startswith", function(s, part) return s:sub(1, #part) == part end)
strings.endswith = affix("endswith", function(s, part)
  return #part <= #s and s:sub(#s - #part + 1) == part
end)

function strings.replace(s, args, named)
  local old, new, count = bind("replace", { "old", "new", "count" }, args, named)
  return methods.replace(s, old, new, count)
end

--- Replaces a part of a string.
---@param s string|ms.ChatText
---@param old any
---@param new any
---@param count any
---@return string|ms.ChatText
function methods.replace(s, old, new, count)
  old, new = plain(arguments.needed("replace", old)), arguments.needed("replace", new)
  count = arguments.integer("replace", count)
  if old == "" then work.refuse("of an empty string the method", "replace") end
  return text.replace(s, old, new, count and count >= 0 and count or NO_LIMIT)
end

-- Letters beyond ASCII need Unicode's tables.
local function ascii(s, name)
  if plain(s):find "[\x80-\xff]" then
    work.fail("unsupported", "'%s' of text that is not ASCII is not built", name)
  end
  return s
end

--- A string with its letters changed; f keeps the length.
---@param s string|ms.ChatText
---@param name string
---@param f fun(bytes: string): string
---@return string|ms.ChatText
function methods.letters(s, name, f)
  work.read(8 * #plain(s))
  local bytes = f(plain(ascii(s, name)))
  return type(s) == "string" and bytes or { kind = "text", text = bytes, marks = s.marks }
end

local function capitalize(s) return s:sub(1, 1):upper() .. s:sub(2):lower() end

--- What changes letters, by its name: these are methods, and but for title filters, too.
methods.cases = {
  upper = string.upper, lower = string.lower, capitalize = capitalize,
  title = function(s) return (s:gsub("%a+", capitalize)) end,
  swapcase = function(s)
    return (s:gsub("%a", function(c) return c:lower() == c and c:upper() or c:lower() end))
  end,
}
for name, f in pairs(methods.cases) do
  strings[name] = function(s, args, named)
    bind(name, {}, args, named)
    return methods.letters(s, name, f)
  end
end

-- The place of a part from 0, or -1; in characters.
local function find(name, last)
  return function(s, args, named)
    local part, first, stop = bind(name, { "sub", "start", "end" }, args, named)
    if first or stop then work.refuse("with a start the method", name) end
    local bytes = plain(s)
    work.read(#bytes)
    part = plain(arguments.needed(name, part))
    local at = bytes:find(part, 1, true)
    while last and at do
      local behind = bytes:find(part, at + 1, true)
      if not behind then break end
      at = behind
    end
    return at and utf8.len(bytes:sub(1, at - 1)) or -1
  end
end
strings.find, strings.rfind = find("find", false), find("rfind", true)

function strings.count(s, args, named)
  local part = plain(arguments.needed("count", (bind("count", { "sub" }, args, named))))
  if part == "" then work.refuse("of an empty string the method", "count") end
  return #text.split(s, part, NO_LIMIT, false) - 1
end

function strings.join(s, args, named)
  local parts = {}
  for i, item in ipairs(values.iterate(bind("join", { "iterable" }, args, named), "join")) do
    if not text.is(item) then
      work.fail("mismatch", "join: item %d is a %s and not a string", i, values.name(item))
    end
    parts[i] = item
  end
  return text.concat(parts, s)
end

function strings.removeprefix(s, args, named)
  local part = plain(arguments.needed("removeprefix", (bind("removeprefix", { "prefix" }, args,
    named))))
  local bytes = plain(s)
  return bytes:sub(1, #part) == part and text.sub(s, #part + 1, #bytes) or s
end

function strings.removesuffix(s, args, named)
  local part = plain(arguments.needed("removesuffix", (bind("removesuffix", { "suffix" }, args,
    named))))
  local bytes = plain(s)
  local ends = part ~= "" and #part <= #bytes and bytes:sub(#bytes - #part + 1) == part
  return ends and text.sub(s, 1, #bytes - #part) or s
end

local function cut(name, right)
  return function(s, args, named)
    local separator = arguments.needed(name, (bind(name, { "sep" }, args, named)))
    if plain(separator) == "" then work.fail("mismatch", "%s: the separator is empty", name) end
    local parts = text.split(s, plain(separator), 1, right)
    local at = #plain(parts[1])
    if #parts == 2 then
      parts = { parts[1], text.sub(s, at + 1, at + #plain(separator)), parts[2] }
    else parts = right and { "", "", s } or { s, "", "" } end
    return values.list(parts, "tuple")
  end
end
strings.partition, strings.rpartition = cut("partition", false), cut("rpartition", true)

for name, class in pairs { isdigit = "%d", isnumeric = "%d", isdecimal = "%d", isalpha = "%a",
  isalnum = "%w" } do
  strings[name] = function(s, args, named)
    bind(name, {}, args, named)
    local rest = plain(s):gsub(class, "")
    if rest:find "[\0-\x7f]" then return false end
    return plain(ascii(s, name)) ~= ""
  end
end

function strings.isspace(s, args, named)
  bind("isspace", {}, args, named)
  return plain(s) ~= "" and plain(text.strip(s, nil, true, false)) == ""
end

for name, other in pairs { isupper = string.upper, islower = string.lower } do
  strings[name] = function(s, args, named)
    bind(name, {}, args, named)
    local bytes = plain(ascii(s, name))
    return bytes:find "%a" ~= nil and other(bytes) == bytes
  end
end

function strings.format() return work.refuse("method", "format", strings) end

function dicts.get(dict, args, named)
  local key, default = bind("get", { "key", "default" }, args, named)
  local value = values.get(dict, key)
  if value ~= nil then return value end
  return default == nil and values.none or default
end

function dicts.keys(dict, args, named)
  bind("keys", {}, args, named)
  return values.list(table.move(dict.keys, 1, #dict.keys, 1, {}), "view")
end

function dicts.values(dict, args, named)
  bind("values", {}, args, named)
  local list = {}
  for i, key in ipairs(dict.keys) do list[i] = values.get(dict, key) end
  return values.list(list, "view")
end

--- The pairs of a dict as tuples.
---@param dict ms.ChatDict
---@return any[]
function methods.pairs(dict)
  local list = {}
  for i, key in ipairs(dict.keys) do
    list[i] = values.list({ key, values.get(dict, key) }, "tuple")
  end
  return list
end

function dicts.items(dict, args, named)
  bind("items", {}, args, named)
  return values.list(methods.pairs(dict), "view")
end

function lists.count(list, args, named)
  local wanted, found = bind("count", { "value" }, args, named), 0
  for _, item in ipairs(list) do found = found + (values.equal(item, wanted) and 1 or 0) end
  return found
end

function lists.index(list, args, named)
  local wanted = bind("index", { "value" }, args, named)
  for i, item in ipairs(list) do if values.equal(item, wanted) then return i - 1 end end
  return work.fail("mismatch", "index: the value is not in the list")
end

-- The attributes of a tuple or a range are those that do not change it.
local function has_attribute(value, kind, name)
  if kind == "list" and value.sort ~= "list" then
    if value.sort == "view" or value.sort == "generator" then
      return name == "mapping" or name == "isdisjoint" or name == "send" or name == "throw"
        or name == "close"
    end
    return name == "count" or name == "index"
      or value.sort == "range" and (name == "start" or name == "stop" or name == "step")
  end
  return exists[kind] and exists[kind][name]
end

--- The attribute of a value that is a method; nil: it has none of this name. Refuses those that are
--- not built.
---@param value any
---@param name string
---@return table?
function methods.find(value, name)
  local kind = values.kind(value)
  if name:find "^__" then work.refuse("attribute", name) end
  if not has_attribute(value, kind, name) then return nil end
  text.unsafe(("the method '%s'"):format(name), value)
  local method = built[kind] and built[kind][name]
  if not method then
    work.refuse("of a " .. values.name(value) .. " the method", name, built[kind])
  end
  return values.callable(name, function(args, named) return method(value, args, named) end)
end

return methods
