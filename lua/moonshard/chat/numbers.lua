-- Operators of numbers, strings and lists, with Python's results. Integers have 64 bits here and
-- any number of bits there, so what leaves 64 bits is refused.
local print = require "moonshard.chat.print"
local text = require "moonshard.chat.text"
local values = require "moonshard.chat.values"
local work = require "moonshard.chat.work"

local numbers = {}

local function overflow()
  return work.fail("unsupported", "an integer beyond 64 bits is not built")
end

local function both_integers(a, b)
  return math.type(a) == "integer" and math.type(b) == "integer"
end

local function add(a, b)
  local sum = a + b
  if both_integers(a, b) and (a ~ sum) & (b ~ sum) < 0 then overflow() end
  return sum
end

local function multiply(a, b)
  local product = a * b
  if both_integers(a, b) and a ~= 0
      and (product // a ~= b or a == -1 and b == math.mininteger) then
    overflow()
  end
  return product
end

local function subtract(a, b)
  local difference = a - b
  if both_integers(a, b) and (a ~ b) & (a ~ difference) < 0 then overflow() end
  return difference
end

local function divisor(b)
  if b == 0 then work.fail("mismatch", "a division by zero") end
  return b
end

local function raise(a, b)
  if not both_integers(a, b) or b < 0 then
    if a == 0 and b < 0 then work.fail("mismatch", "a division by zero") end
    local power = (a * 1.0) ^ b
    if power ~= power or math.abs(power) == math.huge then
      work.fail("unsupported", "this power is not built")
    end
    return power
  end
  local power = 1
  for _ = 1, b do
    power = multiply(power, a)
    work.spend(1)
    if a == 0 or a == 1 then break end
  end
  return power
end

-- Of floats: from the remainder, so that 1.0 // 0.1 is 9.0.
local function floor_division(a, b)
  local rest = math.fmod(a, b)
  local quotient = (a - rest) / b
  if rest ~= 0 and (rest < 0) ~= (b < 0) then quotient = quotient - 1 end
  if quotient == 0 then return 1 / (a / b) < 0 and -0.0 or 0.0 end
  local whole = math.floor(quotient) + 0.0
  return quotient - whole > 0.5 and whole + 1.0 or whole
end

local arithmetic = {
  ["+"] = add, ["-"] = subtract, ["*"] = multiply, ["**"] = raise,
  ["/"] = function(a, b)
    if math.max(math.abs(a), math.abs(b)) > 0x1p53 and both_integers(a, b) then overflow() end
    return (a * 1.0) / divisor(b)
  end,
  ["//"] = function(a, b)
    if both_integers(a, b) and a == math.mininteger and b == -1 then overflow() end
    if both_integers(a, b) then return a // divisor(b) end
    return floor_division(a * 1.0, divisor(b) * 1.0)
  end,
  ["%"] = function(a, b)
    local rest = a % divisor(b)
    if both_integers(a, b) or rest ~= 0 then return rest end
    return b < 0 and -0.0 or 0.0
  end,
}

local function repeated(value, count)
  count = math.max(values.number(count), 0)
  local list = {}
  if text.is(value) then
    work.text(#text.plain(value) * math.min(count, 1 << 40))
    work.spend(math.min(count, 1 << 40))
    for i = 1, count do list[i] = value end
    return text.concat(list)
  end
  work.spend(#value * math.min(count, 1 << 40))
  for _ = 1, count do table.move(value, 1, #value, #list + 1, list) end
  return values.list(list, value.sort)
end

--- A string with its values put in: %s, %d and %% are known.
---@param format string|ms.ChatText
---@param args any[]
---@return string|ms.ChatText
function numbers.format(format, args)
  local parts, at, used, bytes = {}, 1, 0, text.plain(format)
  while true do
    local from = bytes:find("%", at, true)
    parts[#parts + 1] = text.sub(format, at, (from or #bytes + 1) - 1)
    if not from then break end
    local kind = bytes:sub(from + 1, from + 1)
    if kind == "%" then parts[#parts + 1] = "%"
    else
      used = used + 1
      local value = args[used]
      if kind ~= "s" and kind ~= "d" then work.refuse("in a format", "%" .. kind) end
      if value == nil then work.fail("mismatch", "a format has more places than values") end
      if kind == "d" then
        value = values.number(value)
        if math.type(value) ~= "integer" then
          work.fail("unsupported", "%%d of a %s is not built", values.name(value))
        end
      end
      parts[#parts + 1] = print.str(value)
    end
    at = from + 2
  end
  if used < #args then work.fail("mismatch", "a format has fewer places than values") end
  return text.concat(parts)
end

-- Lists and tuples, of which two of one sort can be added.
local function sequence(value)
  return values.kind(value) == "list" and (value.sort == "list" or value.sort == "tuple")
end

-- An operator of strings or lists; nil: it has none.
local function of_sequences(operator, a, b)
  if operator == "+" then
    if text.is(a) and text.is(b) then return text.concat { a, b } end
    if sequence(a) and sequence(b) and a.sort == b.sort then
      local list = table.move(a, 1, #a, 1, {})
      return values.list(table.move(b, 1, #b, #list + 1, list), a.sort)
    end
  elseif operator == "*" then
    if (text.is(a) or sequence(a)) and math.type(values.number(b)) == "integer" then
      return repeated(a, b)
    end
    if (text.is(b) or sequence(b)) and math.type(values.number(a)) == "integer" then
      return repeated(b, a)
    end
  elseif operator == "%" and text.is(a) then
    if values.kind(b) == "dict" then work.refuse("in a format", "%(name)") end
    return numbers.format(a, values.kind(b) == "list" and b.sort == "tuple" and b or { b })
  end
end

--- The result of an operator of two values.
---@param operator string
---@param a any
---@param b any
---@return any
function numbers.binary(operator, a, b)
  local x, y = values.number(a), values.number(b)
  if type(x) == "number" and type(y) == "number" then return arithmetic[operator](x, y) end
  text.unsafe(("'%s'"):format(operator), a)
  text.unsafe(("'%s'"):format(operator), b)
  local result = of_sequences(operator, a, b)
  if result == nil then
    work.fail("mismatch", "'%s' of a %s and a %s has no result", operator, values.name(a),
      values.name(b))
  end
  return result
end

--- -value.
---@param value any
---@return number
function numbers.negative(value)
  local number = values.number(value)
  if type(number) ~= "number" then
    work.fail("mismatch", "'-' of a %s has no result", values.name(value))
  end
  if number == math.mininteger then overflow() end
  return -number
end

return numbers
