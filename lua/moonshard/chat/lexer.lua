-- The text of a template as tokens: text that is written as it is, and what is between braces.
local text = require "moonshard.chat.text"
local work = require "moonshard.chat.work"

---@class ms.ChatToken
--- "text", "name", "string", "integer", "float", "operator"; "{{", "}}", "{%", "%}" are operators.
---@field kind string
---@field value any
---@field line integer

local lexer = {}

local CLOSING <const> = { [")"] = "(", ["]"] = "[", ["}"] = "{" }
local OPERATORS <const> = { "//", "**", "==", "!=", "<=", ">=", "+", "-", "*", "/", "%", "~", "<",
  ">", "=", "|", ".", ",", ":", "(", ")", "[", "]", "{", "}" }
local ESCAPES <const> = { n = "\n", t = "\t", r = "\r", a = "\a", b = "\b", f = "\f", v = "\v",
  ["\\"] = "\\", ["'"] = "'", ['"'] = '"', ["\n"] = "" }
local HEX <const> = { x = 2, u = 4, U = 8 }

-- What is read: source, position, line, tokens, and whether the position begins a line.
local Lexer = {}
Lexer.__index = Lexer

function Lexer:add(kind, value)
  self.tokens[#self.tokens + 1] = { kind = kind, value = value, line = self.line }
end

-- Goes on to a position.
function Lexer:move(to)
  local _, breaks = self.source:sub(self.at, to - 1):gsub("\n", "")
  self.at, self.line = to, self.line + breaks
  work.at(self.line)
end

-- One escape in a string, at a backslash: its text, and the position after it.
local function escape(bytes, at)
  local c = bytes:sub(at + 1, at + 1)
  local octal = bytes:match("^[0-7][0-7]?[0-7]?", at + 1)
  if octal then return utf8.char(tonumber(octal, 8)), at + 1 + #octal end
  if ESCAPES[c] then return ESCAPES[c], at + 2 end
  if c == "N" then work.fail("unsupported", "the escape '\\N' is not built") end
  if not HEX[c] then return "\\", at + 1 end
  local digits = bytes:match("^%x+", at + 2) or ""
  digits = digits:sub(1, HEX[c])
  local code = tonumber(digits, 16)
  if #digits < HEX[c] or code > 0x10FFFF or code >= 0xD800 and code <= 0xDFFF then
    work.fail("corrupt", "'\\%s%s' is no character", c, digits)
  end
  return utf8.char(code), at + 2 + #digits
end

-- A string in quotes, without them, and the position after it.
local function string_at(source, at)
  local quote, parts, from = source:sub(at, at), {}, at + 1
  at = from
  while true do
    local next = source:find("[\\" .. quote .. "]", at)
    if not next then work.fail("corrupt", "a string has no end") end
    parts[#parts + 1] = source:sub(at, next - 1)
    if source:sub(next, next) == quote then return table.concat(parts), next + 1 end
    parts[#parts + 1], at = escape(source, next)
  end
end

-- A number, and the position after it.
local function number_at(source, at)
  local digits = source:match("^%d+", at)
  local fraction = source:match("^%.%d+", at + #digits) or ""
  local exponent = source:match("^[eE][-+]?%d+", at + #digits + #fraction) or ""
  local whole = digits .. fraction .. exponent
  if source:find("^[%w_]", at + #whole) or #whole == #digits and digits:find "^0+[1-9]" then
    work.fail("unsupported", "the number '%s' is not built",
      source:match("^[%w_.]+", at))
  end
  local value = tonumber(whole)
  if #whole == #digits and math.type(value) ~= "integer" then
    work.fail("unsupported", "a number beyond 64 bits (%s) is not built", whole)
  end
  return value, at + #whole
end

-- One token between braces. open: brackets that wait for their ends.
function Lexer:token(open)
  local source, at = self.source, self.at
  local c = source:sub(at, at)
  if c == "'" or c == '"' then
    local value, behind = string_at(source, at)
    self:add("string", value)
    return self:move(behind)
  end
  if c:find "%d" then
    local value, behind = number_at(source, at)
    self:add(math.type(value), value)
    return self:move(behind)
  end
  local name = source:match("^[%a_][%w_]*", at)
  if name then
    self:add("name", name)
    return self:move(at + #name)
  end
  for _, operator in ipairs(OPERATORS) do
    if source:sub(at, at + #operator - 1) == operator then
      if ("([{"):find(operator, 1, true) then open[#open + 1] = operator end
      if CLOSING[operator] and table.remove(open) ~= CLOSING[operator] then
        work.fail("corrupt", "unexpected '%s'", operator)
      end
      self:add("operator", operator)
      return self:move(at + #operator)
    end
  end
  work.fail("corrupt", "unexpected character '%s'", source:match("^" .. utf8.charpattern, at))
end

-- White space after an end that has the sign "-", or the line break that a block swallows.
function Lexer:finish(behind, sign, swallows)
  if sign == "-" then
    while behind <= #self.source and text.is_space(utf8.codepoint(self.source, behind)) do
      behind = utf8.offset(self.source, 2, behind)
    end
  elseif sign ~= "+" and swallows and self.source:sub(behind, behind) == "\n" then
    behind = behind + 1
  end
  self:move(behind)
  self.fresh = self.source:sub(behind - 1, behind - 1) == "\n"
end

-- What is between braces, up to their end.
function Lexer:inside(close)
  local open = {}
  while true do
    local _, last = self.source:find("^[ \t\n\r\f\v]*", self.at)
    self:move(last + 1)
    local sign = self.source:match("^[-+]?", self.at)
    if sign == "+" and close == "}}" then sign = "" end
    local behind = self.at + #sign + 2
    if #open == 0 and self.source:sub(behind - 2, behind - 1) == close then
      self:add("operator", close)
      return self:finish(behind, sign, close == "%}")
    end
    if self.at > #self.source then work.fail("corrupt", "'%s' is missing at the end", close) end
    self:token(open)
  end
end

-- Text before a beginning with a sign. A block that begins its line takes the spaces before it.
function Lexer:write(bytes, sign, block)
  if sign == "-" then bytes = text.strip(bytes, nil, false, true)
  elseif sign ~= "+" and block then
    local before, spaces = bytes:match "^(.*\n)([^\n]*)$"
    if not before then before, spaces = "", bytes end
    if (before ~= "" or self.fresh) and text.strip(spaces, nil, true, false) == "" then
      bytes = before
    end
  end
  if bytes ~= "" then self:add("text", bytes) end
end

function Lexer:comment(at)
  local close = self.source:find("#}", at, true)
  if not close then work.fail("corrupt", "a comment has no end") end
  local sign = close > at and self.source:match("^[-+]", close - 1) or ""
  self:move(close)
  return self:finish(close + 2, sign, true)
end

-- Text that is written as it is, up to endraw.
function Lexer:raw(behind, sign)
  self:finish(behind, sign, false)
  local from, to, first, last = self.source:find("{%%([-+]?)%s*endraw%s*([-+]?)%%}", self.at)
  if not from then work.fail("corrupt", "raw has no end") end
  self:write(self.source:sub(self.at, from - 1), first, true)
  self:move(from)
  return self:finish(to + 1, last, true)
end

-- One piece of text and what begins after it; false at the end.
function Lexer:piece()
  local from = self.source:find("{[%%{#]", self.at)
  if not from then
    self:write(self.source:sub(self.at), "+", false)
    return false
  end
  local open = self.source:sub(from, from + 1)
  local sign = self.source:match("^[-+]?", from + 2)
  self:write(self.source:sub(self.at, from - 1), sign, open ~= "{{")
  local behind = from + 2 + #sign
  self:move(behind)
  if open == "{#" then
    self:comment(behind)
    return true
  end
  local _, last, close = self.source:find("^%s*raw%s*(%-?)%%}", behind)
  if open == "{%" and last then
    self:raw(last + 1, close)
    return true
  end
  self:add("operator", open)
  self:inside(open == "{{" and "}}" or "%}")
  return true
end

--- The tokens of a template. The last line break of the text does not count.
---@param source string
---@return ms.ChatToken[]
function lexer.tokens(source)
  if not utf8.len(source) then work.fail("corrupt", "the template is not UTF-8") end
  source = source:gsub("\r\n?", "\n"):gsub("\n$", "")
  local self = setmetatable({ source = source, at = 1, line = 1, tokens = {}, fresh = true }, Lexer)
  work.at(1)
  while self:piece() do work.spend(1) end
  return self.tokens
end

return lexer
