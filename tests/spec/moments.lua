-- For the specs of faults at any moment of a job over two hosts (tests/hosts/moments_*_spec.lua):
-- while its ranks meet, in its steps, while it saves checkpoints, at its end. Four trials of each
-- fault, one in each of these phases, the MPIs in turns; with MOONSHARD_TEST_FULL=1 20.
-- MOONSHARD_TRIALS is another number of them, and shows each. Moments and victims are drawn; a
-- failure says how to draw them again (MOONSHARD_SEED).
local busted = require "busted" -- a file that specs require has not its functions as globals
local hosts = require "hosts"
local command = require "command"
local core = require "moonshard.core"
local store = require "moonshard.checkpoint.store"

local moments = { STEPS = command.full and 60 or 30, SAVES = command.full and 6 or 3 }

local mpis = hosts.mpis()
local ASKED = math.tointeger(tonumber(os.getenv "MOONSHARD_TRIALS"))
local PHASES = { "init", "step", "save", "exit" }
moments.TRIALS = ASKED or (command.full and 5 or 1) * #PHASES
local SEED = math.tointeger(tonumber(os.getenv "MOONSHARD_SEED")) or os.time()

-- All collectives after the first few are those of gradients, so that reports can name buckets.
-- Nothing is a matrix product, for which each rank would first make machine code. Rank 0 writes
-- down how far the job is.
local JOB = [[
local ms = require "moonshard"
local cfg = ms.config { run = "", steps = 0, saves = 0 }
local model = ms.ddp(ms.nn.Sequential(ms.nn.LayerNorm(2048), ms.nn.LayerNorm(2048)),
  { bucket_bytes = 8192 })
local optimizer = ms.optim.sgd(model, { lr = 0.01 })
ms.report { run = cfg.run }
local function mark(text)
  if ms.rank() > 0 then return end
  local file = assert(io.open(cfg.run .. "/marks", "a"))
  file:write(text, "\n")
  file:close()
end
for _ in ms.steps(cfg.steps) do
  model(ms.ones { 4, 2048 }):sum():backward()
  optimizer:step()
  ms.synchronize() -- the host would be steps ahead
  mark "step"
end
for i = 1, cfg.saves do
  mark "save"
  assert(ms.checkpoint.save(cfg.run,
    { model = model, optimizer = optimizer, step = cfg.steps + i }))
end
assert(ms.checkpoint.wait())
mark "exit"
]]

-- Where the jobs of this spec are: moments.trials makes it.
local folder

local function now() return core.clock_ms() / 1000 end

function moments.draw_host() return math.random(2) == 1 and "hosta" or "hostb" end

------------------------------------------------------------------------------------------- the job

-- Seconds from its first process to its first step, as far as the jobs before have shown.
local join = 0.5

--- Starts the job, which keeps its files in the folder `run`.
function moments.start(mpi, run, switches)
  return hosts.mpirun(mpi, "hosta:2,hostb:2", ("'%s' run --threads 1 %s '%s/job.lua' steps=%d \z
    saves=%d run='%s/%s'"):format(command.program, switches or "", folder, moments.STEPS,
    moments.SAVES, folder, run))
end

--- How far a job is.
---@return { step: integer, save: integer, exit: integer } how often it has begun each
function moments.progress(run)
  local text, marks = command.read(("%s/%s/marks"):format(folder, run)) or "",
    { step = 0, save = 0, exit = 0 }
  for mark in text:gmatch "(%a+)\n" do marks[mark] = marks[mark] + 1 end
  return marks
end

