-- Files for gather=: they return before_gather and after_gather of ms.fsdp, or a function that
-- makes both from options.
local core = require "moonshard.core"

local gathers = {}

local known = { before_gather = true, after_gather = true }

--- The table of the two functions.
---@param path string a Lua file
---@param options table that a file's function gets
---@param are_given boolean whether the user has given some
---@return { before_gather?: function, after_gather?: function }
function gathers.from(path, options, are_given)
  local chunk, message = loadfile(path, "t")
  if not chunk then core.raise(message) end
  local result = chunk()
  if type(result) == "function" then result = result(options)
  elseif are_given then
    core.raise(("'%s' takes no options: it returns no function that makes a table from them")
      :format(path))
  end
  local any = false
  for key, value in pairs(type(result) == "table" and result or {}) do
    if not known[key] or type(value) ~= "function" then
      core.raise(("'%s': %s = %s: the functions before_gather and after_gather are expected")
        :format(path, tostring(key), tostring(value)))
    end
    any = true
  end
  if any then return result end
  core.raise(("'%s' returns a %s: a table with before_gather, after_gather or both is expected")
    :format(path, type(result)))
end

return gathers
