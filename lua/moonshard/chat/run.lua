-- Carries out the statements of a template and collects what it writes.
local evaluate = require "moonshard.chat.evaluate"
local print = require "moonshard.chat.print"
local text = require "moonshard.chat.text"
local values = require "moonshard.chat.values"
local work = require "moonshard.chat.work"

local value_of = evaluate.value

-- A rendering: the pieces that were written, how many bytes they are, and the ranges that blocks
-- marked as learned, from their first byte to the one after the last, from 0.
---@class ms.ChatRun
---@field pieces (string|ms.ChatText)[]
---@field length integer
---@field marked { [1]: integer, [2]: integer }[]
local Run = {}
Run.__index = Run

-- kind of a node -> method of a run: node, scope. It returns "break" or "continue", or nothing.
local statements = {}

local function inner(scope) return { names = {}, outer = scope } end

function Run:write(value)
  local bytes = #text.plain(value)
  work.write(bytes)
  self.pieces[#self.pieces + 1] = value
  self.length = self.length + bytes
end

---@param nodes table[]
---@param scope table
---@return string? "break" or "continue"
function Run:body(nodes, scope)
  work.enter()
  for _, node in ipairs(nodes) do
    work.spend(1)
    work.at(node.line)
    local left = statements[node.kind](self, node, scope)
    if left then
      work.leave()
      return left
    end
  end
  work.leave()
end

-- What a body writes, as one text.
function Run:text_of(nodes, scope)
  local pieces, length = self.pieces, self.length
  self.pieces = {}
  self:body(nodes, scope)
  local made = text.concat(self.pieces)
  -- Those bytes are counted once more when the text is written.
  self.pieces, self.length = pieces, length
  return made
end

function statements.text(self, node) self:write(node.value) end

function statements.output(self, node, scope)
  local value = value_of(node.value, scope)
  work.at(node.line)
  self:write(print.str(value))
end

statements["if"] = function(self, node, scope)
  for _, branch in ipairs(node.branches) do
    if values.truth(value_of(branch.condition, scope)) then return self:body(branch.body, scope) end
  end
  if node.otherwise then return self:body(node.otherwise, scope) end
end

-- Gives names their values: one its value, several the items of it.
local function assign(names, value, scope)
  if #names == 1 then
    scope.names[names[1]] = value
    return
  end
  local items = values.iterate(value, "names that get values")
  if #items ~= #names then
    work.fail("mismatch", "%d names get %d values", #names, #items)
  end
  for i, name in ipairs(names) do scope.names[name] = items[i] end
end

-- The object `loop` of one pass of a loop over items.
local function loop_of(items, i)
  local count = #items
  local fields = {
    index = i, index0 = i - 1, revindex = count - i + 1, revindex0 = count - i, first = i == 1,
    last = i == count, length = count, depth = 1, depth0 = 0,
  }
  fields.previtem = i > 1 and items[i - 1]
  if i == 1 then fields.previtem = values.undefined "loop.previtem" end
  fields.nextitem = items[i + 1]
  if i == count then fields.nextitem = values.undefined "loop.nextitem" end
  fields.cycle = values.callable("cycle", function(args, named)
    if #args == 0 or next(named) then work.fail("mismatch", "loop.cycle takes values") end
    return args[(i - 1) % #args + 1]
  end)
  return { kind = "loop", read = function(name)
    if fields[name] == nil then work.refuse("of loop the attribute", name, fields) end
    return fields[name]
  end }
end

-- The items of a loop that its filter leaves.
local function filtered(node, scope)
  local items = values.iterate(value_of(node.items, scope), "for")
  if not node.filter then return items end
  local list = {}
  for _, item in ipairs(items) do
    local within = inner(scope)
    assign(node.targets, item, within)
    if values.truth(value_of(node.filter, within)) then list[#list + 1] = item end
  end
  return list
end

statements["for"] = function(self, node, scope)
  local items = filtered(node, scope)
  for i, item in ipairs(items) do
    work.spend(10)
    local within = inner(scope)
    within.names.loop = loop_of(items, i)
    assign(node.targets, item, within)
    if self:body(node.body, within) == "break" then return nil end
  end
  if #items == 0 and node.otherwise then return self:body(node.otherwise, inner(scope)) end
end

statements["break"] = function() return "break" end
statements["continue"] = function() return "continue" end

function statements.set(self, node, scope)
  local value
  if node.body then value = self:text_of(node.body, inner(scope))
  else value = value_of(node.value, scope) end
  work.at(node.line)
  assign(node.targets, value, scope)
end

function statements.set_attribute(_, node, scope)
  local object = value_of({ kind = "name", name = node.object, line = node.line }, scope)
  local value = value_of(node.value, scope)
  if values.kind(object) ~= "namespace" then
    work.fail("mismatch", "'%s' is a %s, and only what namespace() makes has attributes to set",
      node.object, values.name(object))
  end
  object.fields[node.name] = value
end

-- The scope of a call of a macro: its parameters.
local function parameters(node, scope, args, named)
  local within, left = inner(scope), 0
  for _ in pairs(named) do left = left + 1 end
  if #args > #node.parameters then
    work.fail("mismatch", "the macro '%s' takes %d arguments, not %d", node.name, #node.parameters,
      #args)
  end
  for i, parameter in ipairs(node.parameters) do
    local value, given = args[i], named[parameter.name]
    if given ~= nil then
      if value ~= nil then
        work.fail("mismatch", "the macro '%s' has two values for '%s'", node.name, parameter.name)
      end
      value, left = given, left - 1
    end
    if value == nil then
      value = parameter.default and value_of(parameter.default, within)
      if not parameter.default then value = values.undefined(parameter.name) end
    end
    within.names[parameter.name] = value
  end
  if left > 0 then
    work.fail("mismatch", "the macro '%s' has no parameter for a named argument", node.name)
  end
  return within
end

function statements.macro(self, node, scope)
  scope.names[node.name] = values.callable(node.name, function(args, named)
    work.enter()
    local within = parameters(node, scope, args, named)
    local made = self:text_of(node.body, within)
    work.leave()
    return made
  end)
end

function statements.generation(self, node, scope)
  local from = self.length
  self:body(node.body, inner(scope))
  self.marked[#self.marked + 1] = { from, self.length }
end

--- Carries out a template.
---@param nodes table[]
---@param names table<string, any>
---@return ms.ChatRun
return function(nodes, names)
  local self = setmetatable({ pieces = {}, length = 0, marked = {} }, Run)
  self:body(nodes, inner { names = names })
  return self
end
