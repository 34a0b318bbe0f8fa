-- Which modules of a model become units of fsdp, and which parameters each unit has.
local core = require "moonshard.core"
local names = require "moonshard.nn.names"
local options_of = require "moonshard.options"
local check = options_of.check

local units = {}

-- Classes that are wrapped unless `wrap` says something else.
local blocks = { GPT2Block = true, LlamaBlock = true }

-- Whether a name is in the list of names and Lua patterns.
local function is_listed(name, list)
  for _, pattern in ipairs(list or {}) do
    if name == pattern or name:match("^" .. pattern .. "$") then return true end
  end
  return false
end

local function class_of(object) return getmetatable(object).class.class_name end

local function classes_in(model)
  local found, list = {}, {}
  for _, object in model:modules() do
    local name = class_of(object)
    if name and not found[name] then
      found[name] = true
      list[#list + 1] = name
    end
  end
  table.sort(list)
  return table.concat(list, ", ")
end

local function count_elements(object)
  local count = 0
  for _, p in ipairs(object:parameters()) do count = count + p:numel() end
  return count
end

-- The function(module, name) that `wrap` stands for.
local function rule_of(wrap)
  if wrap == nil then return function(object) return blocks[class_of(object)] == true end end
  if type(wrap) == "function" then return wrap end
  if type(wrap) ~= "table" then
    core.raise("fsdp: wrap is a table or a function(module, name), not a " .. type(wrap))
  end
  local o = check("fsdp: wrap", wrap,
    { class = "any", min_elements = "integer", names = "table" })
  local classes = type(o.class) == "string" and { o.class } or o.class or {}
  local wanted = {}
  for _, name in ipairs(classes) do wanted[name] = true end
  return function(object, name)
    return wanted[class_of(object)] == true or is_listed(name, o.names)
      or o.min_elements ~= nil and #object:children() == 0
        and count_elements(object) >= o.min_elements
  end
end

-- Modules that are units, in the order in which they are found; the root is not among them.
local function find_modules(model, wrap)
  local rule, list = rule_of(wrap), {}
  for name, object in model:modules() do
    if name ~= "" and rule(object, name) then list[#list + 1] = { module = object, name = name } end
  end
  if type(wrap) == "table" and #list == 0 then
    core.raise(("fsdp: wrap matches no module below the model; its classes are %s")
      :format(classes_in(model)))
  end
  return list
end

-- The innermost unit that each parameter is in; a parameter in two units that are not nested is an
-- error of the core, which names both.
local function fill(unit, model_names, taken, ignored)
  for _, p in ipairs(unit.module:parameters()) do
    local name = model_names[p]
    if not taken[p] and not is_listed(name, ignored) then
      taken[p] = unit
      unit.parameters[#unit.parameters + 1] = p
      unit.names[#unit.names + 1] = name
    end
  end
end

-- A parameter that a unit shares with a module outside of it, or with another unit, would be
-- gathered for one of them only. Where units are nested, inner ones come after outer ones.
local function check_ties(model, list)
  local unit_of = {}
  for _, unit in ipairs(list) do
    for _, object in unit.module:modules() do unit_of[object] = unit end
  end
  local first = {}
  for prefix, object in model:modules() do
    local state = getmetatable(object)
    for _, key in ipairs(state.order) do
      local value = state.fields[key]
      if core.is_parameter(value) then
        local unit, name = unit_of[object], names.join(prefix, key)
        local before = first[value]
        if before and before.unit ~= unit then
          core.raise(("fsdp: '%s' (unit \"%s\") and '%s' (unit \"%s\") are one parameter, and a \z
            parameter belongs to one unit: wrap a module that contains both, or leave both to the \z
            root"):format(before.name, before.unit and before.unit.name or "root", name,
            unit and unit.name or "root"))
        end
        first[value] = before or { unit = unit, name = name }
      end
    end
  end
end

--- The units of a model, the root first. Each has module, name, index, parameters and their names.
---@param model ms.Module
---@param o ms.FSDPOptions
---@return table[]
function units.find(model, o)
  local list = find_modules(model, o.wrap)
  check_ties(model, list)
  local model_names, taken = {}, {}
  for _, item in ipairs(model:named_parameters()) do model_names[item.parameter] = item.name end
  table.insert(list, 1, { module = model, name = "" })
  for i, unit in ipairs(list) do unit.index, unit.parameters, unit.names = i - 1, {}, {} end
  -- Inner units come after outer ones in the list.
  for i = #list, 1, -1 do fill(list[i], model_names, taken, o.ignored) end
  return list
end

return units
