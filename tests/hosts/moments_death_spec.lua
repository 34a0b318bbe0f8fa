-- A rank or a keeper is killed at any moment of a job over two hosts: the job ends within seconds,
-- with a report of who is at fault, and leaves nothing.
local hosts = require "hosts"
local moments = require "moments"

-- Linux tells a keeper how a process has ended from 6.15 on (PIDFD_GET_INFO). Before, it is known
-- only until the launcher has read it.
local function kinds_of_death(host)
  local who = ("rank %%d %%(pid %%d+%%) on host %s "):format(host)
  return { who .. "killed by SIGKILL", who .. "has ended without leaving" }
end

local rank = { name = "a rank is killed", cause = function(all)
  local one = moments.draw_victim(all, "run")
  if not one then return nil end
  hosts.kill(one.process, "KILL")
  -- A launcher may kill the other ranks of the host at once. The report may then name one of them,
  -- because the keeper cannot tell which died first.
  return { host = one.host, rank = one.rank, says = kinds_of_death(one.host) }
end }

local keeper = { name = "a keeper is killed", cause = function(all)
  local one = moments.draw_victim(all, "keep")
  if not one then return nil end
  hosts.kill(one.process, "KILL")
  return { host = one.host, says = { ("host %s %%(ranks %%d, %%d%%) is lost"):format(one.host) } }
end }

moments.describe(function()
  moments.trials("ends at any moment when a rank is killed", function(mpi)
    return moments.try(rank, mpi)
  end)
  moments.trials("ends at any moment when a keeper is killed", function(mpi)
    return moments.try(keeper, mpi)
  end)
end)
