-- The best validation of a run: which one it was, and whether the run stops since none gets better.
-- All ranks have the same losses, and so decide alike.
local about = require "moonshard.train.report.about"
local core = require "moonshard.core"
require "moonshard.parallel.group"                -- methods of the world
local log = require "moonshard.base.log"

local best = {}

--- What is known of a run's validations, as checkpoints have it.
---@class ms.BestValidation
---@field loss number the least loss so far
---@field step integer steps that were done then: the name of its checkpoint
---@field since integer validations after it, none of which was better

-- Notes a validation; returns whether it is the best so far.
local function note(self, done)
  local loss, known = self.valid.loss, self.best
  if loss == loss and (not known or loss < known.loss) then
    self.best = { loss = loss, step = done, since = 0 }
    return true
  end
  -- Without a finite loss there is no best one, and these count, too.
  known = known or { loss = math.huge, step = 0, since = 0 }
  known.since, self.best = known.since + 1, known
  return false
end

-- Why the run stops now; nil: it goes on. What a function says on rank 0 holds for all ranks.
local function reason(self, step)
  local stop, known = self.o.stop, self.best
  if type(stop) == "table" then
    return known.since >= stop.patience and ("%d validation%s without a better one than %.4f at \z
      step %d"):format(known.since, known.since == 1 and "" or "s", known.loss, known.step) or nil
  end
  local says = stop and stop(step, self.valid) and 1 or 0
  local world = core.world()
  if stop and world:size() > 1 then
    says = world:_share("all_gather", "i64", { says }, "stop")[1]
  end
  return says == 1 and "the recipe's function stop says so" or nil
end

--- After a validation of ms.train: whether it is the best so far. If the run stops, its number of
--- steps becomes that of the steps that are done.
---@param self ms.Training
---@param step integer
---@return boolean
function best.judge(self, step)
  local is_best = note(self, step + 1)
  local why = self.o.stop and step + 1 < (self.o.steps or math.huge) and reason(self, step)
  if why then
    self.o.steps, self.stopped = step + 1, step + 1
    self.report:_set_total(step + 1)
    if core.rank() == 0 and self.run then about.note_steps(self.run, step + 1) end
    log.log("stops after step %d: %s", step, why)
  end
  return is_best
end

return best
