-- The hosts of hosts.sh: what is theirs alone, what crosses their cables, and that nothing is left.
-- ctest: waits
local hosts = require "hosts"
local support = require "support"

local exchange = hosts.program "bench/exchange"
local source = os.getenv "MOONSHARD_SOURCE"
local tool = ("'%s/tests/hosts/hosts.sh'"):format(source)

local function output(host, command)
  local code, text = hosts.on(host, command)
  assert.equal(0, code, text)
  return text
end

-- hosta and hostb send each other `bytes`, `runs` times a sample; what they have sent in all.
local function send(bytes, runs)
  local size = ("%dx%d"):format(bytes, runs)
  local listener = hosts.start("hosta", ("'%s' listen 5000 %s"):format(exchange, size))
  assert.equal("listening", listener.line())
  local text = output("hostb", ("'%s' connect hosta 5000 %s"):format(exchange, size))
  assert.equal(0, (listener.finish()))
  return math.tointeger(tonumber(text:match '"moved": (%d+)'))
end

local function seconds(f)
  local core = require "moonshard.core"
  local start = core.clock_ms()
  f()
  return (core.clock_ms() - start) / 1e3
end

describe("a host", function()
  it("has a name, a network and shared memory of its own", function()
    for number, host in ipairs { "hosta", "hostb" } do
      assert.equal(host .. "\n", output(host, "hostname"))
      assert.equal("eth0\nlo\n", output(host, "ls /sys/class/net"))
      assert.truthy(output(host, "ip -4 address show eth0")
        :find("inet 10.77.0." .. number .. "/24", 1, true))
      output(host, ("echo %s >/dev/shm/name"):format(host))
    end
    assert.equal("hosta\n", output("hosta", "cat /dev/shm/name"))
    assert.equal("hostb\n", output("hostb", "cat /dev/shm/name"))
  end)

  it("reaches the others by name, also from another host", function()
    assert.equal("10.77.0.4 hostd\n", output("hostc", "getent hosts hostd | tr -s ' '"))
    assert.equal("hosta\n", output("hostb", ("%s on hosta hostname"):format(tool)))
  end)

  it("runs commands as ssh does", function()
    assert.equal(7, (hosts.on("hosta", "exit 7")))
    assert.equal("a\nb\n", output("hosta", "echo a; echo b"))
    local code, text = support.shell(("MOONSHARD_SEEN=1 HOME=/ %s on hosta env"):format(tool))
    assert.equal(0, code)
    assert.truthy(text:find("HOME=/\n", 1, true))
    assert.falsy(text:find("MOONSHARD_SEEN", 1, true))
  end)

  it("is named in the error when there is none of the name", function()
    local code, text = support.shell(tool .. " bytes hostx")
    assert.equal(1, code)
    assert.truthy(text:find('no host "hostx" among those that hosts.sh run has made here: hosta',
      1, true), text)
  end)
end)

describe("a cable", function()
  it("counts what crosses it, in both directions", function()
    local moved
    local crossing = hosts.crossing({ "hosta", "hostb", "hostc" }, function()
      moved = send(1000000, 1)
    end)
    for _, host in ipairs { "hosta", "hostb" } do
      for direction, bytes in pairs(crossing[host]) do
        assert.truthy(bytes >= moved and bytes < 1.1 * moved,
          ("%s %s %d bytes, %d were moved"):format(host, direction, bytes, moved))
      end
    end
    assert.truthy(crossing.hostc.sent < 0.1 * moved)
  end)

  it("is as fast as it may be", function()
    -- The buckets of tbf let 256 KB pass at once; what takes longer than this rate needs is no
    -- error, since other processes may keep the machine busy.
    hosts.tool("limit", "hostb", "160mbit")
    local moved
    local took = seconds(function() moved = send(1000000, 1) end)
    assert.truthy(took > (moved - 256e3) * 8 / 160e6, ("%.3f s"):format(took))
    hosts.tool("limit", "hostb", "none")
    assert.falsy(output("hostb", "tc qdisc show dev eth0"):find "tbf")
  end)

  it("can be cut and mended", function()
    hosts.tool("cut", "hostb")
    assert.equal("0\n", output("hostb", "cat /sys/class/net/eth0/carrier"))
    assert.equal("1\n", output("hosta", "cat /sys/class/net/eth0/carrier"))
    -- Nothing listens on hosta, which only says so while its answers arrive.
    local try = ("timeout 1 '%s' connect hosta 5000"):format(exchange)
    assert.falsy(select(2, hosts.on("hostb", try)):find "refused")
    hosts.tool("mend", "hostb")
    assert.equal("1\n", output("hostb", "cat /sys/class/net/eth0/carrier"))
    hosts.await("hostb stays away", function()
      return select(2, hosts.on("hostb", try)):find "refused"
    end)
    assert.equal(800, send(100, 1))
  end)
end)

describe("hosts.sh run", function()
  it("ends as its command ends", function()
    assert.equal(9, (support.shell(tool .. " run 1 sh -c 'exit 9'")))
    assert.equal(143, (support.shell(tool .. " run 1 sh -c 'kill -TERM $$'")))
  end)

  -- Hosts inside these hosts; the number of the script tells its processes from others.
  for _, signal in ipairs { "KILL", "TERM", "HUP" } do
    it("leaves no process when SIG" .. signal .. " ends it", function()
      local pipe = io.popen(([[echo $$; exec %s run 2 %s on hosta 'echo up; exec sleep 1000']])
        :format(tool, tool))
      local number = pipe:read "l"
      assert.equal("up", pipe:read "l")
      assert.equal(0, (support.shell(("kill -%s %s"):format(signal, number))))
      -- The pipe ends when every process that could write to it has.
      assert.equal("", pipe:read "a")
      pipe:close()
      local _, text = support.shell "ps -eo args"
      assert.equal(1, select(2, text:gsub("hosts.sh inside", "")))
      -- What keeps the four hosts around this test.
      assert.equal(4, select(2, text:gsub("sleep infinity", "")))
    end)
  end

  it("says why there are no hosts, and does not run the command", function()
    local folder = os.tmpname()
    os.remove(folder)
    assert.equal(0, (support.shell(([[mkdir '%s' && cd '%s' &&
      printf '#!/bin/sh\necho "unshare failed: not permitted" >&2; exit 1\n' >unshare &&
      chmod +x unshare]]):format(folder, folder))))
    local code, text = support.shell(("PATH='%s':$PATH %s run 2 echo ran"):format(folder, tool))
    os.execute(("rm -r '%s'"):format(folder))
    assert.equal(77, code)
    assert.falsy(text:find "ran")
    local last = text:match "[^\n]*\n*$"
    for _, part in ipairs { "makes no namespaces: unshare failed: not permitted", "as root",
      "needs --privileged" } do
      assert.truthy(last:find(part, 1, true), text)
    end
  end)

  it("skips the command if that is asked for", function()
    local code, text = support.shell(("MOONSHARD_NO_NETNS=1 %s run 2 echo ran"):format(tool))
    assert.equal(77, code)
    assert.truthy(text:find "skipped, MOONSHARD_NO_NETNS=1")
    assert.falsy(text:find "ran")
  end)
end)
