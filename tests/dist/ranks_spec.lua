-- Jobs of several ranks: how they end, what is reported, that nothing hangs or is left behind.
local command = require "command"
local core = require "moonshard.core"

local SANITIZED = (os.getenv "MOONSHARD_SANITIZE" or "") ~= ""

-- All ranks add up a tensor in each step; rank `who` does something else in step `at`. meet: first
-- they wait for each other without a limit, so that a short --timeout runs while all are there.
local WAYS = [[
local ms = require "moonshard"
local cfg = ms.config { how = "nothing", who = 1, at = 5, steps = 20, meet = false }
local world = ms.world()
local t = ms.ones { 1024 }
if cfg.meet then world:barrier(1800000) end
local ways = {
  raise = function() error "boom" end,
  table = function() error { what = "no string" } end,
  exit = function() os.exit(3) end,
  exit_well = function() os.exit(0) end,
  leave = function() return true end,
  loop = function() while true do end end,
  kill = function() os.execute "kill -KILL $PPID" end,
  segv = function() os.execute "kill -SEGV $PPID" end,
  stop = function() os.execute "kill -STOP $PPID" end,
  pause = function() os.execute "(sleep 0.2; kill -CONT $PPID) & kill -STOP $PPID" end,
  memory = function() ms.zeros { 1 << 44 } end,
  file = function() assert(ms.data.bytes "nowhere") end,
  length = function() world:all_reduce(ms.ones { 5 }) end,
  dtype = function() world:all_reduce(ms.ones { 1024, dtype = "bf16" }, "avg") end,
  operation = function() world:broadcast(t, 0) end,
  extra = function() world:all_reduce(ms.ones { 1024 }, "max") end,
  cross = function() world:recv(ms.ones { 8 }, 0):sync() end,
  hook = function()
    local x = ms.ones { 3 }:requires_grad_()
    x:on_grad(function() error "in a hook" end)
    x:sum():backward()
  end,
}
for step in ms.steps(cfg.steps) do
  if ms.rank() == cfg.who and step == cfg.at and ways[cfg.how] and ways[cfg.how]() then return end
  world:all_reduce(t, "avg"):sync()
end
if cfg.how == "early" and ms.rank() == cfg.who then return end
print(("rank %d done"):format(ms.rank()))
]]

