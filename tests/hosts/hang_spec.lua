-- MPI that hangs in any of its calls, on one rank: all processes end, and an error names the call.
-- Under one MPI, under all in the full suite. ctest: waits
local hosts = require "hosts"
local command = require "command"

local SECONDS = 2 -- that processes wait for each other
local BESIDE = 7 -- jobs at once

local folder

setup(function()
  folder = command.folder()
  command.write(folder .. "/recipe.lua", [[
    local ms = require "moonshard"
    local o = ms.config { file = "" }
    for step = 1, 400 do
      ms.world():all_reduce(ms.ones { 300 }):value():to_table()
      if step == 200 and ms.rank() == 0 and o.file ~= "" then
        assert(io.open(o.file, "w")):close()
      end
      -- A rank that computes: its thread of MPI has no message.
      local begun = os.clock()
      while step == 201 and os.clock() - begun < 0.1 do end
    end
    io.write("trained\n")
  ]])
end)
teardown(function() command.remove(folder) end)

-- Which rank hangs in which call; when: in the steps, at the end, at the end within --timeout,
-- otherwise at the beginning.
-- all: the others hang in that call, too. ranks: of each host, if not one.
local cases = {
  { call = "Init_thread", rank = 1, all = true }, { call = "Comm_dup", rank = 1, all = true },
  { call = "Get_library_version", rank = 3, ranks = 2 },
  { call = "Comm_rank", rank = 1 }, { call = "Comm_size", rank = 0 },
  { call = "Isend", rank = 1 }, { call = "Irecv", rank = 3, ranks = 2 },
  { call = "Testsome", rank = 1 },
  { call = "Isend", rank = 0, when = "steps" },
  { call = "Irecv", rank = 2, when = "steps", ranks = 2 },
  { call = "Testsome", rank = 1, when = "steps" }, { call = "Iprobe", rank = 1, when = "steps" },
  { call = "Finalize", rank = 1, when = "timeout", ranks = 2 },
}
-- For as long as MPI_Finalize may take where the job has no shorter limit.
if command.full then cases[#cases + 1] = { call = "Finalize", rank = 1, when = "end" } end

-- Only what hangs in the beginning waits there until its limit.
local function start(mpi, number, case, seconds)
  local steps, file = case.when == "steps", ("%s/%s-%d-%d"):format(folder, mpi, number, seconds)
  local ranks = case.ranks or 1
  return hosts.mpirun(mpi, ("hosta:%d,hostb:%d"):format(ranks, ranks), ("env \z
    MOONSHARD_MPI=wrong_%s MOONSHARD_WRONG_MPI=hang:%s:%d%s '%s' run --lost 1800 \z
    --init-timeout %d --timeout %d '%s/recipe.lua' %s")
    :format(mpi, case.call, case.rank, steps and ":" .. file or "", command.program,
      case.when and 1800 or seconds, case.when == "end" and 1800 or seconds, folder,
      steps and "file=" .. file or ""))
end

-- What the job says of the call in which it hangs.
local function words_of(mpi, case)
  if case.call == "Finalize" then return "MPI_Finalize of wrong_" .. mpi .. " did not return" end
  if case.when then
    return ("rank %d: MPI_%s has not returned, and so all_reduce #%%d+"):format(case.rank,
      case.call)
  end
  -- Each rank may say it of a call in which all hang, if the launcher is slow.
  return ("moonshard: rank %s on host host[ab]: MPI_%s of wrong_%s did not return")
    :format(case.all and "%d" or case.rank, case.call, mpi)
end

-- The end of such a job. On a busy machine the time may have been over before the rank has come to
-- that call: then once more, with more time.
local function finish(running, mpi, number, case)
  local seconds = SECONDS
  local code, text = running.finish()
  while not text:find(words_of(mpi, case)) and seconds < 60 do
    seconds = 3 * seconds
    code, text = start(mpi, number, case, seconds).finish()
  end
  return code, text, seconds
end

-- What a job says and returns in which all ranks end.
local function judge(mpi, case, code, text)
  local words = words_of(mpi, case)
  assert.truthy(text:find("MPI_" .. case.call, 1, true), text)
  assert.equal(case.when == "end", text:find "trained" ~= nil, text)
  assert.not_equal(124, code, text)
  if case.when == "steps" then
    assert.truthy(text:find(words), text)
    -- MPICH's launcher may kill ranks that are about to leave, and counts that.
    if mpi == "mpich" then assert.not_equal(0, code, text) else assert.equal(6, code, text) end
  elseif not case.when then
    assert.not_equal(0, code, text)
    assert.matches(words, text)
    local own, all = select(2, text:gsub(words, "")), select(2, text:gsub("moonshard:", ""))
    -- MPICH's launcher lets the other ranks run on, until they miss this one.
    local _, missing = text:gsub("moonshard: host host[ab]: rank %d has heard nothing of \z
      rank %d in %d+ s", "")
    assert.is_true(missing <= 2, text)
    -- Open MPI may wait within a call of another rank for this one, until that rank's time is over
    -- as well.
    local held = 0
    for name in text:gmatch "MPI_(%w+) of wrong_%l+ did not return, so that the rank has \z
      not met the others" do
      if name ~= case.call then held = held + 1 end
    end
    assert.is_true(held <= 3, text)
    if mpi == "mpich" then held = held + missing end
    assert.equal(case.all and own or 1, all - held, text)
  end
end

-- Of MPI_Finalize that hangs within --timeout, one rank says so for all.
local function judge_finalize(mpi, code, text, seconds)
  local _, warnings = text:gsub("MPI_Finalize of wrong_" .. mpi .. " did not return", "")
  assert.equal(1, warnings, text)
  assert.matches("trained", text)
  assert.matches(("rank %%d: warning: MPI_Finalize of wrong_%%l+ did not return in %d s on \z
    host host[ab]; all ranks had done their work"):format(seconds), text)
  -- On a busy machine a step may take so long that its rank is warned of.
  assert.falsy(text:match ".*trained(.*)":find "no progress", text)
  -- Open MPI's launcher counts a process that leaves it so as failed.
  assert.equal(mpi == "openmpi" and 1 or 0, code, text)
end

for i, mpi in ipairs(hosts.mpis()) do
  if i > 1 and not command.full then break end
  describe("when " .. mpi .. " hangs on a rank", function()
    local running = {}
    for number, case in ipairs(cases) do
      it(("in MPI_%s%s, all ranks end"):format(case.call, case.when and ", " .. case.when or ""),
        function()
          -- Several at once, as each waits most of the time.
          for next = #running + 1, math.min(number + BESIDE - 1, #cases) do
            running[next] = start(mpi, next, cases[next], SECONDS)
          end
          local code, text, seconds = finish(running[number], mpi, number, case)
          if case.when == "timeout" then judge_finalize(mpi, code, text, seconds)
          else judge(mpi, case, code, text) end
        end)
    end
    it("nothing is left", function() hosts.await_end() end)
  end)
end
-- It works for longer than ranks wait for one that shows no progress, in a process of its own.
it("ranks that wait at the end for one that works are not taken for stuck", function()
  command.write(folder .. "/late.lua", [[
    local ms = require "moonshard"
    local cfg = ms.config { go = "" }
    ms.world():all_reduce(ms.ones { 300 }):sync()
    if ms.rank() == 2 then os.execute("timeout 600 cat " .. cfg.go) end
    print(("rank %d done"):format(ms.rank()))
  ]])
  for i, mpi in ipairs(hosts.mpis()) do
    -- The cases above are those of the first one.
    if i == #hosts.mpis() or command.full then
      local go, lines = folder .. "/go-" .. mpi, {}
      assert(os.execute("mkfifo " .. go))
      local job = hosts.mpirun(mpi, "hosta:2,hostb:2", ("env MOONSHARD_MPI=%s '%s' run \z
        --timeout 2 '%s/late.lua' go='%s'"):format(mpi, command.program, folder, go))
      for line in job.line do
        lines[#lines + 1] = line
        if line:find("rank 2 has shown no progress", 1, true) then
          assert(io.open(go, "w")):close()
        end
      end
      local code, text = job.finish(), table.concat(lines, "\n")
      assert.equal(0, code, text)
      for rank = 0, 3 do
        assert.matches(("rank %d done"):format(rank), text)
        local quiet = ("rank %d has shown no progress"):format(rank)
        assert.equal(rank == 2, text:find(quiet, 1, true) ~= nil, text)
      end
    end
  end
end)
if #hosts.mpis() == 0 then pending "an MPI that hangs: this build has no MPI" end
