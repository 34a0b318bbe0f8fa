-- The functions that a template can call: Jinja's, and those that transformers adds.
local arguments = require "moonshard.chat.arguments"
local text = require "moonshard.chat.text"
local values = require "moonshard.chat.values"
local work = require "moonshard.chat.work"

local functions = {}

local DAYS <const> = { "Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday",
  "Saturday" }
local MONTHS <const> = { "January", "February", "March", "April", "May", "June", "July", "August",
  "September", "October", "November", "December" }

-- Letters of strftime in English: Lua's os.date writes the names of the process's locale.
local LETTERS <const> = {
  Y = function(t) return ("%04d"):format(t.year) end,
  y = function(t) return ("%02d"):format(t.year % 100) end,
  m = function(t) return ("%02d"):format(t.month) end,
  d = function(t) return ("%02d"):format(t.day) end,
  e = function(t) return ("%2d"):format(t.day) end,
  j = function(t) return ("%03d"):format(t.yday) end,
  H = function(t) return ("%02d"):format(t.hour) end,
  I = function(t) return ("%02d"):format((t.hour + 11) % 12 + 1) end,
  M = function(t) return ("%02d"):format(t.min) end,
  S = function(t) return ("%02d"):format(t.sec) end,
  p = function(t) return t.hour < 12 and "AM" or "PM" end,
  A = function(t) return DAYS[t.wday] end,
  a = function(t) return DAYS[t.wday]:sub(1, 3) end,
  B = function(t) return MONTHS[t.month] end,
  b = function(t) return MONTHS[t.month]:sub(1, 3) end,
  ["%"] = function() return "%" end,
}
LETTERS.h = LETTERS.b
LETTERS.F = function(t) return ("%04d-%02d-%02d"):format(t.year, t.month, t.day) end
LETTERS.T = function(t) return ("%02d:%02d:%02d"):format(t.hour, t.min, t.sec) end
LETTERS.R = function(t) return ("%02d:%02d"):format(t.hour, t.min) end

--- The fields of a date, as os.date "*t" has them: of "2026-03-05" with a time after it or not,
--- or of seconds since 1970 in UTC; now and here unless given. nil: it is no date.
---@param date? string|number
---@return table?
function functions.date(date)
  if date == nil then return os.date "*t" end
  if type(date) == "number" then
    local ok, fields = pcall(os.date, "!*t", math.floor(date))
    return ok and fields or nil
  end
  local y, m, d, rest = date:match "^(%d%d%d%d)%-(%d%d)%-(%d%d)(.*)$"
  if not y then return nil end
  local hour, minute, second = rest:match "^[T ](%d%d):(%d%d):?(%d?%d?)"
  if rest ~= "" and not hour then return nil end
  local fields = os.date("*t", os.time { year = y, month = m, day = d, hour = 12 })
  if fields.month ~= tonumber(m) or fields.day ~= tonumber(d) then return nil end
  fields.hour, fields.min = tonumber(hour or 0), tonumber(minute or 0)
  fields.sec = tonumber(second or "") or 0
  return fields
end

local function strftime(format, fields)
  return (format:gsub("%%(.?)", function(letter)
    if not LETTERS[letter] then work.refuse("of strftime_now", "%" .. letter, LETTERS) end
    return LETTERS[letter](fields)
  end))
end

local function range(args, named)
  local first, last, step = arguments.bind("range", { "start", "stop", "step" }, args, named)
  first, last = arguments.integer("range", first), arguments.integer("range", last)
  step = arguments.integer("range", step) or 1
  if next(named) then work.fail("mismatch", "range takes no named arguments") end
  if not last then first, last = 0, first end
  if not last or step == 0 then work.fail("mismatch", "range takes a count, or two ends") end
  -- Jinja's sandbox allows as many items.
  if (last - first) // step > 100000 then
    work.fail("mismatch", "range has more than 100000 items")
  end
  local items = {}
  for i = first, last + (step > 0 and -1 or 1), step do items[#items + 1] = i end
  return values.list(items, "range")
end

-- Adds a dict and named values to a table by a function of the key and the value.
local function gather(what, args, named, add)
  if #args > 1 or args[1] ~= nil and values.kind(args[1]) ~= "dict" then
    work.fail("unsupported", "%s with other arguments than a dict and names is not built", what)
  end
  for _, key in ipairs(args[1] and args[1].keys or {}) do add(key, values.get(args[1], key)) end
  local names = {}
  for name in pairs(named) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do add(name, named[name]) end
end

local function dict(args, named)
  if next(named) and next(named, (next(named))) then
    work.refuse("with several names the function", "dict")
  end
  local made = values.dict()
  gather("dict", args, named, function(key, value) values.set(made, key, value) end)
  return made
end

local function namespace(args, named)
  local fields = {}
  gather("namespace", args, named, function(key, value)
    fields[text.plain(arguments.needed("namespace: a name", key))] = value
  end)
  return { kind = "namespace", fields = fields }
end

--- The functions by name. asked: called with no arguments when the date is read.
---@param date table its fields
---@param asked fun()
---@return table<string, table>
function functions.all(date, asked)
  local function raise_exception(args, named)
    local message = arguments.needed("raise_exception",
      (arguments.bind("raise_exception", { "message" }, args, named)))
    work.fail("mismatch", "it refuses the conversation: %s", text.plain(message))
  end
  local function strftime_now(args, named)
    asked()
    return strftime(text.plain(arguments.needed("strftime_now",
      (arguments.bind("strftime_now", { "format" }, args, named)))), date)
  end
  local all = { range = range, dict = dict, namespace = namespace,
    raise_exception = raise_exception, strftime_now = strftime_now }
  for name, f in pairs(all) do all[name] = values.callable(name, f) end
  return all
end

return functions
