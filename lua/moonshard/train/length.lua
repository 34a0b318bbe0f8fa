-- How long a run is, and when its samples come, where steps must be timed for that: minutes instead
-- of steps, and samples at growing distances.
--
-- Steps 4 to 13 of this process are timed: the first three also allocate memory and build kernels.
-- Rank 0 then decides, and all ranks follow. Nothing of this changes what is computed: the rates of
-- the first 13 steps do not depend on the number of steps (optim/open_steps.lua).
local about = require "moonshard.train.report.about"
local core = require "moonshard.core"
require "moonshard.parallel.group"                -- methods of the world
local launch = require "moonshard.base.launch"
local log = require "moonshard.base.log"
local open_steps = require "moonshard.optim.open_steps"
local step_owners = require "moonshard.parallel.overlap.step_owners"

local length = {}

local TIMED <const> = 13                -- steps until rank 0 decides
local REST <const> = 0.1                -- of the minutes: for what is not a step

-- All optimizers that step in this run: that of ms.train, and those of optim.in_backward.
local function optimizers_of(self)
  local list, seen = { self.o.optimizer }, { [self.o.optimizer] = true }
  for _, p in ipairs(self.parameters) do
    local own = step_owners.own_of[p]
    for _, optimizer in ipairs(own and own.list or {}) do
      if not seen[optimizer] then list[#list + 1], seen[optimizer] = optimizer, true end
    end
  end
  return list
end

-- The run has so many steps, which its schedules get. Returns the longest warm-up of these.
local function set(self, steps)
  self.o.steps = steps
  return open_steps.set(optimizers_of(self), steps)
end

-- Without times: the least number with which all that is done every so many steps is done once
-- before the last step.
local function assumed(o)
  local steps = TIMED + 1
  for _, every in ipairs {
    o.eval and o.eval.every or 0, o.save and o.save.every or 0,
    o.sample and o.sample.every or 0, o.check_replicas or 0,
  } do
    steps = math.max(steps, every + 1)
  end
  return steps
end

--- Before the first step: the number of steps, if it is known, and what is wrong with choosing it
--- later. Returns the text of the run's first lines about it.
---@param self ms.Training
---@return string
function length.begin(self)
  local o = self.o
  local saved = self.chosen and self.chosen.steps
  self.times_steps = not core.is_sim() and (not o.steps or o.sample and o.sample.seconds ~= nil)
  local stopped = o.stop and self.chosen and self.chosen.stopped
  if stopped then
    set(self, stopped)
    return ("%d, where the run has stopped"):format(stopped)
  elseif o.steps then
    set(self, o.steps)
    return tostring(o.steps)
  elseif saved then
    set(self, saved)
    return ("%d, the checkpoint's"):format(saved)
  elseif core.is_sim() then
    set(self, assumed(o))
    local text = ("%d are assumed: minutes is %g, and the sim device has no times"):format(o.steps,
      o.minutes)
    table.insert(launch.assumptions, "steps " .. text)
    return text
  end
  open_steps.check(optimizers_of(self), self.start + TIMED)
  return ("as many as fit into %g minutes, which %d steps will tell"):format(o.minutes, TIMED)
end

-- How many steps of so many milliseconds fit into the time.
local function fitting(o, mean_ms)
  local has_more = o.eval or o.sample or o.save
  return math.floor((has_more and 1 - REST or 1) * o.minutes * 60e3 / mean_ms)
end

-- The steps after which samples come, from this one on: as many seconds of steps as o.sample says,
-- twice as many, and so on.
local function sample_steps(o, step, mean_ms)
  local list, ms = {}, o.sample.seconds * 1e3
  while ms / mean_ms <= o.steps do
    list[math.max(step, math.floor(ms / mean_ms) - 1)] = true
    ms = 2 * ms
  end
  return list
end

local function decide(self, step)
  local o = self.o
  local mean_ms = self.report:_mean_ms()
  local text = self.world:_share_text(("%d %.17g"):format(o.steps or fitting(o, mean_ms), mean_ms),
    0, "steps")
  local steps, ms = text:match "^(%S+) (%S+)$"
  steps, ms = math.tointeger(tonumber(steps)), tonumber(ms)
  if not o.steps then
    if steps <= step + 1 then
      launch.exit(2, ("minutes=%g: a step takes %.1f s, so that no step fits after the first %d: \z
        give more minutes, steps instead of them, or a smaller model"):format(o.minutes, ms / 1e3,
        step + 1))
    end
    local warmup = set(self, steps)
    self.report:_set_total(steps)
    if core.rank() == 0 and self.run then about.note_steps(self.run, steps) end
    local advice = ", which ends in its warm-up of %d: give it more time, or a smaller model"
    log.log("%d steps; steps=%d repeats this run%s", steps, steps,
      warmup > steps and advice:format(warmup) or "")
  end
  self.sample_steps = o.sample and o.sample.seconds and sample_steps(o, step, ms)
end

--- After a step, before its samples: decides what was left open, once enough steps were timed.
---@param self ms.Training
---@param step integer
function length.after(self, step)
  if not self.times_steps or step ~= self.start + TIMED - 1 then return end
  self.report:outside(function() decide(self, step) end)
end

return length
