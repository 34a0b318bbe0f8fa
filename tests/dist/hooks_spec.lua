-- Links and their states on several ranks: other files of this folder have the expectations of each
-- rank. Here: they are met on any number of ranks; and the message of a job whose hook fails on one
-- rank.
local command = require "command"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

local ways = { processes = "", threads = " --thread-ranks" }

describe("native links", function()
  for _, ranks in ipairs(command.some(2, { 3, 1, 2, 4 })) do
    it(("do what their twins in Lua do on %d ranks"):format(ranks), function()
      command.on_ranks("hooks", ranks .. (ranks % 2 == 1 and "" or " --thread-ranks"))
    end)
  end
end)

describe("native links on sharded buckets", function()
  it("do what their twins in Lua do", function()
    for _, arguments in ipairs { ways.processes, command.full and ways.threads or nil } do
      command.on_ranks("hooks_kinds", "4" .. arguments)
    end
  end)
end)

-- Rounds of halves, an odd number of numbers, ranks above a power of two.
for _, ranks in ipairs { 5, 8 } do
  it(("adasum goes by its definition on %d ranks"):format(ranks), function()
    local script = command.write(folder .. "/adasum.lua", [[
      local ms = require "moonshard"
      local rank, size, lengths = ms.rank(), ms.world_size(), { 37, 1, 12 }
      local Weighted = ms.nn.class "Weighted"
      function Weighted:init()
        for i, n in ipairs(lengths) do self[i] = ms.nn.Parameter(ms.zeros { n }) end
      end
      function Weighted:forward(list)
        return (self[1] * list[1]):sum() + (self[2] * list[2]):sum() + (self[3] * list[3]):sum()
      end
      local function draw(r, i)
        return ms.randn { lengths[i], seed = 10 * r + i, per_rank = false }
      end
      local function reduced(link)
        local net = ms.ddp(Weighted(), { comm_hook = link })
        net { draw(rank, 1), draw(rank, 2), draw(rank, 3) }:backward()
        local result = ms.pack { net[1]:grad(), net[2]:grad(), net[3]:grad() }:clone()
        net:unwrap()
        return result
      end
      local expected, by_definition = {}, dofile(ms.config { reference = "" }.reference)
      for i = 1, 3 do
        local all = {}
        for r = 0, size - 1 do all[r] = draw(r, i):to_table() end
        expected[i] = ms.tensor(by_definition(all, size))
      end
      local native, twin = reduced "adasum", reduced(require "moonshard.hooks.adasum" ())
      assert(native:eq(twin):all():item() and (native - ms.cat(expected)):abs():max():item() < 1e-5)
    ]])
    command.succeed(folder,
      ("run '%s' -n %d --thread-ranks reference='%s/tests/dist/adasum_reference.lua'")
        :format(script, ranks, command.source))
  end)
end

describe("what links remember", function()
  for name, way in pairs(ways) do
    it("is saved by each rank and loaded by any number of them, as " .. name, function()
      for saved = name == "threads" and 1 or 2, name == "threads" and 3 or 2 do
        local where = (" folder='%s/%d'"):format(folder, saved)
        command.on_ranks("hooks_state", saved .. way, where)
        -- Of threads those of another number, or in long ranges any.
        for ranks = 1, 3 do
          if command.full or name == "processes" or ranks == saved % 3 + 1 then
            command.on_ranks("hooks_state", ranks .. way, ("%s saved=%d"):format(where, saved))
          end
        end
      end
    end)
  end
end)

-- Trains with links that have a state, from a checkpoint folder `saved` or nil, for a number of
-- steps. Prints the bits of the weights.
local TRAINING = [[
  local ms = require "moonshard"
  local cfg = ms.config { folder = "", steps = 6, link = "powersgd" }
  ms.seed(1)
  local model = ms.ddp(ms.nn.gpt2 { vocab = 16, context = 8, layers = 1, width = 16, heads = 2 }, {
    bucket_bytes = { 2000, 6000 },
    comm_hook = ms.hooks.chain {
      ms.hooks.clip { max_norm = 1, scope = "lagged" },
      cfg.link == "powersgd" and ms.hooks.powersgd { start_step = 1, rank = 2 }
        or ms.hooks.top_k { fraction = 0.1, momentum = 0.9 },
    },
  })
  local optimizer = ms.optim.adamw(model, { lr = 1e-2 })
  local things = { model = model, optimizer = optimizer }
  local first = 0
  local latest = cfg.folder ~= "" and ms.checkpoint.latest(cfg.folder)
  if latest then
    assert(ms.checkpoint.load(latest, things))
    first = 3
  end
  for step in ms.steps(cfg.steps, first) do
    local x = ms.randint { 4, 9, low = 0, high = 16, seed = 10 * step + ms.rank() }
    model(x:narrow(2, 1, 8)):cross_entropy(x:narrow(2, 2, 8)):backward()
    optimizer:step()
    if step == 2 and cfg.folder ~= "" then
      assert(ms.checkpoint.save(cfg.folder, { step = 3, model = model, optimizer = optimizer }))
    end
  end
  local link, sum = model:stats(), 0
  for _, p in ipairs(model:parameters()) do
    for i, value in ipairs(p:detach():reshape(-1):to_table()) do
      sum = (sum * 31 + string.unpack("<I4", string.pack("<f", value)) + i) % (1 << 48)
    end
  end
  io.stdout:write(("%012x %d %d %d\n")
    :format(sum, ms.memory().peak, link.payload_bytes, link.wire_bytes))
]]

