-- ms.config: the typed options of a recipe.
local core = require "moonshard.core"
local launch = require "moonshard.base.launch"
local table_file = require "moonshard.base.table_file"
local options_of = require "moonshard.base.options"

local config = {}

-- Turns the declaration into a list of { path, default, help, choices }; groups become dotted
-- paths.
local function declare(options, prefix, list)
  local keys = {}
  for key in pairs(options) do
    if type(key) ~= "string" then
      core.raise("config: options have names, as in { steps = 200 }")
    end
    keys[#keys + 1] = key
  end
  table.sort(keys)
  for _, key in ipairs(keys) do
    local value, path = options[key], prefix .. key
    if type(value) == "table" and value[1] == nil then declare(value, path .. ".", list)
    else
      local item = { path = path, default = value }
      if type(value) == "table" then
        item = { path = path, default = value[1], help = value.help, choices = value.choices }
        item.open, item.check, item.replaces = value.open, value.check, value.replaces
      end
      local kind = type(item.default)
      if kind ~= "number" and kind ~= "string" and kind ~= "boolean" then
        core.raise(("config: option %s has a default of type %s; a number, a string, a boolean or \z
          a group is expected"):format(path, kind))
      end
      list[#list + 1] = item
      list[path] = item
    end
  end
  return list
end

-- Raises unless each option that replaces another one names a plain option of this recipe, which
-- itself replaces none.
local function check_replaced(list)
  for _, item in ipairs(list) do
    local other = item.replaces and list[item.replaces]
    if item.replaces ~= nil and (not other or other == item or other.replaces or other.open) then
      core.raise(("config: option %s replaces %s, which is no other plain option"):format(item.path,
        tostring(item.replaces)))
    end
  end
end

local function type_name(default)
  return math.type(default) == "integer" and "integer" or type(default)
end

local function shown(value)
  return type(value) == "string" and ("%q"):format(value) or tostring(value)
end

local function fail(text) launch.exit(2, text) end

-- Checks a value against its option. A text of the command line is converted to the option's type.
local function convert(item, value, from)
  local wanted = type_name(item.default)
  local given = value
  if from == "the command line" and wanted ~= "string" then
    if wanted == "boolean" then value = ({ ["true"] = true, ["false"] = false })[value]
    else value = tonumber(value) end
  end
  local is_too_large = value == math.huge or value == -math.huge
  if is_too_large and from == "the command line" then value = nil end
  if wanted == "integer" and math.type(value) == "float" then value = math.tointeger(value) end
  if wanted == "number" and math.type(value) == "integer" then value = value + 0.0 end
  if value == nil or type_name(value) ~= wanted then
    fail(("option %s takes %s %s (default %s), not %s (from %s)"):format(item.path,
      wanted == "integer" and "an" or "a", wanted, shown(item.default), shown(given), from))
  end
  if item.choices then
    for _, choice in ipairs(item.choices) do if choice == value then return value end end
    local names = {}
    for i, choice in ipairs(item.choices) do names[i] = shown(choice) end
    fail(("option %s is one of %s, not %s (from %s)")
      :format(item.path, table.concat(names, ", "), shown(given), from))
  end
  return value
end

--- The value of an option that is not declared: a number, a boolean, or text. Digits of a number
--- that is too large are text.
---@param text string
---@return number|boolean|string
function config.guess(text)
  if text == "true" or text == "false" then return text == "true" end
  local value = tonumber(text)
  return value and value ~= math.huge and value ~= -math.huge and value or text
end

-- The open option (item.open) to which a path belongs, and the rest of the path: hook and fraction
-- for hook.fraction.
local function open_part(list, path)
  local name, part = path:match "^(.*)%.([%w_]+)$"
  if name and list[name] and list[name].open then return list[name], part end
end

local function find(list, path, from)
  if list[path] then return list[path] end
  local names = {}
  for i, item in ipairs(list) do names[i] = item.path end
  local nearest = core.nearest(path, names)
  fail(("unknown option '%s' (from %s): %s")
    :format(path, from, nearest and ("did you mean '%s'?"):format(nearest) or #names > 0
      and "the recipe has " .. table.concat(names, ", ") or "the recipe has no options"))
end

-- Values of a --config file (a Lua file that returns a table, or .json), flattened.
local function read_file(path)
  local values, message = table_file.read(path)
  if not values then launch.exit(3, ("config file %s: %s"):format(path, message)) end
  local flat = {}
  local function flatten(t, prefix)
    for key, value in pairs(t) do
      if type(value) == "table" then
        flatten(value, prefix .. key .. ".")
      else
        flat[prefix .. key] = value
      end
    end
  end
  flatten(values, "")
  return flat
end

local function print_help(list)
  io.write(("usage: moonshard run %s [switches] [key=value ...]\n\noptions of this recipe:\n")
    :format(launch.recipe_given or launch.recipe or "RECIPE"))
  for _, item in ipairs(list) do
    local default = item.replaces and item.path .. " =" or
      ("%s = %s"):format(item.path, shown(item.default))
    local choices = ""
    if item.choices then
      local names = {}
      for i, choice in ipairs(item.choices) do names[i] = tostring(choice) end
      choices = " (" .. table.concat(names, "|") .. ")"
    end
    io.write(("  %-36s %s%s\n"):format(default, item.help or "", choices))
  end
  io.write "\n`moonshard run --help` lists the switches.\n"
end

-- Notes one value that was given.
local function put(list, values, path, value, from)
  local item, part = open_part(list, path)
  if item then
    if from == "the command line" then value = config.guess(value) end
    item.parts = item.parts or {}
    item.parts[part] = value
    return
  end
  item = find(list, path, from)
  values[path] = convert(item, value, from)
  item.from = from
  local wrong = item.check and item.check(values[path])
  if wrong then fail(("option %s (from %s): %s"):format(path, from, wrong)) end
end

-- Of an option and the one that it replaces, the value that is not in force is removed.
local function choose(list, values)
  for _, item in ipairs(list) do
    local other = item.replaces and list[item.replaces]
    if item.replaces and item.from and other.from == item.from then
      fail(("options %s and %s are both given (from %s), and %s takes the place of %s: give one")
        :format(item.path, other.path, item.from, item.path, other.path))
    elseif item.replaces then
      -- The command line overrides the file.
      local replaced = item.from and other.from ~= "the command line"
      values[replaced and other.path or item.path] = nil
    end
  end
end

-- The values as a table of tables. The parts of an open option are in a table beside it: hook,
-- hook_options.
local function nest(list, values)
  local result = {}
  for _, item in ipairs(list) do
    local place, rest = result, item.path:match "([^.]+)$"
    for group in item.path:gmatch "([^.]+)%." do
      place[group] = place[group] or {}
      place = place[group]
    end
    place[rest] = values[item.path]
    if item.open then place[rest .. "_options"] = item.parts or {} end
  end
  return result
end

-- The list of settings that is shown when the run begins.
local function note_settings(list, values)
  launch.settings = {}
  local function note(name, value, changed)
    launch.settings[#launch.settings + 1] = { name = name, value = value, changed = changed }
  end
  for _, item in ipairs(list) do
    local value = values[item.path]
    if value ~= nil then note(item.path, value, item.replaces ~= nil or value ~= item.default) end
    local names = {}
    for name in pairs(item.parts or {}) do names[#names + 1] = name end
    table.sort(names)
    for _, name in ipairs(names) do note(item.path .. "." .. name, item.parts[name], true) end
  end
end

---@param options table
---@return table
function config.config(options)
  options_of.argument("config", "options", options, "table")
  if launch.declared then
    core.raise("config: it was called already; declare all options at once")
  end
  launch.declared = true
  local list = declare(options, "", {})
  check_replaced(list)
  if launch.help then
    print_help(list)
    launch.exit(0)
  end
  local values = {}
  for _, item in ipairs(list) do values[item.path] = item.default end
  if launch.config_file then
    for path, value in pairs(read_file(launch.config_file)) do
      put(list, values, path, value, launch.config_file)
    end
  end
  for _, argument in ipairs(launch.arguments) do
    local path, text = argument:match "^([%w_.]+)=(.*)$"
    if not path then fail(("'%s': options are written key=value"):format(argument)) end
    put(list, values, path, text, "the command line")
  end
  choose(list, values)
  note_settings(list, values)
  return nest(list, values)
end

return config
