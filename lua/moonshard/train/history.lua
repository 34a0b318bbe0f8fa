-- Which checkpoints of a run stay on disk. On resume, checkpoints after the loaded one are set
-- aside. After a save, old checkpoints are removed.
local core = require "moonshard.core"
local log = require "moonshard.base.log"
local store = require "moonshard.checkpoint.store"
local launch = require "moonshard.base.launch"

local history = {}

local function step_name(step) return ("step-%08d"):format(step) end

-- The first of aside-NAME, aside-2-NAME ... that is free.
local function free_name(run, name)
  local aside, i = "aside-" .. name, 2
  while core.exists(run .. "/" .. aside) do aside, i = ("aside-%d-%s"):format(i, name), i + 1 end
  return aside
end

-- Whether two paths hold the same checkpoint: a manifest has the hash of each tensor.
local function is_same(a, b)
  local text = core.file_read(a .. "/manifest.json")
  return text ~= nil and text == core.file_read(b .. "/manifest.json")
end

local function rename(run, name, to)
  local ok, message = core.checkpoint_rename(run, name, to)
  if not ok then launch.exit(3, message) end
end

--- A run that resumes from an earlier checkpoint abandons the later ones of its folder. They get
--- names under which neither `resume=auto` nor pruning takes them for checkpoints of this run. Call
--- it on rank 0, when all ranks have loaded.
---@param run string
---@param loaded string path of the checkpoint from which the run goes on
---@param step integer the step at which it goes on
function history.set_aside(run, loaded, step)
  for _, one in ipairs(store.list(run)) do
    if one.step > step or one.step == step and not is_same(one.path, loaded) then
      local aside = free_name(run, one.name)
      rename(run, one.name, aside)
      log.log("set aside  %s/%s, now %s: the run continues from step %d", run, one.name,
        aside, step)
    end
  end
  -- A checkpoint that was set aside and is resumed from belongs to this run again.
  local name = loaded:match "[^/]+$"
  if name:match "^aside%-" and is_same(run .. "/" .. name, loaded) then
    rename(run, name, step_name(step))
  end
end

--- Removes old checkpoints. Of those up to the one just committed, the `last` newest stay, and
--- others whose step divides by keep_every. Damaged checkpoints do not count; damage is judged by
--- manifest and sizes.
---@param run string
---@param newest integer step of the checkpoint that was just committed; it is never removed
---@param last integer
---@param keep_every? integer
---@param best? integer step of one that stays in any case, and does not count
function history.prune(run, newest, last, keep_every, best)
  local kept = 0
  for _, one in ipairs(store.list(run)) do
    if one.step <= newest and (one.step ~= best or one.step == newest) then
      if kept < last then
        if one.step == newest or store.judge(one.path) then kept = kept + 1 end
      elseif not (keep_every and one.step % keep_every == 0) then
        local ok, message = core.checkpoint_remove(run, one.name)
        if not ok then log.warn("an old checkpoint was not removed: %s", message) end
      end
    end
  end
end

return history
