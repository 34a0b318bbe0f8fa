-- The values of expressions. A scope is { names = { name -> value }, outer = scope }.
local access = require "moonshard.chat.access"
local filters = require "moonshard.chat.filters"
local numbers = require "moonshard.chat.numbers"
local print = require "moonshard.chat.print"
local tests = require "moonshard.chat.tests"
local text = require "moonshard.chat.text"
local values = require "moonshard.chat.values"
local work = require "moonshard.chat.work"

local evaluate = {}

-- kind of a node -> function of the node and the scope.
local kinds = {}

--- The value of an expression.
---@param node table
---@param scope table
---@return any
local function value_of(node, scope)
  work.spend(1)
  local value = kinds[node.kind](node, scope)
  work.at(node.line)
  return value
end
evaluate.value = value_of

local function all(nodes, scope)
  local list = {}
  for i, node in ipairs(nodes) do list[i] = value_of(node, scope) end
  return list
end

-- Positional and named arguments of a call, a filter or a test.
local function arguments(node, scope)
  local args, named = all(node.args, scope), {}
  for name, one in pairs(node.named) do named[name] = value_of(one, scope) end
  return args, named
end

local CONSTANTS <const> = { ["true"] = true, ["false"] = false, none = values.none }
function kinds.constant(node) return CONSTANTS[node.name] end
function kinds.number(node) return node.value end
function kinds.string(node) return node.value end

function kinds.name(node, scope)
  while scope do
    local value = scope.names[node.name]
    if value ~= nil then return value end
    scope = scope.outer
  end
  if node.name == "lipsum" or node.name == "cycler" or node.name == "joiner" then
    work.at(node.line)
    work.refuse("function", node.name)
  end
  return values.undefined(node.name)
end

function kinds.list(node, scope) return values.list(all(node, scope)) end
function kinds.tuple(node, scope) return values.list(all(node, scope), "tuple") end

function kinds.dict(node, scope)
  local made = values.dict()
  for _, pair in ipairs(node.pairs) do
    values.set(made, value_of(pair[1], scope), value_of(pair[2], scope))
  end
  return made
end

function kinds.attribute(node, scope)
  local object = value_of(node.object, scope)
  work.at(node.line)
  return access.attribute(object, node.name)
end

function kinds.item(node, scope)
  local object, index = value_of(node.object, scope), value_of(node.index, scope)
  work.at(node.line)
  return access.item(object, index)
end

-- A part of a slice, which may be missing or None.
local function place(node, scope)
  if not node then return nil end
  local value = value_of(node, scope)
  if value == values.none then return nil end
  value = values.number(value)
  if math.type(value) == "integer" then return value end
  return work.fail("mismatch", "a slice has integers, not a %s", values.name(value))
end

function kinds.slice(node, scope)
  local object = value_of(node.object, scope)
  local first, last, step = place(node.first, scope), place(node.last, scope),
    place(node.step, scope)
  work.at(node.line)
  local part = values.slice(object, first, last, step)
  if part == nil then work.fail("mismatch", "a %s has no slices", values.name(object)) end
  return part
end

function kinds.call(node, scope)
  local callee = value_of(node.callee, scope)
  local args, named = arguments(node, scope)
  work.at(node.line)
  if values.kind(callee) == "loop" then work.refuse("the call of", "loop") end
  if values.kind(callee) ~= "function" then
    work.fail("mismatch", "a call of %s, which is no function", values.name(callee))
  end
  return callee.call(args, named)
end

function kinds.filter(node, scope)
  local value = value_of(node.value, scope)
  local args, named = arguments(node, scope)
  work.at(node.line)
  return filters.apply(node.name, value, args, named)
end

function kinds.test(node, scope)
  local value = value_of(node.value, scope)
  local args, named = arguments(node, scope)
  work.at(node.line)
  return tests.apply(node.name, value, args, named) ~= node.negated
end

function kinds.binary(node, scope)
  local left, right = value_of(node.left, scope), value_of(node.right, scope)
  work.at(node.line)
  return numbers.binary(node.operator, left, right)
end

function kinds.negative(node, scope) return numbers.negative(value_of(node.value, scope)) end

function kinds.positive(node, scope)
  local value = value_of(node.value, scope)
  return numbers.binary("+", type(values.number(value)) == "number" and 0 or values.none, value)
end

function kinds.join(node, scope)
  local parts = all(node, scope)
  for i, part in ipairs(parts) do parts[i] = print.str(part) end
  return text.concat(parts)
end

function kinds.comparison(node, scope)
  local left = value_of(node.first, scope)
  for _, pair in ipairs(node) do
    local right = value_of(pair[2], scope)
    work.at(node.line)
    if not tests.compare(pair[1], left, right) then return false end
    left = right
  end
  return true
end

kinds["not"] = function(node, scope) return not values.truth(value_of(node.value, scope)) end

kinds["and"] = function(node, scope)
  local left = value_of(node.left, scope)
  if not values.truth(left) then return left end
  return value_of(node.right, scope)
end

kinds["or"] = function(node, scope)
  local left = value_of(node.left, scope)
  if values.truth(left) then return left end
  return value_of(node.right, scope)
end

function kinds.choice(node, scope)
  if values.truth(value_of(node.condition, scope)) then return value_of(node.yes, scope) end
  if not node.no then return values.undefined() end
  return value_of(node.no, scope)
end

return evaluate