describe("training with links that remember", function()
  for _, link in ipairs { "powersgd", "top_k" } do
    it("goes on bit for bit, and check tells its memory and bytes: " .. link, function()
      local script = command.write(folder .. "/script.lua", TRAINING)
      local function train(arguments)
        return command.succeed(folder,
          ("run '%s' -n 2 --thread-ranks link=%s %s"):format(script, link, arguments))
      end
      local whole = train ""
      train "steps=3 folder=saved"
      assert.equal(whole:match "^%x+", train "folder=saved":match "^%x+")
      local core = require "moonshard.core"
      local told = core.json_decode(command.succeed(folder,
        ("check '%s' -n 2 --json link=%s"):format(script, link)):match "({.*})")
      local peak, payload, wire = whole:match "^%x+ (%d+) (%d+) (%d+)"
      assert.same({ tonumber(peak), tonumber(payload), tonumber(wire) },
        { told.peak_bytes[1], told.payload_bytes, told.wire_bytes })
    end)
  end
end)

it("check knows links whose ranks send each other different things", function()
  local script = command.write(folder .. "/script.lua", [[
    local ms = require "moonshard"
    local model = ms.ddp(ms.nn.Linear(8, 8), { comm_hook = ms.hooks.chain { function(bucket, next)
      for _ = 1, ms.rank() do bucket:group("shard"):all_reduce(bucket:buffer()) end
      return next(bucket)
    end, "adasum" } })
    for _ in ms.steps(3) do model(ms.ones { 8 }):sum():backward() end
    io.stdout:write(("%d "):format(ms.memory().peak))
  ]])
  local core = require "moonshard.core"
  local told = core.json_decode(command.succeed(folder, ("check '%s' -n 3 --json"):format(script))
    :match "({.*})")
  local ran = {}
  for peak in command.succeed(folder, ("run '%s' -n 3"):format(script)):gmatch "%d+" do
    ran[#ran + 1] = tonumber(peak)
  end
  table.sort(ran)
  table.sort(told.peak_bytes)
  assert.same(told.peak_bytes, ran)
end)

describe("a job whose hook fails on one rank", function()
  local function fails(hook, way, ...)
    local script = command.write(folder .. "/script.lua", ([[
      local ms = require "moonshard"
      local rank = ms.rank()
      local model = ms.ddp(ms.nn.Linear(2, 2, { bias = false }), { comm_hook = %s })
      for _ in ms.steps(3) do model(ms.ones { 2 }):sum():backward() end
    ]]):format(hook))
    local code, out, err = command.run(folder, ("run '%s' -n 3%s"):format(script, way))
    assert.equal(1, code, out .. err)
    for _, text in ipairs { ... } do assert.truthy((out .. err):find(text, 1, true), out .. err) end
  end

  for name, way in pairs(ways) do
    it("ends with its reason on every rank, as " .. name, function()
      fails("function(bucket, next) if rank == 1 then error 'boom' end return next(bucket) end",
        way, "because rank 1", "bucket 0 \"weight\"", "script.lua:3", "boom")
      fails("function(bucket, next) if rank == 2 then return ms.zeros { 1 } end return \z
        next(bucket) end", way, "because rank 2", "expected is [4] f32", "the hook is link '")
      fails("ms.hooks.chain { function(bucket, next) if rank == 1 then bucket:buffer():fill_(1 / \z
        0) end return next(bucket) end, ms.hooks.nan_check { action = 'stop' } }", way,
        "inf or nan", "nan_check")
      fails("ms.hooks.stage { name = 'x', decode = function(t) if rank == 0 then return nil end \z
        return t end }", way, "because rank 0", "stage 'x'", "decode returned nothing")
      fails("function(bucket, next) kept = kept or bucket if rank == 1 then kept:index() kept = \z
        bucket end return next(bucket) end", way, "because rank 1", "only valid")
    end)
  end
end)
