-- Statements of lua/moonshard/meta.lua on which authors of new methods rely: seeds, dtypes and
-- sizes.
local command = require "command"
local ms = require "moonshard"

local SCRIPT = [[
local ms = require "moonshard"
local world, rank = ms.world(), ms.rank()
local function say(name, ...)
  print(("%d %s: %s"):format(rank, name, table.concat({ ... }, " ")))
end

ms.seed(5)
local function sum(t) return ("%a"):format(t:to "f32":sum():item()) end
say("numbers", sum(ms.rand { 1000 }), sum(ms.rand { 1000, seed = 7 }),
  sum(ms.randn { 64, seed = 7 }), sum(ms.randint { 99, low = 0, high = 1000, seed = 3 }),
  sum(ms.nn.Linear(3, 3).weight),
  sum(ms.codec("int8", { rounding = "stochastic" }):encode(ms.full(0.3, { 999 }))))
say("own numbers", sum(ms.rand { 1000, per_rank = true }),
  sum(ms.arange(1, 999):to "f32":dropout(0.5)))

local _, chosen = ms.rand { 8 }:topk(3)
local _, above, count = ms.rand { 8 }:above(0.5, 4)
local function gathered(t) return world:all_gather(t):value():dtype() end
say("indices", chosen:dtype(), above:dtype(), count:dtype(), gathered(chosen),
  gathered(chosen:to "i32"))

for _, divisor in ipairs { "all", "live" } do
  local seen = {}
  local model = ms.ddp(ms.nn.Linear(2, 1, { bias = false }), { comm_hook = function(bucket, next)
    seen[#seen + 1] = bucket:divisor()
    return next(bucket)
  end })
  local means = {}
  model:join({ divisor = divisor }, function()
    for i = 1, rank + 1 do
      model(ms.ones { 1, 2 }):sum():backward()
      means[i] = ("%.4f"):format(model.weight:grad():to_table()[1][1])
      model.weight:set_grad(nil)
    end
  end)
  say(divisor, table.concat(seen, ","))
  say(divisor .. " mean", table.concat(means, ","))
end

for name, precision in ms.sorted_pairs {
  full = false, param = { param = "bf16" }, reduce = { reduce = "bf16" },
} do
  local model = ms.ddp(ms.nn.Linear(8, 4),
    { precision = precision or nil, comm_hook = "bf16_compress" })
  for _ in ms.steps(2) do model(ms.ones { 2, 8 }):sum():backward() end
  say("bytes " .. name, model:stats().buckets[1].bytes)
end
local low = ms.ddp(ms.nn.Linear(8, 4):to "bf16")
low(ms.ones { 2, 8, dtype = "bf16" }):sum():backward()
say("bytes bf16", low:stats().buckets[1].bytes)

if world:size() == 3 then
  local part = world:split { { 0 }, { 1, 2 } }
  local set = assert(ms.data.bytes "text")
  say("slice",
    ms.data.to_text(set:loader { batch = 4, length = 2, group = part }:next():reshape(-1)))
end
]]

describe("what meta.lua answers", function()
  local folder
  setup(function()
    folder = command.folder()
    command.write(folder .. "/answers.lua", SCRIPT)
    command.write(folder .. "/text", "abcdefghijklm")
  end)
  teardown(function() command.remove(folder) end)

  -- rank -> name -> text
  local function answers(ranks, switches)
    local out = command.succeed(folder, ("run answers.lua -n %d %s"):format(ranks, switches or ""))
    local list = {}
    for rank, name, text in out:gmatch "(%d+) ([%w ]+): ([^\n]*)" do
      rank = math.tointeger(tonumber(rank))
      list[rank] = list[rank] or {}
      list[rank][name] = text
    end
    return list
  end

  it("holds: equal seeds give equal numbers on all ranks, at any number of ranks", function()
    local alone = answers(1)[0]
    for _, ranks in ipairs { 2, 3 } do
      for _, switches in ipairs { "", "--thread-ranks" } do
        local found, own = answers(ranks, switches), {}
        for rank = 0, ranks - 1 do
          assert.equal(alone.numbers, found[rank].numbers)
          assert.is_nil(own[found[rank]["own numbers"]])
          own[found[rank]["own numbers"]] = true
        end
      end
    end
  end)

  it("holds: dtypes of indices, divisors under join, bytes of buckets", function()
    local found = answers(3)
    for rank = 0, 2 do
      assert.equal("i64 i64 i64 i64 i32", found[rank].indices)
      assert.equal("3,3,3", found[rank].all)
      assert.equal("3,2,1", found[rank].live)
      for _, name in ipairs { "full", "param", "reduce" } do
        assert.equal("144", found[rank]["bytes " .. name], name)
      end
      assert.equal("72", found[rank]["bytes bf16"])
      assert.equal(({ [0] = "abcdefgh", "abcd", "efgh" })[rank], found[rank].slice)
    end
    -- Ranks r = 0, 1, 2 have r + 1 inputs; each gradient is 1.
    assert.equal("1.0000,0.6667,0.3333", found[2]["all mean"])
    assert.equal("1.0000,1.0000,1.0000", found[2]["live mean"])
  end)

  it("holds: bytes of scales and codes, at odd lengths too", function()
    local function ceil(a, b) return (a + b - 1) // b end
    local codes = {
      int8 = function(n) return n end,
      fp8 = function(n) return n end,
      int4 = function(n) return ceil(n, 2) end, int2 = function(n) return ceil(n, 4) end,
      fp4 = function(n) return ceil(n, 2) end, sign = function(n) return ceil(n, 8) end,
    }
    for kind, count in pairs(codes) do
      for _, block in ipairs { 8, 256 } do
        local codec = ms.codec(kind, { block = block })
        for _, n in ipairs { 1, 2, 7, 8, 9, 255, 256, 257, 511, 513 } do
          assert.equal(4 * ceil(n, block) + count(n), codec:bytes(n), kind .. " of " .. n)
          assert.same({ codec:bytes(n) }, codec:encode(ms.ones { n }):shape())
        end
      end
    end
    assert.equal(2, ms.codec("sign", { scale = false }):bytes(9))
    -- 7, 7, 7 of a block whose greatest is 7: codes 15, 15 and, in the low half of the last byte,
    -- 15.
    local payload = ms.codec "int4":encode(ms.full(7, { 3 })):to_table()
    assert.same({ 0, 0, 128, 63, 0xff, 0x0f }, payload)
  end)
end)
