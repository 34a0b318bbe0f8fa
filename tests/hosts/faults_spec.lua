-- Faults of jobs over several hosts: each ends the job, with one report of who is at fault, and
-- leaves nothing. With MOONSHARD_TEST_FULL=1 each is tried many times, under each MPI.
-- ctest: waits
local hosts = require "hosts"
local command = require "command"

local TRIALS = command.full and 4 or 1

local folder
before_each(function() folder = command.folder() end)
after_each(function()
  hosts.kill_all()
  command.remove(folder)
end)

local function exists(path)
  local file = io.open(path)
  if file then file:close() end
  return file ~= nil
end

-- How many steps the run has reported.
local function steps()
  local text, count = command.read(folder .. "/run/metrics.jsonl") or "", 0
  for _ in text:gmatch "\n" do count = count + 1 end
  return count
end

-- Waits until f() is true. A job that ends before is an error, with what it said.
local function await(running, f)
  if not hosts.await_job(running, f) then error(select(2, running.finish()), 0) end
end

-- Starts a small model on all ranks that trains until it is stopped; waits for some steps. Its text
-- is short, since a tenth of it is held out, and evaluated in the end.
local function train(mpi, where, switches)
  command.write(folder .. "/text", ("All of them learn the same text. "):rep(300))
  local running = hosts.mpirun(mpi, where, ("'%s' run --threads 1 %s '%s/recipes/gpt_bytes.lua' \z
    length=16 batch=4 model.width=32 model.layers=2 model.heads=2 every.eval=1000000000 \z
    every.sample=1000000000 every.save=1000000000 steps=1000000 dtype=bf16 data='%s/text' \z
    run='%s/run'"):format(command.program, switches, command.source, folder, folder))
  await(running, function() return steps() > 3 end)
  return running
end

-- All processes of ours end; what is left of a launcher that hangs is killed.
local function ended(running)
  hosts.await_end()
  hosts.end_launchers(true)
  local code, text = running.finish()
  for _, host in ipairs { "hosta", "hostb" } do
    local _, doors = hosts.on(host, "ss -Hlx | grep @moonshard")
    assert.equal("", doors, "a door is left on " .. host)
  end
  return code, text
end

-- The report in the run's folder; "": there is none.
local function reported()
  return command.read(folder .. "/run/report.txt")
    or command.read(folder .. "/run/report-hostb.txt") or ""
end

-- Whether a report names the rank that the test has killed. MPICH sees a socket of that rank close
-- before Linux says that its process has ended. It kills the other ranks of the host at once, and
-- one of them may end first. The report names the rank that ended first, so under MPICH any rank of
-- the victim's host is right.
local function names(report, mpi, victim, ranks)
  for _, one in ipairs(mpi == "mpich" and hosts.select(ranks, nil, victim.host) or { victim }) do
    local text = ("rank %d (pid %d) on host %s "):format(one.rank, one.process, one.host)
    if report:find(text, 1, true) then return true end
  end
  return false
end

-- One report, with all of this in it, in the run's folder too.
local function reports(text, ...)
  local report = reported()
  if report == "" then report = text end
  for _, pattern in ipairs { ... } do
    assert.truthy(report:find(pattern), ("no '%s' in:\n%s"):format(pattern, text .. report))
  end
end

for i, mpi in ipairs(hosts.mpis()) do
  if i > 1 and not command.full then break end
  local where = "hosta:2,hostb:2"
  local function trials(what, f)
    it(what, function()
      for _ = 1, TRIALS do
        f()
        command.remove(folder .. "/run")
      end
    end)
  end

  describe("a job over hosts under " .. mpi, function()
    trials("names a rank that was killed", function()
      local running = train(mpi, where, "")
      local victims = hosts.find "run"
      local victim = victims[math.random(#victims)]
      hosts.kill(victim.process, "KILL")
      local code, text = ended(running)
      assert.not_equal(0, code)
      reports(text, "all_reduce #", "at step")
      assert.truthy(names(text .. reported(), mpi, victim, victims), text .. reported())
      assert.falsy(text:find("before its first collective", 1, true), text)
    end)

    -- They do not hear of it, so their launcher ends them, and itself, before they leave the job.
    trials("names a rank that was killed while the others were busy", function()
      command.write(folder .. "/busy.lua", [[
local ms = require "moonshard"
local cfg = ms.config { run = "" }
ms.report { run = cfg.run }
ms.world():all_reduce(ms.ones { 8 }):sync()
io.open(("%s/busy-%d"):format(cfg.run, ms.rank()), "w"):close()
while true do end]])
      local running = hosts.mpirun(mpi, where, ("'%s' run '%s/busy.lua' run='%s/run'"):format(
        command.program, folder, folder))
      for rank = 0, 3 do
        assert.is_true(hosts.await_job(running, function()
          return exists(("%s/run/busy-%d"):format(folder, rank))
        end))
      end
      local victims = hosts.find "run"
      local victim = victims[math.random(#victims)]
      hosts.kill(victim.process, "KILL")
      local _, text = ended(running)
      local report = command.read(folder .. "/run/report.txt")
      assert.truthy(report, text)
      assert.truthy(names(report, mpi, victim, victims), report)
      assert.truthy(report:find("after all_reduce #1 of world", 1, true), report)
    end)

    for _, host in ipairs { "hosta", "hostb" } do
      trials("names " .. host .. " when its keeper was killed", function()
        local running = train(mpi, where, "")
        hosts.kill(hosts.find("keep", host)[1].process, "KILL")
        local code, text = ended(running)
        assert.not_equal(0, code)
        reports(text, ("host %s %%(ranks %%d, %%d%%) is lost"):format(host))
      end)
    end

    trials("names a host whose cable was cut", function()
      local running = train(mpi, where, "--lost 2")
      hosts.tool("cut", "hostb")
      local _, text = ended(running)
      hosts.mend "hostb"
      reports(text, "is lost: host host%a has heard nothing of it for 2.0 s")
    end)

    trials("names a host that was stopped", function()
      local running = train(mpi, where, "--lost 2")
      local stopped = {}
      for _, one in ipairs(hosts.processes()) do
        if one.host == "hostb" then
          hosts.kill(one.process, "STOP")
          stopped[#stopped + 1] = one.process
        end
      end
      await(running, function() return exists(folder .. "/run/report.txt") end)
      hosts.await_end "hosta"
      for _, process in ipairs(stopped) do hosts.kill(process, "CONT") end
      local _, text = ended(running)
      reports(text, "host hostb %(ranks %d, %d%) is lost: host hosta has heard nothing of it")
    end)

    trials("goes on when packets were held back for 2 s, and stops with a checkpoint when any \z
      rank gets SIGTERM", function()
      -- TCP sends again after twice the time of its last attempt, at most 4 s later. A busy machine
      -- may hold up what a host sends for longer.
      local running = train(mpi, where, "--lost 60")
      hosts.tool("cut", "hostb")
      hosts.sleep(2)
      local before = steps()
      assert.is_false(hosts.is_over())
      hosts.mend "hostb"
      await(running, function() return steps() > before + 3 end)
      hosts.kill(hosts.find("run", "hostb")[1].process, "TERM")
      local _, text = ended(running)
      assert.truthy(text:find "stopped on request after step %d+; a checkpoint is saved", text)
      assert.truthy(not exists(folder .. "/run/report.txt"), text)
    end)
  end)
end
if #hosts.mpis() == 0 then pending "faults over hosts: this build has no MPI" end
