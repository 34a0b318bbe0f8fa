-- What recipes/launch gives to clusters: the batch scripts, with programs that are in for Slurm's
-- and for ours, and the module file, with functions that are in for Lmod's.
local command = require "command"
local launch = command.source .. "/recipes/launch/"

local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

-- Puts a shell script into the folder's bin.
local function program(name, text)
  os.execute(("mkdir -p '%s/bin'"):format(folder))
  command.write(("%s/bin/%s"):format(folder, name), "#!/bin/sh\n" .. text)
  os.execute(("chmod +x '%s/bin/%s'"):format(folder, name))
end

-- Runs a batch script as Slurm does; its exit code.
local function batch(script, settings, more)
  program("scontrol", [[
    if [ "$1" = show ]; then printf 'node1\nnode2\n'; else echo "$@" >>requeued; fi]])
  local _, _, code = os.execute(("cd '%s' && env PATH=\"$PWD/bin:$PATH\" SLURM_JOB_ID=17 \z
    SLURM_JOB_NODELIST='node[1-2]' SLURM_NTASKS_PER_NODE=4 SLURM_CPUS_PER_TASK=3 \z
    MOONSHARD=moonshard %s bash '%s%s' r.lua lr=1 %s >out 2>&1")
    :format(folder, settings or "", launch, script, more or ""))
  return code
end

local function read(name) return command.read(folder .. "/" .. name) end

describe("mpirun.slurm", function()
  it("gives the nodes of the job to --hosts, and ends with our code", function()
    program("moonshard", [[
      echo "$@" >arguments
      while [ "$1" != --hosts ]; do shift; done
      cp "$2" hosts
      exit 7]])
    assert.equal(7, batch "mpirun.slurm")
    assert.matches("^run r%.lua lr=1 %-%-threads 3 %-%-hosts %S+ resume=auto\n$", read "arguments")
    assert.equal("node1:4\nnode2:4\n", read "hosts")
    assert.is_nil(read "requeued")
    assert.is_nil(read "hosts-17")
  end)

  it("passes SIGTERM on, waits for the checkpoint, and asks Slurm to go on later", function()
    program("moonshard", [[
      trap 'echo saved >checkpoint; exit 75' TERM
      kill -TERM $PPID
      while :; do sleep 0.01; done]])
    assert.equal(75, batch "mpirun.slurm")
    assert.equal("saved\n", read "checkpoint")
    assert.equal("requeue 17\n", read "requeued")
  end)
end)

describe("the batch scripts", function()
  it("leave --threads to who gives it", function()
    program("srun", 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"')
    program("moonshard", [[echo "$@" >arguments]])
    for _, given in ipairs { "--threads 2", "--threads=2" } do
      assert.equal(0, batch("srun.slurm", nil, given))
      assert.equal(("run r.lua lr=1 %s resume=auto\n"):format(given), read "arguments")
      assert.equal(0, batch("mpirun.slurm", nil, given))
      assert.matches(("^run r.lua lr=1 %s --hosts "):format(given):gsub("[-.]", "%%%0") ..
        "%S+ resume=auto\n$", read "arguments")
    end
  end)
end)

describe("srun.slurm", function()
  local srun = [[
    while [ "${1#--}" != "$1" ]; do echo "$1" >>switches; shift; done
    exec "$@"]]
  it("starts the program with the PMI of an MPI", function()
    program("srun", srun)
    program("moonshard", [[echo "$@" >arguments]])
    assert.equal(0, batch("srun.slurm", "MOONSHARD_PMI=pmi2"))
    assert.equal("run r.lua lr=1 --threads 3 resume=auto\n", read "arguments")
    assert.equal("--mpi=pmi2\n--kill-on-bad-exit=0\n--cpus-per-task=3\n", read "switches")
    assert.is_nil(read "requeued")
  end)

  it("asks Slurm to go on later after a request to stop", function()
    program("srun", srun)
    program("moonshard", "exit 75")
    assert.equal(75, batch "srun.slurm")
    assert.equal("requeue 17\n", read "requeued")
  end)
end)

describe("modulefile.lua", function()
  it("names what an installation has", function()
    local root = folder .. "/root"
    local pipe = assert(io.popen(("DESTDIR='%s' cmake --install '%s' --prefix /opt/moonshard 2>&1")
      :format(root, os.getenv "MOONSHARD_BUILD")))
    local said = pipe:read "a"
    assert(pipe:close(), said)
    local set = {}
    local function put(name, value) set[name] = value end
    local nothing = function() end
    local text = assert(command.read(launch .. "modulefile.lua"))
    assert(load(text, "modulefile.lua", "t", { help = nothing, whatis = nothing,
      prepend_path = put, pushenv = put, os = { getenv = nothing } }))()
    for _, name in ipairs { "PATH", "PKG_CONFIG_PATH", "CMAKE_PREFIX_PATH" } do
      assert.truthy(os.execute(("test -d '%s%s'"):format(root, set[name])), name)
    end
    -- The installation itself says what these two are.
    for _, name in ipairs { "LUA_PATH", "LUA_CPATH" } do
      assert.equal(said:match("export " .. name .. "='([^']*)'"), set[name])
    end
  end)
end)
