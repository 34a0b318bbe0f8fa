-- For the specs of tests/hosts, which run on the login host of hosts.sh: commands on other hosts,
-- and what crosses the cables.
local hosts = {}

local source = os.getenv "MOONSHARD_SOURCE"

--- The programs of the tests of this build: hosts.program "bench/exchange".
function hosts.program(name) return ("%s/tests/%s"):format(os.getenv "MOONSHARD_BUILD", name) end

local function script(name) return ("'%s/tests/hosts/%s.sh'"):format(source, name) end

local function quoted(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

-- Seconds until a command counts as hanging.
local DEADLINE = (os.getenv "MOONSHARD_SANITIZE" or "") ~= "" and 500 or 120

local function start(command)
  local pipe = assert(io.popen(("echo $$; exec timeout -k 5 %d %s 2>&1"):format(DEADLINE, command)))
  local process = pipe:read "l"
  local running = {}
  function running.line() return pipe:read "l" end
  --- Asks the command to end, as Ctrl-C does.
  function running.stop() os.execute("kill " .. process) end
  function running.finish()
    local text = pipe:read "a"
    local _, how, number = pipe:close()
    return how == "signal" and 128 + number or number, text
  end
  return running
end

--- Starts a command on a host: line() reads a line of its output, finish() the rest and its exit
--- code.
---@param host string
---@param command string for a shell there
function hosts.start(host, command)
  return start(("%s %s %s"):format(script "on", host, quoted(command)))
end

--- Runs a command on a host to its end.
---@return integer code
---@return string output
function hosts.on(host, command) return hosts.start(host, command).finish() end

--- The MPIs that have a module.
---@return string[]
function hosts.mpis()
  local list = {}
  for name in (os.getenv "MOONSHARD_TEST_MPIS" or ""):gmatch "%S+" do list[#list + 1] = name end
  return list
end

--- Starts a command in processes of an MPI.
---@param mpi string
---@param where string as "hosta:1,hostb:3"
---@param command string with options of mpirun before it
function hosts.mpirun(mpi, where, command)
  return start(("%s %s %s %s"):format(script "mpirun", mpi, where, command))
end

--- Starts `moonshard run ARGUMENTS`, where --hosts finds this MPI and reaches these hosts.
---@param mpi string
---@param arguments string
---@param settings? string NAME=value ...
function hosts.run(mpi, arguments, settings)
  return start(("env MOONSHARD_MPI=%s OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \z
    OMPI_MCA_plm_rsh_agent=%s OMPI_MCA_mpi_yield_when_idle=1 HYDRA_LAUNCHER=rsh \z
    HYDRA_LAUNCHER_EXEC=%s HYDRA_IFACE=bridge %s '%s' run %s"):format(mpi, script "on", script "on",
    settings or "", os.getenv "MOONSHARD_BIN", arguments))
end

local function read(path)
  local file = io.open(path, "rb")
  local text = file and file:read "a" or ""
  if file then file:close() end
  return text
end

-- The numbers of the namespaces with the hosts' names, of processes: in one call, since a spec asks
-- again and again.
local function namespaces(processes)
  local list = {}
  local pipe = assert(io.popen(("stat -L -c '%%n %%i' $(printf '/proc/%%s/ns/uts ' %s) 2>/dev/null")
    :format(processes)))
  for process, number in pipe:read("a"):gmatch "/proc/(%w+)/ns/uts (%d+)" do
    list[#list + 1] = { process = process, number = number }
  end
  pipe:close()
  return list
end

-- The host of each such number.
local host_of = setmetatable({}, { __index = function(list, number)
  local keepers = { self = "login" }
  for name, keeper in (os.getenv "MOONSHARD_HOSTS"):gmatch "(%w+)=(%d+)" do
    keepers[keeper] = name
  end
  local all = {}
  for keeper in pairs(keepers) do all[#all + 1] = keeper end
  for _, one in ipairs(namespaces(table.concat(all, " "))) do
    rawset(list, one.number, keepers[one.process])
  end
  return rawget(list, number)
end })

--- The processes of the program on all hosts: number, host, kind ("run", "keep"), and rank, which a
--- launcher has put into the environment of those that run.
---@return { process: integer, host: string, kind: string, rank?: integer }[]
function hosts.processes()
  local list = {}
  for _, one in ipairs(namespaces "$(pgrep -x moonshard)") do
    local kind = read(("/proc/%s/cmdline"):format(one.process)):match "^[^\0]*\0([^\0]*)\0"
    local environment = "\0" .. read(("/proc/%s/environ"):format(one.process))
    local rank = environment:match "\0OMPI_COMM_WORLD_RANK=(%d+)"
      or environment:match "\0PMI_RANK=(%d+)" or environment:match "\0PMIX_RANK=(%d+)"
    if kind == "run" or kind == "keep" then
      list[#list + 1] = { process = math.tointeger(tonumber(one.process)),
        host = host_of[one.number], kind = kind,
        rank = kind == "run" and rank and math.tointeger(tonumber(rank)) or nil }
    end
  end
  return list
end

--- hosts.sh VERB ...; what it prints.
function hosts.tool(...)
  local pipe = assert(io.popen(script "hosts" .. " " .. table.concat({ ... }, " ") .. " 2>&1"))
  local text = pipe:read "a"
  assert(pipe:close(), text)
  return text
end

--- The bytes that a host has sent and received.
---@return integer sent
---@return integer received
function hosts.bytes(host)
  local sent, received = hosts.tool("bytes", host):match "^(%d+) (%d+)\n$"
  return math.tointeger(tonumber(sent)), math.tointeger(tonumber(received))
end

--- What f makes the hosts send and receive.
---@param names string[]
---@param f fun()
---@return table<string, {sent: integer, received: integer}>
function hosts.crossing(names, f)
  local result = {}
  for _, name in ipairs(names) do
    local sent, received = hosts.bytes(name)
    result[name] = { sent = -sent, received = -received }
  end
  f()
  for _, name in ipairs(names) do
    local sent, received = hosts.bytes(name)
    result[name].sent = result[name].sent + sent
    result[name].received = result[name].received + received
  end
  return result
end

return hosts
