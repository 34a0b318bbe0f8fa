-- The parser of expressions: tokens become nodes { kind, line, ... }, with Jinja's precedence: "~"
-- binds closer than "+" and "-", a filter or a test closer than any operator, "**" to the left.
local filters = require "moonshard.chat.filters"
local tests = require "moonshard.chat.tests"
local work = require "moonshard.chat.work"

---@class ms.ChatParser
---@field tokens ms.ChatToken[]
---@field at integer
---@field macros integer how many macros are around the token
---@field loops integer how many loops around it `break` may leave
---@field inside boolean whether the text around it is apart from the output
---@field generation boolean whether a block "generation" was read
local Parser = {}
Parser.__index = Parser

local CONSTANTS <const> = { ["true"] = "true", ["True"] = "true", ["false"] = "false",
  ["False"] = "false", none = "none", None = "none" }

-- Names that have a meaning of their own in macros.
local CALLS <const> = { caller = true, varargs = true, kwargs = true }

--- Whether the current token is this operator, or this name.
---@param kind string
---@param value? string
---@return boolean
function Parser:is(kind, value)
  local token = self.tokens[self.at]
  return token ~= nil and token.kind == kind and (value == nil or token.value == value)
end

--- Takes the current token if it is this one, nil if not.
---@param kind string
---@param value? string
---@return ms.ChatToken?
function Parser:take(kind, value)
  if not self:is(kind, value) then return nil end
  self.at = self.at + 1
  local following = self.tokens[self.at]
  if following then work.at(following.line) end
  return self.tokens[self.at - 1]
end

--- Takes the current token, which must be this one.
---@param kind string
---@param value? string
---@return ms.ChatToken
function Parser:expect(kind, value)
  local token = self:take(kind, value)
  if token then return token end
  local found = self.tokens[self.at]
  return work.fail("corrupt", "%s is expected, not %s", value and ("'%s'"):format(value) or kind,
    found and ("'%s'"):format(tostring(found.value)) or "the end")
end

local function operator(self, value) return self:take("operator", value) end

