-- For the specs of tests/hosts, which run on the login host of hosts.sh: commands on other hosts,
-- processes there, and what crosses the cables.
local busted = require "busted" -- a file that specs require has not its functions as globals
local core = require "moonshard.core"
local lfs = require "lfs" -- busted needs it too

local hosts = {}

local source = os.getenv "MOONSHARD_SOURCE"

--- A recipe that trains a little. Each rank prints the hash of its weights at its end.
hosts.TRAINING = [[
local ms = require "moonshard"
ms.seed(1)
local net = ms.ddp(ms.nn.Sequential(ms.nn.Linear(50, 40), ms.nn.Linear(40, 30)))
local optimizer = ms.optim.adamw(net, { lr = 0.01 })
for step in ms.steps(5) do
  net(ms.randn { 8, 50, seed = 100 * ms.rank() + step }):square():mean():backward()
  optimizer:step()
  optimizer:zero_grad()
end
local bits = {}
for _, p in ipairs(net:parameters()) do
  for _, x in ipairs(p:reshape(-1):to_table()) do bits[#bits + 1] = ("%a"):format(x) end
end
io.stdout:write(("rank %d is done, weights %x\n"):format(ms.rank(),
  require "moonshard.core".hash(table.concat(bits, " "))))
]]

--- The programs of the tests of this build: hosts.program "bench/exchange".
function hosts.program(name) return ("%s/tests/%s"):format(os.getenv "MOONSHARD_BUILD", name) end

local function script(name) return ("'%s/tests/hosts/%s.sh'"):format(source, name) end

local function quoted(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

-- Seconds until what is waited for counts as hanging: no other limit of time is a test's own.
local HANGS = 1800
local POLL = 0.02 -- seconds between two looks at what is waited for
local REST = 0.05 -- the same of launchers
-- Looks at which a launcher that does nothing has nothing left to do: in more than 1 s, which that
-- of Open MPI sleeps before it kills what is left, and says what it knows.
local RESTS = 40

local function read(path)
  local file = io.open(path, "rb")
  local text = file and file:read "a" or ""
  if file then file:close() end
  return text
end

--- Starts a command for a shell here: line() reads a line of its output, finish() the rest and its
--- exit code.
---@param command string
function hosts.launch(command)
  local pipe = assert(io.popen(("echo $$; exec timeout -k 5 %d %s 2>&1"):format(HANGS, command)))
  local process = pipe:read "l"
  local running = {}
  function running.line() return pipe:read "l" end
  --- Asks the command to end, as Ctrl-C does.
  function running.stop() os.execute("kill " .. process) end
  --- Whether it has ended: it is a zombie until its output has been read.
  function running.has_ended()
    return not read(("/proc/%s/stat"):format(process)):find "%) [^Z]"
  end
  function running.finish()
    local text = pipe:read "a"
    local _, how, number = pipe:close()
    return how == "signal" and 128 + number or number, text
  end
  return running
end

--- The same for a command for a shell on a host.
---@param host string
---@param command string for a shell there
function hosts.start(host, command)
  return hosts.launch(("%s %s %s"):format(script "on", host, quoted(command)))
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

--- Whether what has this number is tried under this MPI: each number under one, in the full suite
--- under all.
---@param number integer
---@param mpi string
---@return boolean
function hosts.is_tried(number, mpi)
  local mpis = hosts.mpis()
  return os.getenv "MOONSHARD_TEST_FULL" == "1" or mpis[number % #mpis + 1] == mpi
end

--- Starts a command in processes of an MPI.
---@param mpi string
---@param where string as "hosta:1,hostb:3"
---@param command string with options of mpirun before it
function hosts.mpirun(mpi, where, command)
  return hosts.launch(("%s %s %s %s"):format(script "mpirun", mpi, where, command))
end

--- Starts `moonshard run ARGUMENTS`, where --hosts finds this MPI and reaches these hosts.
---@param mpi string
---@param arguments string
---@param settings? string NAME=value ...
function hosts.run(mpi, arguments, settings)
  return hosts.launch(("env MOONSHARD_MPI=%s OMPI_ALLOW_RUN_AS_ROOT=1 \z
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_plm_rsh_agent=%s OMPI_MCA_mpi_yield_when_idle=1 \z
    HYDRA_LAUNCHER=rsh HYDRA_LAUNCHER_EXEC=%s HYDRA_IFACE=bridge %s '%s' run %s"):format(mpi,
    script "on", script "on", settings or "", os.getenv "MOONSHARD_BIN", arguments))
end

function hosts.sleep(seconds) busted.sleep(seconds) end

--- Waits until f() is true; an error once that counts as hanging.
---@param what string|fun(): string what is wrong then
---@param f fun(): any
---@param every? number seconds between two calls
function hosts.await(what, f, every)
  local begun = core.clock_ms()
  while not f() do
    if core.clock_ms() - begun > 1e3 * HANGS then
      error(type(what) == "function" and what() or what, 2)
    end
    hosts.sleep(every or POLL)
  end
end

-- The number of the namespace that has the name of a process' host.
local function namespace(process)
  return lfs.attributes(("/proc/%s/ns/uts"):format(process), "ino")
end

-- The host of each such number.
local host_of = setmetatable({}, { __index = function(list, number)
  list[namespace "self"] = "login"
  for name, keeper in (os.getenv "MOONSHARD_HOSTS"):gmatch "(%w+)=(%d+)" do
    list[namespace(keeper)] = name
  end
  return rawget(list, number)
end })

-- State of a process, and the number of its threads, in what the system says of it.
local STAT = "%) (%a)" .. (" %-?%d+"):rep(16) .. " (%d+)"

-- Whether nothing is left of a process but its exit code, which another has not read yet. When a
-- process ends, the system takes its memory first, with the command line, and then its namespaces;
-- its sockets are closed after these, and only with its last thread.
local function has_ended(process)
  local state, threads = read(("/proc/%s/stat"):format(process)):match(STAT)
  return not state or state == "X" or state == "Z" and threads == "1"
end

-- The processes whose programs have one of these names, without those that have ended.
local function named(...)
  local list = {}
  for process in lfs.dir "/proc" do
    local name = process:find "^%d" and read(("/proc/%s/comm"):format(process)) or ""
    local found = false
    for i = 1, select("#", ...) do found = found or name:find((select(i, ...))) ~= nil end
    if found and not has_ended(process) then list[#list + 1] = process end
  end
  return list
end

local PROGRAM = "^moonshard\n$"

-- A process of the program, as hosts.processes gives it; nil if it is none, or ends.
local function describe(process)
  local number = namespace(process)
  local kind = read(("/proc/%s/cmdline"):format(process)):match "^[^\0]*\0([^\0]*)\0"
  if not number or kind ~= "run" and kind ~= "keep" then return nil end
  local environment = "\0" .. read(("/proc/%s/environ"):format(process))
  local rank = environment:match "\0OMPI_COMM_WORLD_RANK=(%d+)"
    or environment:match "\0PMI_RANK=(%d+)" or environment:match "\0PMIX_RANK=(%d+)"
  return { process = math.tointeger(tonumber(process)), host = host_of[number], kind = kind,
    rank = kind == "run" and rank and math.tointeger(tonumber(rank)) or nil }
end

--- The processes of the program on all hosts: number, host, kind ("run", "keep"), and rank, which a
--- launcher has put into the environment of those that run.
---@return { process: integer, host: string, kind: string, rank?: integer }[]
function hosts.processes()
  local list = {}
  for _, process in ipairs(named(PROGRAM)) do list[#list + 1] = describe(process) end
  return list
end

--- Those of a kind, on a host; nil: of any.
---@param processes table[] as of hosts.processes
---@param kind? string
---@param host? string
function hosts.select(processes, kind, host)
  local found = {}
  for _, one in ipairs(processes) do
    if (not kind or one.kind == kind) and (not host or one.host == host) then
      found[#found + 1] = one
    end
  end
  return found
end
function hosts.find(kind, host) return hosts.select(hosts.processes(), kind, host) end

-- The first process of the program on a host, or on any; also one that ends, as its sockets may be
-- open yet. Its host is not known then.
local function find_any(host)
  for _, process in ipairs(named(PROGRAM)) do
    local found = describe(process)
    if not found and read(("/proc/%s/cmdline"):format(process)) == "" then
      found = { process = process }
    end
    if found and (not host or not found.host or found.host == host) then return found end
  end
end

-- One that was seen last. As long as it lives the system need not be searched for others.
local seen

--- Whether nothing of the program is left, on a host or on all.
---@param host? string
---@return boolean
function hosts.is_over(host)
  local lives = seen and (not host or seen.host == host)
    and read(("/proc/%d/cmdline"):format(seen.process)):find("moonshard", 1, true)
  if not lives then seen = find_any(host) end
  return not seen
end

-- What is left, for a message: of each process its command, and what its threads wait in.
local function describe_all()
  local lines = { "processes are left:" }
  for _, process in ipairs(named(PROGRAM)) do
    local folder = ("/proc/%s"):format(process)
    lines[#lines + 1] = ("%s %s"):format(process, (read(folder .. "/cmdline"):gsub("%z", " ")))
    for thread in lfs.dir(folder .. "/task") do
      if thread:find "^%d" then
        local task = ("%s/task/%s"):format(folder, thread)
        lines[#lines + 1] = ("  %s: %s, %s, system call %s"):format(read(task .. "/comm")
          :gsub("\n", ""), read(task .. "/stat"):match "%) (%a)" or "?",
          read(task .. "/wchan"), (read(task .. "/syscall"):gsub("\n", "")))
      end
    end
  end
  return table.concat(lines, "\n")
end

--- Waits until nothing of the program is left, on a host or on all.
---@param host? string
function hosts.await_end(host)
  hosts.await(describe_all, function() return hosts.is_over(host) end)
end

--- Waits until f() is true of a job that has just been started. False: it has ended before.
---@param running table
---@param f fun(): any
---@param every? number seconds between two calls
---@return any
function hosts.await_job(running, f, every)
  local begun = false
  hosts.await("the job hangs", function()
    if f() then return true end
    local over = hosts.is_over()
    begun = begun or not over
    return begun and over or running.has_ended()
  end, every)
  return f()
end

--- Sends a signal to a process.
---@param process integer
---@param signal string "KILL"
function hosts.kill(process, signal)
  os.execute(("kill -%s %d 2>/dev/null"):format(signal, process))
end

-- The names of those of the MPIs: the system keeps 15 characters.
local LAUNCHERS = { "^mpirun", "^mpiexec", "^orted", "^hydra_pmi" }

local function launchers()
  local list = {}
  for _, process in ipairs(named(table.unpack(LAUNCHERS))) do
    list[#list + 1] = math.tointeger(tonumber(process))
  end
  return list
end

-- What changes whenever one of these processes does something (how often their threads have run),
-- and whether one of their threads runs, or waits for a core.
local function activity(processes)
  local list, runs = {}, false
  for _, process in ipairs(processes) do
    local folder = ("/proc/%d/task"):format(process)
    local found, next, threads = pcall(lfs.dir, folder) -- it may have ended
    while found do
      local thread = next(threads)
      if not thread then break end
      list[#list + 1] = read(("%s/%s/schedstat"):format(folder, thread))
      runs = runs or read(("%s/%s/stat"):format(folder, thread)):find "%) R" ~= nil
    end
  end
  return table.concat(list, " "), runs
end

--- Waits until all launchers have ended. Those that do nothing any more, as they wait for a host
--- that was lost, are killed if that is allowed. On a busy machine a launcher may have something to
--- say and no core, so a look counts only if no thread of a launcher runs or waits for a core.
---@param may_hang? boolean
function hosts.end_launchers(may_hang)
  local before, still, asleep = nil, 0, 0
  hosts.await("launchers are left", function()
    local left = launchers()
    local doing, runs = activity(left)
    still = doing == before and not runs and still + 1 or 0
    asleep = runs and asleep or asleep + 1
    before = doing
    -- Some look around now and then.
    if may_hang and (still > RESTS or asleep > 3 * RESTS) then
      for _, process in ipairs(left) do hosts.kill(process, "KILL") end
    end
    return #left == 0
  end, REST)
end

--- Kills what a test has left that failed: other tests wait until nothing is left.
function hosts.kill_all()
  for _, one in ipairs(hosts.processes()) do hosts.kill(one.process, "KILL") end
  for _, process in ipairs(launchers()) do hosts.kill(process, "KILL") end
end

--- hosts.sh VERB ...; what it prints.
function hosts.tool(...)
  local pipe = assert(io.popen(script "hosts" .. " " .. table.concat({ ... }, " ") .. " 2>&1"))
  local text = pipe:read "a"
  assert(pipe:close(), text)
  return text
end

--- Plugs the cable of a host in, and waits until the host reaches this one again: the system may
--- take a second, and a launcher does not wait for a host.
function hosts.mend(host)
  hosts.tool("mend", host)
  hosts.await(host .. " stays away", function()
    local _, text = hosts.on(host, "timeout 1 bash -c 'exec 3<>/dev/tcp/login/1'")
    return text:find "refused"
  end)
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