describe("a job of several ranks", function()
  local folder
  before_each(function()
    folder = command.folder()
    command.write(folder .. "/ways.lua", WAYS)
  end)
  after_each(function()
    -- No process of this folder is left.
    local left = io.popen(("pgrep -f '^[^ ]*moonshard run %s/'"):format(folder)):read "a"
    assert.equal("", left)
    command.remove(folder)
  end)

  local function job(arguments, settings)
    return command.run(folder, ("run %s/ways.lua %s"):format(folder, arguments), settings)
  end

  -- Seconds that a job takes.
  local function length_of(arguments)
    local clock = core.clock_ms()
    assert.equal(0, (job(arguments)))
    return (core.clock_ms() - clock) / 1e3
  end

  for _, kind in ipairs { "", "--thread-ranks" } do
    local name = kind == "" and "of processes" or "of threads"

    it(name .. " ends well", function()
      local code, out, err = job("-n 3 " .. kind)
      assert.equal("", err)
      assert.equal(0, code)
      for rank = 0, 2 do assert.matches(("rank %d done\n"):format(rank), out) end
    end)

    local ends = {
      raise = {
        1, "rank 1: [^\n]*ways.lua:7: boom\n",
        "ranks 0, 2 stopped because rank 1: [^\n]*ways.lua:7: boom\n",
      },
      table = { 1, "because rank 1: the recipe raised a value that is not a string" },
      exit = { 3, "stopped because rank 1: the recipe called os.exit%(3%)" },
      exit_well = {
        5, "rank 1 left after all_reduce #5 of world", "waits for it at all_reduce #6 of world",
      },
      leave = {
        5, "rank 1 left after all_reduce #5 of world", "waits for it at all_reduce #6 of world",
      },
      memory = { 8, "rank 1: [^\n]*no memory for", "stopped because rank 1: [^\n]*no memory for" },
      file = { 3, "stopped because rank 1: [^\n]*nowhere" },
      hook = { 1, "in a hook", "stopped because rank 1: " },
      length = {
        5, "ranks disagree in call #6", "ranks 0, 2: all_reduce #6 of world %[f32 x 1024, avg",
        "rank 1: all_reduce #6 of world %[f32 x 5, sum, at [^\n]*ways.lua:19",
      },
      dtype = { 5, "ranks 0, 2: [^\n]*f32 x 1024", "rank 1: [^\n]*bf16 x 1024" },
      operation = {
        5, "ranks 0, 2: all_reduce", "rank 1: broadcast",
        "Usual causes: a call that not all ranks make %(under if rank == 0%), or calls in a loop \z
          of pairs",
      },
      extra = { 5, "rank 1: [^\n]*max" },
      cross = {
        5, "the ranks wait for each other, and none can go on",
        "\n  rank 0: all_reduce #6 of world [^\n]*\n  rank 1: recv #1 of world %[f32 x 8, peer 0, \z
          at [^\n]*\n  rank 2: all_reduce #6",
      },
    }
    -- The message is printed once: by the supervisor, with the traceback, and not by the rank as
    -- well.
    local once = {
      raise = "boom", table = "not a string", exit = "the recipe called os.exit",
      memory = "no memory for", file = "nowhere",
      hook = "in a hook",
    }
    for how, expected in pairs(ends) do
      it(("%s: %s ends it with %d"):format(name, how, expected[1]), function()
        local code, _, err = job(("-n 3 %s how=%s"):format(kind, how))
        assert.equal(expected[1], code, err)
        for i = 2, #expected do assert.matches(expected[i], err) end
        if once[how] then assert.equal(1, select(2, err:gsub(once[how], "")), err) end
        -- One report, and no traceback of another rank.
        assert.equal(0, select(2, err:gsub("moonshard: rank [02]: ", "")), err)
      end)
    end

    it(name .. ": a mistake that all make is told once", function()
      command.write(folder .. "/bad.lua",
        [[require "moonshard".config { steps = 1 } error "everywhere"]])
      local code, _, err = command.run(folder, ("run bad.lua -n 3 %s"):format(kind))
      assert.equal(1, code)
      assert.matches("^moonshard: ranks %d, %d stopped because rank %d: bad.lua:1: everywhere\n$",
        err)
      code, _, err = command.run(folder, ("run bad.lua -n 3 %s stepz=3"):format(kind))
      assert.equal(2, code)
      assert.equal(1, select(2, err:gsub("did you mean 'steps'", "")), err)
      command.write(folder .. "/bad.lua", 'require "moonshard".world():barrier() os.exit(3)')
      code, _, err = command.run(folder, ("run bad.lua -n 3 %s"):format(kind))
      assert.equal(3, code)
      assert.matches(
        "^moonshard: ranks %d, %d stopped because rank %d: the recipe called os.exit%(3%)\n$", err)
    end)

    it(name .. ": the last line says where the hook of another rank failed", function()
      command.write(folder .. "/hook.lua", [[
        local ms = require "moonshard"
        local cfg = ms.config { level = 1 }
        local model = ms.ddp(ms.nn.Linear(4, 2), { comm_hook = function(bucket, next)
          if ms.rank() == 1 then error("mine", cfg.level) end
          return next(bucket)
        end })
        local function pass() model(ms.ones { 2, 4 }):sum():backward() end
        for _ in ms.steps(2) do pass() end
      ]])
      for level, place in pairs {
        "link 'hook.lua:3': hook.lua:4: mine", "link 'hook.lua:3': mine",
      } do
        local code, _, err = command.run(folder,
          ("run hook.lua -n 2 level=%d %s"):format(level, kind))
        assert.equal(1, code)
        local last = err:match "([^\n]*)\n$"
        assert.is_truthy(last:match "^moonshard: rank 0 stopped because rank 1: "
          and last:find(place, 1, true), err)
        assert.equal(1, select(2, err:gsub(": mine", "")), err)
        -- The traceback comes before it, without the library's files.
        assert.matches("moonshard: rank 1 was at:\n\t[^\n]*hook.lua:7: ", err)
        assert.is_nil(err:match "share/lua")
      end
    end)

    -- Without this it would compute on until the supervisor ends it.
    it(name .. ": a rank that only computes hears at once that its job has ended", function()
      command.write(folder .. "/computes.lua", [[
local ms = require "moonshard"
local x = ms.ones { 32, 32 }
if ms.rank() == 1 then io.open "computes":read() error "mine" end
local function compute() io.open("computes", "w"):close() while true do x:matmul(x) end end
local _, heard = pcall(compute)
-- It has heard that once, and may still use tensors: to save what it has, say.
print(("heard: %s; sum %.0f"):format(heard, x:sum():item()))
error(heard, 0)
]])
      os.execute(("mkfifo '%s/computes'"):format(folder))
      local code, out, err = command.run(folder, "run computes.lua -n 2 " .. kind)
      assert.equal(1, code)
      assert.equal("heard: computes.lua:4: because rank 1: computes.lua:3: mine; sum 1024\n", out)
      assert.equal("moonshard: rank 0 stopped because rank 1: computes.lua:3: mine\n", err)
    end)

    it(name .. ": a rank that others wait for too long is told where it is", function()
      local code, _, err = job(("-n 2 %s how=loop meet=true at=4 --timeout 0.5"):format(kind))
      assert.equal(6, code, err)
      assert.matches("rank 1 has not come to all_reduce #6 of world", err)
      -- The thread sanitizer holds signals back from a loop that calls nothing.
      if kind == "" and not SANITIZED then
        assert.matches("rank 1: [^\n]*ways.lua:12: the job has ended, and this rank was here", err)
        assert.matches("its process running", err)
      end
    end)
  end

  -- As after an early return; whether the collective had begun on that rank or not.
  it("ends at once when a rank exits with collectives enqueued", function()
    command.write(folder .. "/exits.lua", [[
local ms = require "moonshard"
local cfg = ms.config { begun = true }
local t = ms.ones { 1024 }
local shell = io.popen "echo $PPID"
local other = ms.world():all_gather(ms.tensor({ shell:read "n" }, "i64")):sync():to_table()[2]
shell:close()
if ms.rank() == 1 then
  local x = ms.randn { 1000, 1000 }
  for _ = 1, cfg.begun and 0 or 20 do x = x:matmul(x) end
  t:add_(x:mean())
  ms.world():all_reduce(t)
  os.exit(0)
end
-- Until the process has ended, it may still take part.
os.execute(("while kill -0 %d 2>/dev/null; do sleep 0.01; done"):format(other))
ms.world():all_reduce(t):sync()
print "done"]])
    for _, begun in ipairs { "true", "false" } do
      local code, _, err = command.run(folder, "run exits.lua -n 2 --timeout 1800 begun=" .. begun)
      assert.equal(5, code, err)
      assert.matches("rank 1 ended [^\n]*all_reduce #2 of world[^\n]*, which it had enqueued, \z
        while rank 0 waits for it there: call ms.synchronize", err)
    end
  end)

  it("waits for a rank that stands still for a while", function()
    for _ = 1, command.full and 20 or 1 do
      local code, out, err = job "-n 3 how=pause --timeout 1800"
      assert.equal("", err)
      assert.equal(0, code)
      for rank = 0, 2 do assert.matches(("rank %d done\n"):format(rank), out) end
    end
  end)

  it("is told of a rank that stands still", function()
    local code, _, err = job "-n 2 how=stop meet=true --timeout 0.5"
    assert.equal(6, code)
    assert.matches("its process stopped %(T%)", err)
    assert.matches("rank 1 did not leave and had to be killed", err)
  end)

  it("names the rank that was killed, and what it did", function()
    for how, signal in pairs { kill = "SIGKILL", segv = "SIGSEGV" } do
      if not (SANITIZED and how == "segv") then
        local code, _, err = job(("-n 3 how=%s who=2 at=7"):format(how))
        assert.equal(7, code)
        assert.matches(("^moonshard: rank 2 %%(pid %%d+%%) killed by %s after all_reduce #7 of \z
          world %%[f32 x 1024, avg, at [^\n]*ways.lua:32%%] at step 7\n"):format(signal), err)
        -- A rank that learns of the death before it enters the next collective is reported after
        -- the last one.
        assert.matches("ranks 0, 1 ended within [%d.]+ ms; rank 0 %a+ all_reduce #[78]; rank 1 \z
          %a+ all_reduce #[78]", err)
      end
    end
  end)

  it("names the bucket of each rank's last collective", function()
    command.write(folder .. "/buckets.lua", [[
local ms = require "moonshard"
local model = ms.ddp(ms.nn.Linear(4, 2))
for step in ms.steps(6) do
  model(ms.ones { 2, 4 }):sum():backward()
  ms.synchronize()
  if step == 3 and ms.rank() == 1 then os.execute "kill -KILL $PPID" end
end]])
    local code, _, err = command.run(folder, "run buckets.lua -n 2")
    assert.equal(7, code)
    assert.matches('rank 0 %a+ all_reduce #[56] %(bucket 0 "weight"%)', err)
  end)

  it("may be run twice at once", function()
    local first, second = command.start(folder, folder .. "/ways.lua -n 2 steps=300"),
      command.start(folder, folder .. "/ways.lua -n 2 steps=300")
    local a, b = first.finish(), second.finish()
    assert.equal(0, a)
    assert.equal(0, b)
  end)

  it("leaves nothing in /dev/shm", function()
    job "-n 2 how=kill"
    job "-n 2"
    assert.equal("", io.popen("ls /dev/shm | grep -i -e moonshard -e memfd"):read "a")
  end)

  it("dies with its launcher", function()
    command.write(folder .. "/forever.lua", [[
local ms = require "moonshard"
local t = ms.ones { 4 }
for step in ms.steps(1 << 40) do
  ms.world():all_reduce(t, "avg"):sync()
  if step == 3 then io.stdout:write("rank ", ms.rank(), "\n") io.stdout:flush() end
end]])
    -- The pipe ends when the launcher and its ranks, which hold it too, have ended.
    local pipe = io.popen(("cd '%s' && '%s' run forever.lua -n 3 2>/dev/null & echo $!; wait")
      :format(folder, command.program))
    local launcher = pipe:read "l"
    for _ = 1, 3 do pipe:read "l" end
    os.execute("kill -KILL " .. launcher)
    assert.equal("", pipe:read "a")
    pipe:close()
  end)

  it("stops after the same step when it is asked to", function()
    command.write(folder .. "/ask.lua", [[
local ms = require "moonshard"
local cfg = ms.config { signal = "INT", at = 3, together = true, alone = false }
local last
for step in ms.steps(1 << 40) do
  last = step
  if cfg.together then ms.world():all_reduce(ms.ones { 4 }):sync() end
  if step == cfg.at and ms.rank() == 1 then
    os.execute(("kill -%s %s"):format(cfg.signal,
      cfg.alone and "$PPID" or "$(ps -o ppid= -p $PPID)"))
  end
end
print(("rank %d ended after %d"):format(ms.rank(), last))
]])
    local code_of = { INT = 130, TERM = 143, HUP = 129 }
    for signal, expected in pairs(code_of) do
      -- The supervisor is asked, or one rank alone, which leaves the keys of a terminal to it.
      for _, how in ipairs { "true", "false", signal == "TERM" and "true alone=true" or nil } do
        local code, out, err = command.run(folder, ("run ask.lua -n 3 signal=%s together=%s at=%d")
          :format(signal, how, how == "false" and 2000 or 30))
        assert.equal(expected, code, err)
        assert.falsy(err:find("exit code", 1, true), err)
        local steps = {}
        for rank = 0, 2 do steps[rank] = out:match(("rank %d ended after (%%d+)"):format(rank)) end
        assert.truthy(steps[0], out)
        assert.equal(steps[0], steps[1])
        assert.equal(steps[0], steps[2])
      end
    end
  end)

  it("ends all ranks after one step where they had different numbers of steps before", function()
    command.write(folder .. "/uneven.lua", [[
local ms = require "moonshard"
local cfg = ms.config { stop = false, at = 0 }
local model = ms.ddp(ms.nn.Linear(2, 2))
pcall(model.join, model, { stop = cfg.stop }, function()
  for _ in ms.steps(ms.rank() == 0 and 9 or 2) do
    model(ms.ones { 1, 2 }):sum():backward()
    if cfg.at == 0 and ms.rank() == 0 and ms.step() == 4 then
      os.execute("kill -TERM $(ps -o ppid= -p $PPID)")
    end
  end
end)
local last = -1
for step in ms.steps(1 << 40) do
  last = step
  ms.world():all_reduce(ms.ones { 4 }):sync()
  if cfg.at > 0 and step == cfg.at and ms.rank() == 1 then
    os.execute("kill -TERM $(ps -o ppid= -p $PPID)")
  end
end
print(("rank %d ended after %d"):format(ms.rank(), last))
]])
    for _, arguments in ipairs { "at=20", "at=20 stop=true", "at=0" } do
      local code, out, err = command.run(folder, "run uneven.lua -n 2 " .. arguments)
      assert.equal(143, code, err)
      local first = out:match "rank 0 ended after (%-?%d+)"
      assert.truthy(first, err)
      assert.equal(first, out:match "rank 1 ended after (%-?%d+)")
    end
  end)

  it("is stopped at once by a second request, and when the grace is over", function()
    command.write(folder .. "/deaf.lua", [[
local ms = require "moonshard"
local cfg = ms.config { twice = false }
ms.world():barrier()
if ms.rank() == 0 then
  os.execute("kill -TERM $(ps -o ppid= -p $PPID)"
    .. (cfg.twice and "; kill -INT $(ps -o ppid= -p $PPID)" or ""))
end
ms.world():barrier()
while true do ms.world():barrier() end
]])
    local code, _, err = command.run(folder, "run deaf.lua -n 2 twice=true")
    assert.equal(143, code)
    assert.matches("stopped at once by a second request, SIGINT", err)
    code, _, err = command.run(folder, "run deaf.lua -n 2 --grace 0.2")
    assert.equal(143, code)
    assert.matches("did not stop within 0 s after SIGTERM %(%-%-grace%)", err)
  end)

  it("shares the cores, and keeps a link's pace", function()
    command.write(folder .. "/link.lua", [[
local ms = require "moonshard"
local core = require "moonshard.core"
local t = ms.ones { 50000 }
ms.world():barrier()
local before = core.clock_ms()
ms.world():all_reduce(t):sync()
if ms.rank() == 0 then print(core.clock_ms() - before, ms.info().threads) end
]])
    -- 200,000 bytes at 1 MB/s, both ways between two ranks: 200 ms, and the latency.
    local out = command.succeed(folder, "run link.lua -n 2 --threads 1 --link 1MB,20ms")
    assert.truthy(tonumber(out:match "^[%d.]+") >= 200, out)
    assert.equal("1", out:match "%s(%d+)\n")
    for _, link in ipairs { "1", "fast", "1Gbit,soon", "0MB" } do
      assert.equal(2, (command.run(folder, "run link.lua -n 2 --link " .. link)))
    end
  end)

  it("of unusual size is refused, or runs", function()
    local code, _, err = job "-n 129"
    assert.equal(2, code)
    assert.matches("129 ranks: 1 to 128", err)
    code, _, err = command.run(folder, "run ways.lua -n 2 --device sim")
    assert.equal(2, code)
    assert.matches("moonshard check RECIPE %-n N", err)
    assert.equal(0, (job "-n 9 steps=6"))
  end)

  it("says on which rank a warning was given, and what the machine lacks", function()
    command.write(folder .. "/warn.lua", [[
local ms = require "moonshard"
ms.log("only once")
ms.warn("from %d", ms.rank())
warn("part ", "by part")
]])
    local out, err = command.succeed(folder, "run warn.lua -n 2")
    assert.equal("only once\n", out)
    for rank = 0, 1 do
      assert.matches(("moonshard: rank %d: from %d\n"):format(rank, rank), err)
      assert.matches(("moonshard: rank %d: part by part\n"):format(rank), err)
    end
    local code, _, refusal = command.run(folder, "run warn.lua -n 100", "ulimit -n 40;")
    assert.equal(2, code)
    assert.matches("cannot make the memory files that ranks share", refusal)
  end)

  it("names the switch that helps where address space is rationed", function()
    if SANITIZED then return end  -- a sanitizer reserves terabytes for itself
    command.write(folder .. "/sum.lua", [[
local ms = require "moonshard"
print(ms.world():all_reduce(ms.ones { 3 }):value():to_table()[1])
]])
    local code, _, refusal = command.run(folder, "run sum.lua -n 4", "ulimit -v 4000000;")
    assert.equal(2, code)
    assert.matches("no address space for the memory of 4 ranks .* %(%-%-memory BYTES", refusal)
    assert.equal("4.0\n4.0\n4.0\n4.0\n",
      (command.succeed(folder, "run sum.lua -n 4 --memory 50000000", "ulimit -v 4000000;")))
  end)

  it("whose rank starts another job is not disturbed by it", function()
    command.write(folder .. "/outer.lua", ([[
local ms = require "moonshard"
ms.world():barrier()
local ok = ms.rank() == 1 or os.execute "'%s' run '%s/ways.lua' -n 2 >/dev/null"
ms.world():barrier()
assert(ok)
]]):format(command.program, folder))
    assert.equal(0, (command.run(folder, "run outer.lua -n 2")))
  end)

  -- The moment is drawn over the whole run, its beginning and end included, and so is the rank;
  -- both by time, and by place in the recipe. At the end, the address sanitizer's leak search is a
  -- child of the launcher too, and its death ends the job.
  it("survives nothing, but never hangs: kills", function()
    local count = command.full and 200 or 8
    math.randomseed(20)
    local length = length_of "-n 3 steps=200"
    local killed, trial = 0, 0
    -- More trials where the machine has become faster since the length was measured: then many
    -- moments come after the end.
    while trial < count or killed <= count / 4 and trial < 10 * count do
      trial = trial + 1
      local ranks = math.random(2, 4)
      local victim, moment = math.random(1, ranks), math.random() * length
      local script = ([[
export ASAN_OPTIONS="$ASAN_OPTIONS:detect_leaks=0"
'%s' run '%s/ways.lua' -n %d steps=200 >/dev/null 2>'%s/.stderr' & L=$!
sleep %.6f
P=$(pgrep -P $L)
V=$(echo "$P" | sed -n %dp)
[ -n "$V" ] && kill -KILL $V 2>/dev/null && echo $V of $(echo "$P" | wc -l)
wait $L
echo rc=$?]]):format(command.program, folder, ranks, folder, moment, victim)
      command.write(folder .. "/kill.sh", script)
      local output = io.popen(("timeout 1800 sh '%s/kill.sh'"):format(folder)):read "a"
      local process, seen, code = output:match "^(%d*)[ of]*(%d*)\n?rc=(%d+)"
      local err = command.read(folder .. "/.stderr")
      local where = ("trial %d: %d ranks, the %dth killed after %.4f s: %s%s")
        :format(trial, ranks, victim, moment, output, err)
      assert.truthy(code, where)
      if process ~= "" and code ~= "0" then
        killed = killed + 1
        assert.equal("7", code, where)
        -- The place in the list is the rank where all were there.
        local rank = tonumber(seen) == ranks and victim - 1 or "%d"
        assert.matches(("rank %s %%(pid %s%%) killed by SIGKILL"):format(rank, process), err, where)
      else assert.equal("0", code, where) end
    end
    assert.truthy(killed > count / 4, ("%d of %d were killed in time"):format(killed, trial))
  end)

  -- Once or twice, to the launcher alone or, as a terminal does, to all; at any moment, the
  -- beginning and the end included.
  it("ends in order whenever it is asked to: signals", function()
    math.randomseed(5)
    local length = length_of "-n 2 steps=200"
    local expected = { INT = 130, TERM = 143, HUP = 129 }
    for trial = 1, command.full and 100 or 6 do
      local ranks, signal, moment = math.random(2, 4), ({ "INT", "TERM", "HUP" })[math.random(3)],
        math.random() * length
      local whom, twice = math.random(2) == 1 and "$L" or "-$L", math.random(4) == 1
      local send = ("kill -%s -- %s 2>/dev/null"):format(signal, whom)
      command.write(folder .. "/signal.sh", ([[
set -m
export ASAN_OPTIONS="$ASAN_OPTIONS:detect_leaks=0"
'%s' run '%s/ways.lua' -n %d steps=200 >/dev/null 2>'%s/.stderr' & L=$!
sleep %.6f
%s; %s
wait $L
echo rc=$?]]):format(command.program, folder, ranks, folder, moment, send, twice and send or ":"))
      local output = io.popen(("timeout 1800 bash '%s/signal.sh' 2>/dev/null"):format(folder))
      local code = output:read "a":match "rc=(%d+)"
      local err = command.read(folder .. "/.stderr")
      local where = ("trial %d: SIG%s to %s of %d ranks after %.4f s%s: %s: %s")
        :format(trial, signal, whom, ranks, moment, twice and ", twice" or "", tostring(code), err)
      assert.is_true(code == "0" or tonumber(code) == expected[signal], where)
      if not twice then assert.equal("", err, where) end
      -- The ranks end with their launcher.
      assert.equal("", io.popen(("pgrep -f '^[^ ]*moonshard run %s/'"):format(folder)):read "a",
        where)
    end
  end)

  it("survives nothing, but never hangs: kills inside the recipe", function()
    math.randomseed(7)
    for _ = 1, command.full and 50 or 4 do
      local ranks, at = math.random(2, 4), math.random(0, 19)
      local who = math.random(0, ranks - 1)
      local code, _, err = job(("-n %d how=kill who=%d at=%d"):format(ranks, who, at))
      assert.equal(7, code, err)
      assert.matches(("rank %d %%(pid %%d+%%) killed by SIGKILL"):format(who), err)
      assert.matches(("at step %d\n"):format(at), err)
      if at > 0 then assert.matches(("all_reduce #%d of world"):format(at), err) end
    end
  end)
end)
