-- Functions for planners of all kinds (overlap/plans.lua, ddp/buckets.lua, fsdp/prefetch.lua):
-- making and finding them, their line for messages, and times that are the same on all ranks.
local core = require "moonshard.core"
local watch = require "moonshard.train.watch"
local check = require "moonshard.base.options".check

local planner = {}

--- Makes a kind of planner, that is, the metatable of its planners. shown: the text that tostring
--- puts before the name.
---@param name string
---@param shown string
---@return table
function planner.kind(name, shown)
  local kind = { __name = name, __tostring = function(self) return shown .. " " .. self.name end }
  kind.__index = kind
  return kind
end

--- Makes a planner from a user's table { name, every?, plan }.
---@param kind table
---@param what string the function that users call, for messages
---@param given table
---@return table
function planner.make(kind, what, given)
  given = check(what, given, { "name", "every", "plan" })
  if type(given.name) ~= "string" then
    core.raise(("%s: name must be a string, not %s"):format(what, type(given.name)))
  end
  if type(given.plan) ~= "function" then
    core.raise(("%s: plan must be a function, not %s"):format(what, type(given.plan)))
  end
  local every = given.every == nil and 1 or given.every
  if math.type(every) ~= "integer" or every < 1 then
    core.raise(("%s: every must be a whole number of 1 or more, not %s")
      :format(what, tostring(every)))
  end
  return setmetatable({ name = given.name, every = every, plan = given.plan }, kind)
end

