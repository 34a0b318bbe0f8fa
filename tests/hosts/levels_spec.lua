-- group:levels() of several hosts: the ranks of a host, and those of one position on all hosts.
local hosts = require "hosts"
local command = require "command"

local function run(mpi, where, arguments)
  local code, text = hosts.mpirun(mpi, where, ("'%s' run --threads 1 --sum-order ranks \z
    '%s/tests/dist/levels.lua' %s"):format(command.program, command.source, arguments)).finish()
  assert.equal(0, code, text)
  assert.truthy(text:find("levels are right", 1, true), text)
end

-- What hosts the ranks have does not depend on the MPI: each is tried under one.
for _, mpi in ipairs(hosts.mpis()) do
  local function try(number, what, f)
    if hosts.is_tried(number, mpi) then it(what, f) end
  end

  describe("levels under " .. mpi, function()
    try(0, "are hosts, over which hybrid strategies shard and copy", function()
      run(mpi, "hosta:2,hostb:2", "hosts=aabb")
    end)
    try(1, "may differ in their numbers of ranks, which hybrid strategies refuse", function()
      run(mpi, "hosta:1,hostb:3", "hosts=abbb hybrid=false \z
        message='the hosts have different numbers of them (1, 3)'")
    end)
  end)
end
it("need not have consecutive ranks", function()
  run("openmpi", "hosta:2,hostb:2 --map-by node", "hosts=abab")
end)
if #hosts.mpis() == 0 then pending "levels over hosts: this build has no MPI" end
