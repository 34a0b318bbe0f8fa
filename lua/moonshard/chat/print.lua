-- How values look as text: what Python's str and repr give, and JSON.
local text = require "moonshard.chat.text"
local values = require "moonshard.chat.values"
local work = require "moonshard.chat.work"

local print = {}

-- The fewest digits that mean this number, and its exponent: 0.15 is "15", -1.
local function digits_of(number)
  for digits = 0, 16 do
    local shown = ("%%.%de"):format(digits):format(number):gsub(",", ".")
    if tonumber(shown) == number then
      local lead, rest, exponent = shown:match "^(%d)%.?(%d*)e([-+]%d+)$"
      return (lead .. rest):gsub("0+$", ""), tonumber(exponent)
    end
  end
end

--- A number as Python's repr shows it.
---@param number number
---@return string
function print.number(number)
  if math.type(number) == "integer" then return tostring(number) end
  if number ~= number then return "nan" end
  local sign, size = (1 / number < 0 or number < 0) and "-" or "", math.abs(number)
  if size == math.huge then return sign .. "inf" end
  if size == 0 then return sign .. "0.0" end
  if size >= 0x1p63 and size == math.floor(size) then
    work.fail("unsupported", "a number beyond 64 bits (%g) is not built", number)
  end
  local digits, exponent = digits_of(size)
  if exponent < -4 or exponent >= 16 then
    local rest = digits:sub(2)
    return ("%s%s%s%se%s%02d"):format(sign, digits:sub(1, 1), rest ~= "" and "." or "", rest,
      exponent < 0 and "-" or "+", math.abs(exponent))
  end
  if exponent < 0 then return sign .. "0." .. ("0"):rep(-exponent - 1) .. digits end
  digits = digits .. ("0"):rep(exponent + 1 - #digits)
  local rest = digits:sub(exponent + 2)
  return sign .. digits:sub(1, exponent + 1) .. "." .. (rest ~= "" and rest or "0")
end

-- Characters beyond ASCII that Python's repr shows as they are. Others may be shown as escapes.
local SHOWN <const> = {
  { 0xA1, 0xAC }, { 0xAE, 0x24F }, { 0x391, 0x3A1 }, { 0x3A3, 0x3C9 }, { 0x400, 0x481 },
  { 0x2010, 0x2027 }, { 0x2030, 0x205E }, { 0x3001, 0x301C }, { 0x3041, 0x3096 },
  { 0x30A1, 0x30FA }, { 0x4E00, 0x9FA5 }, { 0xAC00, 0xD7A3 }, { 0x1F600, 0x1F64F },
}

local function is_shown(code)
  for _, range in ipairs(SHOWN) do
    if range[1] <= code and code <= range[2] then return true end
  end
end

local ESCAPES <const> = { ["\\"] = "\\\\", ["\n"] = "\\n", ["\r"] = "\\r", ["\t"] = "\\t" }

local function repr_string(value)
  text.unsafe("printing a list or a dict", value)
  local bytes = text.plain(value)
  for _, code in utf8.codes(bytes) do
    if code >= 0x80 and not is_shown(code) then
      work.fail("unsupported", "printing a list or a dict with the character U+%04X is not built: \z
        tojson writes it", code)
    end
  end
  local quote = bytes:find("'", 1, true) and not bytes:find('"', 1, true) and '"' or "'"
  local shown = text.each(value, function(part)
    return (part:gsub("[%c\\" .. quote .. "]", function(c)
      return ESCAPES[c] or c == quote and "\\" .. c or ("\\x%02x"):format(c:byte())
    end))
  end)
  local origin = text.origin(value, 1)
  return text.concat { text.mark(quote, origin), shown, text.mark(quote, origin) }
end

-- Text around the items of a list or a dict: all of it has the origin of the whole.
local function surround(value, open, parts, close)
  local function own(bytes) return text.mark(bytes, value.origin) end
  local list = { own(open) }
  for i, part in ipairs(parts) do
    if i > 1 then list[#list + 1] = own(", ") end
    list[#list + 1] = part
  end
  list[#list + 1] = own(close)
  return text.concat(list)
end

local function repr_dict(value)
  local parts = {}
  for i, key in ipairs(value.keys) do
    parts[i] = text.concat({ print.repr(key), print.repr(values.get(value, key)) },
      text.mark(": ", value.origin))
  end
  return surround(value, "{", parts, "}")
end

local function repr_list(value)
  if value.sort ~= "list" and value.sort ~= "tuple" then
    work.fail("unsupported", "printing a %s is not built", value.sort)
  end
  local parts = {}
  for i, item in ipairs(value) do parts[i] = print.repr(item) end
  if value.sort == "list" then return surround(value, "[", parts, "]") end
  return surround(value, "(", parts, #parts == 1 and ",)" or ")")
end

--- Python's repr.
---@param value any
---@return string|ms.ChatText
function print.repr(value)
  local kind = values.kind(value)
  local result
  work.enter()
  if kind == "string" then result = repr_string(value)
  elseif kind == "list" then result = repr_list(value)
  elseif kind == "dict" then result = repr_dict(value)
  elseif kind == "undefined" then result = "Undefined"
  else result = print.str(value) end
  work.leave()
  return result
end

--- Python's str.
---@param value any
---@return string|ms.ChatText
function print.str(value)
  local kind = values.kind(value)
  if kind == "string" then return value end
  if kind == "boolean" then return value and "True" or "False" end
  if kind == "integer" or kind == "float" then return print.number(value) end
  if kind == "none" then return "None" end
  if kind == "undefined" then return "" end
  if kind == "list" or kind == "dict" then return print.repr(value) end
  return work.fail("unsupported", "printing a %s is not built", kind)
end

return print
