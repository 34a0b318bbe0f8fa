-- Processes of each MPI on two hosts: their messages cross the cable, and arrive as they were sent.
-- An MPI may find ways around a network between processes of one machine; the cable's counters
-- show that it has not.
local hosts = require "hosts"

local build = os.getenv "MOONSHARD_BUILD"

-- MPICH is asked for no clean end of more than two processes: see the top of messages.c.
local function arguments(mpi, where)
  local program = ("'%s' '%s/lib/libmoonshard_mpi_%s.so'"):format(hosts.program "mpi/messages",
    build, mpi)
  if mpi ~= "mpich" or where == "hosta:1,hostb:1" then return program end
  return "-disable-auto-cleanup " .. program .. " leave"
end

-- Runs tests/mpi/messages, and checks what has crossed, against what hosta's one rank has sent to
-- each of hostb's `there` ranks, and they to it.
local function check(mpi, where, there)
  local code, text
  local crossing = hosts.crossing({ "hosta", "hostb", "hostc" }, function()
    code, text = hosts.mpirun(mpi, where, arguments(mpi, where))
  end)
  assert.equal(0, code, text)
  local sent = {}
  for rank, bytes in text:gmatch "rank (%d+) of %d+ sent (%d+) bytes to each" do
    sent[tonumber(rank)] = math.tointeger(tonumber(bytes))
  end
  local from, back = there * sent[0], 0
  for rank = 1, there do back = back + sent[rank] end
  for _, case in ipairs {
    { crossing.hosta.sent, from }, { crossing.hostb.received, from },
    { crossing.hostb.sent, back }, { crossing.hosta.received, back },
  } do
    local bytes, payload = case[1], case[2]
    assert.truthy(bytes >= payload and bytes <= 1.5 * payload,
      ("%d bytes crossed, the messages had %d\n%s"):format(bytes, payload, text))
  end
  assert.truthy(crossing.hostc.sent + crossing.hostc.received < 0.1 * from)
end

for _, mpi in ipairs(hosts.mpis()) do
  describe("messages of " .. mpi, function()
    it("cross between two hosts with a rank each", function() check(mpi, "hosta:1,hostb:1", 1) end)
    it("cross between one rank and three", function() check(mpi, "hosta:1,hostb:3", 3) end)
  end)
end
if #hosts.mpis() == 0 then pending "messages between hosts: this build has no MPI" end
