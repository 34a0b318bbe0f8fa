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
  assert.truthy(text:find("folder '/dev/shm/run' is not the same on all hosts: host \z
    hostb does not see what rank 0 on host hosta wrote there", 1, true), text)
  assert.equal("lock\n", select(2, hosts.on("hosta", "ls -A /dev/shm/run")))
end)

-- In a loop of one's own. Sharded or not, the ranks know the same, and nothing is left.
it("are refused by ms.checkpoint.save in a folder that the hosts do not share", function()
  local file = command.write(folder .. "/loop.lua", [[
    local ms = require "moonshard"
    local cfg = ms.config { folder = "", sharded = false }
    local net = ms.nn.Linear(4, 4)
    net = cfg.sharded and ms.fsdp(net) or ms.ddp(net)
    for step = 1, 2 do
      local path, message, code = ms.checkpoint.save(cfg.folder, { model = net, step = step })
      print(("rank %d: %s, %s, %s"):format(ms.rank(), path, message, code))
    end
    ms.checkpoint.wait()
  ]])
  for _, sharded in ipairs { false, true } do
    local function save(into, expected)
      local code, text = hosts.mpirun(mpi, "hosta:2,hostb:2", ("%s run --threads 1 '%s' \z
        folder='%s' sharded=%s"):format(program, file, into, sharded)).finish()
      assert.equal(expected, code, text)
      return text
    end
    local into = "/dev/shm/checkpoints" .. tostring(sharded)
    -- The run that has lost its last checkpoint says so, too.
    local text = save(into, 3)
    for rank = 0, 3 do
      local _, told = text:gsub(("rank %d: nil, folder '%s' is not the same on all hosts: host \z
        hostb does not see what rank 0 on host hosta wrote there; choose a folder that all hosts \z
        share, mismatch"):format(rank, into), "")
      -- The first rank to end stops the others, which may be in their second save.
      assert.truthy(told >= 1, text)
    end
    assert.equal("", select(2, hosts.on("hosta", "ls -A " .. into)))
    local shared = ("%s/shared-%s"):format(folder, sharded)
    text = save(shared, 0)
    for rank = 0, 3 do
      assert.truthy(text:find(("rank %d: %s/step-"):format(rank, shared), 1, true), text)
    end
    local _, files = hosts.on("hostb", ("ls -A '%s'"):format(shared))
    assert.equal("step-00000001\nstep-00000002\n", files)
  end
end)
