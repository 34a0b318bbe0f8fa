-- Hyper-parameters that a script has written to an optimizer's groups after the optimizer was made:
-- finding them for a checkpoint, and loading them.
local core = require "moonshard.core"
local named = require "moonshard.base.named"

local written = {}

local function copy(value)
  if type(value) ~= "table" then return value end
  local made = {}
  for key, item in pairs(value) do made[key] = item end
  return made
end

local function equal(a, b)
  if type(a) ~= "table" or type(b) ~= "table" then return rawequal(a, b) end
  for key, item in pairs(a) do if not rawequal(item, b[key]) then return false end end
  for key in pairs(b) do if a[key] == nil then return false end end
  return true
end

--- The first values of a group's hyper-parameters. Tables are copied, so that a write into one does
--- not change other optimizers.
---@param group ms.ParamGroup
---@param defaults table<string, any> all hyper-parameters of the kind
---@return table<string, any>
function written.begin(group, defaults)
  local values = {}
  for name in pairs(defaults) do
    local value = group[name]
    if type(value) == "table" then group[name] = copy(value) end
    values[name] = copy(value)
  end
  return values
end

--- The hyper-parameters that differ from their first values, by position of the group. A tensor is
--- always saved, because the device may have written it.
---@param groups ms.ParamGroup[]
---@param begins table<ms.ParamGroup, table<string, any>>
---@return table<integer, table<string, any>>? groups nil if nothing was written
function written.save(groups, begins)
  local saved
  for i, group in ipairs(groups) do
    for name, before in pairs(begins[group]) do
      local value = group[name]
      if core.is_tensor(value) or not equal(value, before) then
        saved = saved or {}
        saved[i] = saved[i] or named.table {}
        saved[i][name] = copy(value)
      end
    end
  end
  return saved
end

--- Raises unless what was saved can be loaded into these groups.
---@param groups ms.ParamGroup[]
---@param begins table<ms.ParamGroup, table<string, any>>
---@param saved? table<integer, table<string, any>>
function written.check(groups, begins, saved)
  for i, values in pairs(saved or {}) do
    local begin = begins[groups[i]]
    if not begin then
      core.raise(("load_state: the state has values of group %s; here there are %d groups")
        :format(tostring(i), #groups))
    end
    for name, value in pairs(values) do
      local number = name == "lr" and core.is_tensor(value)
      if begin[name] == nil or type(value) ~= type(begin[name]) and not number
          and not core.is_tensor(begin[name]) then
        core.raise(("load_state: group %d cannot take %s = %s")
          :format(i, tostring(name), tostring(value)))
      end
    end
  end
end

--- Sets the groups' hyper-parameters to the saved values; those that were not saved get their first
--- values.
---@param groups ms.ParamGroup[]
---@param begins table<ms.ParamGroup, table<string, any>>
---@param saved? table<integer, table<string, any>>
function written.load(groups, begins, saved)
  for i, group in ipairs(groups) do
    for name, begin in pairs(begins[group]) do
      local value = saved and saved[i] and saved[i][name]
      if core.is_tensor(value) then
        group[name] = core.no_grad(function() return value:clone():keep() end)
      elseif value ~= nil then
        group[name] = copy(value)
      elseif not equal(group[name], begin) then
        group[name] = copy(begin)
      end
    end
  end
end

return written
