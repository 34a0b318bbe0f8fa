-- ms.trace: a recording of all tasks with their times, as one Chrome / Perfetto file for all ranks.
--
-- `pid` is the rank; `tid` is a number of the rank's own, and the stream's name is its thread_name.
-- An event "moonshard" of each rank describes the run: recipe, command, date, machine, version.
-- Every rank of a job writes a part beside the file; the rank that finds all parts joins them.
-- Ranks on one machine have one clock.
local core = require "moonshard.core"
local launch = require "moonshard.base.launch"
local options_of = require "moonshard.base.options"
local machines = require "moonshard.base.machine"
local sorted_pairs = require "moonshard.base.sorted_pairs"
local argument = options_of.argument

local trace = {}

local path                             -- of the trace that runs
local begun                            -- its date, UTC

local function part_of(file, rank) return ("%s.rank-%d"):format(file, rank) end

-- Ranks that write to the same file.
local function writers()
  local world = core.world()
  return world:_has_others() and world:size() or 1
end

--- Joins the parts of ranks 0 to count - 1 that exist into file, and removes them. all: only if no
--- part is missing.
---@param file string
---@param count integer
---@param all? boolean
---@return true?, string?, string?
function trace._join(file, count, all)
  local bodies, found = {}, {}
  for rank = 0, count - 1 do
    local text = core.file_read(part_of(file, rank))
    if text then
      found[#found + 1] = rank
      bodies[#bodies + 1] = text:match "^%[%s*(.-)%s*%]%s*$"
    elseif all then return true end
  end
  if #found == 0 then return true end
  local ok, message, code = core.file_write(file, "[\n" .. table.concat(bodies, ",\n") .. "\n]\n")
  if not ok then return nil, message, code end
  for _, rank in ipairs(found) do core.remove(part_of(file, rank)) end
  return true
end

--- Removes parts that an earlier run has left.
---@param file string
---@param count integer
function trace._sweep(file, count)
  for rank = 0, count - 1 do
    if core.file_read(part_of(file, rank)) then core.remove(part_of(file, rank)) end
  end
end

---@param file string
---@return true?, string?, string?
function trace.start(file)
  if path then core.raise("trace: one runs already, to " .. path) end
  local count = writers()
  local ok, message, code = core.file_write(count > 1 and part_of(file, core.rank()) or file,
    "[]\n")
  if not ok then return nil, message, code end
  if count > 1 then core.remove(part_of(file, core.rank())) end
  core.trace_start()
  core.tracing = true
  path, begun = file, os.date "!%Y-%m-%d %H:%M:%S UTC"
  return true
end

-- A description of the run, for readers of the file.
local function about()
  return {
    recipe = launch.recipe, command = launch.command, date = begun, version = core.version,
    machine = machines.describe(),
  }
end

-- The number of a bucket in a label.
local function bucket_of(label) return label and math.tointeger(label:match "^bucket (%d+)") end

-- The action of a pipeline that a label names, and its microbatch. What it computes has its name:
-- "0F3"; messages with its results have it after the group's: "world, 0F3.0", "world, 0F3 shapes".
local function action_of(label)
  local own = (label or ""):match "[^,]*$":match "^ ?(%d.*)" or ""
  local action, micro = own:match "^(%d+[FBIW](%d+))%f[. \0]"
  return action, math.tointeger(micro)
end

-- For each collective of a bucket, the task that it waits for: the last one that was enqueued on
-- the stream of its wait before it, which writes the last of the bucket's gradients. Records are in
-- the order in which tasks were enqueued. List of { from, to }, both records.
local function arrows(records)
  local last, awaited, list = {}, {}, {}
  for _, record in ipairs(records) do
    local stream = record.stream
    local source = awaited[stream]
    if record.kind == "wait" then awaited[stream] = last[record.of]
    else last[stream] = record end
    -- Links may run other tasks between the wait and the collective.
    if record.kind == "comm" then
      if bucket_of(record.label) and source and record.end_ns > 0 and source.end_ns > 0 then
        list[#list + 1] = { source, record }
      end
      awaited[stream] = nil
    end
  end
  return list
end

-- Spans of steps: from the first start of a step's tasks to their last end. The host runs ahead, so
-- the next step's tasks may start before the last of this one end; spans in one row must not
-- overlap, and the next one begins where this one ends.
local function add_steps(steps, span)
  local before = 0
  for number, step in sorted_pairs(steps) do
    local from = math.max(step.from, before)
    before = math.max(from, step.to)
    span(("step %d"):format(number), "steps", from, before, { kind = "step", step = number })
  end
end

-- One line for each event of this rank: names of rank and streams, tasks and waits, steps, ranges,
-- arrows.
local function lines_of(records, ranges)
  local rank, lines, threads, count, steps = core.rank(), {}, {}, 0, {}
  local function metadata(name, args, thread)
    lines[#lines + 1] = core.json_encode {
      ph = "M", name = name, pid = rank, tid = thread, args = args,
    }
  end
  -- The number of a row of this rank, in order of appearance.
  local function thread_of(name)
    if not threads[name] then
      threads[name], count = count, count + 1
      metadata("thread_name", { name = name }, threads[name])
      metadata("thread_sort_index", { sort_index = threads[name] }, threads[name])
    end
    return threads[name]
  end
  -- Microseconds with all their nanoseconds, and no more digits.
  local function span(name, thread, from, to, args)
    lines[#lines + 1] =
      ('{"ph":"X","pid":%d,"tid":%d,"name":%s,"cat":%s,"ts":%d.%03d,"dur":%d.%03d,"args":%s}')
        :format(rank, thread_of(thread), core.json_encode(name), core.json_encode(args.kind),
          from // 1000, from % 1000, (to - from) // 1000, (to - from) % 1000,
          core.json_encode(args))
  end
  metadata("process_name", { name = ("rank %d"):format(rank) })
  metadata("process_sort_index", { sort_index = rank })
  metadata("moonshard", about())
  thread_of "steps"
  if #ranges > 0 then thread_of "ranges" end
  for _, record in ipairs(records) do
    thread_of(record.stream)
    if record.end_ns > 0 then
      local label = record.label
      local action, micro = action_of(label)
      span(record.name, record.stream, record.start_ns, record.end_ns, {
        kind = record.kind,
        bytes = record.bytes,
        script = record.script ~= "" and record.script or nil,
        step = record.step,
        of = record.of,
        label = label, bucket = bucket_of(label), action = action, microbatch = micro,
      })
      if record.step and record.kind ~= "wait" then
        local step = steps[record.step] or { from = record.start_ns, to = record.end_ns }
        step.from, step.to = math.min(step.from, record.start_ns), math.max(step.to, record.end_ns)
        steps[record.step] = step
      end
    end
  end
  add_steps(steps, span)
  -- An end of an arrow belongs to the span around its time.
  local function arrow_end(mark, number, record, at)
    lines[#lines + 1] =
      ('{"ph":%s,"pid":%d,"tid":%d,"id":"%d.%d","name":"gradients","cat":"bucket","ts":%d.%03d}')
        :format(mark, rank, thread_of(record.stream), rank, number, at // 1000, at % 1000)
  end
  for i, arrow in ipairs(arrows(records)) do
    arrow_end('"s"', i, arrow[1], (arrow[1].start_ns + arrow[1].end_ns) // 2)
    arrow_end('"f","bp":"e"', i, arrow[2], arrow[2].start_ns)
  end
  for _, range in ipairs(ranges) do
    local from, to
    for i = range.first, range.last do
      local record = records[i]
      if record.end_ns > 0 then
        from, to = math.min(from or record.start_ns, record.start_ns),
          math.max(to or 0, record.end_ns)
      end
    end
    local action, micro = action_of(range.name)
    if from then
      span(range.name, "ranges", from, to, {
        kind = "range", action = action, microbatch = micro,
      })
    end
  end
  return lines
end

---@return true?, string?, string?
function trace.stop()
  if not path then return nil, "trace: none runs", "not_found" end
  local file, count = path, writers()
  path, core.tracing = nil, nil
  core.trace_label()
  -- It waits for all tasks. If one has failed or the job has ended, the first wait raises the
  -- error, and later waits do not. The records are complete, so they are written first.
  local stopped, records, ranges = pcall(core.trace_stop)
  local failure = not stopped and { records }
  if failure then
    stopped, records, ranges = pcall(core.trace_stop)
    if not stopped then error(failure[1], 0) end
  end
  local text = "[\n" .. table.concat(lines_of(records, ranges), ",\n") .. "\n]\n"
  local ok, message, code = core.file_write(count > 1 and part_of(file, core.rank()) or file, text)
  if ok and count > 1 then ok, message, code = trace._join(file, count, true) end
  if failure then error(failure[1], 0) end
  return ok, message, code
end

---@param name string
---@param f function
function trace.range(name, f)
  argument("trace.range", "name", name, "string")
  argument("trace.range", "f", f, "function")
  if not path then return f() end
  local first = core.trace_count()
  local results = table.pack(f())
  core.trace_range(first, name)
  return table.unpack(results, 1, results.n)
end

return options_of.closed(trace, "ms.trace")
