-- For specs: what lua/moonshard/meta.lua declares: classes, their functions with parameters, the
-- fields of tables of options.
local annotations = {}

-- Splits at a character that is outside of brackets and quotes.
local function split(text, separator)
  local parts, depth, quoted, first = {}, 0, false, 1
  for i = 1, #text do
    local c = text:sub(i, i)
    if c == '"' then quoted = not quoted end
    if not quoted and c:find "[%(%[{<]" then depth = depth + 1 end
    if not quoted and c:find "[%)%]}>]" then depth = depth - 1 end
    if c == separator and depth == 0 and not quoted then
      parts[#parts + 1] = text:sub(first, i - 1)
      first = i + 1
    end
  end
  parts[#parts + 1] = text:sub(first)
  return parts
end

-- "name?: type" of an argument or a field.
local function declared(text)
  local name, optional, kind = text:match "^%s*([%w_.]+)(%??)%s*:%s*(.-)%s*$"
  return name and { name = name, optional = optional == "?", type = kind }
end

local function parameters_of(text)
  local list = {}
  local inner = text:match "^fun(%b())":sub(2, -2)
  if not inner:find "%S" then return list end
  for _, part in ipairs(split(inner, ",")) do
    list[#list + 1] = part:match "^%s*self%s*$" and { name = "self", type = "self" }
      or declared(part)
  end
  return list
end

-- The type at the beginning of what follows a field's name: comments follow it after two spaces or
-- more.
local function type_of(text)
  local depth = 0
  for i = 1, #text do
    local c = text:sub(i, i)
    if c:find "[%(%[{<]" then depth = depth + 1 elseif c:find "[%)%]}>]" then depth = depth - 1 end
    if depth == 0 and text:sub(i, i + 1) == "  " then return text:sub(1, i - 1) end
  end
  return text
end

--- Classes by name: { functions = { { name, parameters } }, fields = { { name, optional, type } }
--- }. The second result has the aliases.
---@param path string
---@return table<string, table>, table<string, string>
function annotations.read(path)
  local classes, aliases, class = {}, {}, nil
  for line in io.lines(path) do
    local name = line:match "^%-%-%-@class%s+([%w_.]+)"
    if name then
      classes[name] = classes[name] or { functions = {}, fields = {} }
      class = classes[name]
    end
    local alias, meaning = line:match "^%-%-%-@alias%s+([%w_.]+)%s+(.+)$"
    if alias then aliases[alias] = type_of(meaning) end
    local field, optional, rest = line:match "^%-%-%-@field%s+([%w_]+)(%??)%s+(.*)$"
    if field and class then
      table.insert(class.fields, { name = field, optional = optional == "?", type = type_of(rest) })
      if rest:match "^fun%b()" then
        table.insert(class.functions, { name = field, parameters = parameters_of(rest) })
      end
    end
    if line == "" then class = nil end
  end
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
  for _, part in ipairs(split(text, "|")) do
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
  for _, part in ipairs(split(text, "|")) do
    part = part:match "^%s*(.-)%s*$"
    if part:match "^{.*}$" then
      for _, field in ipairs(split(part:sub(2, -2), ",")) do list[#list + 1] = declared(field) end
    elseif classes[part] and not is_object(classes[part]) then
      for _, field in ipairs(classes[part].fields) do list[#list + 1] = field end
    end
  end
  return list
end

return annotations
