-- The lock of a folder: one process writes checkpoints and metrics there at a time. The system
-- drops it when the process ends, however it ends.
local core = require "moonshard.core"

local lock = {}

-- folder -> its lock, while this process has it
local held = setmetatable({}, { __mode = "v" })

-- Equal for most spellings of one folder.
local function key_of(folder)
  return (folder:gsub("/+", "/"):gsub("^%./", ""):gsub("(.)/$", "%1"))
end

--- Takes the lock of a folder until close(). Second: why not ("denied": another process has it).
---@param folder string
---@return table?
---@return string? message
---@return string? code
function lock.take(folder)
  local made, message, code = core.file_lock(folder .. "/lock")
  if not made then return nil, message, code end
  held[key_of(folder)] = made
  return made
end

--- Gives a lock of `take` back.
---@param folder string
---@param taken table
function lock.give(folder, taken)
  held[key_of(folder)] = nil
  taken:close()
end

--- Whether this process has the lock of a folder.
---@param folder string
---@return boolean
function lock.is_held(folder) return held[key_of(folder)] ~= nil end

return lock
