-- Error feedback before each lossy link, native and in Lua: error_feedback.lua has the checks.
local command = require "command"

it("error_feedback: the mean of what is applied tends to the mean of what ranks have", function()
  command.on_ranks("error_feedback", "3 --thread-ranks")
end)