-- A node at the line of the current token.
local function node(self, kind, fields)
  local token = self.tokens[self.at] or self.tokens[#self.tokens]
  fields.kind, fields.line = kind, token.line
  return fields
end

-- Arguments of a call up to ")": positional ones in the list, and named.
local function arguments(self, into)
  into.args, into.named = {}, {}
  while not operator(self, ")") do
    if self:is("operator", "*") or self:is("operator", "**") then
      work.refuse("an argument of the form", self.tokens[self.at].value .. "...")
    end
    local following = self.tokens[self.at + 1]
    if self:is "name" and following and following.kind == "operator" and following.value == "=" then
      local name = self:take("name").value
      operator(self, "=")
      into.named[name] = self:expression()
    else
      if next(into.named) then
        work.fail("corrupt", "an argument without a name is behind one with")
      end
      into.args[#into.args + 1] = self:expression()
    end
    if not self:is("operator", ")") then self:expect("operator", ",") end
  end
  return into
end

-- Items up to a closing bracket, which is taken. Returns whether a comma was among them.
local function items(self, close, list)
  local comma = false
  while not operator(self, close) do
    list[#list + 1] = self:expression()
    if not self:is("operator", close) then
      self:expect("operator", ",")
      comma = true
    end
  end
  return comma
end

local function dict(self)
  local made = node(self, "dict", { pairs = {} })
  while not operator(self, "}") do
    local key = self:expression()
    self:expect("operator", ":")
    made.pairs[#made.pairs + 1] = { key, self:expression() }
    if not self:is("operator", "}") then self:expect("operator", ",") end
  end
  return made
end

local function primary(self)
  local token = self.tokens[self.at]
  if self:is "name" then
    self:take "name"
    local constant = CONSTANTS[token.value]
    if self.macros > 0 and CALLS[token.value] then work.refuse("the name", token.value) end
    return { kind = constant and "constant" or "name", name = constant or token.value,
      line = token.line }
  end
  if self:is "integer" or self:is "float" then
    return { kind = "number", value = self:take(token.kind).value, line = token.line }
  end
  if self:is "string" then
    local parts = {}
    while self:is "string" do parts[#parts + 1] = self:take("string").value end
    return { kind = "string", value = table.concat(parts), line = token.line }
  end
  if operator(self, "(") then
    local list = node(self, "tuple", {})
    if not items(self, ")", list) and #list == 1 then return list[1] end
    return list
  end
  if operator(self, "[") then
    local list = node(self, "list", {})
    items(self, "]", list)
    return list
  end
  if operator(self, "{") then return dict(self) end
  return work.fail("corrupt", "an expression is expected, not %s",
    token and ("'%s'"):format(tostring(token.value)) or "the end")
end

-- What is between "[" and "]": an index, or the three parts of a slice.
local function subscript(self, object)
  local made, parts, colons = node(self, "item", { object = object }), {}, 0
  while not operator(self, "]") do
    if colons < 2 and operator(self, ":") then colons = colons + 1
    elseif parts[colons] then self:expect("operator", "]")
    else parts[colons] = self:expression() end
  end
  if colons == 0 then
    made.index = parts[0] or work.fail("corrupt", "an index is expected, not ']'")
    return made
  end
  made.kind, made.first, made.last, made.step = "slice", parts[0], parts[1], parts[2]
  return made
end

-- Attributes, indexes and calls after a value.
local function postfix(self, object)
  while true do
    if operator(self, ".") then
      local index = self:take "integer"
      if index then
        object = node(self, "item", { object = object,
          index = { kind = "number", value = index.value, line = index.line } })
      else
        local name = self:expect("name").value
        object = node(self, "attribute", { object = object, name = name })
      end
    elseif operator(self, "[") then object = subscript(self, object)
    elseif operator(self, "(") then
      object = arguments(self, node(self, "call", { callee = object }))
    else return object end
  end
end

local function filter(self, value)
  local made = node(self, "filter", { value = value, name = self:expect("name").value })
  if self:is("operator", ".") or not filters.known[made.name] then
    work.refuse("filter", made.name, filters.known)
  end
  if operator(self, "(") then return arguments(self, made) end
  made.args, made.named = {}, {}
  return made
end

local WORDS_BEHIND_TEST <const> = { ["else"] = true, ["or"] = true, ["and"] = true }
local MISTAKES <const> = { is = true, ["in"] = true, ["not"] = true, ["if"] = true }

local function test(self, value)
  local negated = self:take("name", "not") ~= nil
  local made = node(self, "test", { value = value, name = self:expect("name").value,
    negated = negated, args = {}, named = {} })
  if self:is("operator", ".") or not tests.known[made.name] then
    work.refuse("test", made.name, tests.known)
  end
  if operator(self, "(") then return arguments(self, made) end
  local token = self.tokens[self.at]
  local kind = token and token.kind
  if kind == "string" or kind == "integer" or kind == "float"
      or kind == "name" and not WORDS_BEHIND_TEST[token.value]
      or kind == "operator" and (token.value == "[" or token.value == "{") then
    -- Jinja takes any other word for an argument, also these.
    if kind == "name" and MISTAKES[token.value] then
      work.fail("corrupt", "'%s' behind a test is not built: put the test in parentheses",
        token.value)
    end
    made.args[1] = postfix(self, primary(self))
  end
  return made
end

-- Filters and tests, and calls of their results.
local function filtered(self, value)
  while true do
    if operator(self, "|") then value = filter(self, value)
    elseif self:take("name", "is") then value = test(self, value)
    elseif operator(self, "(") then value = arguments(self, node(self, "call", { callee = value }))
    else return value end
  end
end

local function unary(self, plain)
  work.enter()
  local value
  if operator(self, "-") then value = node(self, "negative", { value = unary(self, true) })
  elseif operator(self, "+") then value = node(self, "positive", { value = unary(self, true) })
  else value = primary(self) end
  value = postfix(self, value)
  work.leave()
  return plain and value or filtered(self, value)
end

-- A level of operators that are grouped from the left.
local function level(operators, inner)
  return function(self)
    local left = inner(self)
    while true do
      local token = self.tokens[self.at]
      if not token or token.kind ~= "operator" or not operators[token.value] then return left end
      self:take "operator"
      left = { kind = "binary", operator = token.value, line = token.line, left = left,
        right = inner(self) }
    end
  end
end

local power = level({ ["**"] = true }, unary)
local product = level({ ["*"] = true, ["/"] = true, ["//"] = true, ["%"] = true }, power)

local function joined(self)
  local first = product(self)
  if not self:is("operator", "~") then return first end
  local made = node(self, "join", { first })
  while operator(self, "~") do made[#made + 1] = product(self) end
  return made
end

local sum = level({ ["+"] = true, ["-"] = true }, joined)
local COMPARISONS <const> = { ["=="] = true, ["!="] = true, ["<"] = true, ["<="] = true,
  [">"] = true, [">="] = true }

-- The comparison at the current token, which is taken, or nil.
local function comparison(self)
  local token = self.tokens[self.at]
  if token and token.kind == "operator" and COMPARISONS[token.value] then
    return self:take("operator").value
  end
  if self:take("name", "in") then return "in" end
  local following = self.tokens[self.at + 1]
  if self:is("name", "not") and following and following.value == "in"
      and following.kind == "name" then
    self:take "name"
    self:take "name"
    return "not in"
  end
end

local function compared(self)
  local first = sum(self)
  local made = node(self, "comparison", { first = first })
  for name in comparison, self do made[#made + 1] = { name, sum(self) } end
  return #made > 0 and made or first
end

local function negation(self)
  if not self:take("name", "not") then return compared(self) end
  work.enter()
  local made = node(self, "not", { value = negation(self) })
  work.leave()
  return made
end

-- Words that group from the left, "and" or "or".
local function words(word, inner)
  return function(self)
    local left = inner(self)
    while self:take("name", word) do
      left = node(self, word, { left = left, right = inner(self) })
    end
    return left
  end
end

local disjunction = words("or", words("and", negation))

--- An expression without "if" at its end.
---@return table
function Parser:condition()
  work.enter()
  local value = disjunction(self)
  work.leave()
  return value
end

--- An expression.
---@return table
function Parser:expression()
  local value = self:condition()
  while self:take("name", "if") do
    local condition = self:condition()
    work.enter()
    value = node(self, "choice", { condition = condition, yes = value,
      no = self:take("name", "else") and self:expression() or nil })
    work.leave()
  end
  return value
end

--- One expression, or several with commas as a tuple. inner: the method that reads each.
---@param inner fun(self: ms.ChatParser): table
---@return table
function Parser:expressions(inner)
  local first = inner(self)
  if not self:is("operator", ",") then return first end
  local made = node(self, "tuple", { first })
  while operator(self, ",") do
    if self:is("operator", "%}") or self:is("operator", "}}") then break end
    made[#made + 1] = inner(self)
  end
  return made
end

return Parser
