-- moonshard run --watch: files of links and planners are read again when they change, and all ranks
-- switch to the new version between the same two steps. Rank 0 looks at the files. All ranks learn
-- of a change before the same step, as of a request to stop, and rank 0 sends the new text.
--
-- A new script is on trial for its first step. If it does not load, returns another kind of object,
-- or fails on trial, a warning is printed and the old script stays in force.
local core = require "moonshard.core"
local future = require "moonshard.parallel.future"
local link_state = require "moonshard.parallel.link_state"
local log = require "moonshard.base.log"
local groups = require "moonshard.parallel.group"
local steps = require "moonshard.train.steps"

local watch = { on = false }

local LOOK_MS <const> = 20             -- between two looks at the files

-- The message to the ranks: how many files have changed; of each its number, its hash, and its text
-- in any encoding.
local COUNT <const>, CHANGE <const> = "<i4", "<i4i8s4"

local files = {}  -- in the order in which they were opened or used, which is the same on all ranks
-- A link or a planner -> the file that it comes from.
local item_of = setmetatable({}, { __mode = "k" })
local on_trial = {}                    -- those whose new script runs its first step
local looked = 0

-- The object that a script returns, or nil and a message. Its link gets the states of the earlier
-- version.
local function run(item, text)
  local chunk, message
  if item.read then chunk = function() return item.read(text) end
  else chunk, message = load(text, "@" .. item.path, "t") end
  if not chunk then return nil, "cannot be loaded: " .. message end
  local ok, value, states = pcall(link_state.inherit, item.states, function()
    local value = chunk()
    return item.make and item.make(value) or value
  end)
  if not ok then return nil, "failed: " .. tostring(value) end
  local wrong = item.accept(value)
  if wrong then return nil, wrong end
  return value, nil, states
end

