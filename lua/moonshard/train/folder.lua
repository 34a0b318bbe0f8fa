-- The folder of a run: which one it is, who owns it, its checkpoints, resuming.
local about = require "moonshard.train.report.about"
local core = require "moonshard.core"
local launch = require "moonshard.base.launch"
local link_state = require "moonshard.parallel.link_state"
local lock = require "moonshard.checkpoint.lock"
local log = require "moonshard.base.log"
local history = require "moonshard.train.history"
local shared = require "moonshard.checkpoint.shared"
local ownership = require "moonshard.base.ownership"
local store = require "moonshard.checkpoint.store"
local values_of = require "moonshard.checkpoint.values"
local checkpoint = require "moonshard.checkpoint"

local folder = {}

-- Everything that a checkpoint of this run holds.
local function things_of(self)
  local o = self.o
  local things = { model = o.model, optimizer = o.optimizer, ema = self.ema }
  if type(o.data) ~= "function" and o.data.state then things.data = o.data end
  if self.scaler then things.scaler = self.scaler end
  local method = ownership.methods[o.model]
  if method and method.state then things["local"] = method end
  for name, thing in pairs(o.things or {}) do
    if things[name] ~= nil or name == "step" or name == "chosen" then
      core.raise(("train: things.%s is a name that train uses itself"):format(name))
    end
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

-- The run's folder; where to look for the newest checkpoint, or the checkpoint that was named.
local function choose(o)
  local run, path = o.run or default_run(), o.resume
  if path == "never" then return next_free(run) end
  if path == "auto" then return run, run end
  path = path:gsub("(.)/+$", "%1")
  if not core.exists(path) then
    launch.exit(3, ("resume: there is no checkpoint '%s'"):format(o.resume))
  end
  if core.exists(path .. "/manifest.json") then
    return o.run or path:match "^(.*)/[^/]+$" or ".", nil, path
  end
  if #store.list(path) == 0 then
    launch.exit(3, ("resume: '%s' holds no committed checkpoint"):format(path))
  end
  return o.run or path, path
end

-- Makes the folder, locks it for this rank, which writes there, and removes files that a crashed
-- save has left.
local function own(self, run)
  if core.is_sim() and not launch.checking then return end
  local ok, message = core.make_directory(run)
  if not ok then launch.exit(3, message) end
  self.lock, message = lock.take(run)
  if not self.lock then launch.exit(3, message) end
  ok, message = core.checkpoint_sweep(run)
  if not ok then launch.exit(3, message) end
end

