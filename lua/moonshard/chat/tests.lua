-- The tests after "is", which the filters select and reject know, too.
local arguments = require "moonshard.chat.arguments"
local numbers = require "moonshard.chat.numbers"
local print = require "moonshard.chat.print"
local text = require "moonshard.chat.text"
local values = require "moonshard.chat.values"
local work = require "moonshard.chat.work"

local tests = {}

--- name -> { how many arguments, function of a value and these }
---@type table<string, { [1]: integer, [2]: function }>
local known = {}
tests.known = known

local kind = values.kind

local function of_kind(...)
  local kinds = {}
  for _, name in ipairs { ... } do kinds[name] = true end
  return { 0, function(value) return kinds[kind(value)] == true end }
end

known.string = of_kind "string"
known.boolean = of_kind "boolean"
known.integer = of_kind "integer"
known.float = of_kind "float"
known.number = of_kind("integer", "float", "boolean")
known.mapping = of_kind "dict"
known.none = of_kind "none"
known.undefined = of_kind "undefined"
known.iterable = of_kind("string", "list", "dict", "undefined", "loop")
known.defined = { 0, function(value) return kind(value) ~= "undefined" end }
known["true"] = { 0, function(value) return value == true end }
known["false"] = { 0, function(value) return value == false end }
known.callable = { 0, function(value)
  if kind(value) == "undefined" or kind(value) == "loop" then
    work.refuse("of this value the test", "callable")
  end
  return kind(value) == "function"
end }
known.sequence = { 0, function(value)
  if kind(value) == "list" then return value.sort ~= "view" and value.sort ~= "generator" end
  return kind(value) == "string" or kind(value) == "dict" or kind(value) == "undefined"
end }

local function modulus(value, by) return numbers.binary("%", value, by) end

-- "%" of a string is its format.
local function a_number(value)
  value = values.number(value)
  if type(value) == "number" then return value end
  return work.fail("mismatch", "a number is expected, not a %s", values.name(value))
end

known.odd = { 0, function(value) return modulus(a_number(value), 2) == 1 end }
known.even = { 0, function(value) return modulus(a_number(value), 2) == 0 end }
known.divisibleby = { 1, function(value, by)
  return modulus(a_number(value), a_number(by)) == 0
end }

local function letters(name, f)
  return { 0, function(value)
    local bytes = text.plain(print.str(value))
    if bytes:find "[\x80-\xff]" then
      work.fail("unsupported", "the test '%s' of text that is not ASCII is not built", name)
    end
    return bytes:find "%a" ~= nil and f(bytes) == bytes
  end }
end
known.lower, known.upper = letters("lower", string.lower), letters("upper", string.upper)

known.sameas = { 1, function(value, other)
  if type(other) ~= "boolean" and other ~= values.none then
    work.refuse("with this value the test", "sameas")
  end
  return value == other
end }

known["in"] = { 1, function(value, whole) return values.contains(whole, value) end }

--- The result of a comparison by its operator.
---@param operator string
---@param a any
---@param b any
---@return boolean
function tests.compare(operator, a, b)
  if operator == "==" then return values.equal(a, b) end
  if operator == "!=" then return not values.equal(a, b) end
  if operator == "<" then return values.less(a, b) end
  if operator == ">" then return values.less(b, a) end
  if operator == "in" then return values.contains(b, a) end
  if operator == "not in" then return not values.contains(b, a) end
  local low, high = a, b
  if operator == ">=" then low, high = b, a end
  local x, y = values.number(low), values.number(high)
  -- A NaN is neither less nor greater.
  if type(x) == "number" and type(y) == "number" then return x <= y end
  return not values.less(high, low)
end

for operator, names in pairs { ["=="] = "eq equalto", ["!="] = "ne", ["<"] = "lt lessthan",
  [">"] = "gt greaterthan", ["<="] = "le", [">="] = "ge" } do
  local entry = { 1, function(a, b) return tests.compare(operator, a, b) end }
  known[operator] = entry
  for name in names:gmatch "%S+" do known[name] = entry end
end

--- The result of a test.
---@param name string
---@param value any
---@param args any[]
---@param named table<string, any>
---@return boolean
function tests.apply(name, value, args, named)
  local entry = known[name] or work.refuse("test", name, known)
  if #args ~= entry[1] or next(named) then
    work.fail("mismatch", "the test '%s' takes %d arguments", name, entry[1])
  end
  return entry[2](value, arguments.bind("the test " .. name, { "other" }, args, named))
end

return tests
