-- What is no fault of a job over two hosts does not end it, whenever it happens: packets that are
-- held back for a while, another program at the job's port, another job on the same hosts.
local command = require "command"
local core = require "moonshard.core"
local hosts = require "hosts"
local moments = require "moments"

local PORT = 5300
local HELD = command.full and 2 or 1 -- seconds

-- The cable stays plugged in: an MPI that starts does not take one that is not. TCP sends again
-- after twice the time of its last attempt. A busy machine may hold up what a host sends for
-- longer. Where it is too busy to join the cable to the others again soon, a host may be lost.
local function hold_back(mpi)
  local moment, host, wrong = moments.draw(), moments.draw_host(), {}
  local running = moments.start(mpi, "run", ("--lost %d"):format(30 * HELD))
  moments.await(running, moment, "run")
  local begun = core.clock_ms()
  os.execute(("ip link set %s nomaster; sleep %d; ip link set %s master bridge"):format(host, HELD,
    host))
  local held = core.clock_ms() - begun
  local code, text = running.finish()
  if held < 15000 * HELD then moments.judge_done("run", code, wrong) end
  moments.finish(("packets, %s: %s %d: code %d, held %.0f ms"):format(mpi, moment.phase,
    moment.count, code, held), wrong, "run", text)
  return true
end

-- Another program takes the port before the job does, or is refused.
local function take_port(mpi, trial)
  local wrong, early = {}, (trial - 1) // 2 % 2 == 0 -- under each MPI both
  local function take()
    local taker = hosts.start("hosta", ("'%s' listen %d 8x1")
      :format(hosts.program "bench/exchange", PORT))
    return taker, taker.line() == "listening"
  end
  local taker, has_it
  if early then taker, has_it = take() end
  local running = moments.start(mpi, "run", ("--port %d"):format(PORT))
  if not early then
    moments.await(running, moments.draw_init(), "run")
    taker, has_it = take()
  end
  local code, text = running.finish()
  os.execute "pkill -x exchange"
  taker.finish()
  local _, told = text:gsub(("port %d of host hosta is in use"):format(PORT), "")
  if told == 0 and not early then moments.judge_done("run", code, wrong)
  elseif not has_it or told ~= 1 or code == 0 then
    wrong[#wrong + 1] = ("told %d times, code %d"):format(told, code)
  end
  if select(2, text:gsub("moonshard: ", "")) > 1 then wrong[#wrong + 1] = "more than one error" end
  moments.finish(("port, %s: taken %s, code %d"):format(mpi, early and "before" or "later", code),
    wrong, "run", text)
  return told > 0
end

local function run_beside(mpi)
  local moment, runs, running, codes, texts = moments.draw(), { "run", "other" }, {}, {}, {}
  running[1] = moments.start(mpi, runs[1])
  moments.await(running[1], moment, runs[1])
  running[2] = moments.start(mpi, runs[2])
  for i in ipairs(runs) do codes[i], texts[i] = running[i].finish() end
  for i, run in ipairs(runs) do
    local wrong = {}
    moments.judge_done(run, codes[i], wrong)
    moments.finish(("two jobs, %s: %s %d, %s: code %d"):format(mpi, moment.phase, moment.count, run,
      codes[i]), wrong, run, texts[i])
  end
  return true
end

moments.describe(function()
  moments.trials("goes on when packets are held back for a while", hold_back)
  moments.trials("is done, or ends with one error, where another program takes its port", take_port)
  moments.trials("is done beside another job on the same hosts", run_beside, moments.TRIALS // 2)
end)