--- The names of the ready-made ones, in order.
---@param ready_made table<string, table>
---@return string[]
function planner.names(ready_made)
  local names = {}
  for name in pairs(ready_made) do names[#names + 1] = name end
  table.sort(names)
  return names
end

--- For moonshard.scripts, after planner.find with the same arguments: ready-made planners take no
--- options.
---@param options? table
---@param ready_made table<string, table>
---@param value any
function planner.refuse_options(options, ready_made, value)
  local key = options and ready_made[value] and next(options)
  if key then core.raise(("'%s' is ready-made and takes no options, not %s"):format(value, key)) end
end

--- Finds a planner. value: a planner, the name of a ready-made one, or a file that returns one
--- (read again under --watch). words: for messages: the option, the kind of thing, and the function
--- that makes one.
---@param kind table
---@param value any
---@param ready_made table<string, table>
---@param words { what: string, thing: string, maker: string }
---@param make? fun(value: any): any what becomes of what a file returns
---@return table
function planner.find(kind, value, ready_made, words, make)
  if getmetatable(value) == kind then return value end
  if type(value) ~= "string" then
    core.raise(("%s: a %s is a name, a file or what %s returns, not a %s")
      :format(words.what, words.thing, words.maker, type(value)))
  end
  if ready_made[value] then return ready_made[value] end
  if not value:match "%.lua$" then
    local names = planner.names(ready_made)
    local near = core.nearest(value, names)
    core.raise(("%s: unknown %s '%s'%s; there are %s, and files that end in .lua")
      :format(words.what, words.thing, value,
        near and (": did you mean '%s'?"):format(near) or "", table.concat(names, ", ")))
  end
  local found = setmetatable({}, kind)
  local made = watch.open(value, words.what, function(other)
    return getmetatable(other) ~= kind
      and ("returned a %s; it must return what %s gives"):format(type(other), words.maker) or nil
  end, watch.into(found), found, make)
  found.name, found.every, found.plan = made.name, made.every, made.plan
  return found
end

--- A planner's name and the line of its function, for messages.
---@param of table
---@return string
function planner.line(of)
  local info = debug.getinfo(of.plan, "S")
  return ("%s (%s:%d)"):format(of.name, info.short_src, info.linedefined)
end

--- A planner's name in messages: with its line, unless it is ready-made.
---@param of table
---@return string
function planner.called(of)
  if not of.plan or core.is_library(debug.getinfo(of.plan, "S").source) then return of.name end
  return planner.line(of)
end

-- Names of the planners that were asked so far, in order. Their plans depend on the times in their
-- views.
local asked = {}

local function note_asked(of)
  local text = tostring(of):sub(1, -#of.name - 1) .. planner.called(of)
  if not asked[text] then asked[#asked + 1], asked[text] = text, true end
end

--- The plans so far that were made from times: "overlap plan early_where_hidden".
---@return string[]
function planner.from_times() return table.move(asked, 1, #asked, 1, {}) end

--- A planner's answer. An error says what the planner did wrong, with its line. While a planner
--- runs, calls on tensors, streams and groups raise, because a plan that communicates could
--- deadlock.
---@param of table
---@param view table
---@param refuse fun(message: string) raises
---@return any
function planner.ask(of, view, refuse)
  note_asked(of)
  local ok, answer = pcall(core.plan, of.plan, view)
  if not ok then refuse(tostring(answer)) end
  return answer
end

--- Raises, through refuse, for a field that is neither one of these nor, with `list`, a position.
---@param t table
---@param fields string[]
---@param list boolean
---@param refuse fun(message: string)
function planner.check_fields(t, fields, list, refuse)
  local known = {}
  for _, name in ipairs(fields) do known[name] = true end
  for key in pairs(t) do
    local is_position = list and math.type(key) == "integer" and key >= 1 and key <= #t
    if not known[key] and not is_position then
      local near = type(key) == "string" and core.nearest(key, fields)
      local shown = type(key) == "string" and ("'%s'"):format(key) or tostring(key)
      local hint = near and (": did you mean '%s'?"):format(near) or ""
      refuse(("unknown field %s%s"):format(shown, hint))
    end
  end
end

--- The means of these numbers over the ranks that have numbers, so that all ranks plan with equal
--- times; nil if no rank has any. The second result is the number of ranks whose `yes` is true.
--- Blocks until the other ranks have made the same call.
---@param s ms.GradientSource
---@param numbers number[]? as many on all ranks; nil: this rank has none
---@param count integer
---@param yes? boolean
---@return number[]?, integer
function planner.mean_over_ranks(s, numbers, count, yes)
  if s.group:size() == 1 then return numbers, yes and 1 or 0 end
  local own = { numbers and 1 or 0, yes and 1 or 0 }
  for i = 1, count do own[i + 2] = numbers and numbers[i] or 0 end
  local sum = s.group:_share("sum", "f32", own, "times")
  if not s.group:_has_others() then return numbers, yes and 1 or 0 end
  if sum[1] == 0 then return nil, math.tointeger(sum[2]) end
  local mean = {}
  for i = 1, count do mean[i] = sum[i + 2] / sum[1] end
  return mean, math.tointeger(sum[2])
end

--- Latency in ms and rate in bytes per ms: a least-squares line through times over sizes. samples:
--- { bytes, ms } in an order that is the same on all ranks, since sums depend on it.
---@param samples number[][]
---@return number latency_ms, number bytes_per_ms
function planner.fit(samples)
  local n, bytes, ms, square, product = 0, 0, 0, 0, 0
  for _, sample in ipairs(samples) do
    n, bytes, ms = n + 1, bytes + sample[1], ms + sample[2]
    square, product = square + sample[1] * sample[1], product + sample[1] * sample[2]
  end
  local spread = n * square - bytes * bytes
  local slope = spread > 0 and (n * product - bytes * ms) / spread or 0
  if slope <= 0 then return 0, ms > 0 and bytes / ms or math.huge end
  return math.max(0, (ms - slope * bytes) / n), 1 / slope
end

--- Each rank's list, rank by rank; nil if there are no other ranks. Blocks as mean_over_ranks does.
---@param s ms.GradientSource
---@param own integer[]
---@return integer[][]?
function planner.gather(s, own)
  if s.group:size() == 1 then return nil end
  local flat = s.group:_share("all_gather", "i64", own, "plans")
  if not s.group:_has_others() then return nil end
  local all = {}
  for rank = 1, s.group:size() do
    all[rank] = table.move(flat, (rank - 1) * #own + 1, rank * #own, 1, {})
  end
  return all
end

return planner
