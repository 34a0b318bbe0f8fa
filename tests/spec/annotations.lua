-- For specs: what the annotations of the library declare: classes, their functions with parameters,
-- the fields of tables of options.
local read = require "moonshard.docs.read"

local annotations = {}

--- Classes by name: { functions = { { name, parameters } }, fields = { { name, optional, type, text
--- } } }. The second result has the aliases.
---@return table<string, table>, table<string, string>
function annotations.read()
  local all, classes, aliases = read.all(), {}, {}
  for _, block in ipairs(all.blocks) do
    local class = classes[block.class] or { functions = {}, fields = {} }
    classes[block.class] = class
    for _, field in ipairs(block.fields) do
      table.insert(class.fields, field)
      if field.parameters then table.insert(class.functions, field) end
    end
  end
  for _, alias in ipairs(all.aliases) do aliases[alias.name] = alias.type end
  return classes, aliases
end

local plain = {
  integer = "integer", number = "number", string = "string", boolean = "boolean", any = "any",
  table = "table", ["function"] = "function",
  ["ms.Tensor"] = "tensor", ["ms.Parameter"] = "tensor",
}

-- Whether the values of a class are objects: it has methods on self.
local function is_object(class)
  for _, declared_function in ipairs(class.functions) do
    if (declared_function.parameters[1] or {}).type == "self" then return true end
  end
  return false
end

--- Which kinds of values a type allows, as a set: integer, number, string, boolean, any, table,
--- function, tensor, or the name of a class of objects (those with methods on self).
---@param text string
---@param classes table<string, table>
---@param aliases table<string, string>
---@param set? table<string, boolean>
---@return table<string, boolean>
function annotations.kinds(text, classes, aliases, set)
  set = set or {}
  for _, part in ipairs(read.split(text, "|")) do
    part = part:match "^%s*(.-)%s*$"
    if aliases[part] then annotations.kinds(aliases[part], classes, aliases, set)
    elseif plain[part] then set[plain[part]] = true
    elseif part:match '^"' then set.string = true
    elseif part:match "^fun" then set["function"] = true
    elseif classes[part] and is_object(classes[part]) then set[part] = true
    else set.table = true end
  end
  return set
end

--- The fields of a type that is a table of options: { a?: T, b: U }, or a class without methods.
---@return { name: string, optional: boolean, type: string }[]
function annotations.fields(text, classes)
  local list = {}
  for _, part in ipairs(read.split(text, "|")) do
    part = part:match "^%s*(.-)%s*$"
    if part:match "^{.*}$" then
      for _, field in ipairs(read.split(part:sub(2, -2), ",")) do
        list[#list + 1] = read.declared(field)
      end
    elseif classes[part] and not is_object(classes[part]) then
      for _, field in ipairs(classes[part].fields) do list[#list + 1] = field end
    end
  end
  return list
end

return annotations
