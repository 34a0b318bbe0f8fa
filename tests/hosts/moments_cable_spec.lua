-- A host's cable is cut at any moment of a job over two hosts: the job ends within seconds, with a
-- report of who is at fault, and leaves nothing.
-- ctest: waits
local hosts = require "hosts"
local moments = require "moments"

local cable = { name = "a cable is cut", lost = 2, cause = function(all)
  local host = moments.draw_host()
  if not moments.draw_victim(all, nil, host) then return nil end
  hosts.tool("cut", host)
  -- Each of the two hosts misses the other.
  return { host = "host[ab]", says = { "host host[ab] %(ranks %d, %d%) is lost" },
    mend = function() hosts.mend(host) end }
end }

moments.describe(function()
  moments.trials("ends at any moment when a cable is cut", function(mpi)
    return moments.try(cable, mpi)
  end)
end)
