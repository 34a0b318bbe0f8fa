-- Slurm itself starts the ranks, on two hosts: srun with the PMI of each MPI, a wrong MPI, a rank
-- that is killed, and a batch script that is asked to stop. See slurm.sh.
local hosts = require "hosts"
local command = require "command"
local store = require "moonshard.checkpoint.store"

local script = command.source .. "/tests/hosts/slurm.sh"
-- Of each MPI, the PMI by which srun starts it.
local PMI = { openmpi = "pmix", mpich = "pmi2" }

-- Its code, and what it has printed.
local function output(text)
  local pipe = assert(io.popen(text .. " 2>&1"))
  local said = pipe:read "a"
  local _, _, code = pipe:close()
  return code or 0, said
end

local missing = select(2, output("'" .. script .. "' possible"))
local mpis = hosts.mpis()
if missing ~= "" or #mpis == 0 then
  pending("Slurm: " .. (missing ~= "" and missing or "this build has no MPI"))
  return
end

-- A tiny model that trains. Its text is short: a tenth of it is held out, and evaluated in the end.
local JOB = ("'%s/recipes/gpt_bytes.lua' --threads 1 length=16 batch=4 model.width=32 \z
  model.layers=2 model.heads=2 every.eval=1000000000 every.sample=1000000000 \z
  every.save=1000000000 dtype=bf16"):format(command.source)

local folder, settings
after_each(hosts.kill_all)
setup(function()
  folder = command.folder()
  command.write(folder .. "/text", ("To be or not to be, that is the question. "):rep(100))
  JOB = ("%s data='%s/text'"):format(JOB, folder)
  local code, said = output(("'%s' start '%s/slurm'"):format(script, folder))
  assert(code == 0, said)
  settings = "env SLURM_CONF=" .. said:gsub("\n", "")
end)
teardown(function() command.remove(folder) end)

-- Waits until f() is true.
local function await(what, f)
  if pcall(hosts.await, what, f) then return end
  error(what .. ": " .. select(2, output("tail -n 20 " .. folder .. "/slurm/*.log")))
end

-- Whether a run has done some steps.
local function trains(run)
  local _, steps = (command.read(("%s/%s/metrics.jsonl"):format(folder, run)) or ""):gsub("\n", "")
  return steps > 3
end

local function are_gone() return hosts.is_over() end

-- A command that runs the job by srun, on two ranks of each host.
local function srun(pmi, arguments, variables)
  return ("%s timeout 1800 srun -N 2 --ntasks-per-node 2 --kill-on-bad-exit=0 --mpi=%s env %s \z
    '%s' run %s %s"):format(settings, pmi, variables or "", command.program, JOB, arguments)
end

-- The losses of a run that a command has done.
local function losses(run, text)
  local code, said = output(text)
  assert.equal(0, code, said)
  local list = {}
  for loss in command.read(("%s/%s/metrics.jsonl"):format(folder, run)):gmatch '"loss":([^,}]*)' do
    list[#list + 1] = loss
  end
  assert.equal(3, #list)
  return table.concat(list, " "), said
end

describe("srun", function()
  local alone -- the losses of one host
  for _, mpi in ipairs(mpis) do
    it("starts the ranks of " .. mpi .. ", with the bits of one host", function()
      alone = alone or losses("alone", ("'%s' run -n 4 %s steps=3 run='%s/alone'")
        :format(command.program, JOB, folder))
      local found, said = losses(mpi, srun(PMI[mpi], ("--sum-order ranks steps=3 run='%s/%s'")
        :format(folder, mpi)))
      assert.equal(alone, found)
      assert.matches("4 ranks on 2 hosts, started by srun, over ", said)
      assert.matches("hosta %(ranks 0, 1%), hostb %(ranks 2, 3%)", said)
    end)

    it("ends a job of " .. mpi .. " whose rank is killed, and names it", function()
      local run = "killed-" .. mpi
      local pipe = assert(io.popen(srun(PMI[mpi], ("steps=1000000 run='%s/%s' 2>&1")
        :format(folder, run))))
      await("the job does not train", function() return trains(run) end)
      for _, one in ipairs(hosts.processes()) do
        if one.kind == "run" and one.rank == 3 then os.execute("kill -9 " .. one.process) end
      end
      local said = pipe:read "a"
      pipe:close()
      -- Slurm reads the status of its child at once; after that only Linux 6.15 and later tell it.
      local found = said:find "rank 3 %(pid %d+%) on host hostb killed by SIGKILL"
        or said:find "rank 3 %(pid %d+%) on host hostb has ended without leaving"
      assert(found, said)
      assert.matches("xited with exit code 7", said)
      await("processes are left", are_gone)
    end)
  end

  if #mpis == 2 then
    it("says once that the module is another MPI's than srun's", function()
      local code, said = output(srun("pmix", "steps=5", "MOONSHARD_MPI=mpich"))
      assert.equal(2, code, said)
      local _, times = said:gsub("srun counts 4 processes, but MPICH[^\n]* finds only this one", "")
      assert.equal(1, times, said)
    end)
  end
end)

describe("srun.slurm", function()
  it("saves a checkpoint when Slurm asks it to stop, and is queued again", function()
    local code, said = output(("cd '%s' && %s MOONSHARD='%s' MOONSHARD_PMI=%s sbatch -N 2 \z
      --ntasks-per-node 2 -c 1 -o '%s/out' '%s/recipes/launch/srun.slurm' %s steps=1000000 \z
      run='%s/run'"):format(folder, settings, command.program, PMI[mpis[1]], folder, command.source,
      JOB, folder))
    local job = said:match "Submitted batch job (%d+)"
    assert(code == 0 and job, said)
    await("the job does not train", function() return trains "run" end)
    output(("%s scancel --signal TERM %s"):format(settings, job))
    await("the job is not queued again", function()
      local _, state = output(("%s scontrol show job %s"):format(settings, job))
      return state:find "Restarts=1"
    end)
    output(("%s scancel %s"):format(settings, job))
    assert.equal(1, #store.list(folder .. "/run"))
    await("processes are left", are_gone)
  end)
end)
