-- Faults at any moment of a short job over two hosts: while its ranks meet, in a step, while a
-- checkpoint is written, at its end. The moments are drawn; a failure says how to draw them again.
-- A trial takes seconds, so there are trials with MOONSHARD_TEST_FULL=1 only: 50 of each fault with
-- each MPI, or MOONSHARD_TRIALS. A fault waits for its victim: before a host has a process of ours,
-- its launcher alone can tell what has happened.
local hosts = require "hosts"
local command = require "command"
local core = require "moonshard.core"
local store = require "moonshard.checkpoint.store"

local TRIALS = math.tointeger(tonumber(os.getenv "MOONSHARD_TRIALS" or 50))
local STEPS = 20
local SECONDS = 10 -- from the fault until all processes have ended
local SEED = math.tointeger(tonumber(os.getenv "MOONSHARD_SEED" or os.time()))

local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

local function now() return core.clock_ms() / 1000 end
local function sleep(seconds) os.execute(("sleep %.3f"):format(math.max(seconds, 0))) end
local function kill(process, signal) os.execute(("kill -%s %d"):format(signal, process)) end

-- Whether f() becomes true within so many seconds.
local function becomes(most, f)
  local begun = now()
  while not f() do
    if now() - begun > most then return false end
    sleep(0.02)
  end
  return true
end

local function find(kind, host)
  local found = {}
  for _, one in ipairs(hosts.processes()) do
    if (not kind or one.kind == kind) and (not host or one.host == host) then
      found[#found + 1] = one
    end
  end
  return found
end

-- Starts the job, and returns when its first process is there.
local function start(mpi)
  local running = hosts.mpirun(mpi, "hosta:2,hostb:2", ("'%s' run --threads 1 --lost 2 \z
    --init-timeout 5 '%s/recipes/gpt_bytes.lua' length=16 batch=4 model.width=32 model.layers=2 \z
    model.heads=2 every.eval=1000000000 every.sample=1000000000 every.save=4 steps=%d \z
    run='%s/run'"):format(command.program, command.source, STEPS, folder))
  assert(becomes(30, function() return #hosts.processes() > 0 end), "the job does not begin")
  return running, now()
end

-- The faults: each returns what it has hit, and how it is mended. It waits for its victim, which a
-- launcher may start later than the first process; nil: the job was over.
local function victim(kind, host)
  local found
  becomes(SECONDS, function()
    found = find(kind, host)
    return #found > 0 or #hosts.processes() == 0
  end)
  return found[1] and found[math.random(#found)]
end

local function kill_one(kind)
  local one = victim(kind)
  if not one then return nil end
  kill(one.process, "KILL")
  return ("%s %d of %s"):format(kind, one.rank or one.process, one.host)
end

local faults = {
  { name = "a rank is killed", cause = function() return kill_one "run" end },
  { name = "a keeper is killed", cause = function() return kill_one "keep" end },
  { name = "a cable is cut", cause = function()
    local host = math.random(2) == 1 and "hosta" or "hostb"
    if not victim(nil, host) then return nil end
    hosts.tool("cut", host)
    return "cable of " .. host, function() hosts.tool("mend", host) end
  end },
  { name = "a host is stopped", cause = function()
    local host = math.random(2) == 1 and "hosta" or "hostb"
    if not victim(nil, host) then return nil end
    local stopped = find(nil, host)
    for _, one in ipairs(stopped) do kill(one.process, "STOP") end
    return host .. " stopped", function()
      for _, one in ipairs(stopped) do kill(one.process, "CONT") end
    end, host == "hosta" and "hostb" or "hosta"
  end },
}

-- What a launcher still has to print comes first; one that hangs is killed.
local function launchers_end()
  becomes(3, function()
    return not os.execute "ps -e -o comm= | grep -qE '^(mpirun|mpiexec|orted|hydra_pmi)'"
  end)
  for name in ("mpirun.openmpi mpiexec.hydra mpirun.mpich orted hydra_pmi_proxy"):gmatch "%S+" do
    os.execute("pkill -9 -x " .. name)
  end
end

-- What the program has said of the fault, on the terminal and in the run's folder.
local function said(text)
  local lines = {}
  for line in text:gmatch "[^\n]*moonshard: [^\n]*" do lines[#lines + 1] = line end
  for _, name in ipairs { "report.txt", "report-hosta.txt", "report-hostb.txt" } do
    lines[#lines + 1] = command.read(folder .. "/run/" .. name)
  end
  return table.concat(lines, "\n")
end

-- All that is wrong with a job's end. `left`: processes that did not end in time.
local function judge(code, text, left)
  local wrong = {}
  for _, one in ipairs(left) do
    wrong[#wrong + 1] = ("%s %d of %s is left"):format(one.kind, one.process, one.host)
  end
  if os.execute "ls ${TMPDIR:-/tmp}/moonshard-* >/dev/null 2>&1" then
    wrong[#wrong + 1] = "a door is left"
    os.execute "rm -rf ${TMPDIR:-/tmp}/moonshard-*"
  end
  local words = said(text)
  -- What hits a process after the end of its work is no fault of the job.
  local is_done = text:find(STEPS .. "/" .. STEPS, 1, true)
    and command.read(folder .. "/run/model/model.safetensors")
  if code ~= 0 and not is_done and not words:find "rank %d" and not words:find "host host[ab]" then
    wrong[#wrong + 1] = "neither a rank nor a host is named"
  end
  for _, found in ipairs(store.list(folder .. "/run")) do
    local manifest, message = store.judge(found.path)
    if not manifest then wrong[#wrong + 1] = message end
  end
  return wrong
end

-- One fault, so many seconds after the job's first process. Returns how the job ended.
local function try(mpi, fault, moment)
  local running, begun = start(mpi)
  sleep(begun + moment - now())
  local what, mend, other = fault.cause()
  local at = now()
  becomes(SECONDS, function() return #find(nil, other) == 0 end)
  local left, took = find(nil, other), now() - at
  if mend then mend() end
  if other then becomes(SECONDS, function() return #hosts.processes() == 0 end) end
  if other and #left == 0 then left = hosts.processes() end
  for _, one in ipairs(left) do kill(one.process, "KILL") end
  launchers_end()
  local code, text = running.finish()
  local wrong = judge(code, text, left)
  local line = ("%s at %.3f s (%s): code %s after %.1f s"):format(fault.name, moment,
    what or "the job was over", code, took)
  io.stderr:write(line, "\n")
  if #wrong > 0 then
    error(("%s\n%s\nMOONSHARD_SEED=%d draws the same moments\n%s\n%s"):format(line,
      table.concat(wrong, "\n"), SEED, text, said(text)), 0)
  end
end

for _, mpi in ipairs(command.full and hosts.mpis() or {}) do
  describe("a job over hosts under " .. mpi, function()
    local length
    setup(function()
      folder = command.folder()
      local running, begun = start(mpi)
      local code, text = running.finish()
      assert(code == 0, text)
      length = now() - begun
      command.remove(folder)
    end)

    for number, fault in ipairs(faults) do
      it("ends at any moment when " .. fault.name, function()
        math.randomseed(SEED, number)
        for _ = 1, TRIALS do
          try(mpi, fault, math.random() * length)
          command.remove(folder .. "/run")
        end
      end)
    end
  end)
end
if not command.full then pending "faults at any moment: MOONSHARD_TEST_FULL=1 tries them" end
if #hosts.mpis() == 0 then pending "faults over hosts: this build has no MPI" end
