-- The line of a terminal that is written over and over in place, and what others do who write to
-- the same terminal.
local launch = require "moonshard.launch"

local live = { shown = false }           -- shown: the cursor stands at the end of the line

--- Whether lines can be written in place: only the program knows.
---@return boolean
function live.is_terminal() return launch.process ~= nil and launch.process.is_terminal() end

--- Shows these parts of a line in place of what was shown: as many, from the first on, as fit the
--- terminal as wide as it is now. A part is never cut, unless the first is wider than the terminal:
--- half a number would be another one.
---@param parts string[]
function live.show(parts)
  -- The last column stays free: some terminals go on to the next row as soon as it is written.
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

--- Ends the line, so that other text begins one of its own.
function live.finish()
  if not live.shown then return end
  live.shown = false
  io.stdout:write "\n"
  io.stdout:flush()
end

--- The same for a process that shows no line itself, while another one on the terminal may: what
--- its text must begin with, in one write.
---@return string
function live.fresh_row()
  live.finish()
  return live.is_terminal() and "\r\27[K" or ""
end

return live
