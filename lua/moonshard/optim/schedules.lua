-- Schedules: factors on the learning rate as functions of the number of steps taken. The warm-up is
-- linear: step 0 has the factor 1/warmup.
local core = require "moonshard.core"
local open_steps = require "moonshard.optim.open_steps"
local check = require "moonshard.base.options".check

local schedules = {}

-- Checks a schedule's options, wanted = { name = whether it is required }; returns them with their
-- defaults.
local function read(name, given, wanted)
  local names, what = {}, "optim." .. name
  for key in pairs(wanted) do names[#names + 1] = key end
  table.sort(names)
  local options = check(what, given, names)
  for _, key in ipairs(names) do
    local value = options[key]
    if value == nil then
      if wanted[key] then core.raise(("%s: give %s"):format(what, key)) end
    elseif key == "floor" then
      if type(value) ~= "number" or not (value >= 0 and value <= 1) then
        core.raise(("%s: floor must be a number from 0 to 1"):format(what))
      end
    elseif math.type(value) ~= "integer" or value < 0 then
      core.raise(("%s: %s must be an integer of 0 or more"):format(what, key))
    end
  end
  return options.warmup or 0, options.steps, options.floor or 0, options.decay
end

-- A schedule that is f(progress) after the warm-up; progress goes from 0 to 1 at step `steps`,
-- which may be given later.
local function warmed(name, warmup, steps, f)
  local facts = { name = name, warmup = warmup, steps = steps, fixed = steps ~= nil }
  local function factor(step)
    if step < warmup then return (step + 1) / warmup end
    local span = math.max(1, open_steps.count(facts) - warmup)
    return f(math.min(1, (step - warmup) / span))
  end
  open_steps.note(factor, facts)
  return factor
end

---@param options? { warmup?: integer }
---@return fun(step: integer): number
function schedules.constant(options)
  local warmup = read("constant", options, { warmup = false })
  return function(step) return step < warmup and (step + 1) / warmup or 1 end
end

---@param options? ms.ScheduleOptions
---@return fun(step: integer): number
function schedules.linear(options)
  local warmup, steps, floor = read("linear", options,
    { steps = false, warmup = false, floor = false })
  return warmed("linear", warmup, steps, function(progress) return 1 - (1 - floor) * progress end)
end

---@param options? ms.ScheduleOptions
---@return fun(step: integer): number
function schedules.cosine(options)
  local warmup, steps, floor = read("cosine", options,
    { steps = false, warmup = false, floor = false })
  return warmed("cosine", warmup, steps, function(progress)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
  end)
end

---@param options ms.WSDOptions
---@return fun(step: integer): number
function schedules.wsd(options)
  local warmup, steps, floor, decay = read("wsd", options,
    { steps = false, decay = true, warmup = false, floor = false })
  local facts = { name = "wsd", warmup = warmup, steps = steps, fixed = steps ~= nil }
  function facts.check(count)
    if warmup + decay > count then
      core.raise(("optim.wsd: warmup %d and decay %d are more than the %d steps")
        :format(warmup, decay, count))
    end
  end
  if steps then facts.check(steps) end
  local function factor(step)
    if step < warmup then return (step + 1) / warmup end
    local left = open_steps.count(facts) - step
    if left >= decay then return 1 end
    return floor + (1 - floor) * math.max(0, left) / math.max(1, decay)
  end
  open_steps.note(factor, facts)
  return factor
end

return schedules
