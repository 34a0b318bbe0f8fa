-- What the folders of runs say: settings, state, and the values of each step.
local core = require "moonshard.core"
local about = require "moonshard.train.report.about"

local read = {}

---@class ms.Series
---@field steps integer[] in rising order
---@field values number[] NaN: not finite

---@class ms.RunRecord
---@field path string
---@field about table the content of run.json; empty for a run without it
---@field state string
---@field series table<string, ms.Series> by key
---@field keys string[] sorted
---@field last_step? integer

--- Text for a terminal: control characters, with which a name could move the cursor or change
--- colors, and bytes that are no UTF-8 become \xHH.
---@param text string
---@return string
function read.printable(text)
  local function hex(bytes)
    return (bytes:gsub(".", function(byte) return ("\\x%02x"):format(byte:byte()) end))
  end
  if not utf8.len(text) then text = text:gsub("[\x80-\xff]", hex) end
  return (text:gsub("%c", hex):gsub("\xc2[\x80-\x9f]", hex))
end

-- Steps are below this. A double counts as far.
local STEPS_MAX <const> = 1 << 53

-- Steps of a run in metrics.jsonl. A line that a killed process has left incomplete is skipped.
local function series_of(text)
  local series, last = {}, nil
  for line in text:gmatch "[^\n]+" do
    local entry = core.json_decode(line, true)
    local step = type(entry) == "table" and math.type(entry.step) == "integer" and entry.step
    if step and step >= 0 and step < STEPS_MAX then
      last = step
      for key, value in pairs(entry) do
        if value == core.json_null then value = 0 / 0 end -- not finite: JSON has no such number
        if key ~= "step" and type(value) == "number" then
          local one = series[key] or { steps = {}, values = {} }
          series[key] = one
          one.steps[#one.steps + 1], one.values[#one.values + 1] = step, value
        end
      end
    end
  end
  return series, last
end

-- In words: whether the run goes on, or how it ended.
local function state_of(path, known)
  if core.file_is_locked(path .. "/lock") then return "running" end
  local code = known.code
  if not code then return known.started and "killed" or "unknown" end
  if code == 0 then return "done" end
  return ("%s (%d)"):format((code == 75 or code > 128) and "stopped" or "failed", code)
end

--- Whether the folder is that of a run.
---@param path string
---@return boolean
function read.is_run(path)
  return core.exists(path .. "/metrics.jsonl") == "file"
    or core.exists(path .. "/run.json") == "file"
end

--- Reads a run; nil and a message where it has no metrics.
---@param path string
---@return ms.RunRecord?
---@return string? message
function read.run(path)
  local name = path:gsub("(.)/+$", "%1")
  local kind = core.exists(name)
  if not kind then return nil, ("there is no folder '%s'"):format(name) end
  if kind ~= "folder" then
    return nil, ("'%s' is a file: the folder of a run is expected"):format(name)
  end
  local text, message, code = core.file_read(name .. "/metrics.jsonl")
  if not text and code ~= "not_found" then return nil, message end
  if not text and not read.is_run(name) then
    return nil, ("'%s' is not the folder of a run: it has no metrics.jsonl"):format(name)
  end
  local known = about.read(name) or {}
  local series, last = series_of(text or "")
  local keys = {}
  for key in pairs(series) do keys[#keys + 1] = key end
  table.sort(keys)
  return {
    path = name, about = known, state = state_of(name, known), series = series,
    keys = keys, last_step = last,
  }
end

--- The paths of all runs in a folder and in its folders, sorted.
---@param folder string
---@return string[]?
---@return string? message
function read.find(folder)
  local found = {}
  local function look(path, depth)
    if read.is_run(path) then
      found[#found + 1] = path
      return true
    end
    local names, message = core.list(path)
    if not names then return nil, message end
    for _, name in ipairs(names) do
      local inner = path == "." and name or path .. "/" .. name
      if depth < 3 and name:sub(1, 1) ~= "." and core.exists(inner) == "folder" then
        look(inner, depth + 1)
      end
    end
    return true
  end
  local ok, message = look((folder:gsub("(.)/+$", "%1")), 0)
  if not ok then return nil, message end
  table.sort(found)
  return found
end

--- The keys that one of these runs has, in the order in which they are met, and as a set.
---@param runs ms.RunRecord[]
---@return string[] list
---@return table<string, boolean> there
function read.keys(runs)
  local there, list = {}, {}
  for _, run in ipairs(runs) do
    for _, key in ipairs(run.keys) do
      if not there[key] then list[#list + 1] = key end
      there[key] = true
    end
  end
  return list, there
end

--- The smallest finite value of a series, and its step; nil if there is none.
---@param one ms.Series
---@return number? value
---@return integer? step
function read.least(one)
  local least, at
  for i, value in ipairs(one.values) do
    if value == value and (not least or value < least) then least, at = value, one.steps[i] end
  end
  return least, at
end

--- The names of the settings that are not the same in all of these runs, sorted; without `run`,
--- the folder.
---@param runs ms.RunRecord[]
---@return string[]
function read.differing(runs)
  local names, seen = {}, { run = true }
  for _, run in ipairs(runs) do
    for name in pairs(run.about.settings or {}) do
      if not seen[name] then
        seen[name] = true
        local first = (runs[1].about.settings or {})[name]
        for _, other in ipairs(runs) do
          if (other.about.settings or {})[name] ~= first then
            names[#names + 1] = name
            break
          end
        end
      end
    end
  end
  table.sort(names)
  return names
end

--- The moving mean with weights that fall by `factor` a step, corrected for its beginning (Kingma
--- and Ba 2015, "Adam: A Method for Stochastic Optimization", section 3). Values that are not
--- finite stay, and count for no other step.
---@param values number[]
---@param factor number 0 or more, below 1
---@return number[]
function read.smooth(values, factor)
  local result, mean, weight = {}, 0, 0
  for i, value in ipairs(values) do
    if value == value then
      mean = factor * mean + (1 - factor) * value
      weight = factor * weight + (1 - factor)
      result[i] = mean / weight
    else
      result[i] = value
    end
  end
  return result
end

return read