local function reports(run)
  local texts = {}
  for _, name in ipairs { "report.txt", "report-hosta.txt", "report-hostb.txt" } do
    texts[#texts + 1] = command.read(("%s/%s/%s"):format(folder, run, name))
  end
  return table.concat(texts, "\n")
end

-- What the job and its launcher have said, without the lines that name all hosts at the start.
local function said(run, text)
  return text:gsub("hosts: hosta[^\n]*\n", "") .. "\n" .. reports(run)
end

-- The phase of the trial that runs.
local phase

--- A moment of a job, in the phase of this trial.
function moments.draw()
  local count = phase == "step" and math.random(moments.STEPS)
    or phase == "save" and math.random(moments.SAVES) or phase == "exit" and 1 or 0
  return { phase = phase, count = count,
    after = phase == "init" and math.random() * join or phase == "exit" and math.random() * 0.2
      or math.random() * 0.01 }
end

--- A moment before the first step.
function moments.draw_init() return { phase = "init", count = 0, after = math.random() * join } end

-- Waits until a job is so far: f(). A job that does not come so far fails with what it has said.
local function await_until(running, run, what, f)
  if hosts.await_job(running, f, 0.01) then return end
  local code, text = running.finish()
  error(("the job has ended, and is not %s: code %d\n%s"):format(what, code, said(run, text)), 0)
end

--- Waits for a moment of the job that has just been started. All its processes, where it has begun
--- its steps: looking for them takes longer than a step.
function moments.await(running, moment, run)
  await_until(running, run, "begun", function() return not hosts.is_over() end)
  local all, first = nil, now()
  if moment.count > 0 then
    await_until(running, run, "in its steps", function()
      return moments.progress(run).step > 0
    end)
    join = math.max(join, now() - first)
    all = hosts.processes()
    await_until(running, run, ("at %s %d"):format(moment.phase, moment.count), function()
      return moments.progress(run)[moment.phase] >= moment.count
    end)
  end
  hosts.sleep(moment.after)
  return all
end

------------------------------------------------------------------------------------------- the end

-- What is left of a job, on whichever host. Files of the MPIs in shared memory are not ours: a
-- launcher that was killed leaves them.
local function leftovers(wrong)
  for _, host in ipairs { "hosta", "hostb" } do
    local _, text = hosts.on(host, "ss -Hltx; ls -A /dev/shm | grep -vE '^(vader|mpich|ucx|psm)'; \z
      rm -rf /dev/shm/*")
    if text ~= "" then wrong[#wrong + 1] = ("on %s is left: %s"):format(host, text) end
  end
end

-- Every checkpoint that has its name is whole.
local function judge_checkpoints(run, wrong)
  local found = store.list(("%s/%s"):format(folder, run))
  for _, one in ipairs(found) do
    local manifest, message = store.judge(one.path)
    if not manifest then wrong[#wrong + 1] = message end
  end
  return #found
end

-- MPICH's mpirun does not catch this signal: it dies without a word where it answers a rank by a
-- host whose processes have just ended.
local SIGPIPE = 13

-- Whether a job that a fault has hit says whom, and in what. Before it has trained, its launcher
-- may be the only one to know; while MPI starts, a rank knows only its own call, MPI_Init_thread or
-- MPI_Comm_dup, which did not return, or in which MPICH has ended the rank. A save has collectives
-- of its own, and other ranks may begin it before rank 0 has written down its last step: only the
-- sums of that step need rank 0, which has then written down the step before.
local function judge_words(victim, before, after, run, code, text, wrong)
  local words = said(run, text)
  if before.step < 2 then
    if code == 128 + SIGPIPE then return end
    local rank = ("rank %s%%f[%%D]"):format(victim.rank or "none")
    if not words:find(victim.host) and not words:find(rank)
        and not words:find "rank %d on host host[ab]: MPI_%a+_%a+ of %a+ did not return"
        and not words:find "Fatal error in internal_[%a_]+: " then
      wrong[#wrong + 1] = "neither the victim's host nor its rank is named"
    end
    return
  end
  local report, told = reports(run), false
  for _, pattern in ipairs(victim.says) do told = told or report:find(pattern) end
  if not told then wrong[#wrong + 1] = ("no '%s' in the report"):format(victim.says[1]) end
  if not report:find "%a #%d+" then wrong[#wrong + 1] = "no operation in the report" end
  if after.step < moments.STEPS - 1 and not report:find "bucket %d" then
    wrong[#wrong + 1] = "no bucket in the report"
  end
end

--- Ends a trial, after its job and its launcher: nothing may be left.
---@param line string what was tried
---@param wrong string[] what was not as it should be
---@param run string
---@param text string what the job has written
function moments.finish(line, wrong, run, text)
  hosts.end_launchers()
  leftovers(wrong)
  if ASKED then io.stderr:write(line, "\n") end
  if #wrong == 0 then return end
  error(("%s\n%s\nMOONSHARD_SEED=%d draws it again\n%s"):format(line, table.concat(wrong, "\n"),
    SEED, said(run, text)), 0)
end

--- Checks that a job which was not to be disturbed has done all its work.
function moments.judge_done(run, code, wrong)
  if code ~= 0 then wrong[#wrong + 1] = ("code %d"):format(code) end
  if moments.progress(run).exit ~= 1 then wrong[#wrong + 1] = "the job was not done" end
  local count = judge_checkpoints(run, wrong)
  if count ~= moments.SAVES then wrong[#wrong + 1] = ("%d checkpoints"):format(count) end
  if reports(run) ~= "" then wrong[#wrong + 1] = "there is a report" end
end

-------------------------------------------------------------------------------------- one that ends

--- Who is hit, of all processes that are known. Without these it is waited for: a launcher may
--- start it later than the first process. nil: the job was over.
function moments.draw_victim(all, kind, host)
  local found = all and hosts.select(all, kind, host)
  if not found then
    hosts.await("there is no victim", function()
      found = hosts.find(kind, host)
      return #found > 0 or hosts.is_over()
    end)
  end
  return found[1] and found[math.random(#found)]
end

-- Waits until nothing runs, on the host that can end before the fault is mended, and then on all.
-- The seconds that the former took.
local function await_end(victim)
  local at, mend = now(), victim and victim.mend
  hosts.await_end(victim and victim.other)
  local took = now() - at
  if mend then
    mend()
    hosts.await_end()
  end
  return took
end

--- A trial of a fault that ends the job, unless its work was done already. cause(all) hits the job,
--- and returns the victim: its host and its rank as patterns; says: those of which the report
--- of a job that has trained has one; mend(), where that is needed; other: the host on which all
--- must end before that. Whether the job was hit.
---@param fault { name: string, lost?: number, cause: fun(all: table[]?): table? }
---@param mpi string
---@return boolean
function moments.try(fault, mpi)
  local moment, run = moments.draw(), "run"
  -- A job that is hit before its ranks have met may wait for them to the end of this limit, which
  -- must not strike where the machine is busy: whom a rank misses first is then not the victim.
  local running = moments.start(mpi, run, ("--init-timeout %.1f --lost %.1f")
    :format(phase == "init" and math.max(10, 5 * join) or 1800, fault.lost or 5))
  local all = moments.await(running, moment, run)
  local before = moments.progress(run)
  local victim, wrong = fault.cause(all), {}
  local took = await_end(victim)
  hosts.end_launchers(true)
  local code, text = running.finish()
  local after = moments.progress(run)
  local count = judge_checkpoints(run, wrong)
  -- A process that is not needed as a keeper may be killed, and the end may come first.
  if after.exit == 0 then
    if code == 0 then wrong[#wrong + 1] = "the job was not done" end
    if victim then judge_words(victim, before, after, run, code, text, wrong) end
  elseif code == 0 and count < moments.SAVES then
    wrong[#wrong + 1] = ("%d checkpoints of %d"):format(count, moments.SAVES)
  end
  moments.finish(("%s, %s: %s %d + %.3f s: code %s after %.1f s, %d steps and %d saves"):format(
    fault.name, mpi, moment.phase, moment.count, moment.after, code, took, after.step, after.save),
    wrong, run, text)
  return after.exit == 0
end

---------------------------------------------------------------------------------------- all of them

local number = 0

-- Draws the phase of a trial: four that follow each other have all of them.
local function draw_phase(seed, trial)
  local round, left = (trial - 1) // #PHASES, table.move(PHASES, 1, #PHASES, 1, {})
  math.randomseed(seed, -round)
  for _ = 1, trial - round * #PHASES do phase = table.remove(left, math.random(#left)) end
  math.randomseed(seed, trial)
end

--- A test of trials, f(mpi, trial) each. Whether the trial has hit the job is what f returns; some
--- must, and on a busy machine more trials are tried for one that does. Each has a draw of its own,
--- whatever others took from theirs. A failure does not end the others.
---@param name string
---@param f fun(mpi: string, trial: integer): boolean
---@param trials? integer unless as many as usual
function moments.trials(name, f, trials)
  trials = trials or moments.TRIALS
  number = number + 1
  local seed = SEED + number
  busted.it(name, function()
    local hits, failures, trial = 0, {}, 0
    repeat
      trial = trial + 1
      draw_phase(seed, trial)
      local ok, hit = pcall(f, mpis[(trial - 1) % #mpis + 1], trial)
      if not ok then
        failures[#failures + 1] = tostring(hit)
        hosts.kill_all()
      end
      if ok and hit then hits = hits + 1 end
      command.remove(folder .. "/run")
      command.remove(folder .. "/other")
    until trial >= trials and (hits > 0 or ASKED) or trial >= 10 * trials
    if #failures > 0 then error(table.concat(failures, "\n\n"), 0) end
    assert(hits > 0 or ASKED, "no trial has hit the job")
  end)
end

--- Describes a job over hosts by f, which calls moments.trials.
---@param f fun()
function moments.describe(f)
  if #mpis == 0 then
    busted.pending("faults over hosts: this build has no MPI")
    return
  end
  busted.describe("a job over hosts", function()
    busted.setup(function()
      folder = command.folder()
      command.write(folder .. "/job.lua", JOB)
    end)
    busted.teardown(function() command.remove(folder) end)
    f()
  end)
end

return moments
