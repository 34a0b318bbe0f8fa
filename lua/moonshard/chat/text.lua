-- Strings of a template, which remember where they come from. One is a Lua string, or a table
-- { kind = "text", text, marks } whose marks { from, to, origin } say in order which bytes come
-- from which message. A mark of no bytes (to = from - 1) is kept: it is where an empty text was.
local work = require "moonshard.chat.work"

local text = {}

---@class ms.ChatText
---@field kind "text"
---@field text string
---@field marks { [1]: integer, [2]: integer, [3]: integer }[]
---@field safe? boolean

---@param value string|ms.ChatText
---@return string
function text.plain(value) return type(value) == "string" and value or value.text end
local plain = text.plain

---@param value any
---@return boolean
function text.is(value)
  return type(value) == "string" or type(value) == "table" and value.kind == "text"
end

local function make(bytes, marks)
  return #marks > 0 and { kind = "text", text = bytes, marks = marks } or bytes
end

--- A text that comes from one message.
---@param bytes string
---@param origin? integer nil: from none
---@return string|ms.ChatText
function text.mark(bytes, origin)
  return origin and make(bytes, { { 1, #bytes, origin } }) or bytes
end

--- What the filter "safe" makes. Jinja escapes what is added to such a string, so operations that
--- would do so refuse it.
---@param value string|ms.ChatText
---@return ms.ChatText
function text.safe(value)
  return { kind = "text", text = plain(value), marks = text.marks(value), safe = true }
end

--- Refuses a string that the filter "safe" made.
---@param what string
---@param value any
function text.unsafe(what, value)
  if type(value) == "table" and value.safe then
    work.fail("unsupported", "%s of what the filter 'safe' made is not built", what)
  end
end

--- The marks of a text, none for a Lua string.
---@param value string|ms.ChatText
---@return table[]
function text.marks(value) return type(value) == "string" and {} or value.marks end

--- The message of the byte at a place, or nil.
---@param value string|ms.ChatText
---@param place integer
---@return integer?
function text.origin(value, place)
  for _, mark in ipairs(text.marks(value)) do
    if mark[1] <= place and place <= math.max(mark[2], mark[1]) then return mark[3] end
  end
end

-- Adds marks that begin after `at` bytes to a list; neighbours of one message become one mark.
local function append(marks, more, at)
  for _, mark in ipairs(more) do
    local last = marks[#marks]
    if last and last[3] == mark[3] and last[2] + 1 == at + mark[1] then last[2] = at + mark[2]
    else marks[#marks + 1] = { at + mark[1], at + mark[2], mark[3] } end
  end
end

--- The texts of a list end to end.
---@param list (string|ms.ChatText)[]
---@param separator? string|ms.ChatText
---@return string|ms.ChatText
function text.concat(list, separator)
  local parts, marks, at = {}, {}, 0
  local function add(value)
    local bytes = plain(value)
    append(marks, text.marks(value), at)
    parts[#parts + 1], at = bytes, at + #bytes
    work.spend(1 + #bytes // 64)
    work.text(at)
  end
  for i, value in ipairs(list) do
    if separator and i > 1 then add(separator) end
    add(value)
  end
  return make(table.concat(parts), marks)
end

--- Bytes i to j, which may be none (j = i - 1).
---@param value string|ms.ChatText
---@param i integer
---@param j integer
---@return string|ms.ChatText
function text.sub(value, i, j)
  work.read(j - i)
  if type(value) == "string" then return value:sub(i, j) end
  local marks = {}
  for _, mark in ipairs(value.marks) do
    local from, to = math.max(mark[1], i), math.min(mark[2], j)
    local empty = mark[2] < mark[1] and i <= mark[1] and mark[1] <= j + 1
    if from <= to or empty or i > j and mark[1] <= i and i <= mark[2] + 1 then
      marks[#marks + 1] = { from - i + 1, math.max(to, from - 1) - i + 1, mark[3] }
    end
  end
  return make(value.text:sub(i, j), marks)
end

--- Applies a function to each part that comes from one message, or from none.
---@param value string|ms.ChatText
---@param f fun(bytes: string): string
---@return string|ms.ChatText
function text.each(value, f)
  work.read(4 * #plain(value))
  if type(value) == "string" then return f(value) end
  local parts, at = {}, 1
  for _, mark in ipairs(value.marks) do
    parts[#parts + 1] = f(value.text:sub(at, mark[1] - 1))
    parts[#parts + 1] = text.mark(f(value.text:sub(mark[1], mark[2])), mark[3])
    at = mark[2] + 1
  end
  parts[#parts + 1] = f(value.text:sub(at))
  return text.concat(parts)
end

--- How many characters it has.
---@param value string|ms.ChatText
---@return integer
function text.length(value)
  work.read(#plain(value))
  return utf8.len(plain(value))
end

--- The characters one by one.
---@param value string|ms.ChatText
---@return (string|ms.ChatText)[]
function text.characters(value)
  local list, bytes = {}, plain(value)
  work.read(8 * #bytes)
  for at, code in utf8.codes(bytes) do
    list[#list + 1] = text.sub(value, at, at + #utf8.char(code) - 1)
  end
  return list
end

-- What Python's str.isspace says, beside U+2000 to U+200A.
local SPACES <const> = {
  [9] = true, [10] = true, [11] = true, [12] = true, [13] = true, [0x1C] = true, [0x1D] = true,
  [0x1E] = true, [0x1F] = true, [0x20] = true, [0x85] = true, [0xA0] = true, [0x1680] = true,
  [0x2028] = true, [0x2029] = true, [0x202F] = true, [0x205F] = true, [0x3000] = true,
}

--- Whether a character is white space.
---@param code integer
---@return boolean
function text.is_space(code) return SPACES[code] or code >= 0x2000 and code <= 0x200A end

-- A function that says whether a character is one of these; white space unless given.
local function member(characters)
  if not characters then return text.is_space end
  local set = {}
  for _, code in utf8.codes(characters) do set[code] = true end
  return function(code) return set[code] end
end

--- The text without characters at its ends, white space unless given.
---@param value string|ms.ChatText
---@param characters? string
---@param left boolean
---@param right boolean
---@return string|ms.ChatText
function text.strip(value, characters, left, right)
  local bytes, has = plain(value), member(characters)
  local i, j = 1, #bytes
  while left and i <= j and has(utf8.codepoint(bytes, i)) do i = utf8.offset(bytes, 2, i) end
  while right and i <= j do
    local at = utf8.offset(bytes, 0, j)
    if not has(utf8.codepoint(bytes, at)) then break end
    j = at - 1
  end
  work.read(8 * (#bytes - (j - i)))
  return text.sub(value, i, j)
end

-- The last place at or before `from` at which a text begins in another one.
local function find_last(bytes, part, from)
  work.read(8 * math.max(from, 0))
  for at = from, 1, -1 do
    if bytes:sub(at, at + #part - 1) == part then return at end
  end
end

--- The parts between separators, at most `most` cuts, from the left or from the right.
---@param value string|ms.ChatText
---@param separator string
---@param most integer
---@param right boolean
---@return (string|ms.ChatText)[]
function text.split(value, separator, most, right)
  local bytes, list = plain(value), {}
  local i, j = 1, #bytes
  work.read(#bytes)
  while #list < most do
    local at
    if right then at = find_last(bytes, separator, j - #separator + 1)
    else at = bytes:find(separator, i, true) end
    if not at then break end
    if right then
      table.insert(list, 1, text.sub(value, at + #separator, j))
      j = at - 1
    else
      list[#list + 1] = text.sub(value, i, at - 1)
      i = at + #separator
    end
  end
  table.insert(list, right and 1 or #list + 1, text.sub(value, i, j))
  return list
end

--- The words between white space; after `most` cuts the rest is one word.
---@param value string|ms.ChatText
---@param most integer
---@return (string|ms.ChatText)[]
function text.words(value, most)
  local list, begun = {}, nil
  local bytes = plain(value)
  work.read(8 * #bytes)
  for at, code in utf8.codes(bytes) do
    local space = text.is_space(code)
    if not space and not begun then
      begun = at
      if #list == most then
        list[#list + 1] = text.sub(value, at, #bytes)
        return list
      end
    elseif space and begun then
      list[#list + 1], begun = text.sub(value, begun, at - 1), nil
    end
  end
  if begun then list[#list + 1] = text.sub(value, begun, #bytes) end
  return list
end

local BREAKS <const> = {
  [10] = true, [11] = true, [12] = true, [13] = true, [0x1C] = true, [0x1D] = true, [0x1E] = true,
  [0x85] = true, [0x2028] = true, [0x2029] = true,
}

--- The lines, with their ends if `keep`.
---@param value string|ms.ChatText
---@param keep? boolean
---@return (string|ms.ChatText)[]
function text.lines(value, keep)
  local list, i, bytes = {}, 1, plain(value)
  work.read(8 * #bytes)
  for at, code in utf8.codes(bytes) do
    if BREAKS[code] and at >= i then
      local stop = at + #utf8.char(code) - 1
      if code == 13 and bytes:byte(at + 1) == 10 then stop = at + 1 end
      list[#list + 1] = text.sub(value, i, keep and stop or at - 1)
      i = stop + 1
    end
  end
  if i <= #bytes then list[#list + 1] = text.sub(value, i, #bytes) end
  return list
end

--- The text with a part replaced, at most `most` times. What comes instead has the origin of what
--- it replaces, unless it has one.
---@param value string|ms.ChatText
---@param old string
---@param new string|ms.ChatText
---@param most integer
---@return string|ms.ChatText
function text.replace(value, old, new, most)
  local bytes, parts, i = plain(value), {}, 1
  work.read(#bytes)
  local count = 0
  while count < most do
    local at = bytes:find(old, i, true)
    if not at then break end
    parts[#parts + 1] = text.sub(value, i, at - 1)
    parts[#parts + 1] = type(new) == "string" and text.mark(new, text.origin(value, at)) or new
    i, count = at + #old, count + 1
  end
  if count == 0 then return value end
  parts[#parts + 1] = text.sub(value, i, #bytes)
  return text.concat(parts)
end

return text
