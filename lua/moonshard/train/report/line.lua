-- The step line: its text, and the steps in which it is shown.
local core = require "moonshard.core"

local line = {}

local FIRST_LINES = 10  -- lines for the first steps without a terminal; then the rarer of:
local EVERY_MS, EVERY_PART = 10e3, 100  -- every 10 s, every 1/100 of all steps

local function duration(seconds)
  seconds = math.floor(seconds + 0.5)
  if seconds >= 3600 then
    return ("%d:%02d:%02d"):format(seconds // 3600, seconds // 60 % 60, seconds % 60)
  end
  return ("%d:%02d"):format(seconds // 60, seconds % 60)
end

local function amount(value)
  if value >= 1e6 then return ("%.2fM"):format(value / 1e6) end
  if value >= 1e3 then return ("%.1fk"):format(value / 1e3) end
  return ("%.0f"):format(value)
end

--- The parts of a step's line, in order of importance. The first steps have no times: they also
--- allocate memory and build kernels.
---@param self ms.Report
---@param entry table
---@return string[]
function line.parts(self, entry)
  local values = entry.values
  local parts = { ("step %5d%s"):format(entry.step, self.total and "/" .. self.total or "") }
  local function add(format, value)
    if value then parts[#parts + 1] = format:format(value) end
  end
  local has_times = entry.position > 3
  add("loss %.4f", values.loss)
  if has_times and self.total then
    add("eta %s", duration((self.total - entry.step - 1) * entry.mean_ms / 1e3))
  end
  if has_times then add("%s tok/s", values.tok_s and amount(values.tok_s)) end
  if has_times then add("%.1f ms", entry.mean_ms) end
  add("norm %.3f", values.grad_norm)
  add("lr %.2e", values.lr)
  if has_times then add("mfu %.0f%%", values.mfu and 100 * values.mfu) end
  add("mem %.0f MiB", values.peak_bytes / 2 ^ 20)
  return parts
end

--- Whether a step's line is shown. If `every` is given, every so many steps. Otherwise each step on
--- a terminal; elsewhere the first 10, then one every 10 s or 1% of the steps, whichever is rarer.
--- The last step of a run is always shown.
---@param self ms.Report
---@param entry table
---@return boolean
function line.is_due(self, entry)
  if entry.step + 1 == self.total then return true end
  if self.every then return entry.step % self.every == 0 end
  if self.terminal or entry.position <= FIRST_LINES then return true end
  local steps = entry.step - self.last_line.step
  return core.clock_ms() - self.last_line.at >= EVERY_MS and steps >= (self.total or 0) / EVERY_PART
end

return line
