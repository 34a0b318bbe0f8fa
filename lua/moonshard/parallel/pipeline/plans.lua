-- Schedules of pipelines (numbers in, table out): finding them, their views, and tables made of
-- their answers. A schedule is asked once, before the first step. One with `every` is asked again
-- with times and bytes that a pass has measured, and that of a watched file when it has changed.
--
-- Invariants. Measured numbers are equal on all ranks before a schedule gets them. A new table is
-- compared on all ranks before any of them runs it, and has the placement of the first one. All
-- ranks take it, or none does.
local actions = require "moonshard.parallel.pipeline.actions"
local core = require "moonshard.core"
local dtype_bytes = require "moonshard.base.dtype_bytes"
local made_by = require "moonshard.scripts.made_by"
local options_of = require "moonshard.base.options"
local planners = require "moonshard.parallel.planner"
local play = require "moonshard.parallel.pipeline.play"
local schedules = require "moonshard.parallel.pipeline.schedules"
local watch = require "moonshard.train.watch"

local plans = {}

---@class ms.Schedule
local Schedule = planners.kind("ms.Schedule", "schedule")

----------------------------------------------------------------------------------------- schedules

-- The ready-made ones: from_csv makes others.
local ready_made = {}
for name in pairs(schedules) do ready_made[name] = name ~= "from_csv" and name or nil end
plans.ready_made = planners.names(ready_made)

local words = { what = "pipeline: schedule", thing = "schedule", maker = "ms.schedule" }

local function named(value, options, are_given)
  if value:match "%.lua$" then
    return planners.find(Schedule, value, {}, words, made_by.planner(options or {}, are_given))
  end
  local key = options and next(options)
  if key then
    core.raise(("'%s' takes no options, only files in Lua do, not %s"):format(value, key))
  end
  if value:match "%.csv$" then
    local found = setmetatable({ name = value }, Schedule)
    found.plan = watch.open(value, words.what, function() end, watch.into(found), found, nil,
      function(text) return { name = value, plan = schedules.from_csv(value, text) } end).plan
    return found
  end
  if not ready_made[value] then
    core.raise(("pipeline: there is no schedule '%s': use %s, a file in CSV or Lua, or a function")
      :format(value, table.concat(plans.ready_made, ", ")))
  end
  return setmetatable({ name = value, plan = schedules[value] }, Schedule)
end

