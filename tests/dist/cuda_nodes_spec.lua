-- Host threads on the NUMA nodes of GPUs, over the stand-in for NVIDIA's driver. The machine of the
-- test has another /sys, with two nodes of one core each, in a namespace of its own: without the
-- right to make one, or with one core alone, the test is pending.
local command = require "command"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

local SYSTEM = [[
set -e
mkdir -p sys
mount -t tmpfs none sys
file() { mkdir -p "sys/${1%/*}"; echo "$2" > "sys/$1"; }
file bus/pci/devices/0000:1a:00.0/numa_node 1
file bus/pci/devices/0000:1b:00.0/numa_node "$OTHER"
file devices/system/node/node0/cpulist "${CORES%,*}"
file devices/system/node/node1/cpulist "${CORES#*,}"
file devices/system/node/online "$NODES"
file devices/system/cpu/online "$CORES"
mount --bind sys /sys
exec "$@"
]]

local SHOW = [[
  local ms = require "moonshard"
  local threads = ms.info().threads
  local cores = io.open("/proc/thread-self/status"):read "a":match "Cpus_allowed_list:%s*(%S+)"
  io.write(("rank %d: cores %s, threads %d\n"):format(ms.rank(), cores, threads))
]]

-- Two cores that this process may use.
local function two_cores()
  local list = io.open("/proc/self/status"):read "a":match "Cpus_allowed_list:%s*(%S+)"
  local first, rest = list:match "^(%d+)[,-](%d+)"
  return first, rest
end

describe("host threads", function()
  local first, second = two_cores()
  local can = first and os.execute "unshare -m mount -t tmpfs none /tmp 2>/dev/null"
  local try = can and it or pending

  local function settings(other, nodes)
    command.write(folder .. "/system.sh", SYSTEM)
    command.write(folder .. "/show.lua", SHOW)
    return ("MOONSHARD_LOG=info MOONSHARD_CUDA_DRIVER='%s' MOONSHARD_STAND_IN_GPUS=2 CORES=%s,%s \z
      OTHER=%d NODES=%s taskset -c %s,%s unshare -m sh system.sh"):format(
      os.getenv "MOONSHARD_STAND_IN", first, second, other, nodes, first, second)
  end

  local function run(switches, ...)
    return command.succeed(folder, "run show.lua --device cuda " .. switches, settings(...))
  end

  try("run on the NUMA node of their GPU", function()
    local out, err = run("", 0, "0-1")
    assert.equal(("rank 0: cores %s, threads 1\n"):format(second), out)
    assert.matches("host threads run on the NUMA node of their GPU: those of rank 0 on node 1, \z
      cores " .. second, err)
    assert.matches("PCI 0000:1A:00%.0, NUMA node 1\n",
      command.succeed(folder, "info", settings(0, "0-1")))
  end)

  try("of ranks are each on the node of its own", function()
    for _, threads in ipairs { "", " --thread-ranks" } do
      local out, err = run("-n 2" .. threads, 0, "0-1")
      assert.matches(("rank 0: cores %s, threads 1\n"):format(second), out)
      assert.matches(("rank 1: cores %s, threads 1\n"):format(first), out)
      assert.equal(1, select(2, err:gsub("NUMA", "")))
    end
  end)

  try("of ranks whose node is not known get their shares of all cores", function()
    local out = run("-n 2", -1, "0-1")
    assert.matches(("rank 0: cores %s, "):format(second), out)
    assert.matches(("rank 1: cores %s, "):format(second), out)
  end)

  try("stay where they are on one node, or where the user wants more of them", function()
    local out, err = run("", 0, "0")
    assert.matches("threads 2\n", out)
    assert.is_nil(err:find("NUMA", 1, true))
    out, err = run("--threads 2", 0, "0-1")
    assert.matches("threads 2\n", out)
    assert.is_nil(err:find("NUMA", 1, true))
  end)
end)
