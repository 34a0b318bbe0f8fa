-- Kinds of optimizers: their options, their defaults, and the check of both.
local core = require "moonshard.core"
local options_of = require "moonshard.base.options"
local argument = options_of.argument

local kinds = {
  ---@type table<string, table> by name
  by_name = {},
  -- What a group may have besides the hyper-parameters of its kind.
  settings = { params = true, schedule = true, master = true, shard = true, name = true },
}

-- Options that every kind has, besides its own hyper-parameters.
local common = { lr = 0.01, weight_decay = 0, maximize = false }

--- The names of all options of a kind, sorted.
function kinds.known_options(kind)
  local names = { "schedule", "master", "shard" }
  for name in pairs(kind.all_defaults) do names[#names + 1] = name end
  table.sort(names)
  return names
end

--- Raises for an option that the kind does not have or that has another type than its default.
function kinds.check(kind, options)
  argument(kind.name, "options", options, "table")
  for name, value in pairs(options) do
    if type(name) == "string" then
      local default = kind.all_defaults[name]
      if default == nil and not kinds.settings[name] then
        local names = kinds.known_options(kind)
        core.raise(("%s: unknown option '%s'%s has %s")
          :format(kind.name, name, core.nearest(name, names)
            and (": did you mean '%s'? It"):format(core.nearest(name, names)) or "; it",
            table.concat(names, ", ")))
      elseif default ~= nil and type(value) ~= type(default)
          and not (name == "lr" and core.is_tensor(value)) then
        core.raise(("%s: option %s must be a %s, not a %s")
          :format(kind.name, name, type(default), type(value)))
      end
    end
  end
  if options.schedule ~= nil and type(rawget(options, "schedule")) ~= "function" then
    core.raise(("%s: schedule must be a function from the step to a factor, not a %s")
      :format(kind.name, type(options.schedule)))
  end
  local ranks = rawget(options, "shard")
  if ranks ~= nil
      and not (type(ranks) == "userdata" and pcall(function() return ranks:size() end)) then
    core.raise(("%s: shard must be a group of ranks (ms.world()), not a %s")
      :format(kind.name, type(ranks)))
  end
  if options.master ~= nil and options.master ~= "f32" and options.master ~= "none" then
    core.raise(("%s: unknown master '%s': known are f32, none")
      :format(kind.name, tostring(options.master)))
  end
  local native = kind.native and kind or kind.second and kind.second.native and kind.second
  if native then core.optim_check(native.name, options) end
end

-- The kind that steps what `whole` does not: it must be able to step pieces.
local function second_of(kind)
  local name = kind.second or "adamw"
  local second = kinds.by_name[name]
  if not second then
    core.raise(("optim.define: kind '%s': second = '%s', and there is no such kind")
      :format(kind.name, name))
  end
  if not second.elementwise then
    core.raise(("optim.define: kind '%s': second = '%s', which is not elementwise: vectors may be \z
      sharded as well"):format(kind.name, name))
  end
  return second
end

local function check_whole(kind)
  argument("optim.define", "whole", kind.whole, "table?")
  argument("optim.define", "second", kind.second, "string?")
  if not kind.whole then
    if kind.second == nil then return end
    core.raise(("optim.define: kind '%s' has a second kind, for what `whole` does not step, and \z
      no `whole`"):format(kind.name))
  end
  if type(kind.whole.update) ~= "function"
      or kind.whole.before ~= nil and type(kind.whole.before) ~= "function" then
    core.raise(("optim.define: kind '%s': whole = { before = function?, update = function } is \z
      expected"):format(kind.name))
  end
  if kind.step_param ~= nil or kind.elementwise ~= nil then
    core.raise(("optim.define: kind '%s' has whole, so it has no step_param and no elementwise: \z
      its second kind steps vectors"):format(kind.name))
  end
end

--- Registers what optim.define was given, and returns the kind.
---@param kind ms.Kind
---@return table
function kinds.add(kind)
  if type(kind) ~= "table" or type(kind.name) ~= "string" then
    core.raise("optim.define: a table with name, defaults and step_param is expected")
  end
  argument("optim.define", "base", kind.base, "string?")
  argument("optim.define", "defaults", kind.defaults, "table?")
  argument("optim.define", "elementwise", kind.elementwise, "boolean?")
  check_whole(kind)
  if not kind.whole and type(kind.step_param) ~= "function" then
    core.raise(("optim.define: kind '%s' has no function step_param"):format(kind.name))
  end
  local own = {
    all_defaults = {}, name = kind.name, base = kind.base, step_param = kind.step_param,
    native = kind.native, elementwise = kind.native or kind.elementwise == true,
  }
  for name, value in pairs(common) do own.all_defaults[name] = value end
  if kind.whole then
    own.whole, own.second = kind.whole, second_of(kind)
    own.all_defaults.whole = true
    for name, value in pairs(own.second.all_defaults) do
      if common[name] == nil then own.all_defaults[name] = value end
    end
  end
  for name, value in pairs(kind.defaults or {}) do own.all_defaults[name] = value end
  kinds.by_name[own.name] = own
  return own
end

return kinds
