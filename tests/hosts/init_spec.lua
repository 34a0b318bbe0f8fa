-- ms.init { group = "mpi" }: stock interpreters that each MPI starts on two hosts.
local hosts = require "hosts"
local command = require "command"
local support = require "support"

local folder
before_each(function() folder = command.folder() end)
after_each(function()
  hosts.kill_all()
  os.execute(("pkill -KILL -f '%s/script.lu[a]'"):format(folder))
  command.remove(folder)
end)

-- The interpreter that runs this spec, and the variables by which it finds the library.
local function interpreter()
  local i = -1
  while arg[i - 1] do i = i - 1 end
  return ("env 'LUA_PATH=%s' 'LUA_CPATH=%s' '%s'"):format(os.getenv "LUA_PATH",
    os.getenv "LUA_CPATH", arg[i])
end

-- Each rank prints the bits of its sums.
local SUMS = [[
local ms = require "moonshard"
if not os.getenv "ALONE" then
  ms.init { group = "mpi", threads = 1, sum_order = "ranks", interface = "eth0" }
end
local world, results = ms.world(), {}
for i, n in ipairs { 3, 1000, 70000 } do
  local t = ms.randn { n, seed = 10 * i + world:rank(), per_rank = false }
  local sum = world:all_reduce(t, "sum"):value():to_table()
  for k = 1, n, n // 3 do results[#results + 1] = ("%a"):format(sum[k]) end
end
io.write(("rank %d of %d: %s\n"):format(ms.rank(), ms.world_size(), table.concat(results, " ")))
]]

-- They add until something ends them. Rank 2 may have had enough.
local ENDLESS = [[
local ms = require "moonshard"
ms.init { group = "mpi", threads = 1, lost = 1800 }
local t = ms.full(1, { 100 })
io.write(("rank %d is %s\n"):format(ms.rank(), io.open "/proc/self/stat":read "n"))
io.stdout:flush()
for step = 1, math.huge do
  if arg[1] == "raise" and step == 100 and ms.rank() == 2 then error("rank 2 has had enough", 0) end
  ms.world():all_reduce(t, "avg"):sync()
end
]]

local function start(mpi, script, arguments)
  return hosts.mpirun(mpi, "hosta:2,hostb:2", ("%s '%s' %s"):format(interpreter(),
    command.write(folder .. "/script.lua", script), arguments or ""))
end

local function lines_of(text)
  local lines = {}
  for line in text:gmatch "rank %d of 4: [^\n]*" do lines[#lines + 1] = line end
  table.sort(lines)
  assert.equal(4, #lines, text)
  return table.concat(lines, "\n")
end

-- Nothing of a job is left.
local function check_nothing_is_left()
  hosts.await_end()
  hosts.await("processes are left", function()
    return not os.execute(("pgrep -f '%s/script.lu[a]' >/dev/null"):format(folder))
  end)
end

for _, mpi in ipairs(hosts.mpis()) do
  describe("ms.init under " .. mpi, function()
    it("gives the bits of -n 4", function()
      command.write(folder .. "/sums.lua", SUMS)
      local alone = command.succeed(folder, "run -n 4 sums.lua", "ALONE=1")
      local code, text = start(mpi, SUMS).finish()
      assert.equal(0, code, text)
      assert.equal(lines_of(alone), lines_of(text))
      check_nothing_is_left()
    end)

    it("ends all when one raises an error", function()
      local code, text = start(mpi, ENDLESS, "raise").finish()
      -- MPICH's launcher may name the signal by which it has ended the last process, and ends with
      -- 0 where it takes a rank's exit code 1 for signal 1; its text says that the job has failed.
      if mpi == "openmpi" then assert.equal(5, code, text)
      else assert.truthy(code ~= 0 or text:find("BAD TERMINATION", 1, true), text) end
      -- Ranks write at one time, so what the interpreter puts before it may be torn off.
      assert.truthy(text:find("rank 2 has had enough", 1, true), text)
      local _, reports = text:gsub("\nmoonshard: rank 2 on host hostb left after all_reduce #99",
        "")
      assert.equal(1, reports, text)
      check_nothing_is_left()
    end)

    it("ends all when one is killed", function()
      local running = start(mpi, ENDLESS)
      local process, text = nil, {}
      for line in running.line do
        text[#text + 1] = line
        process = process or line:match "rank 2 is (%d+)"
        if process then break end
      end
      os.execute(("kill -KILL %s"):format(assert(process, table.concat(text, "\n"))))
      local code, rest = running.finish()
      assert.not_equal(0, code, rest)
      assert.truthy(rest:find(("rank 2 (pid %s) "):format(process), 1, true), rest)
      check_nothing_is_left()
    end)
  end)
end

describe("ms.init", function()
  local function refuse(options, settings)
    local file = command.write(folder .. "/script.lua",
      ('require "moonshard".init { group = "mpi", %s }'):format(options))
    local code, text = support.shell(("%s %s '%s' 2>&1"):format(settings or "", interpreter(),
      file))
    assert.equal(1, code, text)
    return text
  end

  it("says what it needs", function()
    local launched = "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2"
    assert.truthy(refuse(""):find("script.lua:1: init: group \"mpi\": no launcher has started \z
      this process as one of several: start the script with mpirun", 1, true))
    assert.truthy(refuse("", launched .. " MOONSHARD_PROGRAM=/nowhere"):find("needs the program \z
      moonshard, which watches the ranks of a host: it is not at /nowhere", 1, true))
    assert.truthy(refuse("lost = 0", launched)
      :find("init: lost: a number of seconds above 0 is expected, not 0", 1, true))
    assert.truthy(refuse("threds = 1"):find("did you mean 'threads'", 1, true))
    assert.truthy(refuse("rank = 1", launched):find("rank, world_size", 1, true))
  end)
end)
