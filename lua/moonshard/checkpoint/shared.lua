-- Whether a folder is the same on all hosts: checkpoints are written and read there by ranks of all
-- of them.
local core = require "moonshard.core"
local pieces = require "moonshard.checkpoint.pieces"

local shared = {}

-- How long a host may take to see what another has written.
local PATIENCE_MS <const> = 3000

-- No host has looked for this name before, so that none remembers that there is no such file.
local function new_name(folder)
  local token = core.hash(("%s %d %.3f"):format({}, os.time(), core.clock_ms()))
  return ("%s/.tmp-hosts-%016x"):format(folder, token)
end

local function appears(path)
  local start = core.clock_ms()
  while not core.exists(path) do
    if core.clock_ms() - start > PATIENCE_MS then return false end
  end
  return true
end

local function host_name()
  local file = io.open "/proc/sys/kernel/hostname"    -- its size is 0: core.file_read reads nothing
  local text = file and file:read "l"
  if file then file:close() end
  return text or "?"
end

-- Writes there on rank 0, and looks on all ranks.
local function look(world, folder)
  local path, message, code = "", nil, nil
  if core.rank() == 0 then
    path = new_name(folder)
    local _, why, kind = core.file_write(path, "")
    message, code = why, kind
  end
  -- Also if the job ends meanwhile: another rank may know the message first.
  local scope <close> = setmetatable({}, { __close = function() -- luacheck: ignore scope
    if core.rank() == 0 then core.remove(path) end
  end })
  path = world:_share_text(path, 0, "folder")
  local host = world:_share_text(host_name(), 0, "folder")
  message, code = pieces.agree(message, code)
  if message then return message, code end
  if not appears(path) then
    message = ("folder '%s' is not the same on all hosts: host %s does not see what rank 0 on \z
      host %s wrote there; choose a folder that all hosts share"):format(folder, host_name(), host)
  end
  return pieces.agree(message, "mismatch")
end

-- Folders that were found the same: by name.
local found = {}

--- A message and its code, the same on all ranks, if one does not see in this folder what rank 0
--- writes there; nil if all do, or are on one host. All ranks call it; it looks once.
---@param folder string
---@return string? message
---@return string? code
function shared.problem(folder)
  local world = core.world()
  if core.is_sim() or found[folder] or #world:_hosts() == 1 then return end
  local message, code = look(world, folder)
  if message then return message, code end
  found[folder] = true
end

return shared
