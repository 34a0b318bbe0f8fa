-- Processes of each MPI on two hosts: their messages cross the cable, and arrive as they were sent.
-- An MPI may find ways around a network between processes of one machine; the cable's counters
-- show that it has not.
local command = require "command"
local hosts = require "hosts"

local build = os.getenv "MOONSHARD_BUILD"

-- Runs tests/mpi/messages; what each rank says that it has sent to each other. Processes of MPICH
-- come to no end of their own (see messages.c) and are ended when all have reported.
local function run(mpi, where, ranks)
  local ends = mpi ~= "mpich"
  local job = hosts.mpirun(mpi, where, ("'%s' '%s/lib/libmoonshard_mpi_%s.so' %s")
    :format(hosts.program "mpi/messages", build, mpi, ends and "" or "stay"))
  local sent, text = {}, {}
  for line in job.line do
    text[#text + 1] = line
    local rank, bytes = line:match "rank (%d+) of %d+ sent (%d+) bytes to each"
    if rank then
      sent[tonumber(rank)] = math.tointeger(tonumber(bytes))
      ranks = ranks - 1
    end
    if ranks == 0 then break end
  end
  if not ends then job.stop() end
  local code, rest = job.finish()
  text = table.concat(text, "\n") .. "\n" .. rest
  assert.equal(0, ranks, text)
  if ends then assert.equal(0, code, text) end
  return sent, text
end

-- What has crossed the cables, against what hosta's one rank has sent to each of hostb's `there`
-- ranks, and they to it.
local function check(mpi, where, there)
  local sent, text
  local crossing = hosts.crossing({ "hosta", "hostb", "hostc" }, function()
    sent, text = run(mpi, where, 1 + there)
  end)
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

for i, mpi in ipairs(hosts.mpis()) do
  describe("messages of " .. mpi, function()
    it("cross between two hosts with a rank each", function() check(mpi, "hosta:1,hostb:1", 1) end)
    if i == 1 or command.full then
      it("cross between one rank and three", function() check(mpi, "hosta:1,hostb:3", 3) end)
    end
  end)
end
if #hosts.mpis() == 0 then pending "messages between hosts: this build has no MPI" end
