-- The folder of a run: which one it is, who owns it, its checkpoints, resuming.
local core = require "moonshard.core"
local launch = require "moonshard.launch"
local log = require "moonshard.log"

local folder = {}

local function checkpoints() return require "moonshard.checkpoint" end

-- Everything that a checkpoint of this run holds.
local function things_of(self)
  local o = self.o
  local things = { model = o.model, optimizer = o.optimizer }
  if type(o.data) ~= "function" and o.data.state then things.data = o.data end
  if self.scaler then things.scaler = self.scaler end
  for name, thing in pairs(o.things or {}) do
    if things[name] ~= nil or name == "step" then core.raise(("train: things.%s is a name that train uses itself"):format(name)) end
    things[name] = thing
  end
  return things
end

local function default_run()
  local name = launch.recipe and launch.recipe:match "([^/]+)%.lua$" or "run"
  return "runs/" .. name
end

-- The first of name, name-2, name-3 ... that does not exist.
local function next_free(name)
  if not core.exists(name) then return name end
  local i = 2
  while core.exists(("%s-%d"):format(name, i)) do i = i + 1 end
  return ("%s-%d"):format(name, i)
end

-- The folder, and the checkpoint to go on from.
local function choose(self)
  local o = self.o
  local run = o.run or default_run()
  if o.resume == "never" then return next_free(run) end
  if o.resume == "auto" then return run, checkpoints().latest(run) end
  local path = o.resume
  if not core.exists(path) then launch.exit(3, ("resume: there is no checkpoint '%s'"):format(path)) end
  if core.exists(path .. "/manifest.json") then return o.run or path:match "^(.*)/[^/]+$" or ".", path end
  local latest = checkpoints().latest(path)
  if not latest then launch.exit(3, ("resume: '%s' holds no committed checkpoint"):format(path)) end
  return o.run or path, latest
end

-- Makes the folder and locks it: this rank writes there.
local function own(self, run)
  if core.is_sim() and not launch.checking then return end
  local ok, message = core.make_directory(run)
  if not ok then launch.exit(3, message) end
  self.lock, message = core.file_lock(run .. "/lock")
  if not self.lock then launch.exit(3, message) end
end

-- Rank 0 chooses and owns the folder; the others follow when it has it.
local function choose_together(self)
  local world = core.world()
  local run, path = "", nil
  if core.rank() == 0 then
    run, path = choose(self)
    own(self, run)
  end
  run, path = world:_share_text(run .. "\0" .. (path or "")):match "^(%Z*)%z?(.*)$"
  return run, path ~= "" and path or nil
end

-- Loads the checkpoint into what trains. Where nobody named it, a damaged one gives way to the one before.
local function load(self, path)
  while true do
    local loaded, message, code = checkpoints().load(path, things_of(self))
    if loaded then return loaded.step, path end
    local before = self.o.resume == "auto" and code == "corrupt" and checkpoints().latest(self.run, path)
    if not before then launch.exit(3, message) end
    log.warn("%s; going on from %s", message, before)
    path = before
  end
end

-- Lines of steps behind the checkpoint go: the run makes them again.
local function trim_metrics(self)
  local path = self.run .. "/metrics.jsonl"
  local text = core.file_read(path)
  if not text then return end
  local kept = {}
  for line in text:gmatch "[^\n]+" do
    local entry = core.json_decode(line)
    if type(entry) == "table" and math.type(entry.step) == "integer" and entry.step < self.start then kept[#kept + 1] = line .. "\n" end
  end
  local ok, message = core.file_write(path, table.concat(kept))
  if not ok then launch.exit(3, message) end
end

--- Chooses the folder, locks it, loads the checkpoint if there is one to go on from.
---@param self ms.Training
function folder.open(self)
  local path
  self.run, path = choose_together(self)
  self.start = 0
  if core.is_sim() and not launch.checking then return end
  launch.run = self.run
  core.comm_folder(self.run)
  if not path then return end
  self.start, path = load(self, path)
  if core.rank() == 0 then trim_metrics(self) end
  log.log("resumed from %s", path)
end

-- Of the last `last` checkpoints on disk all stay, of older ones those whose step divides by keep_every.
local function prune(self)
  local save, found = self.o.save, {}
  if not save or not save.last or core.rank() ~= 0 then return end
  for _, name in ipairs(core.list(self.run) or {}) do
    local step = name:match "^step%-(%d+)$"
    if step then found[#found + 1] = { name = name, step = math.tointeger(tonumber(step)) } end
  end
  table.sort(found, function(a, b) return a.step > b.step end)
  for i = save.last + 1, #found do
    if not (save.keep_every and found[i].step % save.keep_every == 0) then
      local ok, message = core.checkpoint_remove(self.run, found[i].name)
      if not ok then log.warn("an old checkpoint was not removed: %s", message) end
    end
  end
end

--- Saves a checkpoint from which step `step` is the next. A failure is told and training goes on: the one before is untouched.
---@param self ms.Training
---@param step integer
function folder.save(self, step)
  if core.is_sim() and not launch.checking then return end
  local things = things_of(self)
  things.step = step
  local path, message = checkpoints().save(self.run, things)
  self.report:flush()
  if not path then
    log.warn("step %d: %s", step, message)
    return
  end
  self.saved = step
  log.log("saved %s", path)
  prune(self)
end

--- Waits for what is still being written; false if the last checkpoint did not make it.
---@param self ms.Training
---@return boolean
function folder.close(self)
  local written = true
  if self.saved and (launch.checking or not core.is_sim()) then
    local ok, message = checkpoints().wait()
    if not ok then log.warn("the last checkpoint was not saved: %s", message) end
    prune(self)
    written = ok == true
  end
  if self.lock then self.lock:close() end
  self.lock = nil
  return written
end

return folder
