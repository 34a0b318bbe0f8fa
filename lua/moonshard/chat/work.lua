-- One parse or one rendering of a chat template: how much it may still do, the line that it is at,
-- and the errors that end it. There is one at a time, because nothing in it calls a user's code.
local core = require "moonshard.core"

local work = {}

---@class ms.ChatFault
---@field message string
---@field code string
local Fault = {}

-- Nested expressions, statements and macros: each takes levels of Lua's stack.
local DEPTH <const> = 150

local line, steps, bytes, depth, limits

--- Fails with a message that begins with the template's line.
---@param code string
---@param format string
---@param ... any
function work.fail(code, format, ...)
  local where = line and ("chat template, line %d: "):format(line) or "chat template: "
  error(setmetatable({ message = where .. format:format(...), code = code }, Fault), 0)
end

--- Fails because something is not built, and names what is known or meant.
---@param what string "filter", "test" or the like
---@param name string
---@param known? table<string, any> what there is, by name
function work.refuse(what, name, known)
  local names = {}
  for one in pairs(known or {}) do names[#names + 1] = one end
  table.sort(names)
  local nearest = names[1] and core.nearest(name, names)
  local hint = nearest and (": did you mean '%s'?"):format(nearest)
    or names[1] and ": known are " .. table.concat(names, ", ") or ""
  work.fail("unsupported", "%s '%s' is not built%s", what, name, hint)
end

--- Says which line is worked on.
---@param number integer?
function work.at(number) line = number end

--- Counts steps of evaluation.
---@param count integer
function work.spend(count)
  steps = steps - count
  if steps < 0 then
    work.fail("timeout", "it took more than %d steps (the option `steps` sets the limit)",
      limits.steps)
  end
end

--- Counts the work of going through the bytes of a text.
---@param length integer
function work.read(length) work.spend(length // 64) end

--- Checks the length of a text that is about to be made.
---@param length integer
function work.text(length)
  if length > limits.bytes then
    work.fail("no_space", "a text has more than %d bytes (the option `bytes` sets the limit)",
      limits.bytes)
  end
end

--- Counts bytes of the output.
---@param length integer
function work.write(length)
  bytes = bytes - length
  if bytes < 0 then
    work.fail("no_space", "it wrote more than %d bytes (the option `bytes` sets the limit)",
      limits.bytes)
  end
end

--- Enters a level of nesting; `work.leave` ends it.
function work.enter()
  depth = depth + 1
  if depth > DEPTH then
    work.fail("unsupported", "more than %d levels are nested, or a macro calls itself for ever",
      DEPTH)
  end
end

function work.leave() depth = depth - 1 end

--- Runs f under limits. Returns its result, or nil, message, code where work.fail ended it.
---@param given { steps: integer, bytes: integer }
---@param f function
---@param ... any
---@return any
---@return string? message
---@return string? code
function work.run(given, f, ...)
  limits, steps, bytes, depth, line = given, given.steps, given.bytes, 0, nil
  local ok, result = pcall(f, ...)
  if ok then return result end
  -- Long chains of operators take levels of the stack that `work.enter` does not count.
  if type(result) == "string" and result:find("stack overflow", 1, true) then
    return core.refuse(("chat template, line %d: an expression is too long"):format(line or 1),
      "unsupported")
  end
  if getmetatable(result) ~= Fault then error(result, 0) end
  return core.refuse(result.message, result.code)
end

--- Runs f within a rendering. Returns its result, or nil where it failed because of the
--- conversation.
---@param f function
---@param ... any
---@return any
function work.attempt(f, ...)
  local level = depth
  local ok, result = pcall(f, ...)
  if ok then return result end
  if getmetatable(result) ~= Fault or result.code ~= "mismatch" then error(result, 0) end
  depth = level
  return nil
end

return work
