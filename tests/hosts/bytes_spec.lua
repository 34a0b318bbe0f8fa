-- What goes between hosts: `moonshard check --hosts` predicts what each rank of a run counts, and
-- the cables carry it.
local command = require "command"
local core = require "moonshard.core"
local hosts = require "hosts"

local RECIPE = [[
local ms = require "moonshard"
local cfg = ms.config { shard = false, all = 0, hook = "" }
local world = ms.world()
local gpt = ms.nn.gpt2 { vocab = 64, context = 16, layers = 2, width = 32, heads = 2 }
local model = cfg.shard and ms.fsdp(gpt) or ms.ddp(gpt, {
  bucket_bytes = 20000, comm_hook = cfg.hook ~= "" and cfg.hook or nil,
})
local optimizer = ms.optim.adamw(model, { lr = 1e-3 })
local x = ms.randint { 2, 16, low = 0, high = 64, seed = 1 }
local function counted() return (select(4, world:_traffic())) end
local before, own = 0, 0
for step in ms.steps(3) do
  before = counted()
  model(x):cross_entropy(x):backward()
  optimizer:step()
  own = counted() - before
end
local stats = model:stats()
for i = 1, cfg.all do world:all_reduce(ms.ones { 1 << 21, group = world }) end
io.stdout:write(("rank %d stats %d of %d step %d all %d\n"):format(world:rank(),
  stats.between_hosts_bytes, stats.payload_bytes, own, counted()))
]]

-- What goes between hosts does not depend on the MPI.
local mpi = hosts.mpis()[1]

describe("bytes between hosts", function()
  if not mpi then return pending "this build has no MPI" end
  local folder
  before_each(function()
    folder = command.folder()
    command.write(folder .. "/r.lua", RECIPE)
  end)
  after_each(function() command.remove(folder) end)

  -- What each rank has counted, from rank 0 on: stats, payload, step, all.
  local function run(where, options)
    local code, text = hosts.mpirun(mpi, where, ("'%s' run '%s/r.lua' %s")
      :format(command.program, folder, options)).finish()
    assert.equal(0, code, text)
    local ranks = {}
    for rank, stats, payload, step, all in
        text:gmatch "rank (%d+) stats (%d+) of (%d+) step (%d+) all (%d+)" do
      ranks[tonumber(rank) + 1] = { stats = tonumber(stats), payload = tonumber(payload),
        step = tonumber(step), all = tonumber(all) }
    end
    assert.equal(4, #ranks, text)
    return ranks
  end

  local function checked(where, options)
    return assert(core.json_decode((command.succeed(folder, ("check r.lua --json --hosts %s %s")
      :format(where, options)))))
  end

  local function check_prediction(where, options)
    local told, seen = checked(where, options), run(where, options)
    for i, rank in ipairs(seen) do
      assert.equal(math.tointeger(told.between_hosts_bytes[i]), rank.step)
    end
    local of_hosts = { {}, {} }
    local first = tonumber(where:match "hosta:(%d)")
    for i, rank in ipairs(seen) do table.insert(of_hosts[i <= first and 1 or 2], rank) end
    for h, ranks in ipairs(of_hosts) do
      local stats, step = 0, 0
      for _, rank in ipairs(ranks) do stats, step = stats + rank.stats, step + rank.step end
      assert.equal(math.tointeger(told.hosts[h].between_hosts_bytes), step)
      -- A host's sum of each gradient goes to the other host once; of sharded models, the parts
      -- of that host's ranks.
      local all = ranks[1].payload
      assert.equal(options == "shard=true" and all * (4 - #ranks) // 4 or all, stats)
    end
  end
  for i, where in ipairs { "hosta:2,hostb:2", "hosta:1,hostb:3" } do
    for k, options in ipairs { "", "shard=true", "hook=bf16_compress" } do
      if command.full or (i + k) % 2 == 0 then
        it(("are predicted on %s %s"):format(where, options), function()
          check_prediction(where, options)
        end)
      end
    end
  end

  it("are what the cables carry", function()
    local seen
    local crossing = hosts.crossing({ "hosta", "hostb" }, function()
      seen = run("hosta:2,hostb:2", "all=4")
    end)
    for host, ranks in pairs { hosta = { 1, 2 }, hostb = { 3, 4 } } do
      local all = seen[ranks[1]].all + seen[ranks[2]].all
      assert.truthy(all > 4 << 23)
      local sent = crossing[host].sent
      assert.truthy(sent >= all and sent < 1.1 * all,
        ("%s has sent %d bytes, its ranks have counted %d"):format(host, sent, all))
    end
  end)

  it("are none on one host", function()
    for _, options in ipairs { "", "shard=true" } do
      for _, rank in ipairs(run("hosta:4", options)) do
        assert.equal(0, rank.stats)
        assert.equal(0, rank.all)
      end
    end
  end)
end)
