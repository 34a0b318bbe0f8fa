-- Ranks that show no progress: which of them end the job, which only cause a warning, and what the
-- report says about their positions.
local command = require "command"

local SANITIZED = (os.getenv "MOONSHARD_SANITIZE" or "") ~= ""

-- After a meeting, which has no limit, rank 1 does something, and rank 0 ends (or, with waits=true,
-- waits for rank 1 in a collective). A rank that is only warned about goes on after the warning,
-- which it finds in the job's stderr. To stop, a rank loops, or it reads a named pipe that
-- has no writer: that blocks, and takes no processor time from the other jobs.
local RECIPE = [[
local ms = require "moonshard"
local cfg = ms.config { how = "loop", waits = false }
local t = ms.ones { 1024 }
ms.world():barrier(1800000)
local until_warned = "until grep -qs 'rank 1 has shown no progress' .stderr; do sleep 0.05; done"
local function block() io.open("nobody"):read() end
local ways = {
  loop = function() while true do end end,
  finalizer = function()
    setmetatable({}, { __gc = function() while true do end end })
    collectgarbage()
  end,
  at_close = function() X = setmetatable({}, { __gc = block }) end,
  stop = function() os.execute "kill -STOP $PPID" end,
  library = function() io.open("nobody"):read() end,
  child = function() os.execute(until_warned) end,
  coroutine = function()
    local inner = coroutine.create(function() while true do end end)
    coroutine.wrap(function() coroutine.resume(inner) end)()
  end,
  works = function()
    local x = ms.randn { 700, 700 }
    for _ = 1, 50 do x = x:matmul(x):tanh() end
    x:sum():item()
  end,
}
if ms.rank() == 1 then ways[cfg.how]() end
if cfg.waits then ms.world():all_reduce(t):sync() end
print(("rank %d done"):format(ms.rank()))
]]

