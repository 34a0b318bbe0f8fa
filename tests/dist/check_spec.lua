-- moonshard check -n N: its predictions equal the real run on each rank: the peak to the byte, the
-- bytes of a step, the collectives and their order.
local command = require "command"
local core = require "moonshard.core"

local RECIPE = [[
local ms = require "moonshard"
local cfg = ms.config { steps = 3, differ = false, groups = false }
local model = ms.ddp(ms.nn.gpt2 { vocab = 64, context = 16, layers = 2, width = 32, heads = 2 },
  { bucket_bytes = 20000 })
local optimizer = ms.optim.adamw(model, { lr = 1e-3 })
local x = ms.randint { 2, 16, low = 0, high = 64, seed = 1 }
local within, across
if cfg.groups then within, across = ms.world():levels(2) end
local before, own = 0, 0
for step in ms.steps(cfg.steps) do
  before = own
  model(x):cross_entropy(x):backward()
  optimizer:step()
  if cfg.groups then
    local t = ms.ones { 10, dtype = "bf16" }
    within:all_reduce(t)
    across:all_gather(t)
  end
  if cfg.differ and ms.rank() == 1 then ms.world():all_reduce(ms.ones { 3 }) end
  own = 0
  for _, bytes in pairs(ms.world():bytes_sent()) do own = own + bytes end
end
io.stdout:write(("rank %d peak %d sent %d\n"):format(ms.rank(), ms.memory().peak, own - before))
]]

