-- Which parameters share a bucket: plans (numbers in, table out), made from the order and the
-- times of gradients and from the times of reductions.
local core = require "moonshard.core"
local made_by = require "moonshard.scripts.made_by"
local planners = require "moonshard.parallel.planner"
local watch = require "moonshard.train.watch"

local buckets = {}

---@class ms.Buckets
local Buckets = planners.kind("ms.Buckets", "bucket plan")

------------------------------------------------------------------------------------------- planners

---@param given ms.BucketsPlanner
---@return ms.Buckets
function buckets.buckets(given) return planners.make(Buckets, "buckets", given) end

-- The time, since backward began, at which the last reduction ends with buckets of this size. A
-- reduction begins when its bucket is ready and the reduction before it has ended.
local function finish_with(view, cap)
  local done, bytes = 0, 0
  for i, p in ipairs(view.parameters) do
    bytes = bytes + p.bytes
    if bytes >= cap or i == #view.parameters then
      done = math.max(done, p.ready_ms) + view.latency_ms + bytes / view.bytes_per_ms
      bytes = 0
    end
  end
  return done
end

-- The bucket size (a power of two, from 64 KiB) with which the reductions end first; of nearly
-- equal ones the largest.
local function fitted(view)
  local best, best_ms
  for power = 32, 16, -1 do
    local ms = finish_with(view, 1 << power)
    if not best_ms or ms < best_ms * 0.999 then best, best_ms = 1 << power, ms end
  end
  return { caps_bytes = { best } }
end

local ready_made = {
  arrival = buckets.buckets {
    name = "arrival",
    every = 100,
    plan = function() return { caps_bytes = { 1 << 20, 25 << 20 } } end,
  },
  fitted = buckets.buckets { name = "fitted", every = 100, plan = fitted },
}

buckets.ready_made = planners.names(ready_made)

local words = { what = "ddp: buckets", thing = "plan", maker = "ms.buckets" }

--- Finds a planner: value is a planner, the name of a ready-made one ("arrival": by size limits, in
--- the order in which gradients are complete; "fitted": of the size with which reductions end
--- first), or a file that returns one. options, are_given: for a file that makes its planner from
--- options, as in scripts/made_by.lua.
---@param value any
---@param options? table
---@param are_given? boolean
---@return ms.Buckets
function buckets.planner_of(value, options, are_given)
  planners.refuse_options(options, ready_made, value)
  local make = options and made_by.planner(options, are_given)
  return planners.find(Buckets, value, ready_made, words, make)
end

-- Raises an error about a plan, with the line of its planner.
local function refuse(planner, format, ...)
  core.raise(("bucket plan %s: %s"):format(planners.line(planner), format:format(...)))
end

---------------------------------------------------------------------------------------------- views

