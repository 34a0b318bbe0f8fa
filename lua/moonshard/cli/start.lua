-- moonshard run --hosts: an MPI's launcher starts the ranks on other hosts, and this process waits
-- for the end of the job.
local core = require "moonshard.core"
local launch = require "moonshard.base.launch"

local start = {}

-- Launchers by what they print for --version, and the module that their ranks need.
local KINDS = {
  { says = "Open MPI", module = "openmpi", name = "mpirun of Open MPI" },
  { says = "OpenRTE", module = "openmpi", name = "mpirun of Open MPI" },
  { says = "HYDRA", module = "mpich", name = "mpirun of MPICH" },
}
local NAMES = { "mpirun", "mpirun.openmpi", "mpirun.mpich", "mpiexec.hydra" }

-- What a command of a shell prints.
local function output(command)
  local pipe = assert(io.popen(command .. " </dev/null 2>&1"))
  local text = pipe:read "a"
  pipe:close()
  return text
end

-- The first launcher on PATH for which there is a module: { path =, module =, name = }.
local function find_launcher()
  local wish, modules = os.getenv "MOONSHARD_MPI", core.hosts_modules()
  if wish == "" then wish = nil end
  if not modules then launch.exit(2, "--hosts: this build has no MPI (cmake says why)") end
  for _, name in ipairs(NAMES) do
    local path = output("command -v " .. name):match "^(/[^\n]*)"
    local says = path and output(("'%s' --version"):format(path)) or ""
    for _, kind in ipairs(KINDS) do
      if says:find(kind.says, 1, true) and (", " .. modules .. ","):find(" " .. kind.module .. ",")
        and (not wish or wish == kind.module) then
        return { path = path, module = kind.module, name = kind.name }
      end
    end
  end
  return launch.exit(2, ("--hosts needs the launcher of an MPI that this build has a module for \z
    (%s%s), and PATH has none; sought: %s"):format(modules,
    wish and "; MOONSHARD_MPI=" .. wish or "", table.concat(NAMES, ", ")))
end

-- The variables that ranks on other hosts need, by name: values do not belong on command lines.
local function variables()
  local list = { "MOONSHARD_STARTER" }
  for name in output("env"):gmatch "([%u%d_]+)=" do
    local ours = name:match "^MOONSHARD_" or name:match "^LUA_C?PATH"
    if ours and name ~= list[1] and os.getenv(name) then list[#list + 1] = name end
  end
  return list
end

-- The hosts of the list as its launchers read them: "node1:4,node2:4"; and the number of ranks.
local function read_hosts(text)
  local list, message = core.hosts_list(text)
  if not list then launch.exit(2, message) end
  local parts, ranks = {}, 0
  for i, host in ipairs(list) do
    if host.name:find ":" then
      launch.exit(2, ("--hosts: launchers of MPI take no IPv6 address (%s): give the host a name")
        :format(host.name))
    end
    parts[i] = ("%s:%d"):format(host.name, host.ranks)
    ranks = ranks + host.ranks
  end
  return table.concat(parts, ","), ranks
end

-- Ranks keep all cores of their host: their threads share them as those of `-n` do. Open MPI's
-- launcher prints a page about each rank that fails, which has its report already.
local function arguments_of(launcher, where, ranks)
  local list
  if launcher.module == "openmpi" then
    list = { launcher.path, "--host", where, "-n", tostring(ranks), "--map-by", "slot",
      "--bind-to", "none", "--quiet" }
    for _, name in ipairs(variables()) do
      list[#list + 1] = "-x"
      list[#list + 1] = name
    end
  else
    list = { launcher.path, "-hosts", where, "-n", tostring(ranks) }
  end
  list[#list + 1] = launch.process.program
  return table.move(launch.arguments_given, 1, #launch.arguments_given, #list + 1, list)
end

-- Open MPI refuses root, with a page of text.
local function check_root(launcher)
  if launcher.module ~= "openmpi" or not launch.process.is_root
    or os.getenv "OMPI_ALLOW_RUN_AS_ROOT" == "1"
    and os.getenv "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM" == "1" then return end
  launch.exit(2, "--hosts: mpirun of Open MPI refuses to run as root. Use another user, or set \z
    OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")
end

local function refuse_others(parsed)
  if parsed.ranks > 1 then
    launch.exit(2, ("-n %d beside --hosts: the list says how many ranks each host has; leave -n \z
      out"):format(parsed.ranks))
  elseif parsed.thread_ranks then
    launch.exit(2, "--thread-ranks beside --hosts: ranks of several hosts are processes")
  elseif parsed.device == "sim" then
    launch.exit(2, "--device sim beside --hosts: it runs one rank; `moonshard check RECIPE -n N` \z
      shows what N would do")
  end
end

--- Starts the ranks on the hosts of --hosts, and waits for the job's end. Returns its exit code.
---@param parsed table of moonshard run
---@return integer
function start.run(parsed)
  refuse_others(parsed)
  local where, ranks = read_hosts(parsed.hosts)
  local launcher = find_launcher()
  check_root(launcher)
  io.stdout:flush()
  local code, message, report = launch.process.start {
    arguments = arguments_of(launcher, where, ranks), launcher = launcher.name,
    program = launch.process.program, where = where, interface = parsed.interface,
    init_ns = parsed.init_timeout * 1e9, lost_ns = parsed.lost * 1e9,
    grace_ns = parsed.grace * 1e9,
  }
  if not code then launch.exit(2, message) end
  if message then io.stderr:write("moonshard: ", message, "\n") end
  io.stderr:write(report)
  return code
end

return start
