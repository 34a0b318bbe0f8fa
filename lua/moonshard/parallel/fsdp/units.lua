-- Which modules of a model become units of fsdp, and which parameters each unit has.
local core = require "moonshard.core"
local listed = require "moonshard.nn.listed"
local names = require "moonshard.nn.names"
local options_of = require "moonshard.base.options"
local sorted_pairs = require "moonshard.base.sorted_pairs"
local check = options_of.check

local units = {}

-- Classes that are wrapped unless `wrap` says something else.
local blocks = { GPT2Block = true, LlamaBlock = true, DecoderBlock = true }

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

-- Modules with so many numbers that no module inside of them has taken, from the inside out. Lists
-- have no forward, so they are passed over; the model itself is the root.
local function large_ones(model, least)
  local large, seen = {}, {}
  local function visit(object)
    local state, count = getmetatable(object), 0
    for _, key in ipairs(state.order) do
      local value = state.fields[key]
      if core.is_parameter(value) and not seen[value] then count = count + value:numel() end
      if core.is_parameter(value) then seen[value] = true end
    end
    for _, child in ipairs(object:children()) do count = count + visit(child) end
    if count < least or object == model or not object.forward then return count end
    large[object] = true
    return 0
  end
  visit(model)
  return large
end

-- The function(module, name) that `wrap` represents.
local function rule_of(model, wrap)
  if wrap == nil then return function(object) return blocks[class_of(object)] == true end end
  if type(wrap) == "function" then return wrap end
  if type(wrap) ~= "table" then
    core.raise("fsdp: wrap is a table or a function(module, name), not a " .. type(wrap))
  end
  local o = check("fsdp: wrap", wrap,
    { class = "any", min_elements = "integer", names = "table", groups = "table" })
  local classes = type(o.class) == "string" and { o.class } or o.class or {}
  local wanted = {}
  for _, name in ipairs(classes) do wanted[name] = true end
  local large = o.min_elements and large_ones(model, o.min_elements) or {}
  return function(object, name)
    return wanted[class_of(object)] == true or listed.has(o.names, name) or large[object] == true
  end
end

-- Raises unless each name or pattern of a group is that of a module below the model.
local function check_group(number, group, all)
  if type(group) ~= "table" or #group == 0 then
    core.raise(("fsdp: wrap.groups[%d] is a list of names of modules, not a %s"):format(number,
      type(group) == "table" and "table without any" or type(group)))
  end
  for _, pattern in ipairs(group) do
    local any = false
    if type(pattern) == "string" then
      for _, name in ipairs(all) do any = any or listed.has({ pattern }, name) end
    end
    if not any then
      local near = type(pattern) == "string" and core.nearest(pattern, all)
      core.raise(("fsdp: wrap.groups[%d]: no module below the model is called '%s'%s")
        :format(number, tostring(pattern), near and (": did you mean '%s'?"):format(near) or ""))
    end
  end
end

-- Module -> number of its group in wrap.groups.
local function grouped(model, wrap)
  local groups, number_of, all = type(wrap) == "table" and wrap.groups or {}, {}, {}
  for name in model:modules() do if name ~= "" then all[#all + 1] = name end end
  for number, group in ipairs(groups) do
    check_group(number, group, all)
    for name, object in model:modules() do
      if name ~= "" and listed.has(group, name) then
        if number_of[object] then
          core.raise(("fsdp: wrap.groups: module '%s' is in groups %d and %d, and a module \z
            belongs to one unit"):format(name, number_of[object], number))
        end
        number_of[object] = number
      end
    end
  end
  return number_of
end

-- The options of wrap, as a text.
local function asked_for(wrap)
  local function show(value)
    if type(value) ~= "table" then
      return type(value) == "string" and ("'%s'"):format(value) or tostring(value)
    end
    local items = {}
    for i, item in ipairs(value) do items[i] = show(item) end
    return "{ " .. table.concat(items, ", ") .. " }"
  end
  local texts = {}
  for name, value in sorted_pairs(wrap) do
    texts[#texts + 1] = ("%s = %s"):format(name, show(value))
  end
  return #texts > 0 and table.concat(texts, ", ") or "nothing"
end

-- Units in the order in which their first modules are found; the root is not among them. Each has a
-- list of modules, and a name that joins theirs.
local function find_modules(model, wrap)
  local rule, list, by_group = rule_of(model, wrap), {}, {}
  local number_of = grouped(model, wrap)
  for name, object in model:modules() do
    local number = number_of[object]
    local unit = number and by_group[number]
    if unit then
      unit.modules[#unit.modules + 1] = object
      unit.name = unit.name .. "+" .. name
    elseif name ~= "" and (number or rule(object, name)) then
      unit = { modules = { object }, name = name }
      list[#list + 1] = unit
      if number then by_group[number] = unit end
    end
  end
  if type(wrap) == "table" and #list == 0 then
    core.raise(("fsdp: wrap matches no module below the model: it asks for %s; its classes are %s")
      :format(asked_for(wrap), classes_in(model)))
  end
  return list
end

-- Module -> the innermost unit that it is in; nil: the root. Modules come before those below them.
local function innermost(model, list)
  local own, unit_of = {}, {}
  for _, unit in ipairs(list) do
    for _, object in ipairs(unit.modules) do own[object] = unit end
  end
  for _, object in model:modules() do
    if own[object] then
      for _, below in object:modules() do unit_of[below] = own[object] end
    end
  end
  return unit_of
end

-- A parameter that a unit shares with a module outside of it, or with another unit, would be
-- gathered for one of them only.
local function check_ties(unit, name, before)
  local other = before.unit
  if other == unit then return end
  core.raise(("fsdp: '%s' (unit \"%s\") and '%s' (unit \"%s\") are one parameter, and a \z
    parameter belongs to one unit: make the modules that use it one unit (wrap = { groups = { { \z
    ... } } }), or leave both to the root"):format(before.name, other and other.name or "root",
    name, unit and unit.name or "root"))
end

-- Gives each parameter to the unit of the module that has it, in the model's order.
local function fill(model, unit_of, root, ignored)
  local first = {}
  for prefix, object in model:modules() do
    local state, unit = getmetatable(object), unit_of[object]
    for _, key in ipairs(state.order) do
      local value, name = state.fields[key], names.join(prefix, key)
      if core.is_parameter(value) then
        if first[value] then check_ties(unit, name, first[value])
        elseif not listed.has(ignored, name) then
          local to = unit or root
          to.parameters[#to.parameters + 1] = value
          to.names[#to.names + 1] = name
        end
        first[value] = first[value] or { unit = unit, name = name }
      end
    end
  end
end

--- The units of a model, the root first. Each has modules, name, index, parameters and their names.
---@param model ms.Module
---@param o ms.FSDPOptions
---@return table[]
---@return table<ms.Module, table> unit_of the innermost unit of a module; nil: the root
function units.find(model, o)
  local list = find_modules(model, o.wrap)
  local unit_of = innermost(model, list)
  table.insert(list, 1, { modules = { model }, name = "" })
  for i, unit in ipairs(list) do unit.index, unit.parameters, unit.names = i - 1, {}, {} end
  fill(model, unit_of, list[1], o.ignored)
  return list, unit_of
end

return units
