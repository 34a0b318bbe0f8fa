-- Schedules: factors on the learning rate by the number of steps taken. Warm-up is linear: step 0 gets 1/warmup.
local core = require "moonshard.core"

local schedules = {}

local function check(name, options, wanted)
  options = options or {}
  for key, value in pairs(options) do
    if wanted[key] == nil then
      local known = {}
      for other in pairs(wanted) do known[#known + 1] = other end
      table.sort(known)
      core.raise(("optim.%s: unknown option '%s'; it has %s"):format(name, tostring(key), table.concat(known, ", ")))
    end
    local count = key ~= "floor"
    if count and (math.type(value) ~= "integer" or value < 0) then core.raise(("optim.%s: %s must be an integer of 0 or more"):format(name, key)) end
    if not count and (type(value) ~= "number" or value < 0 or value > 1) then core.raise(("optim.%s: floor must be a number from 0 to 1"):format(name)) end
  end
  for key, required in pairs(wanted) do
    if required and options[key] == nil then core.raise(("optim.%s: give %s"):format(name, key)) end
  end
  return options.warmup or 0, options.steps, options.floor or 0, options.decay
end

-- f(progress) behind the warm-up, progress from 0 to 1 at `steps`.
local function warmed(warmup, steps, f)
  return function(step)
    if step < warmup then return (step + 1) / warmup end
    local span = math.max(1, steps - warmup)
    return f(math.min(1, (step - warmup) / span))
  end
end

--- 1 after the warm-up.
---@param options? { warmup?: integer }
---@return fun(step: integer): number
function schedules.constant(options)
  local warmup = check("constant", options, { warmup = false })
  return warmed(warmup, warmup + 1, function() return 1 end)
end

--- From 1 straight down to floor at `steps`.
---@param options { steps: integer, warmup?: integer, floor?: number }
---@return fun(step: integer): number
function schedules.linear(options)
  local warmup, steps, floor = check("linear", options, { steps = true, warmup = false, floor = false })
  return warmed(warmup, steps, function(progress) return 1 - (1 - floor) * progress end)
end

--- From 1 down to floor at `steps`, as half a cosine wave.
---@param options { steps: integer, warmup?: integer, floor?: number }
---@return fun(step: integer): number
function schedules.cosine(options)
  local warmup, steps, floor = check("cosine", options, { steps = true, warmup = false, floor = false })
  return warmed(warmup, steps, function(progress) return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)) end)
end

--- Warm up, stay at 1, go straight down to floor in the last `decay` steps.
---@param options { steps: integer, decay: integer, warmup?: integer, floor?: number }
---@return fun(step: integer): number
function schedules.wsd(options)
  local warmup, steps, floor, decay = check("wsd", options, { steps = true, decay = true, warmup = false, floor = false })
  if warmup + decay > steps then core.raise(("optim.wsd: warmup %d and decay %d are more than the %d steps"):format(warmup, decay, steps)) end
  return function(step)
    if step < warmup then return (step + 1) / warmup end
    local left = steps - step
    if left >= decay then return 1 end
    return floor + (1 - floor) * math.max(0, left) / math.max(1, decay)
  end
end

return schedules
