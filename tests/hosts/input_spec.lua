-- What is wrong before ranks train: one error for the whole job, on the terminal once, and no
-- process stays. Each under one MPI, under all in the full suite.
local hosts = require "hosts"
local command = require "command"
local core = require "moonshard.core"

local folder
local program = "'" .. command.program .. "'"
local version = require "moonshard".version
local other_program

setup(function()
  folder = command.folder()
  command.write(folder .. "/recipe.lua", [[
    local ms = require "moonshard"
    ms.config { x = 0 }
    ms.world():all_reduce(ms.ones { 3 })
    io.write("trained\n")
  ]])
  other_program = command.other_version(folder)
end)
teardown(function() command.remove(folder) end)

-- How a shell finds its rank.
local rank = "${OMPI_COMM_WORLD_RANK-$PMI_RANK}"

-- How each job is started, and what it says; where: hosts, unless there is one rank on each of two.
-- one_per_host: each host has an error of its own. only: of one MPI.
local FOUR = "hosta:2,hostb:2"
local cases = {
  { what = "a size that is not MPI's", only = "openmpi", where = FOUR,
    line = "env OMPI_COMM_WORLD_SIZE=5 %s run RECIPE",
    says = "mpirun of Open MPI says rank 0 of 5, and openmpi says rank 0 of 4" },
  { what = "a rank that is not MPI's, of one process", only = "openmpi", where = FOUR,
    line = ([[sh -c '[ %s != 3 ] || export OMPI_COMM_WORLD_RANK=1; exec "$0" run RECIPE' %%s]])
      :format(rank),
    says = "rank 3 on host hostb: mpirun of Open MPI says rank 1 of 4, and openmpi says rank 3" },
  { what = "the module of the other MPI", line = "env MOONSHARD_MPI=OTHER_MPI %s run RECIPE",
    says = "counts 2 processes, but [^\n]* finds only this one" },
  { what = "a module that is not there", line = "env MOONSHARD_MPI=none %s run RECIPE",
    says = "host host[ab]: cannot load MPI: [^\n]*libmoonshard_mpi_none", one_per_host = true,
    where = FOUR },
  { what = "an MPI without threads",
    line = "env MOONSHARD_MPI=wrong_THIS MOONSHARD_WRONG_MPI=level:single %s run RECIPE",
    says = "it has less than MPI_THREAD_FUNNELED" },
  { what = "-n", line = "%s run -n 4 RECIPE", says = "%-n 4 beside mpirun", where = FOUR },
  { what = "--thread-ranks", line = "%s run --thread-ranks RECIPE",
    says = "%-%-thread%-ranks beside mpirun" },
  { what = "a wrong switch", line = "%s run --bogus RECIPE",
    says = "unknown switch '%-%-bogus'" },
  { what = "a wrong switch of one rank", where = FOUR,
    line = ([[sh -c '[ %s != 2 ] || set -- --bogus; exec "$0" run "$@" RECIPE' %%s]]):format(rank),
    says = "rank 2 on host hostb: unknown switch '%-%-bogus'" },
  { what = "an interface that does not exist", line = "%s run --interface eth7 RECIPE",
    says = "host hosta has no interface 'eth7'" },
  { what = "a port in use", line = "%s run --port 5100 RECIPE",
    says = "port 5100 of host hosta is in use" },
  { what = "options that differ", line = ([[sh -c 'exec "$0" run RECIPE x=%s' %%s]]):format(rank),
    where = FOUR, says = "rank 0 on host hosta: x=0\n  rank 1 on host hosta: x=1" },
  { what = "another version on one host", where = FOUR,
    line = ([[sh -c '[ %s -lt 2 ] || set -- OTHER_VERSION
      exec "${1-$0}" run RECIPE' %%s]]):format(rank),
    says = "rank 2 on host hostb runs Moonshard [%d.]+, rank 0 on host hosta runs " .. version
      .. ": install the same version on all hosts" },
  { what = "recipes that differ",
    line = [[sh -c 'mkdir -p /dev/shm/r; echo "-- $(hostname)" >/dev/shm/r/r.lua
      cat RECIPE >>/dev/shm/r/r.lua; exec "$0" run /dev/shm/r/r.lua' %s]],
    says = "rank 0 on host hosta: recipe=r.lua, [^\n]*\n  rank 1 on host hostb: recipe=r.lua," },
  { what = "an option that the recipe does not know", line = "%s run RECIPE y=1",
    says = "unknown option 'y'" },
}

local function start(mpi, case)
  local line = case.line:format(program):gsub("%u[%u_]+", {
    RECIPE = folder .. "/recipe.lua", OTHER_VERSION = other_program,
    OTHER_MPI = mpi == "mpich" and "openmpi" or "mpich", THIS = mpi,
  })
  return hosts.mpirun(mpi, case.where or "hosta:1,hostb:1", line)
end

local function count(text, pattern) return select(2, text:gsub(pattern, "")) end

-- The code and the text of a job. mpiexec of MPICH may end by an assertion of its own where
-- processes end after MPI_Init, and then nothing of what they said arrives: the job starts again.
local function outcome(job, mpi, case)
  local code, text = job.finish()
  for _ = 1, 3 do
    local lost = text:find "HYD_[%w_]+ [^\n]*assert" and not text:find("moonshard: ", 1, true)
    if mpi ~= "mpich" or not lost then break end
    code, text = start(mpi, case).finish()
  end
  return code, text
end

local mpis = hosts.mpis()
for _, mpi in ipairs(mpis) do
  local tried, turn = {}, 0
  for _, case in ipairs(cases) do
    if not case.only then turn = turn + 1 end
    local here = not case.only and hosts.is_tried(turn, mpi)
    if case.only == mpi or here then tried[#tried + 1] = case end
  end

  local function try(number, what, f)
    if hosts.is_tried(number, mpi) then it(what, f) end
  end

  describe("jobs of " .. mpi, function()
    -- All at once, as each waits most of the time.
    local running, busy = {}, nil
    setup(function()
      busy = hosts.start("hosta", ("'%s' listen 5100 8x1")
        :format(hosts.program "bench/exchange"))
      assert.equal("listening", busy.line())
      for i, case in ipairs(tried) do running[i] = start(mpi, case) end
    end)
    teardown(function()
      os.execute "pkill -x exchange"
      busy.finish()
    end)

    for i, case in ipairs(tried) do
      it("end with one error because of " .. case.what, function()
        local code, text = outcome(running[i], mpi, case)
        assert.equal(case.one_per_host and 2 or 1, count(text, case.says), text)
        assert.equal(case.one_per_host and 2 or 1, count(text, "moonshard: "), text)
        assert.falsy(text:find "trained", text)
        -- That of MPICH may end with a signal of its own where processes end after MPI_Init.
        if mpi == "openmpi" then assert.equal(2, code, text) end
        assert.not_equal(124, code, "it hung")
      end)
    end
    it("leave no process", function()
      hosts.await_end()
      assert.same({}, hosts.processes())
    end)

    try(1, "run beside each other on the same hosts", function()
      local jobs = {}
      for i = 1, 3 do jobs[i] = start(mpi, { line = "%s run RECIPE", where = FOUR }) end
      for i = 1, 3 do
        local code, text = jobs[i].finish()
        assert.equal(0, code, text)
        assert.equal(4, count(text, "trained"), text)
      end
    end)

    try(2, "work, or end with one error, where several have the same port", function()
      local jobs, worked = {}, 0
      for i = 1, 3 do jobs[i] = start(mpi, { line = "%s run --port 5101 RECIPE", where = FOUR }) end
      for i = 1, 3 do
        local code, text = jobs[i].finish()
        local works = count(text, "trained") == 4
        worked = worked + (works and 1 or 0)
        assert.equal(works, code == 0, text)
        assert.equal(works and 0 or 1, count(text, "moonshard: "), text)
        assert.equal(works and 0 or 1, count(text, "port 5101 of host hosta is in use"), text)
      end
      assert.is_true(worked >= 1)
    end)

    try(3, "are told once where ranks share cores", function()
      local cores = core.info().cores
      local ranks = math.min(cores + 1, 17)
      local code, text = start(mpi, { line = "%s run RECIPE",
        where = "hosta:1,hostb:" .. ranks }).finish()
      assert.equal(0, code, text)
      local warning = ("host hostb has %d ranks and only %d core"):format(ranks, cores)
      assert.equal(cores < ranks and 1 or 0, count(text, warning), text)
      assert.equal(cores < ranks and 1 or 0, count(text, "warning: "), text)
      assert.equal(1 + ranks, count(text, "trained"), text)
    end)
  end)
end
if #mpis == 0 then pending "bad input over hosts: this build has no MPI" end
