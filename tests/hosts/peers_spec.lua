-- moonshard bench collectives --hosts 2: each peer reports each size, and its bytes cross between
-- the hosts.
local command = require "command"
local core = require "moonshard.core"
local hosts = require "hosts"
local support = require "support"

local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

describe("moonshard bench collectives --hosts 2", function()
  -- Two ranks on each host: every rank of a host sends the sum of its half, so the bytes are two
  -- thirds of those of a flat ring in the order of hosts.
  it("measures ours beside others, and what crosses the cable", function()
    local sizes = { 4096, 2000000 } -- sums of the small one are compared
    -- Open MPI does not free all that it allocates.
    local result = assert(core.json_decode((command.succeed(folder,
      ("bench collectives --hosts 2 --json --rounds 1 --bytes '%sx2'"):format(
        table.concat(sizes, "x2 ")), "ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=0"))))
    local seen = {}
    for _, row in ipairs(result.all_reduce) do
      seen[("%s %d %d"):format(row.peer, row.ranks, row.bytes)] = row
      assert.truthy(row.us_min > 0 and row.us_med >= row.us_min)
      assert.truthy(row.crossed >= 1)
    end
    for _, bytes in ipairs(sizes) do
      assert.truthy(seen["tcp 2 " .. bytes])
      for _, mpi in ipairs(hosts.mpis()) do
        for _, ranks in ipairs { 2, 4 } do
          assert.truthy(seen[("%s %d %d"):format(mpi, ranks, bytes)])
          assert.truthy(seen[("moonshard-%s %d %d"):format(mpi, ranks, bytes)])
        end
        local ours = seen[("moonshard-%s 4 2000000"):format(mpi)].crossed
        assert.truthy(ours / (2 * 3 / 4) < 0.7, ("%.3f"):format(ours))
      end
    end
  end)

  it("says why it cannot", function()
    local function says(settings, options, why)
      local code, _, errors = command.run(folder, "bench collectives " .. options, settings)
      assert.equal("number", type(code))
      assert.not_equal(0, code)
      assert.truthy(errors:find(why, 1, true), errors)
    end
    says("", "--hosts 3", "there are two hosts")
    says("", "--hosts 2 -n 3", "2 or 4 ranks")
    says("", "--hosts 2 --bytes 10", "'10' is no size")
    assert.equal(0, (support.shell(([[cd '%s' && printf '#!/bin/sh\necho "not permitted" >&2
      exit 1\n' >unshare && chmod +x unshare]]):format(folder))))
    says(("env -u MOONSHARD_HOSTS PATH='%s':$PATH"):format(folder), "--hosts 2",
      "makes no namespaces: not permitted")
  end)
end)
