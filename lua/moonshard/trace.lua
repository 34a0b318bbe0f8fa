-- ms.trace: what ran when, as a Chrome / Perfetto trace.
local core = require "moonshard.core"

local trace = {}

local path                             -- of the trace that runs
local ranges = {}                      -- { name, first, last }: what was enqueued while a range was open, as positions in the records

--- From now on all tasks of all streams are recorded; stop writes them to path.
---@param file string
---@return true?, string?, string?
function trace.start(file)
  if path then core.raise("trace: one runs already, to " .. path) end
  local ok, message, code = core.file_write(file, "[]\n")
  if not ok then return nil, message, code end
  core.trace_start()
  path, ranges = file, {}
  return true
end

--- Writes the file.
---@return true?, string?, string?
function trace.stop()
  if not path then return nil, "trace: none runs", "not_found" end
  local events, streams, records = {}, {}, core.trace_stop()
  for _, record in ipairs(records) do
    if not streams[record.stream] then
      streams[record.stream] = true
      events[#events + 1] = { ph = "M", name = "thread_name", pid = core.rank(), tid = record.stream, args = { name = record.stream } }
    end
    if record.end_ns > 0 then
      events[#events + 1] = {
        ph = "X", name = record.name, pid = core.rank(), tid = record.stream, ts = record.start_ns / 1000, dur = (record.end_ns - record.start_ns) / 1000,
        args = { kind = record.kind, bytes = record.bytes, script = record.script },
      }
    end
  end
  for _, range in ipairs(ranges) do
    local from, to
    for i = range.first + 1, range.last do
      local record = records[i]
      if record.end_ns > 0 then from, to = math.min(from or record.start_ns, record.start_ns), math.max(to or 0, record.end_ns) end
    end
    if from then events[#events + 1] = { ph = "X", name = range.name, pid = core.rank(), tid = "ranges", ts = from / 1000, dur = (to - from) / 1000 } end
  end
  local file = path
  path = nil
  return core.file_write(file, core.json_encode(events) .. "\n")
end

--- A named range around what f enqueues; returns f's results.
---@param name string
---@param f function
function trace.range(name, f)
  if not path then return f() end
  local first = core.trace_count()
  local results = table.pack(f())
  ranges[#ranges + 1] = { name = name, first = first, last = core.trace_count() }
  return table.unpack(results, 1, results.n)
end

return trace