describe("moonshard check -n", function()
  local folder
  before_each(function()
    folder = command.folder()
    command.write(folder .. "/r.lua", RECIPE)
  end)
  after_each(function() command.remove(folder) end)

  local function checked(options)
    return assert(core.json_decode((command.succeed(folder, "check r.lua --json " .. options))))
  end

  for _, how in ipairs { "", "--thread-ranks" } do
    it("predicts peak and bytes of each rank's run " .. how, function()
      for _, ranks in ipairs { 2, 3 } do
        local result = checked("-n " .. ranks)
        local out = command.succeed(folder, ("run r.lua -n %d %s"):format(ranks, how))
        assert.equal(ranks, result.ranks)
        for rank = 0, ranks - 1 do
          local peak, sent = out:match(("rank %d peak (%%d+) sent (%%d+)"):format(rank))
          assert.equal(math.tointeger(tonumber(peak)), result.peak_bytes[rank + 1])
          assert.equal(math.tointeger(tonumber(sent)), result.wire_bytes)
        end
      end
    end)
  end

  it("says what goes between hosts, and refuses hosts that do not fit", function()
    local three = checked("-n 5 --hosts 3").hosts
    assert.same({ 2, 2, 1 }, { three[1].ranks, three[2].ranks, three[3].ranks })
    local whole = checked("-n 2").payload_bytes
    assert.same({ whole, whole }, checked("-n 2 --hosts 2").between_hosts_bytes)
    assert.same({ 0, 0 }, checked("-n 2 --hosts 1").between_hosts_bytes)
    -- In the order of ranks the data of every rank go to the other host.
    assert.same({ whole, whole, whole },
      checked("--hosts a:1,b:2 --sum-order ranks").between_hosts_bytes)
    assert.matches("from a +%d+ bytes to other hosts; ranks 0%-1 %d+ %d+",
      (command.succeed(folder, "check r.lua --hosts a:2,b:1")))
    for options, why in pairs {
      ["-n 2 --hosts 3"] = "1 to 2 hosts", ["--hosts a:x"] = "a number of ranks",
      ["-n 2 --hosts a:1,b:2"] = "have 3 ranks in all",
    } do
      local code, _, errors = command.run(folder, "check r.lua " .. options)
      assert.equal(2, code)
      assert.matches(why, errors, 1, true)
    end
    local code, _, errors = command.run(folder, "check r.lua -n 256 --hosts 32")
    assert.equal(1, code)
    assert.matches("256 ranks on 32 hosts: over several hosts a job has at most 128", errors, 1,
      true)
  end)

  -- The root has 7 numbers: of 5 ranks, three have two of them, the fourth has one, and the last
  -- has none. So their states, and what they make of their pieces, take different bytes.
  it("runs one rank for each shard, and predicts the peak of each", function()
    command.write(folder .. "/s.lua", [[
local ms = require "moonshard"
local cfg = ms.config {
  strategy = "full_shard", within = 0, accumulate = 1, clip = 0.0, prefetch = "backward_pre",
  param = "", reduce = "", low = false, layout = "flat", offload = "", look = "", units = false,
}
local function given(name) return cfg[name] ~= "" and cfg[name] or nil end
local precision = (given "param" or given "reduce") and {
  param = given "param", reduce = given "reduce", keep = { ".*norm.*" }, output = "f32",
} or nil
if cfg.units then
  precision = { units = {
    ["0"] = precision or false, [""] = { param = "f32", reduce = "bf16" },
    ["1"] = { param = "f16", reduce = "f16", output = "f32", keep = { ".*norm.*" } },
  } }
end
local shards, replicas
if cfg.within > 0 then shards, replicas = ms.world():levels(cfg.within) end
local block = ms.nn.class "Block"
function block:init()
  self.a, self.norm, self.b = ms.nn.Linear(6, 7), ms.nn.LayerNorm(7), ms.nn.Linear(7, 6)
end
function block:forward(x) return self.b(self.norm(self.a(x)):gelu()) end
local model = ms.fsdp(ms.nn.Sequential(block(), block(), ms.nn.Linear(6, 1)), {
  strategy = cfg.strategy, wrap = { class = "Block" }, prefetch = cfg.prefetch,
  shard_group = shards, replica_group = replicas, layout = cfg.layout, precision = precision,
  keep_low_precision_grads = precision and cfg.low or nil, offload = given "offload",
})
local optimizer = ms.optim.adamw(model, { lr = 1e-3 })
for _ in ms.steps(3) do
  model:accumulate(cfg.accumulate, function() model(ms.ones { 5, 6 }):sum():backward() end)
  local looks = { offload = given "look", grads = true, writeback = cfg.layout ~= "rows" }
  if looks.offload then
    model:summon(looks, function(list) for _, p in ipairs(list) do p:grad():mul_(0.5) end end)
  end
  if cfg.clip > 0 then model:clip_grad_norm(cfg.clip) end
  optimizer:step()
  -- What each rank makes of its pieces.
  for _, p in ipairs(model:parameters()) do ms.zeros { p:numel(), 400 } end
end
local memory = ms.memory()
io.stdout:write(("rank %d peak %d offloaded %d\n"):format(ms.rank(), memory.peak,
  memory.offload_peak))
]])
    local differ, cases = false, {
      "-n 2", "-n 5 strategy=shard_grad_op",
      "-n 4 strategy=hybrid_shard within=2 param=bf16 prefetch=none",
      "-n 3 param=bf16 reduce=bf16 low=true layout=rows", "-n 2 param=f16 strategy=no_shard",
      "-n 3 reduce=bf16 accumulate=2", "-n 3 offload=cpu clip=1 param=bf16",
      "-n 2 offload=cpu strategy=no_shard", "-n 4 offload=cpu strategy=hybrid_shard within=2",
      "-n 3 look=cpu", "-n 2 look=cpu offload=cpu layout=rows", "-n 3 units=true param=bf16",
    }
    for _, options in ipairs(command.full and {
      "-n 3 accumulate=2", "-n 4 clip=1", "-n 6 strategy=hybrid_shard within=3 prefetch=none",
      "-n 5 param=bf16 reduce=bf16 low=true layout=rows",
      "-n 4 strategy=hybrid_shard within=2 param=bf16", "-n 5 offload=cpu clip=1 param=bf16",
      "-n 5 look=cpu", "-n 2 param=bf16", "-n 6 strategy=hybrid_shard within=3 param=bf16",
      "-n 2 offload=cpu", "-n 6 offload=cpu strategy=hybrid_shard within=3",
      "-n 4 units=true low=true offload=cpu", "-n 2 units=true layout=rows prefetch=both clip=1",
    } or {}) do
      cases[#cases + 1] = options
    end
    for _, options in ipairs(cases) do
      local result = assert(core.json_decode((command.succeed(folder,
        "check s.lua --json " .. options))))
      local out = command.succeed(folder, "run s.lua " .. options)
      for rank, predicted in ipairs(result.peak_bytes) do
        local peak, offloaded = out:match(("rank %d peak (%%d+) offloaded (%%d+)"):format(rank - 1))
        assert.equal(math.tointeger(tonumber(peak)), predicted, options .. " rank " .. rank - 1)
        assert.equal(math.tointeger(tonumber(offloaded)), result.offload_peak_bytes[rank], options)
        assert.equal(options:find("=cpu", 1, true) ~= nil, tonumber(offloaded) > 0)
        differ = differ or predicted ~= result.peak_bytes[1]
      end
      assert.is_nil(result.shards)
    end
    assert.is_true(differ)
  end)

  -- Nothing else is sharded, and ranks 0 and 1 have a smaller expert than 2 and 3.
  it("runs ranks that share parameters with few others", function()
    command.write(folder .. "/e.lua", [[
local ms = require "moonshard"
local number, experts = ms.rank() // 2 + 1, ms.world():levels(2)
local net = ms.nn.class "Net"
function net:init()
  self.base = ms.nn.Linear(8, 8)
  self["expert" .. number] = ms.nn.Linear(8, 8 * number)
end
function net:forward(x) return self["expert" .. number](self.base(x)) end
local model = ms.fsdp(net(), {
  strategy = "no_shard",
  group_of = function(name) return name:find "expert" and experts or nil end,
})
local optimizer = ms.optim.adamw(model)
for _ in ms.steps(2) do
  model(ms.ones { 4, 8 }):sum():backward()
  optimizer:step()
end
io.stdout:write(("rank %d peak %d\n"):format(ms.rank(), ms.memory().peak))
]])
    local result = assert(core.json_decode((command.succeed(folder, "check e.lua --json -n 4"))))
    local out = command.succeed(folder, "run e.lua -n 4")
    for rank, predicted in ipairs(result.peak_bytes) do
      local peak = out:match(("rank %d peak (%%d+)"):format(rank - 1))
      assert.equal(math.tointeger(tonumber(peak)), predicted, "rank " .. rank - 1)
    end
    assert.is_true(result.peak_bytes[1] < result.peak_bytes[3])
  end)

  it("lists the last step's collectives, by group", function()
    local result = checked "-n 64 groups=true"
    assert.equal(64, #result.peak_bytes)
    local names, calls = {}, {}
    for i, group in ipairs(result.groups) do names[i] = group.name end
    for _, record in ipairs(result.collectives) do
      calls[record.op] = (calls[record.op] or 0) + 1
    end
    assert.equal(3, #names)
    assert.equal("world", names[1])
    assert.equal(1, calls.all_gather)
    -- 10 bf16 numbers between two ranks: 2 S (N - 1) / N; gathered from 32: S (N - 1) / N of the
    -- 320.
    assert.equal(20, result.groups[2].wire_bytes)
    assert.equal(20, result.groups[3].payload_bytes)
    assert.equal(32 * 20 * 31 // 32, result.groups[3].wire_bytes)
    assert.equal(result.payload_bytes, result.groups[1].payload_bytes + 40)
    assert.equal(checked("-n 16 groups=true").order_hash,
      checked("-n 16 groups=true --all-ranks").order_hash)
    local text = command.succeed(folder, "check r.lua -n 64 groups=true")
    assert.matches("rank 0%-63 +peak memory", text)
    assert.matches("all_gather of world/[%d.]+, bf16 x", text)
  end)

  it("lists no more than 100 collectives, and says how many follow", function()
    command.write(folder .. "/many.lua", [[
local ms = require "moonshard"
local t, calls = ms.ones { 1 }, ms.config { calls = 101 }.calls
for _ in ms.steps(2) do
  for _ = 1, calls do ms.world():all_reduce(t) end
end
]])
    local out = command.succeed(folder, "check many.lua -n 2")
    assert.truthy(out:find("collectives of the last step: 101,", 1, true), out)
    assert.truthy(out:find("\n   100 all_reduce", 1, true), out)
    assert.truthy(out:find("\n  and 1 more: --json has all of them\n", 1, true), out)
    assert.falsy(out:find("\n   101 ", 1, true), out)
    out = command.succeed(folder, "check many.lua -n 2 calls=100")
    assert.truthy(out:find("\n   100 all_reduce", 1, true), out)
    assert.falsy(out:find("more:", 1, true), out)
  end)

  it("names the channels of parameters and of numbers that hosts share", function()
    command.write(folder .. "/s.lua", [[
local ms = require "moonshard"
local model = ms.ddp(ms.nn.Linear(4, 4), { find_unused = true })
local optimizer = ms.optim.adamw(model, { lr = 1e-3, shard = ms.world() })
for step in ms.steps(2) do
  model(ms.ones { 1, 4 }):sum():backward()
  optimizer:step()
end
]])
    local on = {}
    for _, record in ipairs(core.json_decode((command.succeed(folder, "check s.lua -n 2 --json")))
        .collectives) do
      on[record.channel] = record.op .. " " .. record.label
    end
    assert.same({
      "all_reduce weight", parameters = "all_gather ", numbers = "all_reduce used parameters",
    }, on)
    assert.matches("all_gather of world, f32 x %d+, channel parameters",
      command.succeed(folder, "check s.lua -n 2"))
  end)

  it("finds ranks that would disagree, and names the call", function()
    local code, out, err = command.run(folder, "check r.lua -n 3 differ=true")
    assert.equal(5, code)
    assert.equal("", out)
    assert.matches("ranks disagree in collective %d+ of the last step:\n  rank 0: none\n  rank 1: \z
      all_reduce of world, f32 x 3", err)
  end)

  it("says what is wrong with its arguments", function()
    assert.equal(2, (command.run(folder, "check r.lua -n 3 --rank 3")))
    local code, _, err = command.run(folder, "check r.lua -n 3 nonsense=1")
    assert.equal(2, code)
    assert.equal(1, select(2, err:gsub("unknown option", "")), err)
  end)
end)
