-- Lists of names and Lua patterns, which options use to choose parameters and buffers of a model.
local core = require "moonshard.core"

local listed = {}

--- Whether a name is in the list. A pattern must match all of it.
---@param name string
---@param list? string[]
---@return boolean
function listed.has(list, name)
  for _, pattern in ipairs(list or {}) do
    if name == pattern or name:match("^" .. pattern .. "$") then return true end
  end
  return false
end

--- Raises unless the option is a list of names and patterns, or nil.
---@param what string the function that users call
---@param option string
---@param list any
function listed.check(what, option, list)
  if list ~= nil and type(list) ~= "table" then
    core.raise(("%s: option %s is a list of names and patterns, not a %s")
      :format(what, option, type(list)))
  end
  for i, pattern in ipairs(list or {}) do
    if type(pattern) ~= "string" then
      core.raise(("%s: %s[%d] must be a name or a pattern, not a %s")
        :format(what, option, i, type(pattern)))
    end
    local ok, why = pcall(string.find, "", "^" .. pattern .. "$")
    if not ok then
      core.raise(("%s: %s[%d], '%s', is no pattern: %s"):format(what, option, i, pattern, why))
    end
  end
end

--- Raises if an entry of the list matches no parameter or buffer: a misspelled name would be
--- synchronized although the user wanted to ignore it.
---@param what string
---@param option string
---@param list? string[]
---@param model ms.Module
function listed.check_matches(what, option, list, model)
  for _, pattern in ipairs(list or {}) do
    local found = false
    for _, item in ipairs(model:named_parameters()) do
      found = found or listed.has({ pattern }, item.name)
    end
    for name in pairs(model:buffers()) do found = found or listed.has({ pattern }, name) end
    if not found then
      core.raise(("%s: %s: no parameter or buffer is called '%s'"):format(what, option, pattern))
    end
  end
end

return listed
