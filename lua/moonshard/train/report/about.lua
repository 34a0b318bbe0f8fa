-- run.json: what a run is, and how it ended. The process that runs rank 0 writes it when the run
-- begins; the one that knows the exit code adds it at the end.
local core = require "moonshard.core"
local launch = require "moonshard.base.launch"
local log = require "moonshard.base.log"
local machines = require "moonshard.base.machine"

local about = {}

local NAME <const> = "/run.json"

local function write(run, object)
  local ok, message = core.file_write(run .. NAME, core.json_encode(object) .. "\n")
  if not ok then log.warn("%s is not written: %s", run .. NAME, message) end
end

-- What the file says, by type. Others may have written it: what is of another type is not there.
local KINDS <const> = {
  version = "text", recipe = "text", message = "text", ranks = "count", steps = "count",
  code = "count", started = "count", ended = "count", settings = "settings",
  set = "settings",
}
local is = {}
function is.text(value) return type(value) == "string" end
-- A calendar has years of four digits; no count comes near to 2^37 either.
function is.count(value)
  return math.type(value) == "integer" and value >= 0 and value < 1 << 37
end
function is.settings(value)
  if type(value) ~= "table" then return false end
  for name, one in pairs(value) do
    if type(name) ~= "string" or type(one) == "table" then return false end
  end
  return true
end

--- What is known of a run; nil: it has no such file, or a damaged one.
---@param run string folder
---@return table?
function about.read(run)
  local text = core.file_read(run .. NAME)
  local object = text and core.json_decode(text)
  if type(object) ~= "table" then return nil end
  for name, kind in pairs(KINDS) do
    if object[name] ~= nil and not is[kind](object[name]) then object[name] = nil end
  end
  return object
end

--- Writes the file of a run that begins.
---@param run string folder
---@param steps? integer of the whole run
function about.begin(run, steps)
  local settings, set = {}, {}
  for _, item in ipairs(launch.settings or {}) do
    settings[item.name] = item.value
    if item.changed then set[item.name] = item.value end
  end
  write(run, {
    version = core.version, recipe = launch.recipe, command = launch.command,
    machine = machines.describe(),
    ranks = core.world():size(), steps = steps, started = os.time(), settings = settings, set = set,
  })
end

--- Notes the number of steps of a run, where it is known only later.
---@param run string folder
---@param steps integer
function about.note_steps(run, steps)
  local object = about.read(run)
  if not object then return end
  object.steps = steps
  write(run, object)
end

--- Notes how a run ended.
---@param run? string folder; nil: there was no run
---@param code integer the exit code
---@param message? string of an error
function about.finish(run, code, message)
  local object = run and about.read(run)
  if not object or object.code == code then return end
  object.code, object.ended = code, os.time()
  object.message = message and message ~= "" and message:match "[^\n]*" or nil
  write(run, object)
end

return about