describe("a rank that shows no progress", function()
  -- Each job has a folder of its own. The jobs wait most of the time, so they run side by side.
  local folders = {}
  local function new_folder()
    local folder = command.folder()
    folders[#folders + 1] = folder
    command.write(folder .. "/r.lua", RECIPE)
    assert(os.execute(("mkfifo '%s/nobody'"):format(folder)))
    return folder
  end
  local function start(arguments) return command.start(new_folder(), "r.lua " .. arguments) end
  teardown(function() for _, folder in ipairs(folders) do command.remove(folder) end end)

  -- The report on rank 1, for each thing that it does.
  local PLACES = {
    loop = "it runs its script at r.lua:8",
    finalizer = "it runs a finalizer %(__gc%), its last known line is r.lua:4",
    at_close = "it runs a finalizer %(__gc%)",
    stop = "its process is stopped %(T%), its last known line is r.lua:4",
    library = "it runs code that is neither its script nor the engine %(a library function, \z
      say%), its last known line is r.lua:4",
    coroutine = "it runs its script at r.lua:18",
  }

  local RECIPE_OF_LINKS = [[
local ms = require "moonshard"
local cfg = ms.config { place = "planner" }
local stuck = ms.rank() == 1
local function plan(view)
  while stuck and cfg.place == "planner" do end
  local moments = {}
  for i, b in ipairs(view.buckets) do
    moments[i] = { bucket = b.index, step = "after_backward" }
  end
  return moments
end
local function link(bucket, next)
  while stuck and cfg.place == "link" do end
  return next(bucket)
end
ms.world():barrier(1800000)
local net = ms.ddp(ms.nn.Linear(4, 4), { comm_hook = ms.hooks.chain { link } })
local opt = ms.optim.sgd(net, { lr = 0.1 })
opt:overlap(net, ms.overlap { name = "slow", plan = plan })
for step in ms.steps(5) do
  net(ms.ones { 2, 4 }):sum():backward()
  opt:step()
end
]]

  -- Sanitizers delay signals in loops without calls.
  if not SANITIZED then
    local alone, threads, links = {}, {}, {}
    local function start_links(place, seconds)
      local folder = new_folder()
      command.write(folder .. "/p.lua", RECIPE_OF_LINKS)
      return command.start(folder, ("p.lua -n 2 --timeout %d place=%s"):format(seconds, place))
    end
    setup(function()
      for how in pairs(PLACES) do
        alone[how] = { [false] = start("-n 2 --timeout 0.5 how=" .. how) }
      end
      for _, how in ipairs { "loop", "stop" } do
        alone[how][true] = start(("-n 2 --timeout 0.5 how=%s waits=true"):format(how))
      end
      for _, how in ipairs { "loop", "coroutine" } do
        threads[how] = start("-n 2 --thread-ranks --timeout 0.5 how=" .. how)
      end
      for _, place in ipairs { "planner", "link" } do links[place] = start_links(place, 1) end
    end)

    for how, place in pairs(PLACES) do
      for _, waits in ipairs { false, true } do
        -- The report does not depend on which call waits, so two ways are enough.
        if not waits or how == "loop" or how == "stop" then
          it(("(%s) ends the job when %s")
            :format(how, waits and "others wait for it" or "the others have finished"), function()
            local code, _, err = alone[how][waits].finish()
            assert.equal(6, code, err)
            assert.matches("moonshard: rank 1 has [^\n]*" .. place, err)
            assert.matches(
              waits and "rank 0 waits for it" or "rank 0 has finished and waits for it", err)
          end)
        end
      end
    end

    it("is found among threads, too", function()
      for how, one in pairs(threads) do
        local code, _, err = one.finish()
        assert.equal(6, code, err)
        assert.matches(
          "rank 1 has shown no progress for [%d.]+ s, and rank 0 has finished and waits for it; "
            .. PLACES[how], err)
      end
    end)

    it("is found in a planner, and in a link", function()
      for place, line in pairs { planner = 5, link = 13 } do
        local said = "moonshard: rank 1 has not come to [^\n]*it runs its script at p.lua:" .. line
        local code, _, err = links[place].finish()
        -- On a busy machine the limit may strike before that, where the model is wrapped: then once
        -- more, with more time.
        local seconds = 1
        while not err:find(said) and seconds < 100 do
          seconds = 4 * seconds
          code, _, err = start_links(place, seconds).finish()
        end
        assert.equal(6, code, err)
        assert.matches(said, err)
      end
    end)
  end

  -- Nothing but --stuck ends these jobs; what the report says of the looping rank.
  describe("ends the job after --stuck seconds", function()
    local LOOP = "it runs its script at r.lua:8"
    local function stuck(ranks, how)
      return ("-n %s --timeout 1800 --stuck 0.5 how=%s"):format(ranks, how)
    end
    local function ends(job, rank, place)
      local code, _, err = job.finish()
      assert.equal(6, code, err)
      local head = ("moonshard: rank %s has shown no progress for [%%d.]+ s \z
        %%(%%-%%-stuck 0.5%%); it "):format(rank)
      assert.matches(SANITIZED and head or head .. place:gsub("^it ", ""), err)
      assert.matches("\n  rank 0 [^\n]*", err)
    end

    -- Each rank loops at one line.
    local ALL = [[
local ms = require "moonshard"
ms.world():barrier(1800000)
while true do end]]
    local function all(arguments)
      local folder = new_folder()
      command.write(folder .. "/all.lua", ALL)
      return command.start(folder, "all.lua --timeout 1800 --stuck 0.5 " .. arguments)
    end

    it("where all ranks loop: one, several, processes and threads", function()
      local jobs = {}
      for _, ranks in ipairs { "1", "3" } do
        for _, threads in ipairs { "", " --thread-ranks" } do
          jobs[#jobs + 1] = all("-n " .. ranks .. threads)
        end
      end
      for _, job in ipairs(jobs) do ends(job, "%d", "it runs its script at all.lua:3") end
    end)

    it("where a script loops before it uses the engine", function()
      local folder = new_folder()
      command.write(folder .. "/early.lua", "while true do end")
      ends(command.start(folder, "early.lua --stuck 0.5"), 0, "it runs its script at early.lua:1")
    end)

    it("where it waits for a process, and in a finalizer", function()
      local child, finalizer = new_folder(), new_folder()
      command.write(child .. "/child.lua", "os.execute 'exec >/dev/null 2>&1; read line <nobody'")
      command.write(finalizer .. "/gc.lua",
        "setmetatable({}, { __gc = function() while true do end end }) collectgarbage()")
      local jobs = {
        command.start(child, "child.lua --stuck 0.5"),
        command.start(finalizer, "gc.lua --stuck 0.5"),
      }
      ends(jobs[1], 0, "it waits for a process that it has started")
      ends(jobs[2], 0, "it runs a finalizer %(__gc%)")
      assert(io.open(child .. "/nobody", "w")):close()     -- the process goes on, and ends
    end)

    it("and names the one that loops, not one that waits", function()
      for _, waits in ipairs { "false", "true" } do
        ends(start(stuck(2, "loop") .. " waits=" .. waits), 1, LOOP)
      end
    end)
  end)

  it("is only warned about while it waits for a process that it has started", function()
    for _, waits in ipairs { false, true } do
      local code, out, err = start(("-n 2 --timeout 0.3 how=child waits=%s"):format(waits))
        .finish()
      assert.equal(0, code, err)
      assert.matches("rank 1 done", out)
      assert.matches("warning: rank 1 has shown no progress for [%d.]+ s: it waits for a process \z
        that it has started, its last known line is r.lua:4", err)
    end
  end)

  -- Rank 0 waits for rank 1, which waits inside the engine for rank 2, which waits for the warning.
  it("is only warned about while it is inside a call of the engine", function()
    local folder = new_folder()
    command.write(folder .. "/r.lua", [[
local ms = require "moonshard"
local rank, world, t = ms.rank(), ms.world(), ms.ones { 8 }
local pair = world:split { { 0, 1 }, { 2 } }
world:barrier(1800000)
if rank == 2 then
  os.execute "until grep -qs 'rank 1 has shown .* inside a call' .stderr; do sleep 0.05; done"
  world:send(t, 1)
elseif rank == 1 then world:recv(t, 2):sync() end
if rank < 2 then pair:all_reduce(t):sync() end
print(("rank %d done"):format(rank))]])
    local code, out, err = command.run(folder, "run r.lua -n 3 --timeout 0.3")
    assert.equal(0, code, err)
    assert.matches("rank 1 done", out)
    assert.matches("warning: rank 1 has shown no progress for [%d.]+ s: it is inside a call of \z
      the engine, its last known line is r.lua:%d+", err)
  end)

  it("shows some as long as its device works, however long the others wait", function()
    local code, out, err = start "-n 2 --timeout 0.1 how=works waits=true".finish()
    assert.equal(0, code, err)
    assert.matches("rank 1 done", out)
  end)

  -- Each rank loops until both have been warned about, and where: a rank that gets little time may
  -- be found between two lines of its script at first. The barriers have no limit that could end
  -- the job.
  it("is a warning, not an end, where all ranks run Lua", function()
    local folder = new_folder()
    command.write(folder .. "/lua.lua", ([[
local ms = require "moonshard"
local function told() local f <close> = io.open ".stderr" return f:read "a" end
ms.world():barrier(1800000)
for rank = 0, 1 do repeat until told():find("rank " .. rank .. " has shown no progress%s") end
ms.world():barrier(1800000)
print("rank " .. ms.rank() .. " done")]])
      :format(SANITIZED and "" or "[^\\n]*it runs its script at"))
    local code, out, err = command.run(folder, "run lua.lua -n 2 --timeout 0.4")
    assert.equal(0, code, err)
    for rank = 0, 1 do
      assert.matches(("rank %d done"):format(rank), out)
      if not SANITIZED then
        assert.matches(
          ("warning: rank %d has shown no progress for [%%d.]+ s: it runs its script at \z
            lua.lua:[24] %%(moonshard run %%-%%-stuck SECONDS ends such a job%%)"):format(rank),
          err)
      end
    end
  end)
end)

describe("coroutines of a rank", function()
  it("do what Lua's do", function()
    local folder = command.folder()
    command.write(folder .. "/r.lua", [[
      require "moonshard"
      local function lines()
        local made = coroutine.wrap(function(a, ...)
          local b = coroutine.yield(a + 1, select("#", ...))
          return b * 2
        end)
        print(made(1, nil, nil), made(21))
        print(select("#", coroutine.resume(coroutine.create(function() return nil, nil end))))
        print(pcall(coroutine.wrap(function() error "text" end)))
        print(pcall(coroutine.wrap(function() error({}) end)) == false)
        print(coroutine.resume(coroutine.create(function() error("no position", 0) end)))
        local closed
        local failing = coroutine.wrap(function()
          local _ <close> = setmetatable({}, { __close = function() closed = true end })
          coroutine.yield()
          error "late"
        end)
        failing()
        print(pcall(failing), closed)
        print(pcall(failing))
        print(pcall(coroutine.resume, 1))
        print(pcall(coroutine.wrap, 1))
        print(coroutine.isyieldable(coroutine.create(print)),
          coroutine.wrap(function() return coroutine.isyieldable() end)())
        local deep = 0
        local function nest(n) if n > 0 then coroutine.wrap(nest)(n - 1) end deep = deep + 1 end
        nest(50)
        print(deep)
      end
      if require "moonshard".rank() == 0 then lines() end]])
    local code, ranked, err = command.run(folder, "run r.lua -n 2 --thread-ranks")
    assert.equal(0, code, err)
    local plain = select(2, command.run(folder, "run r.lua"))
    assert.equal(plain, ranked)
    command.remove(folder)
  end)
end)
