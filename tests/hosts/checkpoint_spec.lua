-- Checkpoints of a run over several hosts: all write into one folder, and another number of hosts
-- resumes with the same bits. A folder that each host has for itself is refused.
local hosts = require "hosts"
local command = require "command"
local ms = require "moonshard"

local mpi = hosts.mpis()[1]
if not mpi then
  pending "checkpoints over hosts: this build has no MPI"
  return
end

local folder
before_each(function() folder = command.folder() end)
after_each(function()
  hosts.kill_all()
  command.remove(folder)
end)

-- Launchers do not pass on all of the environment.
local program = ("env MOONSHARD_SOURCE='%s' '%s'"):format(command.source, command.program)

local function start(where, run, more)
  return hosts.mpirun(mpi, where, ("%s run --threads 1 --sum-order ranks \z
    '%s/recipes/gpt_bytes.lua' data='%s/README.md' steps=4 dtype=bf16 every.save=2 length=16 \z
    batch=12 model.width=32 model.layers=2 model.heads=2 run='%s' %s")
    :format(program, command.source, command.source, run, more))
end

local function succeed(where, run, more)
  local code, text = start(where, run, more).finish()
  assert.equal(0, code, text)
  return assert(command.read(run .. "/model/model.safetensors")), text
end

local cases = { [""] = { "hosta:2" }, ["shard=full_shard"] = { "hosta:1,hostb:2" } }
local begin = { [""] = "hosta:1,hostb:1", ["shard=full_shard"] = "hosta:2,hostb:1" }
if command.full then
  cases = {
    [""] = { "hosta:4" }, ["shard=full_shard"] = { "hosta:2,hostb:2", "hosta:1,hostb:3" },
  }
  begin = { [""] = "hosta:2,hostb:2", ["shard=full_shard"] = "hosta:2,hostb:2" }
end
for shard, wheres in ms.sorted_pairs(cases) do
  it(("continue on %s with the bits of an undisturbed run %s")
    :format(table.concat(wheres, " and "), shard), function()
    local whole = succeed(begin[shard], folder .. "/whole", shard)
    for i, where in ipairs(wheres) do
      local bits, text = succeed(where, ("%s/rest%d"):format(folder, i),
        ("%s resume='%s/whole/step-00000002'"):format(shard, folder))
      assert.truthy(text:find("resumed from", 1, true), text)
      assert.truthy(bits == whole, text)
    end
  end)
end
it("need a folder that all hosts share", function()
  local code, text = start("hosta:1,hostb:1", "/dev/shm/run", "").finish()
  assert.equal(3, code, text)
  assert.truthy(text:find("folder '/dev/shm/run' is not the same on all hosts: host \z
    hostb does not see what rank 0 on host hosta wrote there", 1, true), text)
  assert.equal("lock\n", select(2, hosts.on("hosta", "ls -A /dev/shm/run")))
end)

-- In a loop of one's own. Sharded or not, the ranks know the same, and nothing is left.
it("are refused by ms.checkpoint.save in a folder that the hosts do not share", function()
  local file = command.write(folder .. "/loop.lua", [[
    local ms = require "moonshard"
    local cfg = ms.config { folder = "", sharded = false, steps = 0 }
    local net = ms.nn.Linear(4, 4)
    net = cfg.sharded and ms.fsdp(net) or ms.ddp(net)
    for step = 1, cfg.steps do
      local path, message, code = ms.checkpoint.save(cfg.folder, { model = net, step = step })
      print(("rank %d: %s, %s, %s"):format(ms.rank(), path, message, code))
    end
    ms.checkpoint.wait()
    -- The launcher kills the others when one has ended with a code.
    io.stdout:flush()
    ms.world():barrier()
  ]])
  -- Each host waits some seconds for what another has written: all jobs beside each other.
  local function start_save(into, sharded, steps)
    return hosts.mpirun(mpi, "hosta:1,hostb:1", ("%s run --threads 1 '%s' folder='%s' sharded=%s \z
      steps=%d"):format(program, file, into, sharded, steps))
  end
  local kinds = command.full and { false, true } or { true }
  local running = {}
  for i, sharded in ipairs(kinds) do
    local own = "/dev/shm/checkpoints" .. tostring(sharded)
    local shared = ("%s/shared-%s"):format(folder, sharded)
    running[i] = { own, start_save(own, sharded, 1), shared, start_save(shared, sharded, 2) }
  end
  for i in ipairs(kinds) do
    local own, refused, shared, done = table.unpack(running[i])
    -- The run that has lost its last checkpoint says so, too.
    local code, text = refused.finish()
    assert.equal(3, code, text)
    for rank = 0, 1 do
      local _, told = text:gsub(("rank %d: nil, folder '%s' is not the same on all hosts: host \z
        hostb does not see what rank 0 on host hosta wrote there; choose a folder that all hosts \z
        share, mismatch"):format(rank, own), "")
      assert.equal(1, told, text)
    end
    assert.equal("", select(2, hosts.on("hosta", "ls -A " .. own)))
    code, text = done.finish()
    assert.equal(0, code, text)
    for rank = 0, 1 do
      assert.truthy(text:find(("rank %d: %s/step-"):format(rank, shared), 1, true), text)
    end
    local _, files = hosts.on("hostb", ("ls -A '%s'"):format(shared))
    assert.equal("lock\nstep-00000001\nstep-00000002\n", files)
  end
end)
