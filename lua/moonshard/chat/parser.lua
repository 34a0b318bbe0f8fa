-- The parser of statements: a template becomes a list of nodes.
local Parser = require "moonshard.chat.expressions"
local lexer = require "moonshard.chat.lexer"
local work = require "moonshard.chat.work"

local parser = {}

-- Names that a template cannot set.
local FIXED <const> = { loop = true, caller = true, varargs = true, kwargs = true, ["true"] = true,
  ["false"] = true, none = true, ["True"] = true, ["False"] = true, None = true }

local statements = {}

local function close(self) self:expect("operator", "%}") end

local function name_to_set(self)
  local name = self:expect("name").value
  if FIXED[name] then work.fail("unsupported", "setting '%s' is not built", name) end
  return name
end

-- Names that get values: one, or several with commas.
local function targets(self)
  local parenthesis = self:take("operator", "(")
  local list = { name_to_set(self) }
  while self:take("operator", ",") do
    if not self:is "name" or self:is("name", "in") then
      work.fail("unsupported", "a comma at the end of names is not built")
    end
    list[#list + 1] = name_to_set(self)
  end
  if parenthesis then self:expect("operator", ")") end
  return list
end

-- Nodes up to one of these words after "{%", which is taken and returned.
local function body(self, ...)
  local ends, list = { ... }, {}
  work.enter()
  local begun = self.tokens[self.at - 1].line
  while true do
    local token = self.tokens[self.at]
    if not token then
      work.fail("corrupt", "'%s' is missing for the block that begins at line %d", ends[#ends],
        begun)
    end
    if self:is("operator", "{%") then
      local word = self.tokens[self.at + 1]
      for _, name in ipairs(ends) do
        if word and word.kind == "name" and word.value == name then
          self:take "operator"
          self:take "name"
          work.leave()
          return list, name
        end
      end
    end
    list[#list + 1] = self:statement()
  end
end

function statements.if_(self, line)
  local made, word = { kind = "if", line = line, branches = {} }, "elif"
  while word == "elif" do
    local branch = { condition = self:expressions(self.condition) }
    close(self)
    branch.body, word = body(self, "elif", "else", "endif")
    table.insert(made.branches, branch)
  end
  if word == "else" then
    close(self)
    made.otherwise = body(self, "endif")
  end
  close(self)
  return made
end

function statements.for_(self, line)
  local made = { kind = "for", line = line, targets = targets(self) }
  self:expect("name", "in")
  made.items = self:expressions(self.condition)
  if self:take("name", "if") then made.filter = self:expression() end
  if self:is("name", "recursive") then work.refuse("the loop", "recursive") end
  close(self)
  local word
  self.loops = self.loops + 1
  made.body, word = body(self, "else", "endfor")
  self.loops = self.loops - 1
  if word == "else" then
    close(self)
    made.otherwise = body(self, "endfor")
  end
  close(self)
  return made
end

-- A block whose text or code is apart from what is around it: a loop outside cannot be left.
local function apart(self, ...)
  local loops, inside = self.loops, self.inside
  self.loops, self.inside = 0, true
  local list = body(self, ...)
  self.loops, self.inside = loops, inside
  return list
end

function statements.set(self, line)
  local following = self.tokens[self.at + 1]
  if following and following.kind == "operator" and following.value == "." then
    local made = { kind = "set_attribute", line = line, object = self:expect("name").value }
    self:expect("operator", ".")
    made.name = self:expect("name").value
    self:expect("operator", "=")
    made.value = self:expressions(self.expression)
    close(self)
    return made
  end
  local made = { kind = "set", line = line, targets = targets(self) }
  if self:take("operator", "=") then
    made.value = self:expressions(self.expression)
    close(self)
    return made
  end
  if self:is("operator", "|") then work.refuse("a filter of the block", "set") end
  if #made.targets > 1 then self:expect("operator", "=") end
  close(self)
  made.body = apart(self, "endset")
  close(self)
  return made
end

function statements.macro(self, line)
  local made = { kind = "macro", line = line, name = name_to_set(self), parameters = {} }
  self:expect("operator", "(")
  while not self:take("operator", ")") do
    local parameter = { name = name_to_set(self) }
    if self:take("operator", "=") then parameter.default = self:expression()
    elseif #made.parameters > 0 and made.parameters[#made.parameters].default then
      work.fail("corrupt", "a parameter without a default is behind one with")
    end
    table.insert(made.parameters, parameter)
    if not self:is("operator", ")") then self:expect("operator", ",") end
  end
  close(self)
  self.macros = self.macros + 1
  made.body = apart(self, "endmacro")
  self.macros = self.macros - 1
  if self:is "name" then self:expect("name", made.name) end
  close(self)
  return made
end

function statements.generation(self, line)
  close(self)
  if self.inside then
    work.fail("unsupported", "the block 'generation' inside of generation, set or macro is not \z
      built")
  end
  local made = { kind = "generation", line = line }
  made.body = apart(self, "endgeneration")
  close(self)
  self.generation = true
  return made
end

local function leave_loop(word)
  return function(self, line)
    if self.loops == 0 then
      work.fail("unsupported", "'%s' outside of a loop is not built", word)
    end
    close(self)
    return { kind = word, line = line }
  end
end

statements["break"], statements["continue"] = leave_loop "break", leave_loop "continue"

local WORDS <const> = { ["if"] = statements.if_, ["for"] = statements.for_, set = statements.set,
  macro = statements.macro, generation = statements.generation, ["break"] = statements["break"],
  ["continue"] = statements["continue"] }

--- One statement, output or text.
---@return table
function Parser:statement()
  local token = self.tokens[self.at]
  if self:is "text" then
    self:take "text"
    return { kind = "text", value = token.value, line = token.line }
  end
  if self:take("operator", "{{") then
    local made = { kind = "output", line = token.line, value = self:expressions(self.expression) }
    self:expect("operator", "}}")
    return made
  end
  self:expect("operator", "{%")
  local word = self:expect "name"
  if not WORDS[word.value] then
    if word.value:find "^end" or word.value == "else" or word.value == "elif" then
      work.fail("corrupt", "unexpected '%s'", word.value)
    end
    work.refuse("block", word.value, WORDS)
  end
  return WORDS[word.value](self, word.line)
end

--- The nodes of a template, and whether it marks what is learned.
---@param source string
---@return { body: table[], generation: boolean }
function parser.parse(source)
  local self = setmetatable({ tokens = lexer.tokens(source), at = 1, loops = 0, macros = 0,
    inside = false, generation = false }, Parser)
  local list = {}
  while self.tokens[self.at] do
    work.at(self.tokens[self.at].line)
    list[#list + 1] = self:statement()
  end
  return { body = list, generation = self.generation }
end

return parser
