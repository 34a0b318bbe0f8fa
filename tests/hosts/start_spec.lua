-- `moonshard run --hosts`: an MPI's launcher starts the ranks, and the program passes on requests
-- and returns the job's code. With MOONSHARD_TEST_FULL=1 all is tried under each MPI.
-- ctest: waits
local hosts = require "hosts"
local command = require "command"

local folder
before_each(function() folder = command.folder() end)
after_each(function()
  hosts.kill_all()
  command.remove(folder)
end)

-- Starts the program with --hosts by this MPI.
local function start(mpi, where, arguments, settings)
  return hosts.run(mpi, ("--hosts '%s' %s"):format(where, arguments), settings)
end

local function find_rank(rank)
  for _, one in ipairs(hosts.processes()) do
    if one.rank == rank then return one.process end
  end
end
local function starter() return hosts.find(nil, "login")[1].process end

-- What the program has left: processes, a keeper's door, a port at which it listens.
local function check_nothing_is_left()
  hosts.await_end()
  hosts.end_launchers()
  hosts.await("a door is left", function()
    local _, first = hosts.on("hosta", "ss -Hlx | grep @moonshard")
    local _, second = hosts.on("hostb", "ss -Hlx | grep @moonshard")
    return first .. second == ""
  end)
  local pipe = io.popen "ss -Hltn 2>&1"
  local listening = pipe:read "a"
  pipe:close()
  assert.equal("", listening)
end

-- The job's end: its code, and what it has printed.
local function finish(running)
  local code, text = running.finish()
  check_nothing_is_left()
  return code, text
end

