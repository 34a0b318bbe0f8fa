-- Log lines: ms.log prints on rank 0, ms.warn on any rank that calls it.
local core = require "moonshard.core"
local launch = require "moonshard.base.launch"
local live = require "moonshard.base.status_line"

local log = {}

-- A tensor is an argument of %s only and shows shape and dtype: showing values would wait for the
-- device.
local function text(format, ...)
  if type(format) ~= "string" then core.raise("log: a format is expected, not " .. type(format)) end
  local count = select("#", ...)
  local values = { ... }
  local i = 0
  for directive in format:gmatch "%%[-+ #0]*%d*%.?%d*(.)" do
    if directive ~= "%" then
      i = i + 1
      if i <= count and core.is_tensor(values[i]) then
        if directive ~= "s" then
          core.raise("log: a tensor can be shown by %s only; its values are not on the host")
        end
        values[i] = tostring(values[i])
      end
    end
  end
  local ok, line = pcall(string.format, format, table.unpack(values, 1, count))
  if ok then return line end
  -- A text alone may have a percent sign.
  return count == 0 and format or core.raise("log: " .. line)
end

--- Writes a line where lines of the log go.
---@param line string
function log.put(line)
  if launch.on_line then return launch.on_line(line, false) end
  live.finish()
  io.stdout:write(line, "\n")
  io.stdout:flush()
end

---@param format string
function log.log(format, ...)
  local line = text(format, ...)
  if launch.checking or launch.quiet or core.rank() ~= 0 then return end
  log.put(line)
end

--- 1234567 as "1,234,567".
---@param count integer
---@return string
function log.grouped(count)
  local digits = tostring(count):reverse():gsub("(%d%d%d)", "%1,"):reverse()
  return (digits:gsub("^,", ""))
end

---@param format string
function log.warn(format, ...)
  local line = ("moonshard: rank %d: %s"):format(core.rank(), text(format, ...))
  if launch.on_line then return launch.on_line(line, true) end
  io.stderr:write(live.fresh_row() .. line .. "\n")
end

return log
