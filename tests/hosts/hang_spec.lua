-- MPI that hangs in any of its calls, on one rank: all processes end, and an error names the call.
-- Under one MPI, under all in the full suite. ctest: serial
local hosts = require "hosts"
local command = require "command"
local core = require "moonshard.core"

local SECONDS = 10 -- that processes wait for each other

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

-- So many processes spin at once that keepers may be late: no host counts as lost.
-- Which rank hangs in which call; when: in the steps, at the end, otherwise at the beginning.
-- all: the others hang in that call, too.
local cases = {
  { call = "Init_thread", rank = 1, all = true }, { call = "Comm_dup", rank = 1, all = true },
  { call = "Get_library_version", rank = 3 },
  { call = "Comm_rank", rank = 2 }, { call = "Comm_size", rank = 0 },
  { call = "Isend", rank = 1 }, { call = "Irecv", rank = 3 }, { call = "Testsome", rank = 2 },
  { call = "Isend", rank = 0, when = "steps" }, { call = "Irecv", rank = 2, when = "steps" },
  { call = "Testsome", rank = 3, when = "steps" }, { call = "Iprobe", rank = 1, when = "steps" },
  { call = "Finalize", rank = 1, when = "end" },
}

-- Only what hangs in the beginning waits there until its limit.
local function start(mpi, number, case)
  local steps, file = case.when == "steps", ("%s/%s-%d"):format(folder, mpi, number)
  return hosts.mpirun(mpi, "hosta:2,hostb:2", ("env MOONSHARD_MPI=wrong_%s \z
    MOONSHARD_WRONG_MPI=hang:%s:%d%s '%s' run --lost 60 --init-timeout %d \z
    --timeout %d '%s/recipe.lua' %s")
    :format(mpi, case.call, case.rank, steps and ":" .. file or "", command.program,
      case.when and 300 or SECONDS, case.when == "end" and 300 or SECONDS, folder,
      steps and "file=" .. file or ""))
end

for i, mpi in ipairs(hosts.mpis()) do
  if i > 1 and not command.full then break end
  describe("when " .. mpi .. " hangs on a rank", function()
    -- All at once, as each waits most of the time.
    local running, begun = {}, nil
    setup(function()
      begun = core.clock_ms()
      for number, case in ipairs(cases) do running[number] = start(mpi, number, case) end
    end)
    for number, case in ipairs(cases) do
      it(("in MPI_%s%s, all ranks end"):format(case.call, case.when and ", " .. case.when or ""),
        function()
          local code, text = running[number].finish()
          assert.truthy(text:find("MPI_" .. case.call, 1, true), text)
          assert.equal(case.when == "end", text:find "trained" ~= nil, text)
          assert.not_equal(124, code, text)
          if case.when == "steps" then
            assert.truthy(text:find(("rank %d: MPI_%s has not returned, and so all_reduce #%%d+")
              :format(case.rank, case.call)), text)
            -- MPICH's launcher may kill ranks that are about to leave, and counts that.
            if mpi == "mpich" then assert.not_equal(0, code, text)
            else assert.equal(6, code, text) end
          elseif not case.when then
            -- Each rank may say it of a call in which all hang, if the launcher is slow.
            local rank = case.all and "%d" or case.rank
            local line = ("moonshard: rank %s on host host[ab]: MPI_%s of wrong_%s did not return")
              :format(rank, case.call, mpi)
            assert.not_equal(0, code, text)
            assert.matches(line, text)
            local own, all = select(2, text:gsub(line, "")), select(2, text:gsub("moonshard:", ""))
            -- MPICH's launcher lets the other ranks run on, until they miss this one.
            local _, missing = text:gsub("moonshard: host host[ab]: rank %d has heard nothing of \z
              rank %d in 10 s", "")
            assert.is_true(missing <= 2, text)
            -- Open MPI may wait within a call of another rank for this one, until that rank's time
            -- is over as well.
            local held = 0
            for name in text:gmatch "MPI_(%w+) of wrong_%l+ did not return, so that the rank has \z
              not met the others" do
              if name ~= case.call then held = held + 1 end
            end
            assert.is_true(held <= 3, text)
            if mpi == "mpich" then held = held + missing end
            assert.equal(case.all and own or 1, all - held, text)
          end
        end)
    end
    it("in MPI_Finalize, within --timeout, one rank says so for all", function()
      local job = hosts.mpirun(mpi, "hosta:2,hostb:2", ("env MOONSHARD_MPI=wrong_%s \z
        MOONSHARD_WRONG_MPI=hang:Finalize:1 '%s' run --timeout 3 '%s/recipe.lua'")
        :format(mpi, command.program, folder))
      local text, at, took = "", nil, nil
      for line in job.line do
        text = text .. line .. "\n"
        if line == "trained" then at = core.clock_ms()
        elseif line:find "MPI_Finalize" and not took then took = core.clock_ms() - at end
      end
      local code = job.finish()
      local _, warnings = text:gsub("MPI_Finalize of wrong_" .. mpi .. " did not return", "")
      assert.equal(1, warnings, text)
      assert.matches("rank %d: warning: MPI_Finalize of wrong_%l+ did not return in 3 s on host \z
        host[ab]; all ranks had done their work", text)
      assert.falsy(text:find "no progress", text)
      -- Open MPI's launcher counts a process that leaves it so as failed.
      assert.equal(mpi == "openmpi" and 1 or 0, code, text)
      assert.truthy(took < 6e3, took)
    end)
    it("nothing is left, soon after the time that ranks wait for each other", function()
      -- MPI_Finalize has 10 s.
      while #hosts.processes() > 0 do
        assert(core.clock_ms() - begun < 1e3 * (2 * SECONDS + 20), "processes are left")
        os.execute "sleep 0.05"
      end
    end)
  end)
end
-- It works for longer than ranks wait for one that shows no progress, in a process of its own.
it("ranks that wait at the end for one that works are not taken for stuck", function()
  command.write(folder .. "/late.lua", [[
    local ms = require "moonshard"
    ms.world():all_reduce(ms.ones { 300 }):sync()
    if ms.rank() == 2 then os.execute "sleep 4" end
    print(("rank %d done"):format(ms.rank()))
  ]])
  for _, mpi in ipairs(hosts.mpis()) do
    local code, text = hosts.mpirun(mpi, "hosta:2,hostb:2", ("env MOONSHARD_MPI=%s '%s' run \z
      --timeout 1 '%s/late.lua'"):format(mpi, command.program, folder)).finish()
    assert.equal(0, code, text)
    for rank = 0, 3 do
      assert.matches(("rank %d done"):format(rank), text)
      local quiet = ("rank %d has shown no progress"):format(rank)
      assert.equal(rank == 2, text:find(quiet, 1, true) ~= nil, text)
    end
  end
end)
if #hosts.mpis() == 0 then pending "an MPI that hangs: this build has no MPI" end