-- Starts a small model on the ranks that trains until it is stopped; waits for some steps.
local function train(mpi, where, switches)
  local running = start(mpi, where, ("%s --threads 1 '%s/recipes/gpt_bytes.lua' length=16 batch=4 \z
    model.width=32 model.layers=2 model.heads=2 every.eval=1000000000 every.sample=1000000000 \z
    every.save=1000000000 steps=1000000 dtype=bf16 data='%s/README.md' run='%s/run'")
    :format(switches, command.source, command.source, folder))
  local begun = hosts.await_job(running, function()
    local _, steps = (command.read(folder .. "/run/metrics.jsonl") or ""):gsub("\n", "")
    return steps > 3
  end)
  if not begun then error(select(2, running.finish()), 0) end
  return running
end

-- The lines that ranks end with, in their order: the hashes of their weights.
local function ends(text)
  local lines = {}
  for line in text:gmatch "[^\n]*weights %x+[^\n]*" do lines[#lines + 1] = line end
  table.sort(lines)
  return table.concat(lines, "\n")
end

local ddp = ("'%s/tests/dist/ddp.lua'"):format(command.source)

describe("run --hosts", function()
  local places = {
    { "hosta:2,hostb:2", 4 }, { "hosta,hostb,hostc", 3 }, { "hosta,hostb:3", 4 },
  }
  local alone, scratch, small = {}, nil, nil
  setup(function()
    scratch = command.folder()
    small = ("'%s'"):format(command.write(scratch .. "/small.lua", hosts.TRAINING))
    for _, ranks in ipairs { 3, 4 } do
      alone[ranks] = ends(command.succeed(scratch, ("run -n %d %s"):format(ranks, small)))
    end
  end)
  teardown(function() command.remove(scratch) end)

  local mpis = hosts.mpis()
  for i, mpi in ipairs(mpis) do
    local function try(number, what, f)
      if hosts.is_tried(number, mpi) then it(what .. mpi, f) end
    end

    for number, place in ipairs(places) do
      local where, ranks = table.unpack(place)
      try(number, ("gives the bits of -n %d on %s by "):format(ranks, where), function()
        local code, text = finish(start(mpi, where, "--sum-order ranks " .. small))
        assert.equal(0, code, text)
        assert.truthy(text:find(("%d ranks on %%d hosts, started by moonshard run %%-%%-hosts \z
          %%(mpirun of M?P?I?C?H?O?p?e?n?"):format(ranks)), text)
        assert.equal(alone[ranks], ends(text))
      end)
    end

    try(0, "returns 75 after a checkpoint when it gets SIGTERM, by ", function()
      local running = train(mpi, "hosta:2,hostb:2", "")
      hosts.kill(starter(), "TERM")
      local code, text = finish(running)
      assert.equal(75, code, text)
      assert.truthy(text:find "stopped on request after step %d+; a checkpoint is saved", text)
      assert.is_nil(text:find("exit code", 1, true), text)
    end)

    try(1, "writes the flight records of all ranks when it gets SIGUSR2, by ", function()
      local running = train(mpi, "hosta:2,hostb:2", "")
      hosts.kill(starter(), "USR2")
      for rank = 0, 3 do
        local there = hosts.await_job(running, function()
          local record = command.read(("%s/run/flight/rank-%d.jsonl"):format(folder, rank)) or ""
          return record:find(('"rank":%d[,}]'):format(rank)) and record:find("all_reduce", 1, true)
        end)
        if not there then error(select(2, finish(running)), 0) end
      end
      hosts.kill(starter(), "TERM")
      local code, text = finish(running)
      assert.equal(75, code, text)
    end)

    -- MPICH's launcher kills what passes on the keeper's output: the report comes from the program
    -- itself, once, also where there is no folder that has it.
    it("returns 7 and the report when a rank is killed, by " .. mpi, function()
      local running = train(mpi, "hosta:2,hostb:2", "")
      hosts.kill(find_rank(2), "KILL")
      local code, text = finish(running)
      assert.equal(7, code, text)
      assert.truthy(text:find "rank 2 %(pid %d+%) on host hostb [^\n]* at step %d+", text)
      local report = command.read(folder .. "/run/report.txt")
      local first, last = text:find(report, 1, true)
      assert.truthy(first, text)
      assert.is_nil(text:find(report, last, true), text)
      local recipe = command.write(folder .. "/killed.lua", [[
        local ms = require "moonshard"
        ms.world():barrier()
        if ms.rank() == 1 then os.execute "kill -9 $PPID" end
        ms.world():barrier()]])
      code, text = finish(start(mpi, "hosta,hostb", "'" .. recipe .. "'"))
      assert.equal(7, code, text)
      -- Rank 0 may learn of the death before it enters the second barrier.
      assert.truthy(text:find("moonshard: rank 1 %(pid %d+%) [^\n]*\n  rank 0 on host hosta %a+ \z
        barrier #[12]\n"), text)
    end)

    try(0, "ends a job whose ranks all loop after --stuck seconds, by ", function()
      local recipe = command.write(folder .. "/loops.lua", [[
        local ms = require "moonshard"
        ms.world():barrier()
        while true do end]])
      for _, where in ipairs { "hosta,hostb", "hostb" } do
        local code, text = finish(start(mpi, where, "--timeout 1800 --stuck 0.5 " .. recipe))
        assert.equal(6, code, text)
        assert.truthy(text:find("rank %d has shown no progress for [%d.]+ s %(%-%-stuck 0.5%); \z
          it runs its script at [^\n]*loops.lua:3\n  rank 0 on host host"), text)
      end
    end)

    try(1, "returns the code of a rank that calls os.exit, by ", function()
      local recipe = command.write(folder .. "/exits.lua", [[
        local ms = require "moonshard"
        if ms.rank() == 2 then os.exit(9) end
        ms.world():barrier()]])
      local code, text = finish(start(mpi, "hosta:2,hostb:2", "'" .. recipe .. "'"))
      assert.equal(9, code, text)
      assert.truthy(text:find("because rank 2: the recipe called os.exit(9)", 1, true), text)
    end)

    it("returns 2 when a host cannot be reached, by " .. mpi, function()
      local code, text = finish(start(mpi, "hosta,hostx", ddp))
      assert.equal(2, code, text)
      assert.truthy(text:find('there is no host "hostx"', 1, true), text)
      local _, count = text:gsub("moonshard: mpirun of [^\n]*before the ranks met; it was to \z
        start [^\n]*moonshard on hosta:1,hostx:1\n", "")
      assert.equal(1, count, text)
    end)

    if i == 1 or command.full then
      for _, host in ipairs { "hosta", command.full and "hostb" or nil } do
        it(("returns 7 when the cable of %s is cut, by %s"):format(host, mpi), function()
          local running = train(mpi, "hosta:2,hostb:2", "--lost 2")
          hosts.tool("cut", host)
          local code, text = running.finish()
          hosts.mend(host)
          assert.equal(7, code, text)
          assert.truthy(text:find(("host %s %%(ranks %%d, %%d%%) is lost"):format(host)), text)
          check_nothing_is_left()
        end)
      end

      it("leaves nothing when it is killed, by " .. mpi, function()
        local running = train(mpi, "hosta:2,hostb:2", "")
        hosts.kill(starter(), "KILL")
        finish(running)
        -- The launcher dies with the program. Its daemons kill the ranks then, and one of these may
        -- be gone before its agent has noticed that the program is.
        local report = command.read(folder .. "/run/report.txt")
        assert.truthy(report:find(
          "the process that has started the job (moonshard run --hosts) has ended", 1, true)
          or report:find "rank %d[^\n]* killed by SIG%u+"
          or report:find "host host[ab] %(ranks %d, %d%) is lost", report)
      end)

      it("ends a launcher that does nothing after --init-timeout, by " .. mpi, function()
        local agent = command.write(folder .. "/agent", "#!/bin/sh\nexec sleep 1000\n")
        assert(os.execute(("chmod +x '%s'"):format(agent)))
        local code, text = finish(start(mpi, "hosta,hostb", "--init-timeout 1 " .. ddp,
          ("OMPI_MCA_plm_rsh_agent='%s' HYDRA_LAUNCHER_EXEC='%s'"):format(agent, agent)))
        assert.equal(2, code, text)
        assert.truthy(text:find("has done nothing for 1 s (--init-timeout), before the ranks met",
          1, true), text)
      end)
    end
  end

  it("refuses what makes no sense, before anything is started", function()
    local file = command.write(folder .. "/list", "hosta:2\n\nhostb slots=x # two\n")
    for arguments, says in pairs {
      ["--hosts hosta -n 2"] = "-n 2 beside --hosts",
      ["--hosts hosta --thread-ranks"] = "--thread-ranks beside --hosts",
      ["--hosts hosta --device sim"] = "--device sim beside --hosts",
      ["--hosts hosta:2,hostb:x"] = "--hosts, character 15: expected a number of ranks",
      ["--hosts hosta,hosta"] = "the host 'hosta' is named twice",
      ["--hosts [fd00::1]:2"] = "take no IPv6 address (fd00::1): give the host a name",
      ["--hosts '" .. file .. "'"] = "list, line 3, character 13: expected a number of ranks",
    } do
      local code, text = finish(hosts.run("openmpi", arguments .. " " .. ddp))
      assert.equal(2, code, text)
      assert.truthy(text:find(says, 1, true), text)
      local _, lines = text:gsub("\n", "")
      assert.equal(1, lines, text)
    end
    for settings, says in pairs {
      ["OMPI_ALLOW_RUN_AS_ROOT= "] = "refuses to run as root. Use another user, or set \z
        OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
      ["PATH=/nowhere "] = "PATH has none; sought: mpirun, mpirun.openmpi, mpirun.mpich",
    } do
      local code, text = finish(hosts.run("openmpi", "--hosts hosta " .. ddp, settings))
      assert.equal(2, code, text)
      assert.truthy(text:find(says, 1, true), text)
    end
    local code, text = hosts.mpirun("openmpi", "hosta:2", ("'%s' run --hosts hosta:2 %s"):format(
      command.program, ddp)).finish()
    assert.not_equal(0, code)
    local _, count = text:gsub("moonshard: %-%-hosts beside mpirun of Open MPI", "")
    assert.equal(1, count, text)
  end)

  it("starts one rank on another host, with the hosts of a file", function()
    local file = command.write(folder .. "/list", "# one\nhostb slots=1\n")
    local recipe = command.write(folder .. "/who.lua", "print(io.popen('hostname'):read())")
    local code, text = finish(hosts.run(hosts.mpis()[1],
      ("--hosts '%s' '%s'"):format(file, recipe)))
    assert.equal(0, code, text)
    assert.truthy(text:find("1 rank on 1 host, started by moonshard run --hosts", 1, true), text)
    assert.truthy(text:find("\nhostb\n", 1, true), text)
  end)
end)
