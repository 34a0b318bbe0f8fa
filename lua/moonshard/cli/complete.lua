-- Completion of names in an interactive session: from live values, and from the annotations.
local core = require "moonshard.core"
local read = require "moonshard.docs.read"

local complete = {}

local KEYWORDS <const> = {
  "and", "break", "do", "else", "elseif", "end", "false", "for", "function", "goto", "if", "in",
  "local", "nil", "not", "or", "repeat", "return", "then", "true", "until", "while",
}

-- Names of the members of each annotated class, and its base; read once.
local classes
local function members_of(class)
  if not classes then
    classes = {}
    for _, block in ipairs(read.all().blocks) do
      local one = classes[block.class] or { names = {} }
      classes[block.class] = one
      one.base = one.base or block.base
      for _, field in ipairs(block.fields) do one.names[field.name] = true end
    end
  end
  return classes[class]
end

-- Adds names of annotated members, those of the bases included.
local function add_annotated(set, class)
  while class do
    local one = members_of(class)
    for name in pairs(one and one.names or {}) do set[name] = true end
    class = one and one.base
  end
end

-- Adds the keys of a table that are names, and those of tables that it falls back to.
local function add_keys(set, value)
  for _ = 1, 8 do
    if type(value) ~= "table" then return end
    for key in next, value do
      if type(key) == "string" and key:find "^[%a_][%w_]*$" then set[key] = true end
    end
    local meta = debug.getmetatable(value)
    -- The fields of a module are there.
    if type(meta) == "table" and type(meta.fields) == "table" then add_keys(set, meta.fields) end
    value = type(meta) == "table" and rawget(meta, "__index") or nil
  end
end

-- Names below a value: fields and methods.
local function names_below(value, path)
  local set = {}
  add_annotated(set, path)
  add_keys(set, value)
  local meta = debug.getmetatable(value)
  if type(value) == "string" then add_keys(set, string) return set end
  if type(meta) ~= "table" then return set end
  local name = rawget(meta, "__name")
  if not name and type(meta.class) == "table" then name = meta.class.__name end
  add_annotated(set, type(name) == "string" and name or nil)
  -- A parameter is a tensor with a gradient, and has the base of its class.
  if core.is_tensor(value) and value:requires_grad() then add_annotated(set, "ms.Parameter") end
  for key in pairs(set) do if key:find "^__" then set[key] = nil end end
  return set
end

-- The value of a path of names: "model.blocks". Nothing is called, but for what reads a field.
local function value_of(path)
  local value = _G
  for name in path:gmatch "[^.]+" do
    local ok, next_value = pcall(function() return value[name] end)
    if not ok or next_value == nil then return nil, false end
    value = next_value
  end
  return value, true
end

--- What a word may become: "ms.nn.Li" to "ms.nn.Linear", "t:sh" to "t:shape".
---@param word string
---@return string[] in the order of the alphabet
function complete.words(word)
  local path, separator, begin = word:match "^([%a_][%w_.]*)([.:])([%w_]*)$"
  local set, before = {}, ""
  if path then
    local value, is_there = value_of(path)
    if not is_there then return {} end
    set, before = names_below(value, path), path .. separator
  elseif word:find "^[%w_]*$" then
    begin = word
    for _, keyword in ipairs(KEYWORDS) do set[keyword] = true end
    add_keys(set, _G)
  else return {} end
  local list = {}
  for name in pairs(set) do
    local is_hidden = name:find "^_" and not begin:find "^_"
    if name:sub(1, #begin) == begin and not is_hidden then list[#list + 1] = before .. name end
  end
  table.sort(list)
  return list
end

return complete
