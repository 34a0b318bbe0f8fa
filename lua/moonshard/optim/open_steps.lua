-- Schedules that are made without a number of steps: the training loop gives it when it is known.
-- Until then such a schedule has its warm-up only.
local core = require "moonshard.core"

local open_steps = {}

--- What is known of a ready-made schedule whose factor depends on the number of steps.
---@class ms.OpenSteps
---@field name string of the function that made it
---@field warmup integer
---@field fixed boolean whether the script gave the number of steps
---@field steps? integer
---@field check? fun(steps: integer) raises if the schedule does not fit into so many steps

-- schedule -> ms.OpenSteps
local known = setmetatable({}, { __mode = "k" })

--- Notes a new schedule.
---@param schedule fun(step: integer): number
---@param facts ms.OpenSteps
function open_steps.note(schedule, facts) known[schedule] = facts end

--- The number of steps of a schedule; raises while it is not known.
---@param facts ms.OpenSteps
---@return integer
function open_steps.count(facts)
  return facts.steps or core.raise(("optim.%s: the number of steps is not known after the warm-up \z
    of %d: give steps, or train with ms.train, which gives its own"):format(facts.name,
    facts.warmup))
end

-- The schedules of these optimizers, each once.
local function each(optimizers)
  local list, seen = {}, {}
  for _, optimizer in ipairs(optimizers) do
    for _, group in ipairs(optimizer:groups()) do
      local facts = group.schedule and known[group.schedule]
      if facts and not seen[facts] then list[#list + 1], seen[facts] = facts, true end
    end
  end
  return list
end

--- Raises unless the rates of the first `first` steps are the same with any number of steps, and
--- the number can still be chosen.
---@param optimizers ms.Optimizer[]
---@param first integer
function open_steps.check(optimizers, first)
  for _, facts in ipairs(each(optimizers)) do
    if facts.fixed then
      core.raise(("train: with minutes the number of steps is chosen while the run goes on, but \z
        optim.%s has steps = %d of its own: leave steps out there, or give steps instead of \z
        minutes"):format(facts.name, facts.steps))
    elseif facts.warmup < first then
      core.raise(("train: with minutes the number of steps is chosen after step %d, and rates \z
        must not depend on it before, but the warm-up of optim.%s is %d steps: make it %d or \z
        more, or give steps instead of minutes"):format(first, facts.name, facts.warmup, first))
    end
  end
end

--- Gives the number of steps to all schedules that were made without one. Returns the longest
--- warm-up of these.
---@param optimizers ms.Optimizer[]
---@param steps integer
---@return integer
function open_steps.set(optimizers, steps)
  local longest = 0
  for _, facts in ipairs(each(optimizers)) do
    if not facts.fixed then
      if facts.check then facts.check(steps) end
      facts.steps, longest = steps, math.max(longest, facts.warmup)
    end
  end
  return longest
end

return open_steps
