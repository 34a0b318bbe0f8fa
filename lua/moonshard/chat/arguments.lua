-- Arguments of functions, filters and methods by the names of their parameters.
local text = require "moonshard.chat.text"
local values = require "moonshard.chat.values"
local work = require "moonshard.chat.work"

local arguments = {}

--- The values of parameters in their order, nil where none is given.
---@param what string for messages
---@param parameters string[]
---@param args any[]
---@param named table<string, any>
---@return any ...
function arguments.bind(what, parameters, args, named)
  if #args > #parameters then
    work.fail("mismatch", "%s takes %d arguments at the most, not %d", what, #parameters, #args)
  end
  local list = table.move(args, 1, #args, 1, {})
  local left = 0
  for _ in pairs(named) do left = left + 1 end
  for i, name in ipairs(parameters) do
    if named[name] ~= nil then
      if list[i] ~= nil then work.fail("mismatch", "%s: '%s' is given twice", what, name) end
      list[i], left = named[name], left - 1
    end
  end
  if left > 0 then
    local known = {}
    for _, name in ipairs(parameters) do known[name] = true end
    for name in pairs(named) do
      if not known[name] then work.refuse("of " .. what .. " the argument", name, known) end
    end
  end
  return table.unpack(list, 1, #parameters)
end

--- A string that must be one, or nil, which None means too.
---@param what string
---@param value any
---@return string|ms.ChatText|nil
function arguments.string(what, value)
  if value == nil or value == values.none then return nil end
  if text.is(value) then return value end
  return work.fail("mismatch", "%s must be a string, not a %s", what, values.name(value))
end

--- A string that must be given.
---@param what string
---@param value any
---@return string|ms.ChatText
function arguments.needed(what, value)
  return arguments.string(what, value) or work.fail("mismatch", "%s must be given", what)
end

--- An integer, or nil, which None means too.
---@param what string
---@param value any
---@return integer?
function arguments.integer(what, value)
  if value == nil or value == values.none then return nil end
  value = values.number(value)
  if math.type(value) == "integer" then return value end
  return work.fail("mismatch", "%s must be an integer, not a %s", what, values.name(value))
end

return arguments
