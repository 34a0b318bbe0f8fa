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
after_each(function() command.remove(folder) end)

-- Launchers do not pass on all of the environment.
local program = ("env MOONSHARD_SOURCE='%s' '%s'"):format(command.source, command.program)

local function train(where, run, more)
  return hosts.mpirun(mpi, where, ("%s run --threads 1 --sum-order ranks \z
    '%s/recipes/gpt_bytes.lua' data='%s/README.md' steps=4 every.save=2 length=16 batch=8 \z
    model.width=32 model.layers=2 model.heads=2 run='%s' %s"):format(program, command.source,
    command.source, run, more)).finish()
end

local function succeed(where, run, more)
  local code, text = train(where, run, more)
  assert.equal(0, code, text)
  return assert(command.read(run .. "/model/model.safetensors")), text
end

for shard, wheres in ms.sorted_pairs {
  [""] = { "hosta:4" }, ["shard=full_shard"] = { "hosta:2,hostb:2", "hosta:1,hostb:3" },
} do
  it(("continue on %s with the bits of an undisturbed run %s")
    :format(table.concat(wheres, " and "), shard), function()
    local whole = succeed("hosta:2,hostb:2", folder .. "/whole", shard)
    for i, where in ipairs(wheres) do
      local bits, text = succeed(where, ("%s/rest%d"):format(folder, i),
        ("%s resume='%s/whole/step-00000002'"):format(shard, folder))
      assert.truthy(text:find("resumed from", 1, true), text)
      assert.truthy(bits == whole, text)
    end
  end)
end
it("need a folder that all hosts share", function()
  local code, text = train("hosta:2,hostb:2", "/dev/shm/run", "")
  assert.equal(3, code, text)
  assert.truthy(text:find("folder '/dev/shm/run' of this run is not the same on all hosts: host \z
    hostb does not see what rank 0 on host hosta wrote there", 1, true), text)
  assert.equal("lock\n", select(2, hosts.on("hosta", "ls -A /dev/shm/run")))
end)