--- Finds a schedule. value: one, the name of a ready-made one, a file, a function or a planner's
--- table. options, are_given: for a file that makes its schedule from options, as in
--- scripts/made_by.lua.
---@param value any
---@param options? table
---@param are_given? boolean
---@return ms.Schedule
function plans.find(value, options, are_given)
  if getmetatable(value) == Schedule then return value end
  if type(value) == "string" then return named(value, options, are_given) end
  if type(value) == "function" then
    local info = debug.getinfo(value, "S")
    local where = ("the schedule at %s:%d"):format(info.short_src, info.linedefined)
    return setmetatable({ name = where, where = where, plan = value }, Schedule)
  end
  if type(value) == "table" then
    local made = planners.make(Schedule, "schedule", value)
    made.every = value.every                  -- nil: it wants no times
    return made
  end
  core.raise(("pipeline: schedule is a name, a file in CSV or Lua, a function or what ms.schedule \z
    gives, not %s"):format(type(value)))
end

---@param value string|ms.SchedulePlanner|fun(view: ms.PipelineView): ms.PipelineSchedule
---@return ms.Schedule
function plans.schedule(value)
  return plans.find(value)
end

-- What messages call it. A watched file may have got another one.
local function where_of(schedule) return schedule.where or planners.called(schedule) end

-- The library's own raise messages with the user's line: they are called as they are. While another
-- one runs, calls on tensors, streams and groups raise.
local function ask(schedule, view)
  if core.is_library(debug.getinfo(schedule.plan, "S").source) then return schedule.plan(view) end
  return core.plan(schedule.plan, view)
end

---@param options { ranks: integer, each?: integer, microbatches: integer }
---@return integer[][]
function Schedule:placement(options)
  local o = options_of.check("schedule:placement", options, {
    ranks = "integer", each = "integer", microbatches = "integer",
  })
  for _, name in ipairs { "ranks", "each", "microbatches" } do
    local value = o[name] or name == "each" and 1
    if not value or value < 1 then
      core.raise(("schedule:placement: %s is 1 or more"):format(name))
    end
  end
  local shape = {
    ranks = o.ranks, chunks = o.ranks * (o.each or 1), microbatches = o.microbatches,
  }
  local view = { ranks = shape.ranks, chunks = shape.chunks, microbatches = shape.microbatches }
  local t = actions.read(where_of(self), shape, ask(self, view))
  local placement = {}
  for r = 1, shape.ranks do placement[r] = {} end
  for chunk = 0, shape.chunks - 1 do table.insert(placement[t.rank_of[chunk] + 1], chunk) end
  return placement
end

options_of.methods(Schedule, "a schedule")

------------------------------------------------------------------------------------------ measuring

local KINDS <const> = { "F", "B", "I", "W" }
-- Numbers of a chunk: nanoseconds of each kind, bytes that go in, bytes that are kept.
local COUNT <const> = #KINDS + 2

--- Runs what an action computes and notes its time and what it keeps. The stream is empty before
--- and after, so all of the action is in its time and nothing else. What it waits for has come: a
--- rank waits here for nothing that comes later in the order of play.lua.
--- Garbage does not count as kept.
---@param meter table<integer, table> by chunk
---@param action ms.PipelineAction
---@param inputs? ms.Tensor[] of a forward
---@param f fun()
function plans.measured(meter, action, inputs, f)
  local stream = core.stream()
  if inputs then core.collect() end
  stream:sync()
  local begun, live = core.clock_ms(), core.memory().live
  f()
  stream:sync()
  local took = core.clock_ms() - begun
  local own = meter[action.chunk] or { ns = {}, counts = {}, kept = 0, input = 0 }
  meter[action.chunk] = own
  local kind = action.kind
  own.ns[kind] = (own.ns[kind] or 0) + math.floor(took * 1e6)
  own.counts[kind] = (own.counts[kind] or 0) + 1
  if inputs then
    core.collect()
    own.kept, own.input = own.kept + math.max(0, core.memory().live - live), 0
    for _, t in ipairs(inputs) do own.input = own.input + t:numel() * dtype_bytes[t:dtype()] end
  end
end

-- What this rank has measured, as whole numbers: zeros for the chunks of others.
local function numbers_of(meter, chunks)
  local numbers = {}
  for chunk = 0, chunks - 1 do
    local own = meter[chunk]
    for i, kind in ipairs(KINDS) do
      local count = own and own.counts[kind]
      numbers[chunk * COUNT + i] = count and own.ns[kind] // count or 0
    end
    numbers[chunk * COUNT + COUNT - 1] = own and own.input or 0
    numbers[chunk * COUNT + COUNT] = own and own.kept // own.counts.F or 0
  end
  return numbers
end

-- The numbers of all chunks: means over the ranks that have the same chunks. Sums of whole numbers
-- do not depend on their order, so all ranks get the same. Blocks until the others have called it.
local function shared(group, data, numbers)
  for _, over in ipairs { group, data } do
    if over:size() > 1 then numbers = over:_share("sum", "i64", numbers, "times") end
  end
  local replicas = data and data:size() or 1
  for i, sum in ipairs(numbers) do numbers[i] = sum // replicas end
  return numbers
end

-- B is I and W in one: where a chunk's backward ran in the other way, its times are made from those
-- that there are.
local function view_of(shape, numbers)
  local view = { ranks = shape.ranks, chunks = shape.chunks, microbatches = shape.microbatches }
  if not numbers then return view end
  view.times, view.bytes = {}, {}
  for chunk = 0, shape.chunks - 1 do
    local at, times = chunk * COUNT, {}
    for i, kind in ipairs(KINDS) do times[kind] = numbers[at + i] / 1e6 end
    if times.B > 0 then times.I, times.W = times.B / 2, times.B / 2
    else times.B = times.I + times.W end
    view.times[chunk] = times
    view.bytes[chunk] = { input = numbers[at + COUNT - 1], kept = numbers[at + COUNT] }
  end
  return view
end

-------------------------------------------------------------------------------------------- tables

-- What all ranks' lists are, in one text.
local function text_of(t)
  local lists = {}
  for r, list in ipairs(t.lists) do
    local texts = {}
    for i, action in ipairs(list) do texts[i] = action.text end
    lists[r] = table.concat(texts, " ")
  end
  return table.concat(lists, "\n")
end

-- The table of an answer, played once; raises what is wrong with it.
local function table_of(entry)
  local schedule, shape, where = entry.schedule, entry.shape, where_of(entry.schedule)
  local t = actions.read(where, shape, ask(schedule, view_of(shape, entry.numbers)))
  for chunk = 0, shape.chunks - 1 do
    local before = entry.table and entry.table.rank_of[chunk]
    if before and before ~= t.rank_of[chunk] then
      core.raise(("pipeline: %s: rank %d: chunk %d is on rank %d: placement never changes in a run")
        :format(where, t.rank_of[chunk], chunk, before))
    end
  end
  local own, rank = 0, entry.group:rank()
  for chunk = 0, shape.chunks - 1 do own = own + (t.rank_of[chunk] == rank and 1 or 0) end
  if own ~= entry.own then
    core.raise(("pipeline: %s places %d chunks on rank %d, which has %d modules"):format(where, own,
      rank, entry.own))
  end
  local played = play.run(t)
  for r, live in ipairs(played.live) do
    if entry.max_live and live > entry.max_live then
      core.raise(("pipeline: %s: rank %d holds %d microbatches, and max_live is %d"):format(where,
        r - 1, live, entry.max_live))
    end
  end
  return t, played
end

-- What is wrong with the outcomes of a group's ranks, and the code of a run that ends by it.
local function difference(group, outcomes)
  for r, outcome in ipairs(outcomes) do
    local failed = outcome:match "^failed: (.*)"
    if failed then return ("rank %d of the group: %s"):format(r - 1, failed) end
  end
  for r, outcome in ipairs(outcomes) do
    if outcome ~= outcomes[1] then
      return ("pipeline: rank 0 of the group has a table with the hash %s, and rank %d has %s")
        :format(outcomes[1], r - 1, outcome), 5
    end
  end
end

-- A new table, if all ranks have made the same; else all of them raise.
local function agreed(entry)
  local ok, t, played = pcall(table_of, entry)
  local outcome = ok and ("%016x"):format(core.hash(text_of(t))) or "failed: " .. tostring(t)
  local wrong, code
  for _, over in ipairs { entry.group, entry.data } do
    if over:size() > 1 then
      local own = wrong and "failed: " .. wrong or outcome
      local found, of_found = difference(over, over:_share_texts(own, "pipeline"))
      if not wrong then wrong, code = found, of_found end
    end
  end
  if not ok then error(t, 0) end
  if wrong then core.raise(wrong, code) end
  return t, played
end

---------------------------------------------------------------------------------------------- plans

-- The pass that is measured first: one before it allocates memory.
local FIRST <const> = 2

--- What a pipeline runs by.
---@class ms.PipelinePlan
---@field schedule ms.Schedule
---@field group ms.Group
---@field data? ms.Group
---@field shape ms.PipelineShape
---@field own integer chunks of this rank
---@field max_live? integer
---@field table ms.PipelineTable in force
---@field played ms.PipelinePlay
---@field numbers? integer[] the last measured ones, equal on all ranks
---@field meter? table what a pass has measured and ranks have not shared yet
---@field pass integer passes that have begun
---@field next integer the pass before which the schedule is asked again, if it wants times
---@field version? integer of the schedule's file

--- Asks a schedule for the first time. All ranks of the group, and of data, call it.
---@param entry ms.PipelinePlan with the fields from schedule to max_live
---@return ms.PipelinePlan
function plans.begin(entry)
  entry.table, entry.played = agreed(entry)
  entry.pass, entry.next, entry.version = 0, FIRST + 1, entry.schedule.version
  watch.use(entry.schedule)
  return entry
end

--- Before a pass: asks the schedule again if this is due. Returns what the pass is to be measured
--- into, or nil; and whether there is a new table.
---@param entry ms.PipelinePlan
---@return table? meter, boolean is_new
function plans.before(entry)
  local schedule = entry.schedule
  entry.pass = entry.pass + 1
  local is_due = schedule.every ~= nil and entry.meter ~= nil and entry.pass >= entry.next
  local is_new = is_due or entry.version ~= schedule.version
  if is_due then
    entry.numbers = shared(entry.group, entry.data,
      numbers_of(entry.meter, entry.shape.chunks))
    entry.meter = nil
  end
  if is_new then
    entry.table, entry.played = table.unpack(watch.tried(schedule, function()
      return { agreed(entry) }
    end))
    entry.version = schedule.version
    if schedule.every then
      entry.next = entry.pass + (entry.numbers and schedule.every or FIRST)
    end
  end
  -- Tensors of the sim device have no values, and its clock tells nothing.
  local is_measured = schedule.every ~= nil and entry.pass >= FIRST
    and entry.pass + 1 >= entry.next and not core.is_sim()
  return is_measured and {} or nil, is_new
end

--- After a pass that was measured and has ended well.
---@param entry ms.PipelinePlan
---@param meter table
function plans.after(entry, meter) entry.meter = meter end

return plans
