-- Groups of several hosts that are dropped: dropped_groups.lua holds what each rank expects.
local hosts = require "hosts"
local command = require "command"

local ROUNDS = ("rounds=%d memory=false"):format(command.full and 60 or 30)

for _, mpi in ipairs(hosts.mpis()) do
  it("dropped groups of several hosts are freed under " .. mpi, function()
    -- Processes of MPICH come to no end of their own where there are more than two: see the top of
    -- tests/mpi/messages.c.
    local where = mpi == "mpich" and "hosta:1,hostb:1" or "hosta:2,hostb:1"
    local code, text = hosts.mpirun(mpi, where, ("'%s' run --threads 1 '%s/tests/dist/%s' %s")
      :format(command.program, command.source, "dropped_groups.lua", ROUNDS))
      .finish()
    assert.equal(0, code, text)
    local _, done = text:gsub("rank %d is done", "")
    assert.equal(mpi == "mpich" and 2 or 3, done, text)
  end)
end
if #hosts.mpis() == 0 then pending "dropped groups over hosts: this build has no MPI" end