--- The object that a file returns. accept(value) returns what is wrong with the object, or nil.
--- take(value, item) is called for watched files whenever there is a new object: it puts the object
--- in force, and returns a function that restores the old one.
---@param path string
---@param what string for messages
---@param accept fun(value: any): string?
---@param take fun(value: any, item: table): fun()
---@param owner table the link or planner that represents the file, as use and drop know it
---@param make? fun(value: any): any what becomes of what the file returns, before it is accepted
---@param read? fun(text: string): any of a file that is no script: what its text says
---@return any
function watch.open(path, what, accept, take, owner, make, read)
  local text, message = core.file_read(path)
  if not text then
    core.raise(("%s: the file '%s' cannot be loaded: %s"):format(what, path, message))
  end
  local item = {
    path = path, text = text, accept = accept, take = take, make = make, read = read, users = 0,
  }
  local value, wrong, states = run(item, text)
  if wrong then core.raise(("%s: the file '%s' %s"):format(what, path, wrong)) end
  if watch.on then
    item.states = states
    files[#files + 1] = item
    item_of[owner] = item
  end
  return value
end

local function place_of(item)
  for i, other in ipairs(files) do if other == item then return i end end
end

--- use: a model has this link or planner. drop: the model is unwrapped. A file that no model uses
--- is not watched. All ranks call both functions, in the same order.
---@param owner any
function watch.use(owner)
  local item = item_of[owner]
  if not item then return end
  item.users = item.users + 1
  if not place_of(item) then files[#files + 1] = item end
end

---@param owner any
function watch.drop(owner)
  local item = item_of[owner]
  if not item then return end
  item.users = item.users - 1
  if item.users == 0 then table.remove(files, place_of(item)) end
end

------------------------------------------------------------------------------------------ switching

local function tell(format, ...) if core.rank() == 0 then log.log("watch: " .. format, ...) end end

-- Goes back to the old script. Each rank prints its own reason, because the new one may have failed
-- on one rank only.
local function fall_back(item, message)
  item.undo()
  item.states, item.trial, item.failed = item.before, false, true
  log.warn("watch: '%s' failed in its first step, the old one stays in force: %s", item.path,
    tostring(message))
end

-- All ranks switch to the new text, or no rank does.
local function switch(item, text, step)
  local value, wrong, states = run(item, text)
  item.text = text
  local failures = groups.world():_sum({ wrong and 1 or 0 }, "watch")[1]
  if failures > 0 then
    if wrong then
      log.warn("watch: '%s' has changed, but the old one stays in force: it %s", item.path, wrong)
    end
    return
  end
  item.before, item.states, item.trial, item.failed, item.undo = item.states, states, true, false,
    item.take(value, item)
  on_trial[#on_trial + 1] = item
  tell("'%s' has changed: the new one is in force from step %d on", item.path, step)
end

-- On rank 0: whether a file has a new text.
local function has_changed()
  if core.rank() ~= 0 or core.clock_ms() - looked < LOOK_MS then return false end
  looked = core.clock_ms()
  for _, item in ipairs(files) do
    -- A file that cannot be read now may be in the middle of a replacement: it is tried again.
    item.seen = core.file_read(item.path) or item.text
    if item.seen ~= item.text then return true end
  end
  return false
end

--- Called before the requests of a step are read: whether this rank, which is alone, must switch
--- now. With several ranks, a request tells all of them.
---@return boolean
function watch.ask()
  if #files == 0 or not has_changed() then return false end
  return not core.comm_reload()
end

--- All ranks call it before the same step.
---@param step integer that begins
function watch.reload(step)
  local changed = {}
  if core.rank() == 0 then
    for i, item in ipairs(files) do
      item.seen = core.file_read(item.path) or item.text
      if item.seen ~= item.text then
        changed[#changed + 1] = CHANGE:pack(i, core.hash(item.seen), item.seen)
      end
    end
  end
  local all = groups.world()
    :_share_text(COUNT:pack(#changed) .. table.concat(changed), 0, "watch")
  local count, at = COUNT:unpack(all)
  for _ = 1, count do
    local file, hash, text
    file, hash, text, at = CHANGE:unpack(all, at)
    if core.hash(text) ~= hash then
      core.raise(("watch: '%s' arrived damaged"):format(files[file].path))
    end
    switch(files[file], text, step)
  end
end

-- If a link failed on some ranks only, the ranks have computed different gradients, so their
-- parameters would differ from now on: raises.
local function agree(item)
  local world = groups.world()
  local failures = world:_sum({ item.failed and 1 or 0 }, "watch")[1]
  if failures == 0 or failures == world:size() then return end
  core.raise(("watch: '%s' failed in its first step on %d of %d ranks, which have reduced their \z
    gradients differently from the others: resume from the last checkpoint")
    :format(item.path, failures, world:size()))
end

steps.on_end(function()
  -- A planner is on trial until it has planned.
  local left = {}
  for _, item in ipairs(on_trial) do
    if item.plans then left[#left + 1] = item.trial and item or nil
    else
      item.trial = false
      agree(item)
    end
  end
  on_trial = left
end)

------------------------------------------------------------------------------------------- planners

--- Copies the fields of a new planner into the one that is in use, and back.
---@param planner table
---@return fun(value: table, item: table): fun()
function watch.into(planner)
  local version = 0
  local function put(fields, item)
    version = version + 1
    planner.name, planner.every, planner.plan, planner.version, planner.item = fields.name,
      fields.every, fields.plan, version, item
  end
  return function(value, item)
    local old = { name = planner.name, every = planner.every, plan = planner.plan }
    item.plans = true
    put(value, item)
    return function() put(old, nil) end
  end
end

--- f(), and once more with the old planner if the new one fails on trial.
---@param planner table
---@param f fun(): any
---@return any
function watch.tried(planner, f)
  local item = planner.item
  if not (item and item.trial) then return f() end
  local ok, result = pcall(f)
  if ok then
    item.trial = false
    return result
  end
  fall_back(item, result)
  return f()
end

---------------------------------------------------------------------------------------------- links

-- metatable of { current, item, name }, which represents the link of a watched file
local Link = {}

--- A link from a file; name(link) is what messages call one.
---@param path string
---@param what string
---@param accept fun(value: any): string?
---@param name fun(link: any): string
---@param make? fun(value: any): any
---@return ms.Link
function watch.link(path, what, accept, name, make)
  local made = setmetatable({ name = name }, Link)
  made.current = watch.open(path, what, accept, function(value, item)
    local old = made.current
    made.current, made.item = value, item
    return function() made.current = old end
  end, made, make)
  return watch.on and made or made.current
end

Link.__tostring = function(self) return self.name(self.current) end

-- On trial, the bucket's numbers are copied, so that the old link can start from them if the new
-- one fails, in its call or in its use of the result.
local function try(self, bucket, next, again, first)
  local item, before, failed = self.item, bucket:buffer(), false
  local kept = before:clone()
  local function instead(message)
    failed = true
    if item.trial then fall_back(item, message) end
    before:copy_(kept)
    bucket:set_buffer(before)
    again()
    return self.current(bucket, next)
  end
  local function guarded(fut)
    if not future.is_future(fut) then return fut end
    local and_then = fut.and_then
    fut.and_then = function(from, f)
      return guarded(and_then(from, function(value)
        if failed then return value end
        local ok, result = pcall(f, value)
        if ok then return result end
        return instead(result)
      end))
    end
    return fut
  end
  local ok, result = pcall(self.current, bucket, function(given) return guarded(next(given)) end)
  if ok and not core.is_tensor(result) and not future.is_future(result) then
    ok, result = false, ("it returned %s: a future (what next gives) or a tensor is expected")
      :format(result == nil and "nothing" or "a " .. type(result))
  end
  if not ok then return instead(result) end
  if not first or bucket:kind() ~= "all_reduce" then return result end
  -- The engine's checks of a chain's result, made here while the old link can still run.
  return guarded(future.is_future(result) and result or future.new(result, core.stream()))
    :and_then(function(value)
      if not core.is_tensor(value) or value:dtype() ~= before:dtype()
          or value:numel() ~= before:numel() then
        error(("it returned %s; %d numbers in %s are expected")
          :format(tostring(value), before:numel(), before:dtype()), 0)
      end
    end)
end

-- again: allows next to be called once more. first: whether this is the first link of its chain.
function Link.__call(self, bucket, next, again, first)
  if self.item and self.item.trial then return try(self, bucket, next, again, first) end
  return self.current(bucket, next)
end

return watch
