-- What planners of every kind share (overlap.lua, ddp/buckets.lua): making and finding them, their line for messages, and times that are the same on all ranks.
local core = require "moonshard.core"
local watch = require "moonshard.watch"
local check = require "moonshard.options".check

local planner = {}

--- A kind of planner: their metatable. shown: what tostring says before the name.
---@param name string
---@param shown string
---@return table
function planner.kind(name, shown)
  local kind = { __name = name, __tostring = function(self) return shown .. " " .. self.name end }
  kind.__index = kind
  return kind
end

--- A planner from what a user describes: { name, every?, plan }.
---@param kind table
---@param what string the function that users call, for messages
---@param given table
---@return table
function planner.make(kind, what, given)
  check(what, given, { "name", "every", "plan" })
  if type(given.name) ~= "string" then core.raise(("%s: name must be a string, not %s"):format(what, type(given.name))) end
  if type(given.plan) ~= "function" then core.raise(("%s: plan must be a function, not %s"):format(what, type(given.plan))) end
  local every = given.every == nil and 1 or given.every
  if math.type(every) ~= "integer" or every < 1 then core.raise(("%s: every must be a whole number of 1 or more, not %s"):format(what, tostring(every))) end
  return setmetatable({ name = given.name, every = every, plan = given.plan }, kind)
end

--- A planner, the name of a ready-made one, or a file that returns one (read again under --watch).
---@param kind table
---@param value any
---@param ready_made table<string, table>
---@param words { what: string, thing: string, maker: string } for messages: where, what is looked for, and which function makes one
---@return table
function planner.find(kind, value, ready_made, words)
  if getmetatable(value) == kind then return value end
  if type(value) ~= "string" then core.raise(("%s: a %s is a name, a file or what %s returns, not a %s"):format(words.what, words.thing, words.maker, type(value))) end
  if ready_made[value] then return ready_made[value] end
  if not value:match "%.lua$" then
    local names = {}
    for name in pairs(ready_made) do names[#names + 1] = name end
    table.sort(names)
    local near = core.nearest(value, names)
    core.raise(("%s: unknown %s '%s'%s; there are %s, and files that end in .lua"):format(words.what, words.thing, value,
      near and (": did you mean '%s'?"):format(near) or "", table.concat(names, ", ")))
  end
  local found = setmetatable({}, kind)
  local made = watch.open(value, words.what, function(other)
    return getmetatable(other) ~= kind and ("returned a %s; it must return what %s gives"):format(type(other), words.maker) or nil
  end, watch.into(found), found)
  found.name, found.every, found.plan = made.name, made.every, made.plan
  return found
end

--- Its name and where it was written, for messages.
---@param of table
---@return string
function planner.line(of)
  local info = debug.getinfo(of.plan, "S")
  return ("%s (%s:%d)"):format(of.name, info.short_src, info.linedefined)
end

--- Times in a view are means over the ranks, so that planners cannot come to different answers. Blocks.
---@param s table state of a ddp model
---@param numbers number[]
---@return number[]
function planner.mean_over_ranks(s, numbers)
  if s.group:size() == 1 then return numbers end
  local mean = s.group:all_reduce(core.tensor(numbers, "f32"), "avg"):sync():to_table()
  return s.reducer:is_fake() and numbers or mean
end

return planner
