-- moonshard run -n N: the process that supervises the ranks. Its switches, the report on how a job
-- ended, the exit code.
local core = require "moonshard.core"
local launch = require "moonshard.base.launch"
local own_command = require "moonshard.base.own_command"

local ranks = {}

local RATES = {
  bit = 1 / 8, kbit = 1e3 / 8, Mbit = 1e6 / 8, Gbit = 1e9 / 8, B = 1, kB = 1e3, MB = 1e6, GB = 1e9,
}
local TIMES = { ns = 1, us = 1e3, ms = 1e6, s = 1e9 }

-- For argparse: "1Gbit,5ms", either part alone, in any order.
local function link(text)
  local result = {}
  for part in text:gmatch "[^,]+" do
    local number, unit = part:match "^([%d.]+)(%a+)$"
    number = tonumber(number)
    if number and RATES[unit] and number * RATES[unit] >= 1 then
      result.bytes_per_second = math.floor(number * RATES[unit])
    elseif number and TIMES[unit] then
      result.latency_ns = math.floor(number * TIMES[unit])
    else
      return nil, ("a rate (1Gbit, 200MB) and a latency (5ms, 50us) are expected, as in --link \z
        1Gbit,5ms; not '%s'"):format(part)
    end
  end
  return result
end

-- For argparse: seconds, above 0.
local function seconds(text)
  local number = tonumber(text)
  if number and number > 0 and number < 1e8 then return number end
  return nil, ("a number of seconds above 0 is expected, not '%s'"):format(text)
end

--- The switches of a job.
---@param parser table
function ranks.add_switches(parser)
  parser:flag("--thread-ranks", "ranks are threads of one process, not processes")
  parser:flag("--share-gpu", "with --device cuda: more ranks than GPUs may compute on them, on \z
    one host; tensors of ranks then travel through memory of the host, not by NCCL; with \z
    --thread-ranks on one GPU they stay in its memory")
  parser:option("--link",
    "simulated network link between ranks, such as 1Gbit,5ms (default: none, shared memory)")
    :argname "LINK":convert(link)
  parser:option("--timeout", "seconds that ranks wait for one that shows no progress")
    :argname "SECONDS":convert(seconds):default "300"
  parser:option("--grace",
    "seconds from a request to stop (Ctrl-C, SIGTERM) until ranks are stopped without a checkpoint")
    :argname "SECONDS":convert(seconds):default "60"
end

--- --stuck, of commands that have their one rank supervised, too, where it is given.
---@param parser table
function ranks.add_stuck(parser)
  parser:option("--stuck", "end the job, with code 6, when a rank shows no progress for so long \z
    though no other waits for it: it calls nothing of the engine, and none of its tasks ends; \z
    give more than a script computes without the engine, or waits for a process (default: warn)")
    :argname "SECONDS":convert(seconds)
end

------------------------------------------------------------------------------------------ exit code

local SIGKILL = 9
local CODES = { mismatch = 5, left = 5, timeout = 6, died = 7 }

--- The exit code of a job that ended for this reason; nil: that of the rank that raised.
---@param reason string
---@param signal? integer the request to stop
---@return integer?
function ranks.code_of_cause(reason, signal)
  return reason == "stopped" and 128 + (signal or 15) or CODES[reason]
end

-- The code of the first rank that failed, not of ranks that were stopped because of it.
local function code_of(outcome)
  local cause = outcome.cause
  if not cause then return outcome.ranks[1].code end
  local code = ranks.code_of_cause(cause.reason, outcome.stop_signal)
  if code then return code end
  local first = outcome.ranks[cause.rank + 1]
  return first and first.signal == 0 and first.code ~= 0 and first.code or 1
end

--------------------------------------------------------------------------------------------- report

local function list(numbers)
  return (#numbers == 1 and "rank " or "ranks ") .. table.concat(numbers, ", ")
end

local function others_of(outcome, rank)
  local others = {}
  for i in ipairs(outcome.ranks) do
    if i - 1 ~= rank then others[#others + 1] = i - 1 end
  end
  return others
end

local STATES = {
  R = "running", S = "sleeping", D = "in the system (D)", T = "stopped (T)",
  t = "stopped by a debugger",
}

-- Where each rank was: "rank 0 at all_reduce #17 (bucket 2 "blocks.3"); rank 1 at step 3".
local function places(outcome, numbers, flights)
  local texts = {}
  for i, rank in ipairs(numbers) do
    local record, state = flights(rank), outcome.ranks[rank + 1]
    local last = record[#record]
    local where
    if last then
      where = (last.left_ns == 0 and "at " or "after ") .. ("%s #%d"):format(last.op, last.number)
      if last.bucket >= 0 then
        where = where .. (" (bucket %d%s)"):format(last.bucket,
          last.label ~= "" and (' "%s"'):format(last.label) or "")
      end
    else
      where = state.step >= 0 and ("at step %d"):format(state.step) or "before its first collective"
    end
    texts[i] = ("rank %d%s %s"):format(rank, state.host and " on host " .. state.host or "", where)
    if state.state then
      texts[i] = texts[i] .. ", its process " .. (STATES[state.state] or state.state)
    end
  end
  return table.concat(texts, "; ")
end

-- The command that goes on with the run of this folder.
local function resume_command(parsed, folder)
  local kept = launch.process and launch.process.kept_ranks
  return own_command.resume(parsed.recipe, parsed.options, folder, kept and not parsed.hosts)
end

local function read(path)
  local file = io.open(path)
  local text = file and file:read "a" or ""
  if file then file:close() end
  return text
end

--- The number of processes that the kernel has killed in this control group and below it because
--- memory ran out.
---@param root? string where proc and sys are: "" unless given
---@return integer
function ranks.oom_kills(root)
  root = root or ""
  local groups = read(root .. "/proc/self/cgroup")
  local two, one = groups:match "0::([^\n]*)", groups:match "%d+:[^:\n]*memory[^:\n]*:([^\n]*)"
  local files = {}
  if two then
    files = { "/sys/fs/cgroup" .. two .. "/memory.events", "/sys/fs/cgroup/memory.events" }
  end
  -- A container may see its group's path on the host, while the group's files are at the top.
  if one then
    table.move({
      "/sys/fs/cgroup/memory" .. one .. "/memory.oom_control",
      "/sys/fs/cgroup/memory/memory.oom_control",
    }, 1, 2, #files + 1, files)
  end
  for _, file in ipairs(files) do
    local count = read(root .. file):match "oom_kill (%d+)"
    if count then return math.tointeger(tonumber(count)) end
  end
  return 0
end

--- The report on a job that ended with an error.
---@param outcome table of process.launch
---@param parsed table
---@param flights fun(rank: integer): table[] flight record of a rank
---@param oom_kills integer processes that the kernel killed since the job began: out of memory
---@return string
function ranks.report(outcome, parsed, flights, oom_kills)
  local cause, lines = outcome.cause, {}
  local others = others_of(outcome, cause.rank)
  if cause.message:match "^because rank" then
    lines[1] = ("%s stopped %s"):format(list(others), cause.message)
  else
    lines[1] = cause.message
  end
  if cause.reason == "died" then
    local latest = 0
    for _, rank in ipairs(others) do latest = math.max(latest, outcome.ranks[rank + 1].ended_ns) end
    local after = latest - (cause.rank >= 0 and outcome.ranks[cause.rank + 1].ended_ns or latest)
    -- Over several hosts nobody sees when all ranks end.
    lines[#lines + 1] = outcome.settle and "  " .. places(outcome, others, flights)
      or ("  %s ended within %.1f ms; %s")
        :format(list(others), math.max(after, 0) / 1e6, places(outcome, others, flights))
    local first = outcome.ranks[cause.rank + 1]
    if oom_kills > 0 and first and first.signal == SIGKILL then
      lines[#lines + 1] = "  the system has killed a process for want of memory (oom_kill of its \z
        control group): fewer ranks or less per rank may fit"
    end
  elseif cause.reason == "timeout" then
    lines[#lines + 1] = "  " .. places(outcome, others_of(outcome), flights)
  end
  local killed = {}
  for i, rank in ipairs(outcome.ranks) do
    if rank.killed or not rank.ended and not outcome.settle then killed[#killed + 1] = i - 1 end
  end
  if #killed > 0 then
    lines[#lines + 1] = ("  %s did not leave and had to be killed"):format(list(killed))
  end
  local latest = outcome.folder ~= "" and require "moonshard.checkpoint.store".find(outcome.folder)
  if latest then
    lines[#lines + 1] = ("  last committed checkpoint: %s (resume: %s)")
      :format(latest, resume_command(parsed, outcome.folder))
  end
  return "moonshard: " .. table.concat(lines, "\n") .. "\n"
end

-- Writes a flight record to folder/flight/rank-R.jsonl, a line for each collective.
local function write_flight(folder, rank, record)
  local lines = {}
  for i, flight in ipairs(record) do
    flight.rank = rank
    lines[i] = core.json_encode(flight) .. "\n"
  end
  local ok, message = core.file_write(("%s/flight/rank-%d.jsonl"):format(folder, rank),
    table.concat(lines))
  if not ok then io.stderr:write("moonshard: ", message, "\n") end
end

-- The flight records of all ranks, or (only_here) of those on this host.
local function write_flights(folder, count, flights, only_here)
  if folder == "" then return end
  core.make_directory(folder .. "/flight")
  for rank = 0, count - 1 do
    local record, is_here = flights(rank)
    if is_here or not only_here then write_flight(folder, rank, record) end
  end
end

--- Starts the ranks, supervises them, reports; returns the exit code.
---@param parsed table of moonshard run
---@return integer
function ranks.launch(parsed)
  if parsed.device == "sim" then
    launch.exit(2, parsed.ranks == 1 and "--stuck beside --device sim: nothing watches that rank" or
      "--device sim runs one rank: `moonshard check RECIPE -n N` shows what N would do")
  end
  local process = launch.process
  local trace = parsed.trace and require "moonshard.trace"
  if trace then trace._sweep(parsed.trace, parsed.ranks) end
  local kills_before = ranks.oom_kills()
  local flights
  local outcome, message = process.launch({
    ranks = parsed.ranks,
    threads = parsed.threads,
    memory_bytes = parsed.memory,
    thread_ranks = parsed.thread_ranks,
    timeout_ns = parsed.timeout * 1e9, grace_ns = parsed.grace * 1e9,
    stuck_ns = parsed.stuck and parsed.stuck * 1e9,
    link_bytes_per_second = parsed.link and parsed.link.bytes_per_second,
    link_latency_ns = parsed.link and parsed.link.latency_ns,
    share_gpu = parsed.share_gpu, near_gpu = parsed.device == "cuda",
  }, function(read_flights, read_folder)
    flights = read_flights
    return function() write_flights(read_folder(), parsed.ranks, flights, true) end
  end)
  if not outcome then launch.exit(2, message) end
  if outcome.cause and outcome.reports then
    local report = ranks.report(outcome, parsed, flights, ranks.oom_kills() - kills_before)
    -- What an agent writes is lost where its launcher has cleaned up.
    if not (outcome.tell_report and outcome.tell_report(report)) then
      io.stderr:write(require "moonshard.base.status_line".fresh_row(), report)
    end
    write_flights(outcome.folder, parsed.ranks, flights)
    local advice = not outcome.settle and parsed.recipe and require "moonshard.cli.room".advice(
      outcome.cause.message, {
        recipe = parsed.recipe, arguments = parsed.options, config = parsed.config,
        ranks = parsed.ranks, is_gpu = parsed.device == "cuda",
      })
    if advice then io.stderr:write(advice, "\n") end
    -- The terminal may be gone: the launcher of another host, or one that has cleaned up.
    if outcome.settle and outcome.folder ~= "" then
      local whose = outcome.other_host and "-" .. outcome.other_host or ""
      core.file_write(("%s/report%s.txt"):format(outcome.folder, whose), report)
    end
  end
  for i, code in ipairs(outcome.settle and outcome.settle() or {}) do
    if code then outcome.ranks[i].code = code end
  end
  -- Joins the trace parts that ranks have left. After a successful run there are none: the ranks
  -- have joined them.
  local joined, why = true, nil
  if trace then joined, why = trace._join(parsed.trace, parsed.ranks) end
  if not joined then io.stderr:write(("moonshard: the trace was not written: %s\n"):format(why)) end
  local code = code_of(outcome)
  if outcome.folder ~= "" and not outcome.other_host then
    require "moonshard.train.report.about".finish(outcome.folder, code,
      outcome.cause and outcome.cause.message)
  end
  for _, rank in ipairs(outcome.settle and {} or outcome.ranks) do
    if not rank.ended then process.quit(code) end          -- a rank that is a thread and hangs
  end
  return code
end

return ranks