-- Rank 0 chooses the folder and locks it; the other ranks then get its choice.
local function choose_together(self)
  local world = core.world()
  local run, search, path = "", nil, nil
  if core.rank() == 0 then
    run, search, path = choose(self.o)
    own(self, run)
  end
  local texts = {}
  local chosen = table.concat({ run, search or "", path or "", "." }, "\0")
  for text in world:_share_text(chosen, 0, "folder"):gmatch "(%Z*)%z" do
    texts[#texts + 1] = text ~= "" and text or false
  end
  return texts[1] or run, texts[2], texts[3]
end

-- A warning that concerns all ranks, printed once.
local function warn_once(...)
  if core.rank() == 0 then log.warn(...) end
end

local function tell(passed)
  for _, message in ipairs(passed) do warn_once("%s; it is skipped", message) end
end

-- The newest checkpoint of a folder, or the newest one before `before`, which turned out to be
-- damaged. If there are checkpoints and none can be read, the run ends: it must not start again
-- silently.
local function find(search, before)
  local path, passed, message = store.find(search, before)
  tell(passed)
  if path then
    if before or #passed > 0 then warn_once("resuming from %s", path) end
    return path
  end
  if message then launch.exit(3, message) end
  if before or #passed > 0 then
    launch.exit(3, ("resume: no checkpoint in '%s' can be read; move them away, or name another \z
      run, to begin anew"):format(search))
  end
end

-- What the run that saved a checkpoint had chosen; nil: an older version saved it, or it cannot be
-- read, which `load` then reports.
local function chosen_by(path)
  local manifest = store.read_manifest(path)
  local ok, chosen = pcall(values_of.decode, manifest and manifest.values.chosen, function() end)
  if not ok or type(chosen) ~= "table" then return nil end
  return { steps = math.tointeger(chosen.steps), dtype = chosen.dtype, best = chosen.best,
    stopped = math.tointeger(chosen.stopped), ema = chosen.ema == true }
end

-- Loads the checkpoint into model, optimizer and the other things. If the user has not named a
-- checkpoint, a damaged one is skipped and the one before it is loaded.
local function load(self, search, path)
  while true do
    local chosen = chosen_by(path)
    self:settle(chosen)
    local things = things_of(self)
    -- Averages may begin in the middle of a run.
    local begins = self.ema and not (chosen and chosen.ema)
    if begins then things.ema = nil end
    local loaded, message, code = checkpoint.load(path, things)
    if loaded and begins then
      self.ema:_begin()
      log.log("ema: the checkpoint has no averages: they begin with its weights")
    end
    if loaded then
      if math.type(loaded.step) ~= "integer" then
        launch.exit(3, ("'%s' has no step from which to resume"):format(path))
      end
      return loaded.step, path
    end
    if not search or code ~= "corrupt" then launch.exit(3, message) end
    tell { message }
    path = find(search, path)
  end
end

-- Settings that name the run, and not what it computes.
local NAMES <const> = { run = true, resume = true }

local function shown(value)
  if value == nil or value == "" then return "none" end
  return type(value) == "table" and core.json_encode { value }:sub(2, -2) or tostring(value)
end

-- One line about what the run that saved this checkpoint had otherwise: its settings and ranks, and
-- saved states of links that are not in the chain now.
local function tell_of_changes(path)
  local before = about.read(path:match "^(.*)/[^/]+$" or ".")
  local parts, unclaimed, told = {}, link_state.unclaimed(), false
  local function compare(name, old, new)
    if shown(old) == shown(new) then return end
    local lost = name == "hook" and #unclaimed > 0
    parts[#parts + 1] = ("%s %s -> %s%s"):format(name, shown(old), shown(new),
      lost and " (its state is not loaded)" or "")
    told = told or lost
  end
  if before and type(before.settings) == "table" then
    for _, item in ipairs(launch.settings or {}) do
      if not NAMES[item.name] then compare(item.name, before.settings[item.name], item.value) end
    end
    compare("ranks", before.ranks, core.world():size())
  end
  if #unclaimed > 0 and not told then
    parts[#parts + 1] = ("no link has the state '%s', which is not loaded"):format(
      table.concat(unclaimed, "', '"))
  end
  if #parts > 0 then
    log.log("differs from the checkpoint's run: %s", table.concat(parts, "; "))
  end
end

--- Chooses the folder, locks it, and loads the checkpoint from which the run continues, if there is
--- one. Calls self:settle(chosen) before it loads anything, with what the checkpoint's run had
--- chosen, or nil.
---@param self ms.Training
function folder.open(self)
  local search, path
  if self.o.run == false then
    self.start = 0
    self:settle()
    return
  end
  self.run, search, path = choose_together(self)
  self.start = 0
  if core.is_sim() and not launch.checking then
    self:settle()
    return
  end
  local problem = shared.problem(self.run)
  if problem then launch.exit(3, problem) end
  launch.run = self.run
  core.comm_folder(self.run)
  if search then path = find(search) end
  if not path then
    self:settle()
    if search then log.log("nothing to resume in %s: training begins at step 0", search) end
    return
  end
  self.start, path = load(self, search, path)
  -- A checkpoint must not be renamed while another rank reads it.
  if core.world():size() > 1 then core.world():barrier() end
  local steps = self.o.steps or self.chosen and self.chosen.steps or math.huge
  if core.rank() == 0 and self.start < steps and not launch.checking then
    history.set_aside(self.run, path, self.start)
  end
  log.log("resumed from %s", path)
  if core.rank() == 0 then tell_of_changes(path) end
end

--- If the checkpoint that is being written has ended, logs its result and, after a success, removes
--- old checkpoints.
---@param self ms.Training
---@param wait boolean waits for its end
function folder.settle(self, wait)
  local path = self.saving
  if not path or not (wait or core.checkpoint_is_done()) then return end
  self.saving = nil
  local ok, message = checkpoint.wait()
  self.committed, self.lost = ok == true, message
  if not ok then
    log.warn("%s was not saved: %s", path, message)
    return
  end
  log.log("saved %s", path)
  local save = self.o.save
  if save and save.last and core.rank() == 0 then
    history.prune(self.run, self.saved, save.last, save.keep_every,
      save.best and self.best and self.best.step)
  end
end

--- Saves a checkpoint whose next step is `step`. After a failure a warning is printed and training
--- continues; the checkpoint before is not touched.
---@param self ms.Training
---@param step integer
function folder.save(self, step)
  if core.is_sim() and not launch.checking then return end
  folder.settle(self, true)
  local things = things_of(self)
  things.step = step
  things.chosen = { steps = self.o.steps, dtype = self.o.dtype, best = self.best,
    stopped = self.stopped, ema = self.ema ~= nil }
  local path, message = checkpoint.save(self.run, things)
  self.saved, self.committed, self.saving, self.lost = step, false, path, message
  if not path then warn_once("the checkpoint of step %d was not saved: %s", step, message) end
end

--- Waits for the checkpoint that is being written. Returns whether the run's last checkpoint is on
--- disk.
---@param self ms.Training
---@return boolean
function folder.close(self)
  folder.settle(self, true)
  if self.lock then lock.give(self.run, self.lock) end
  self.lock = nil
  return self.committed == true
end

return folder
