-- moonshard trace: how the steps of a recorded run used their time, as a table, JSON or a page.
local core = require "moonshard.core"
local launch = require "moonshard.base.launch"
local switches = require "moonshard.cli.switches"
local sorted_pairs = require "moonshard.base.sorted_pairs"

local trace = {}

------------------------------------------------------------------------------------------ intervals

-- The union of intervals { from, to }: sorted, and disjoint.
local function union(list)
  table.sort(list, function(a, b) return a[1] < b[1] end)
  local result = {}
  for _, span in ipairs(list) do
    local last = result[#result]
    if last and span[1] <= last[2] then last[2] = math.max(last[2], span[2])
    else result[#result + 1] = { span[1], span[2] } end
  end
  return result
end

-- The part of a union between from and to.
local function length(spans, from, to)
  local sum = 0
  for _, span in ipairs(spans) do
    sum = sum + math.max(0, math.min(span[2], to) - math.max(span[1], from))
  end
  return sum
end

-- The union a without the union b.
local function without(a, b)
  local result, first = {}, 1
  for _, span in ipairs(a) do
    local from = span[1]
    while b[first] and b[first][2] <= from do first = first + 1 end
    local i = first
    while b[i] and b[i][1] < span[2] do
      if b[i][1] > from then result[#result + 1] = { from, b[i][1] } end
      from = math.max(from, b[i][2])
      i = i + 1
    end
    if from < span[2] then result[#result + 1] = { from, span[2] } end
  end
  return result
end

------------------------------------------------------------------------------------------- analysis

local COLUMNS = {
  "step_ms", "compute_ms", "comm_ms", "exposed_ms", "optimizer_ms", "idle_ms", "overlap_percent",
}
-- Copies of gradients and buffers count as computing.
local CLASS = { compute = "compute", copy = "compute", comm = "comm", optimizer = "optimizer" }

-- Tasks by rank: spans of each class, and of each class in each step.
local function by_rank(events)
  local ranks = {}
  for _, event in ipairs(events) do
    local class = event.ph == "X" and type(event.args) == "table" and CLASS[event.args.kind]
    if class then
      local rank = ranks[event.pid] or { compute = {}, comm = {}, optimizer = {}, steps = {} }
      ranks[event.pid] = rank
      -- A trace without steps counts as one step.
      local number, span = event.args.step or -1, { event.ts, event.ts + event.dur }
      local step = rank.steps[number]
        or { compute = {}, comm = {}, optimizer = {}, from = span[1], to = span[2] }
      rank.steps[number] = step
      step.from, step.to = math.min(step.from, span[1]), math.max(step.to, span[2])
      table.insert(rank[class], span)
      table.insert(step[class], { span[1], span[2] })
    end
  end
  return ranks
end

-- The times of one step of one rank, in milliseconds. Communication is exposed while nothing else
-- of its rank runs, in any step. A rank is idle while nothing of it runs at all.
local function row_of(number, rank_number, step, other, all)
  local comm = union(step.comm)
  local function inside(spans) return length(spans, step.from, step.to) end
  local row = {
    step = number, rank = rank_number, step_ms = step.to - step.from,
    compute_ms = inside(union(step.compute)), comm_ms = inside(comm),
    exposed_ms = inside(without(comm, other)),
    optimizer_ms = inside(union(step.optimizer)), idle_ms = step.to - step.from - inside(all),
  }
  for _, key in ipairs {
    "step_ms", "compute_ms", "comm_ms", "optimizer_ms", "exposed_ms", "idle_ms",
  } do
    row[key] = row[key] / 1000
  end
  row.overlap_percent = row.comm_ms > 0 and 100 * (1 - row.exposed_ms / row.comm_ms) or nil
  return row
end

-- The mean of rows; the overlap is computed from the sums of the rows.
local function mean_of(rows)
  local mean = {}
  for _, key in ipairs(COLUMNS) do
    local sum = 0
    for _, row in ipairs(rows) do sum = sum + (row[key] or 0) end
    mean[key] = sum / #rows
  end
  mean.overlap_percent = mean.comm_ms > 0 and 100 * (1 - mean.exposed_ms / mean.comm_ms) or nil
  return mean
end

-- The first steps allocate memory, make plans and build buckets: means do not count them if enough
-- other steps remain.
local FIRST_STEPS <const>, LEAST_LEFT <const> = 2, 3

local function first_counted(count)
  return count >= FIRST_STEPS + LEAST_LEFT and FIRST_STEPS + 1 or 1
end

--- The times of the tasks of each name, the longest total first: { name, kind, calls, total_ms,
--- mean_ms, share }. counts: the set of step numbers that count; nil: all steps. share: percent of
--- the time of all tasks. Waits do not count as tasks.
---@param events table[] of a Chrome trace
---@param counts? table<integer, boolean>
---@return table[]
function trace.operators(events, counts)
  local list, by_name, all = {}, {}, 0
  for _, event in ipairs(events) do
    local args = event.ph == "X" and type(event.args) == "table" and event.args or {}
    if CLASS[args.kind] and (not counts or counts[args.step or -1]) then
      local key = args.kind .. "/" .. event.name
      local row = by_name[key]
      if not row then
        row = { name = event.name, kind = args.kind, calls = 0, total_ms = 0 }
        by_name[key], list[#list + 1] = row, row
      end
      row.calls, row.total_ms, all = row.calls + 1, row.total_ms + event.dur / 1000,
        all + event.dur / 1000
    end
  end
  for _, row in ipairs(list) do
    row.mean_ms, row.share = row.total_ms / row.calls, all > 0 and 100 * row.total_ms / all or 0
  end
  table.sort(list, function(a, b)
    if a.total_ms ~= b.total_ms then return a.total_ms > b.total_ms end
    return a.kind .. a.name < b.kind .. b.name
  end)
  return list
end

--- The times of each step of each rank: { ranks, rows = one for each step and rank, steps = one for
--- each step: the mean over ranks, mean = the mean over the steps from mean.from_step on, operators
--- = the operators of these steps, see trace.operators }. Work outside of steps does not count,
--- unless the trace has no steps: then all work is one step with the number -1.
---@param events table[] of a Chrome trace
---@return table
function trace.summary(events)
  local result, by_step, numbers = { ranks = 0, rows = {}, steps = {} }, {}, {}
  local ranks, has_steps = by_rank(events), false
  for _, rank in pairs(ranks) do
    for number in pairs(rank.steps) do has_steps = has_steps or number >= 0 end
  end
  for rank_number, rank in sorted_pairs(ranks) do
    result.ranks = result.ranks + 1
    local other = {}
    for _, class in ipairs { "compute", "optimizer" } do
      for _, span in ipairs(rank[class]) do other[#other + 1] = { span[1], span[2] } end
    end
    other = union(other)
    local all = {}
    for _, list in ipairs { other, rank.comm } do
      for _, span in ipairs(list) do all[#all + 1] = { span[1], span[2] } end
    end
    all = union(all)
    for number, step in sorted_pairs(rank.steps) do
      if number >= 0 or not has_steps then
        local row = row_of(number, rank_number, step, other, all)
        result.rows[#result.rows + 1] = row
        if not by_step[number] then
          by_step[number] = {}
          numbers[#numbers + 1] = number
        end
        table.insert(by_step[number], row)
      end
    end
  end
  table.sort(numbers)
  for i, number in ipairs(numbers) do
    result.steps[i] = mean_of(by_step[number])
    result.steps[i].step = number
  end
  if #result.steps > 0 then
    local first, counts = first_counted(#result.steps), {}
    for i = first, #result.steps do counts[numbers[i]] = true end
    result.mean = mean_of { table.unpack(result.steps, first) }
    result.mean.from_step = numbers[first]
    result.operators = trace.operators(events, counts)
  end
  return result
end

---------------------------------------------------------------------------------------------- table

local HEADS = {
  "step", "ms", "compute", "communication", "exposed", "optimizer", "idle", "overlap",
}

local MOST_OPERATORS <const> = 20

-- Lines of the table of operators: the longest ones, and one line for all others.
local function operator_lines(operators)
  local widest, lines = #"operator", {}
  local rest = { name = "others", kind = "", calls = 0, total_ms = 0, share = 0 }
  for i, row in ipairs(operators) do
    if i <= MOST_OPERATORS then
      widest = math.max(widest, #row.name)
    else
      rest.calls, rest.total_ms, rest.share = rest.calls + row.calls, rest.total_ms + row.total_ms,
        rest.share + row.share
    end
  end
  local function line(...)
    lines[#lines + 1] = ("%-" .. widest .. "s  %-9s  %8s  %11s  %10s  %7s"):format(...)
  end
  line("operator", "kind", "calls", "total ms", "mean ms", "share")
  local function add(row)
    line(row.name, row.kind, row.calls, ("%.2f"):format(row.total_ms),
      ("%.4f"):format(row.total_ms / row.calls), ("%.1f%%"):format(row.share))
  end
  for i = 1, math.min(#operators, MOST_OPERATORS) do add(operators[i]) end
  if rest.calls > 0 then add(rest) end
  return lines
end

--- The summary as text: a line for each step, and the operators of the steps that the mean is over.
---@param summary table
---@return string
function trace.text(summary)
  local lines = {
    ("%d rank%s, milliseconds of a step (mean over ranks); exposed: communication while nothing \z
      else runs"):format(summary.ranks, summary.ranks == 1 and "" or "s"),
  }
  local function line(first, row)
    local cells = { ("%6s"):format(first) }
    for i, key in ipairs(COLUMNS) do
      local value = row[key]
      local text = key == "overlap_percent" and (value and ("%.0f%%"):format(value) or "-")
        or ("%.2f"):format(value)
      cells[#cells + 1] = ("%" .. math.max(9, #HEADS[i + 1]) .. "s"):format(text)
    end
    lines[#lines + 1] = table.concat(cells, "  ")
  end
  local heads = { ("%6s"):format(HEADS[1]) }
  for i = 2, #HEADS do heads[i] = ("%" .. math.max(9, #HEADS[i]) .. "s"):format(HEADS[i]) end
  lines[2] = table.concat(heads, "  ")
  for _, row in ipairs(summary.steps) do
    line(row.step < 0 and "all" or ("%d"):format(row.step), row)
  end
  if #summary.steps > 1 then line("mean", summary.mean) end
  local first = summary.mean.from_step
  local of = first >= 0 and first ~= summary.steps[1].step
    and ("steps %d to %d (as the mean)"):format(first, summary.steps[#summary.steps].step)
    or "all steps"
  lines[#lines + 1] = ""
  lines[#lines + 1] = ("tasks of %s, all ranks together; share: of the time of all tasks")
    :format(of)
  for _, text in ipairs(operator_lines(summary.operators)) do lines[#lines + 1] = text end
  return table.concat(lines, "\n")
end

-------------------------------------------------------------------------------------------- command

local function read(path)
  local text, message = core.file_read(path)
  if not text then launch.exit(3, message) end
  local events, why = core.json_decode(text)
  if type(events) == "table" and events.traceEvents then events = events.traceEvents end
  if type(events) ~= "table" then
    launch.exit(3, ("%s is no trace: %s"):format(path, why or "a list of events is expected"))
  end
  for i, event in ipairs(events) do
    local whole = type(event) == "table" and (event.ph ~= "X" or type(event.ts) == "number"
      and type(event.dur) == "number" and math.type(event.pid) == "integer")
    if not whole then
      launch.exit(3,
        ("%s is no trace of Moonshard: event %d lacks a time or a rank"):format(path, i))
    end
  end
  return events
end

--- The parser of its command line.
---@return table
function trace.parser()
  local parser = switches.plain("trace", "Shows how the steps of a run used their time, from the \z
    file that `moonshard run --trace FILE` writes.")
  parser:argument("file", "the trace"):args "?"
  parser:flag("--json", "one line of JSON, with a row for each step and rank")
  parser:option("--html", "write a page with the timeline to this file")
  return parser
end

--- moonshard trace FILE [--json] [--html OUT]
---@param arguments string[]
---@return integer
function trace.main(arguments)
  local parser = trace.parser()
  local parsed = switches.parse(parser, arguments)
  if not parsed.file then launch.exit(2, "which trace?\n" .. parser:get_usage()) end
  local events = read(parsed.file)
  local summary = trace.summary(events)
  if #summary.rows == 0 then launch.exit(3, parsed.file .. ": it has no tasks") end
  if parsed.html then
    local ok, message = core.file_write(parsed.html,
      require "moonshard.cli.trace_page"(parsed.file, events, trace.text(summary)))
    if not ok then launch.exit(3, message) end
  end
  print(parsed.json and core.json_encode(summary) or trace.text(summary))
  return 0
end

return trace
