-- metrics.jsonl: a line for each step, which is a JSON object.
local core = require "moonshard.core"
local log = require "moonshard.base.log"

---@class ms.MetricsFile
local File = {}
File.__index = File

local metrics_file = {}

--- The file of a run. It is created if it does not exist, and opened for writing with the first
--- line.
---@param run string folder
---@return ms.MetricsFile
function metrics_file.new(run)
  local self = setmetatable({ path = run .. "/metrics.jsonl" }, File)
  assert(core.file_append(self.path)):close()
  return self
end

-- Removes the lines of this step and of later steps, because the run writes them again, and an
-- incomplete line of a process that was killed.
local function cut(self, step)
  local text = core.file_read(self.path)
  if not text or text == "" then return true end
  local kept, lost = {}, 0
  for line in text:gmatch "[^\n]+" do
    local entry = core.json_decode(line)
    if type(entry) == "table" and math.type(entry.step) == "integer" and entry.step < step then
      kept[#kept + 1] = line .. "\n"
    else
      lost = lost + 1
    end
  end
  local whole = table.concat(kept)
  if whole == text then return true end
  if lost > 0 then
    log.log("metrics    %d lines of %s were removed: this run begins at step %d", lost,
      self.path, step)
  end
  return core.file_write(self.path, whole)
end

-- A failure to write does not stop training; one warning is printed.
local function tell(self, message)
  if not self.told then log.warn("metrics are not written: %s", message) end
  self.told = true
end

--- Adds an object as a line. Before the first one, lines from its step on are cut.
---@param object table with a field step
function File:append(object)
  local ok, message = true, nil
  if not self.file then
    if not self.is_cut then ok, message = cut(self, object.step) end
    self.is_cut = true
    if ok then
      self.file, message = core.file_append(self.path)
      ok = self.file ~= nil
    end
  end
  if ok then ok, message = self.file:write(core.json_encode(object) .. "\n") end
  if not ok then tell(self, message) end
end

--- Closes it; another append opens it again.
function File:close()
  if self.file then self.file:close() end
  self.file = nil
end

return metrics_file
