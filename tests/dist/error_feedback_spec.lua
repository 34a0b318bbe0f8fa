-- Error feedback before each lossy link, native and in Lua: error_feedback.lua has the checks.
local command = require "command"

it("error_feedback: the mean of what is applied tends to the mean of what ranks have", function()
  local folder, file = command.folder(), command.source .. "/tests/dist/error_feedback.lua"
  local out = command.succeed(folder, ("run '%s' -n 3 --thread-ranks"):format(file))
  for rank = 0, 2 do assert.truthy(out:find(("rank %d is done"):format(rank), 1, true), out) end
  command.remove(folder)
end)
