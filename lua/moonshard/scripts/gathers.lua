-- Files for gather=: they return before_gather and after_gather of ms.fsdp, or a function that
-- makes both from options; or pieces of a method.
local core = require "moonshard.core"
local pieces = require "moonshard.scripts.pieces"

local gathers = {}

--- The pieces that a file gives; a table of the two functions is the piece `gather`.
---@param path string a Lua file
---@param options table that a file's function gets
---@param are_given boolean whether the user has given some
---@return ms.Pieces
function gathers.from(path, options, are_given)
  local chunk, message = loadfile(path, "t")
  if not chunk then core.raise(message) end
  local result = chunk()
  if type(result) == "function" then result = result(options)
  elseif are_given then
    core.raise(("'%s' takes no options: it returns no function that makes a table from them")
      :format(path))
  end
  local found = pieces.of(path, result)
  if found then return found end
  if type(result) == "table" and next(result) ~= nil then
    return { gather = pieces.check_gather(path, result) }
  end
  core.raise(("'%s' returns a %s: a table with before_gather, after_gather or both is expected, %s")
    :format(path, type(result), pieces.expected))
end

return gathers
