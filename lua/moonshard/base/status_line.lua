-- The line of a terminal that is rewritten in place, and what other writers to the same terminal
-- must do so that their text does not mix with it.
local launch = require "moonshard.base.launch"

local live = { shown = false }           -- shown: the cursor is at the end of the line

--- Whether lines can be rewritten in place. Only the program (not an application) can tell.
---@return boolean
function live.is_terminal() return launch.process ~= nil and launch.process.is_terminal() end

--- Replaces the shown line by as many of these parts, from the first on, as fit the terminal's
--- present width. A part is never cut, because half a number would read as another number; only a
--- first part that is wider than the terminal is.
---@param parts string[]
function live.show(parts)
  -- The last column stays free: some terminals move to the next row as soon as it is written.
  local room, text = math.max(launch.process.columns() - 1, 1), parts[1]
  for i = 2, #parts do
    local longer = text .. "  " .. parts[i]
    if #longer > room then break end
    text = longer
  end
  io.stdout:write("\r\27[K", text:sub(1, room))
  io.stdout:flush()
  live.shown = true
end

--- Ends the line, so that other text begins on a new line.
function live.finish()
  if not live.shown then return end
  live.shown = false
  io.stdout:write "\n"
  io.stdout:flush()
end

--- For a process that shows no line itself, while another process on the terminal may: returns the
--- prefix of its text, which clears that line. Prefix and text go out in one write.
---@return string
function live.fresh_row()
  live.finish()
  return live.is_terminal() and "\r\27[K" or ""
end

return live
