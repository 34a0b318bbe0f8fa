-- Errors as users see them: the message, and their own lines of the traceback.
local core = require "moonshard.core"
local launch = require "moonshard.base.launch"

local failure = {}

-- An error that no line of a script has made begins with a line of the library, which tells users
-- nothing; a fault of the library itself keeps it.
local function without_own_place(message)
  local rest = message:match "^[^\n]-lua/[%d.]*/?moonshard/[^\n:]*:%d+: (.*)$"
  local is_own = rest and (rest:find "^attempt to " or rest:find "^bad argument"
    or rest:find "^assertion failed")
  return rest and not is_own and rest or message
end

-- For a script that goes on with the nil of a call that failed: what had failed, and where.
local function reason_of_nil(message)
  if not message:find "attempt to %a+ [%a ]*a nil value" then return "" end
  local reason, line = core.refusal()
  return reason and ("\n%s: a call has failed here and given nil: %s; assert(...) around it \z
    raises this at once"):format(line, reason) or ""
end

--- For xpcall: the error as text, with the lines of the user's scripts on the way to it. With
--- MOONSHARD_LOG=debug all lines.
---@param value any
---@return any
function failure.handler(value)
  if launch.is_exit(value) then return value end
  -- An error in a hook was raised deeper in the stack than the place where it arrives.
  local inner = core.traceback(value)
  local message = value
  if type(value) ~= "string" then
    local meta = getmetatable(value)
    message = type(meta) == "table" and meta.__tostring and tostring(value)
      or ("the recipe raised a value that is not a string: " .. tostring(value))
  end
  if os.getenv "MOONSHARD_LOG" == "debug" then
    return message .. "\n" .. (inner or debug.traceback("", 2))
  end
  message = without_own_place(message)
  message = message .. reason_of_nil(message)
  -- The user's part of the traceback, without the frames of the library and the program.
  local lines = {}
  for line in (inner or debug.traceback("", 2)):gmatch "[^\n]+" do
    local ours = line:match "^stack traceback" or line:match "lua/[%d.]*/?moonshard/"
      or line:match "%[C%]" or line:match "%(%.%.%.tail calls"
    -- Repeated lines of a recursion are shown once.
    if not ours and line ~= lines[#lines] then lines[#lines + 1] = line end
  end
  -- A single frame adds nothing: the message begins with its line.
  local only = #lines == 1 and lines[1]:match "^%s*(.-:%d+:)"
  if #lines == 0 or only and message:sub(1, #only) == only then return message end
  return message .. "\n" .. table.concat(lines, "\n")
end

return failure