-- Latency and rate of reductions, from the times of all sizes so far.
local function fit(plan, layout, numbers, first)
  local sorted = {}
  for i, b in ipairs(layout) do plan.samples[b.bytes] = numbers[first + i] end
  for size, took in pairs(plan.samples) do sorted[#sorted + 1] = { size, took } end
  -- Sums must have one order on all ranks.
  table.sort(sorted, function(a, b) return a[1] < b[1] end)
  return planners.fit(sorted)
end

-- The view of a recorded pass, and the reducer's position of each of view.parameters; nil if no
-- rank has the times of one. In join, ranks that took part with zeros have no times.
local function view_of(s, plan)
  local times, arrivals, layout = s.reducer:stats(), s.reducer:arrivals(), s.reducer:bucket_times()
  local numbers, bytes_of = {}, {}
  for _, arrival in ipairs(arrivals) do
    local p = s.trained[arrival.position]
    bytes_of[arrival.position] = p:numel() * (p:dtype() == "f32" and 4 or 2)
  end
  if times.backward_ms > 0 and layout[1].reduce_ms then
    numbers[1], numbers[2] = times.forward_ms, times.backward_ms
    for _, arrival in ipairs(arrivals) do numbers[2 + arrival.position] = arrival.ms end
    for i, b in ipairs(layout) do numbers[2 + #arrivals + i] = b.reduce_ms end
  else numbers = nil end
  numbers = planners.mean_over_ranks(s, numbers, 2 + #arrivals + #layout)
  if not numbers then return nil end
  table.sort(arrivals, function(a, b)
    local first, second = numbers[2 + a.position], numbers[2 + b.position]
    if first ~= second then return first < second end
    return a.position < b.position
  end)
  local view = {
    step = plan.pass, world_size = s.group:size(), forward_ms = numbers[1],
    backward_ms = numbers[2], parameters = {},
  }
  view.latency_ms, view.bytes_per_ms = fit(plan, layout, numbers, 2 + #arrivals)
  local positions = {}
  for i, arrival in ipairs(arrivals) do
    local p = s.trained[arrival.position]
    positions[i] = arrival.position
    view.parameters[i] = {
      name = p:name(), bytes = bytes_of[arrival.position], dtype = p:dtype(),
      ready_ms = numbers[2 + arrival.position],
    }
  end
  return view, positions
end

---------------------------------------------------------------------------------------------- plans

local keys = { f32 = 1, f16 = 2, bf16 = 3 }

local function cut_by_caps(planner, view, caps)
  if type(caps) ~= "table" or #caps == 0 then
    refuse(planner, "caps_bytes is a list of sizes in bytes, the last of which holds for all \z
      further buckets")
  end
  planners.check_fields(caps, {}, true, function(what) refuse(planner, "caps_bytes: %s", what) end)
  for i, cap in ipairs(caps) do
    if math.type(cap) ~= "integer" or cap < 1 then
      refuse(planner, "caps_bytes[%d] must be a whole number of 1 or more, not %s", i,
        tostring(cap))
    end
  end
  local bytes, dtypes = {}, {}
  for i, p in ipairs(view.parameters) do bytes[i], dtypes[i] = p.bytes, keys[p.dtype] end
  return core.ddp_assign(bytes, dtypes, caps)
end

-- Lists of positions in the view, from a planner's answer; raises unless each position occurs once
-- and each bucket has one dtype.
local function check_plan(planner, answer, view)
  if type(answer) ~= "table" then
    refuse(planner, "it returned %s; lists of positions in view.parameters, or { caps_bytes = { \z
      ... } }, are expected", answer == nil and "nothing" or "a " .. type(answer))
  end
  local function refuse_field(what) refuse(planner, "%s", what) end
  planners.check_fields(answer, { "caps_bytes" }, true, refuse_field)
  if answer.caps_bytes ~= nil then
    if #answer > 0 then
      refuse(planner, "it returned both lists of positions and caps_bytes: return one of them")
    end
    return cut_by_caps(planner, view, answer.caps_bytes)
  end
  local bucket_of = {}
  for b, list in ipairs(answer) do
    if type(list) ~= "table" or #list == 0 then
      refuse(planner, "bucket %d is %s; a list of positions is expected", b - 1,
        type(list) == "table" and "empty" or "a " .. type(list))
    end
    for _, at in ipairs(list) do
      local p = math.type(at) == "integer" and view.parameters[at]
      if not p then
        refuse(planner, "bucket %d: there is no parameter %s; positions are 1 to %d", b - 1,
          tostring(at), #view.parameters)
      end
      if bucket_of[at] then
        refuse(planner, "bucket %d: %d ('%s') is in bucket %d already", b - 1, at, p.name,
          bucket_of[at] - 1)
      end
      local first = view.parameters[list[1]]
      if p.dtype ~= first.dtype then
        refuse(planner, "bucket %d has '%s', which is %s, and '%s', which is %s", b - 1, first.name,
          first.dtype, p.name, p.dtype)
      end
      bucket_of[at] = b
    end
  end
  for at, p in ipairs(view.parameters) do
    if not bucket_of[at] then refuse(planner, "parameter %d ('%s') is in no bucket", at, p.name) end
  end
  return answer
end

-- Raises unless all ranks have planned the same bucket and place for each parameter.
local function compare(s, planner, lists, view)
  local own = {}
  for b, list in ipairs(lists) do
    for place, at in ipairs(list) do own[2 * at - 1], own[2 * at] = b - 1, place end
  end
  local all = planners.gather(s, own)
  for rank, row in ipairs(all or {}) do
    local first = all[1]
    for i, number in ipairs(row) do
      if number ~= first[i] then
        local at = (i + 1) // 2
        refuse(planner, "ranks planned differently: parameter %d ('%s') is in bucket %d at place \z
          %d on rank 0, in bucket %d at place %d on rank %d: plan from the view alone", at,
          view.parameters[at].name, first[2 * at - 1], first[2 * at], row[2 * at - 1], row[2 * at],
          rank - 1)
      end
    end
  end
end

-- Whether the reducer has these buckets already.
local function is_layout(s, lists)
  local now = s.reducer:bucket_times()
  for b, list in ipairs(lists) do
    if not now[b] or table.concat(list, ",") ~= table.concat(now[b].positions, ",") then
      return false
    end
  end
  return true
end

local function make_plan(s, plan)
  local planner = plan.planner
  local view, positions = view_of(s, plan)
  if not view then return end
  local lists = watch.tried(planner, function()
    local answer = planners.ask(planner, view, function(message) refuse(planner, "%s", message) end)
    local checked = check_plan(planner, answer, view)
    compare(s, planner, checked, view)
    return checked
  end)
  local own = {}
  for b, list in ipairs(lists) do
    own[b] = {}
    for i, at in ipairs(list) do own[b][i] = positions[at] end
  end
  if not is_layout(s, own) then s.reducer:assign(own) end
  plan.next = plan.pass + planner.every
end

--- The state of a ddp model with a planner for its buckets.
---@class ms.BucketPlan
---@field planner ms.Buckets
---@field pass integer number of synchronized passes
---@field next integer pass of the next plan
---@field recorded integer number of passes in a row that were recorded
---@field records? boolean the pass that runs is recorded
---@field version? integer of the planner's file
---@field samples table<integer, number> what reductions took, in ms, by bytes

---@param planner ms.Buckets
---@return ms.BucketPlan
function buckets.new(planner)
  return { planner = planner, pass = 0, next = 0, recorded = 0, samples = {} }
end

--- For ddp: before the reducer's synchronized forward. A plan is made after two recorded passes and
--- holds for `every` passes. It waits for the first of the two, which has usually ended on the
--- device by then.
---@param s ms.DDPState
function buckets.begin(s)
  local plan = s.plan
  if plan.version ~= plan.planner.version then
    plan.version, plan.next = plan.planner.version, plan.pass
  end
  local _, passes = s.reducer:layout()
  plan.recorded = plan.records and s.reducer:arrivals() and plan.recorded + 1 or 0
  if plan.pass >= plan.next and plan.recorded >= 2 and passes >= 2 then
    s.reducer:await_times()
    make_plan(s, plan)
  end
  plan.pass = plan.pass + 1
  plan.records = plan.pass + 1 >= plan.next
  s.reducer:record(plan.records)
end

--- For ddp: makes a new plan due, as soon as passes were recorded.
---@param s ms.DDPState
function buckets.again(s) s.plan.next = s.plan.pass end

return buckets
