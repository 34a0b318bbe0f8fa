-- All processes of a host are stopped at any moment of a job over two hosts: the job ends within
-- seconds, with a report of who is at fault, and leaves nothing.
-- ctest: waits
local hosts = require "hosts"
local moments = require "moments"

-- Stops all processes of a host but the one that keeps it; their numbers.
local function stop(host)
  local _, text = hosts.on(host, [[own=$(stat -L -c %i /proc/self/ns/net)
    stat -L -c "%i %n" /proc/[0-9]*/ns/net 2>/dev/null | while IFS=" /" read -r space _ p _; do
      [ $space = $own ] && [ $p != $$ ] && read -r name 2>/dev/null </proc/$p/comm || continue
      case $name in sleep | sh | stat) ;; *) kill -STOP $p 2>/dev/null && echo $p ;; esac
    done]])
  local stopped = {}
  for process in text:gmatch "%d+" do stopped[#stopped + 1] = math.tointeger(tonumber(process)) end
  return stopped
end

local stopping = { name = "a host is stopped", lost = 2, cause = function(all)
  local host = moments.draw_host()
  if not moments.draw_victim(all, nil, host) then return nil end
  local stopped = stop(host)
  -- Before the ranks have met, those of the other host know only that a rank is silent.
  local ranks = { hosta = "[01]", hostb = "[23]" }
  return { host = host, rank = ranks[host], other = host == "hosta" and "hostb" or "hosta",
    says = { ("host %s %%(ranks %%d, %%d%%) is lost"):format(host) },
    mend = function()
      for _, process in ipairs(stopped) do hosts.kill(process, "CONT") end
    end }
end }

moments.describe(function()
  moments.trials("ends at any moment when a host is stopped", function(mpi)
    return moments.try(stopping, mpi)
  end)
end)
