-- moonshard run under mpirun, srun or torchrun: this process becomes a rank of their job.
local core = require "moonshard.core"
local launch = require "moonshard.base.launch"
local mpi = require "moonshard.parallel.mpi"
local switches = require "moonshard.cli.switches"

local hosts = {}

-- For argparse: seconds, above 0.
local function seconds(text)
  local number = tonumber(text)
  if number and number > 0 and number < 1e8 then return number end
  return nil, ("a number of seconds above 0 is expected, not '%s'"):format(text)
end

-- For argparse: a TCP port.
local function port(text)
  local number = math.tointeger(tonumber(text))
  if number and number >= 1 and number <= 65535 then return number end
  return nil, ("a port from 1 to 65535 is expected, not '%s'"):format(text)
end

--- The switches of a job over several hosts.
---@param parser table
function hosts.add_switches(parser)
  parser:option("--hosts", "start ranks on these hosts by the mpirun that is found: \z
    node1:4,node2:4 or node[1-2]:4, or a file with a host a line (default: none, this machine)")
    :argname "LIST"
  parser:option("--sum-order", "over several hosts, sums are first those of each host, or of \z
    ranks in their order, with the bits of one host")
    :choices { "hosts", "ranks" }:default "hosts"
  parser:option("--interface", "network interface by which hosts find each other (default: any)")
    :argname "NAME"
  parser:option("--port", "port of the first host at which the others find it (default: any free)")
    :argname "PORT":convert(port)
  parser:option("--init-timeout", "seconds that processes wait for each other at the start")
    :argname "SECONDS":convert(seconds):default "120"
  parser:option("--lost", "seconds without a sign of life after which a host is lost")
    :argname "SECONDS":convert(seconds):default "5"
end

-- What all ranks must have in common, as lines.
local function agreed(parsed, command)
  local lines = { "recipe=" .. mpi.content_of(parsed.recipe) }
  if parsed.config then lines[#lines + 1] = "config=" .. mpi.content_of(parsed.config) end
  local names = switches.agreed()
  for _, name in ipairs { "timeout", "stuck", "sum_order", "lost", "init_timeout", "trace", "watch",
    "log_every", "share_gpu" } do
    names[#names + 1] = name
  end
  for _, name in ipairs(names) do
    if parsed[name] ~= nil then
      lines[#lines + 1] = ("--%s %s"):format(name:gsub("_", "-"), tostring(parsed[name]))
    end
  end
  for _, option in ipairs(parsed.options or {}) do lines[#lines + 1] = option end
  lines[#lines + 1] = "command=" .. command
  return table.concat(lines, "\n")
end

-- Ranks of torchrun on one host meet at a path of it.
local function meet_torchrun(found)
  core.configure{ group = "local", rank = found.rank, world_size = found.size,
    rendezvous = ("%s/moonshard-torchrun-%s-%s"):format(os.getenv "TMPDIR" or "/tmp",
      os.getenv "MASTER_PORT" or "0", (os.getenv "TORCHELASTIC_RUN_ID" or ""):gsub("[^%w]", "")) }
  return found.rank
end

-- Without MPI only NCCL carries tensors from host to host. Tensors of GPUs always go by it.
local function need_nccl(found, device)
  if device == "cuda" or os.getenv "MOONSHARD_TRANSPORT" == "nccl" then return end
  launch.exit(2, found.local_rank > 0 and "" or ("%s started ranks on several hosts (%d in all), \z
    and no MPI connects them: on CPUs start them with mpirun or srun%s; without MPI their tensors \z
    travel through NCCL (MOONSHARD_TRANSPORT=nccl)"):format(found.launcher, found.size,
    os.getenv "MOONSHARD_MASTER" and ", and do not set MOONSHARD_MASTER" or ""))
end

-- The line that rank 0 prints when all have met.
local function describe(found, place)
  return ("%d rank%s on %d host%s, started by %s, over %s"):format(place.ranks,
    place.ranks == 1 and "" or "s", place.hosts, place.hosts == 1 and "" or "s",
    os.getenv "MOONSHARD_STARTER" and ("moonshard run --hosts (%s)"):format(found.launcher)
      or found.launcher, place.library)
end

-- Which ranks are on which host, and where the hosts' agents meet.
local function describe_hosts(place)
  local list, ranks = {}, {}
  for rank, name in ipairs(place.names) do
    if not ranks[name] then
      ranks[name] = {}
      list[#list + 1] = name
    end
    table.insert(ranks[name], rank - 1)
  end
  for i, name in ipairs(list) do
    list[i] = ("%s (rank%s %s)"):format(name, #ranks[name] == 1 and "" or "s",
      table.concat(ranks[name], ", "))
  end
  return ("hosts: %s; their keepers meet at %s"):format(table.concat(list, ", "), place.meeting)
end

-- What the launcher has said already.
local function refuse_others(parsed, found)
  local message
  if parsed.hosts and not os.getenv "MOONSHARD_STARTER" then
    message = ("--hosts beside %s, which has started this process: leave one of the two out")
      :format(found.launcher)
  elseif parsed.ranks > 1 then
    message = ("-n %d beside %s: the launcher says how many ranks there are; leave -n out")
      :format(parsed.ranks, found.launcher)
  elseif parsed.thread_ranks then
    message = ("--thread-ranks beside %s: each of its processes is one rank")
      :format(found.launcher)
  end
  -- Ranks of MPI tell rank 0 (hosts.refuse).
  if message then launch.exit(2, (found.mpi or found.rank == 0) and message or "") end
end

local function report(message)
  io.stdout:flush()
  io.stderr:write("moonshard: ", message, "\n")
end

-- The end of a process that did not become a rank.
local function quit(message, is_told)
  if not is_told then report(message) end
  launch.process.quit(2)
end

--- Ends a process that cannot become a rank: it meets the other ranks of its job, if there is one,
--- so that one of them reports this error.
---@param message string
function hosts.refuse(message)
  local process = launch.process
  local ok, found = pcall(core.hosts_launched)
  if not (ok and found and found.mpi) or process.kept_ranks then return end
  local _, told, is_told = core.hosts_join {
    program = process.program, arguments = {}, refused = message, report = report,
    init_ns = 120000000000,
  }
  quit(told, is_told)
end

--- Joins the job of the launcher that started this process. Returns whether there is one; this
--- process is then a rank. An error ends the program: once for the whole job.
---@param command string "run"
---@param parsed table
---@return boolean
function hosts.join(command, parsed)
  local process = launch.process
  if not process or process.rank or process.kept_ranks then return false end
  local found = core.hosts_launched()
  if not found then
    if parsed.ranks == 1 and os.getenv "MOONSHARD_MASTER" then
      launch.exit(2, "MOONSHARD_MASTER is set, but no launcher started this process as one of \z
        several ranks: start them with torchrun or srun, or do not set it")
    end
    return false
  end
  refuse_others(parsed, found)
  if not found.mpi then
    if not os.getenv "MOONSHARD_MASTER"
        and tonumber(os.getenv "LOCAL_WORLD_SIZE") == found.size then
      if parsed.stuck then
        launch.exit(2, found.local_rank > 0 and "" or "--stuck beside torchrun on one host: \z
          nothing watches its ranks; start them with moonshard run -n N")
      end
      process.rank = meet_torchrun(found)
      return true
    end
    need_nccl(found, parsed.device)
  end
  local place, message, is_told = core.hosts_join {
    program = process.program, arguments = launch.arguments_given,
    agree = agreed(parsed, command), interface = parsed.interface, port = parsed.port,
    init_ns = math.floor(parsed.init_timeout * 1e9), lost_ns = math.floor(parsed.lost * 1e9),
    threads = parsed.threads, memory_bytes = parsed.memory,
    timeout_ns = math.floor(parsed.timeout * 1e9),
    link_bytes_per_second = parsed.link and parsed.link.bytes_per_second,
    link_latency_ns = parsed.link and parsed.link.latency_ns,
    sum_by_ranks = parsed.sum_order == "ranks",
    report = report,
  }
  if not place then quit(message, is_told) end
  process.rank, process.hosts = place.rank, place.hosts
  process.joined()
  if place.rank == 0 then
    local log = require "moonshard.base.log".log
    log("%s", describe(found, place))
    if place.hosts > 1 then log("%s", describe_hosts(place)) end
  end
  return true
end

return hosts
