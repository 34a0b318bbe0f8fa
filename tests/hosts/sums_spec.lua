-- All-reduces between the ranks of two hosts, over each MPI: with --sum-order ranks they have the
-- bits of one host, otherwise the same in every run.
local hosts = require "hosts"
local support = require "support"

local bin = os.getenv "MOONSHARD_BIN"

-- Each rank prints its number and its results, as bits.
local recipe = [[
local ms = require "moonshard"
local world, results = ms.world(), {}
for i, n in ipairs { 3, 1000, 100000 } do
  local t = ms.randn { n, seed = 10 * i + world:rank(), per_rank = false }
  local sum = world:all_reduce(t, "sum"):value():to_table()
  for k = 1, n, n // 3 do results[#results + 1] = ("%a"):format(sum[k]) end
end
io.write(("rank %d: %s\n"):format(world:rank(), table.concat(results, " ")))
]]

-- Processes of MPICH come to no end of their own where there are more than two: see the top of
-- tests/mpi/messages.c.
local places = {
  openmpi = { where = "hosta:2,hostb:2", ranks = 4 },
  mpich = { where = "hosta:1,hostb:1", ranks = 2 },
}

-- The result of all ranks, which is the same on each.
local function result_of(expected, code, text)
  assert.equal(0, code, text)
  local result, ranks = nil, 0
  for line in text:gmatch "rank %d+: ([-+.xp%x ]+)" do
    result, ranks = result or line, ranks + 1
    assert.equal(result, line)
  end
  assert.equal(expected, ranks, text)
  return result
end

local file

local function run(mpi, switches)
  local place = places[mpi]
  return result_of(place.ranks, hosts.mpirun(mpi, place.where,
    ("env MOONSHARD_MPI=%s '%s' run %s '%s'"):format(mpi, bin, switches, file)).finish())
end

for _, mpi in ipairs(hosts.mpis()) do
  describe("sums over two hosts by " .. mpi, function()
    setup(function()
      file = os.tmpname()
      local handle = assert(io.open(file, "w"))
      handle:write(recipe)
      handle:close()
    end)
    teardown(function() os.remove(file) end)

    it("have the bits of one host in the order of ranks", function()
      local ranks = places[mpi].ranks
      local one = result_of(ranks,
        support.shell(("'%s' run -n %d '%s' 2>&1"):format(bin, ranks, file)))
      assert.equal(one, run(mpi, "--sum-order ranks"))
    end)

    it("have the same bits in every run", function()
      assert.equal(run(mpi, ""), run(mpi, ""))
    end)
  end)
end
if #hosts.mpis() == 0 then pending "sums over hosts: this build has no MPI" end
