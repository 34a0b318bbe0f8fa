-- Tables of options: an unknown name is an error that tells the nearest one.
local core = require "moonshard.core"

local options = {}

--- Raises unless given is nil or a table whose keys are all among names.
---@param what string whose options they are; begins the message
---@param given? table
---@param names string[]
---@return table given, or an empty table
function options.check(what, given, names)
  if given == nil then return {} end
  if type(given) ~= "table" then core.raise(("%s: a table of options is expected, not %s"):format(what, type(given))) end
  for key in pairs(given) do
    local known = false
    for _, name in ipairs(names) do known = known or name == key end
    if not known then
      local nearest = core.nearest(tostring(key), names)
      core.raise(("%s: unknown option '%s'%s; it has %s"):format(what, tostring(key), nearest and (": did you mean '%s'?"):format(nearest) or "", table.concat(names, ", ")))
    end
  end
  return given
end

--- Raises unless given is nil or a group of ranks.
---@param what string whose option it is; begins the message
---@param name string
---@param given any
function options.check_group(what, name, given)
  if given ~= nil and not core.is_group(given) then
    core.raise(("%s: %s must be a group of ranks (ms.world(), or what its split gives), not a %s"):format(what, name, type(given)))
  end
end

return options
