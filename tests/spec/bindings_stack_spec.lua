-- The hazards of a C library in Lua, as far as a script can make them: whatever it does, it gets an
-- error or a value, never a crash. Here: yields, deep and wide structures, recursion.
-- Hosts with several engines are in recipes/embed.
-- luacheck: ignore 512
local ms = require "moonshard"
local hazards = require "hazards"
local core = require "moonshard.core"
local support = require "support"
local near, fails = support.near, support.fails
local leaf = hazards.leaf

describe("yields", function()
  it("across the engine are errors", function()
    local x = leaf { 1 }
    local ways = {
      hook = function() x:on_grad(coroutine.yield) x:sum():backward() end,
      no_grad = function() ms.no_grad(coroutine.yield) end,
      autocast = function() ms.autocast("bf16", coroutine.yield) end,
      recompute = function() ms.recompute(coroutine.yield, x) end,
      forward = function() ms.custom { forward = coroutine.yield, backward = print }(x) end,
      backward = function()
        ms.custom { forward = function(t) return t end, backward = coroutine.yield }(x):sum()
          :backward()
      end,
      stream = function() ms.stream():run(coroutine.yield) end,
      and_then = function() ms.all { x }:and_then(coroutine.yield) end,
    }
    for name, way in ms.sorted_pairs(ways) do
      x = leaf { 1 }
      local ok, message = coroutine.resume(coroutine.create(way))
      assert.is_false(ok, name)
      assert.truthy(tostring(message):find("yield", 1, true), name .. ": " .. tostring(message))
      assert.is_true(core.is_recording())
      assert.equal("compute", ms.stream():name())
    end
  end)

  it("outside of it work, also in the middle of a step", function()
    local run = coroutine.wrap(function()
      for step in ms.steps(3) do
        local x = leaf { step }
        ;(x * 2):sum():backward()
        coroutine.yield(x:grad():item())
      end
      return "end"
    end)
    assert.equal(2, run())
    near({ 3 }, ms.ones { 1 } * 3)
    collectgarbage()
    assert.equal(2, run())
    assert.equal(2, run())
    assert.equal("end", run())
  end)

  it("hooks made in a coroutine that is gone still run", function()
    local x, seen = leaf { 1 }, 0
    coroutine.wrap(function() x:on_grad(function() seen = seen + 1 end) end)()
    collectgarbage()
    collectgarbage()
    x:sum():backward()
    coroutine.wrap(function() x:sum():backward() end)()
    assert.equal(2, seen)
  end)

  it("a step in a coroutine that is closed ends", function()
    local held
    local routine = coroutine.create(function()
      for _ in ms.steps(3) do held = ms.ones { 1 } coroutine.yield() end
    end)
    coroutine.resume(routine)
    assert.is_true(select(2, core.step()))
    coroutine.close(routine)
    assert.is_false(select(2, core.step()))
    fails(function() held:sum() end, "step ended")
  end)
end)

describe("deep and wide", function()
  it("tables nested deeper than any tensor", function()
    local t = 1
    for _ = 1, 10000 do t = { t } end
    fails(function() ms.tensor(t) end, "8")
    local itself = {}
    itself[1] = itself
    fails(function() ms.tensor(itself) end, "8")
    assert.has_error(function() core.json_encode(itself) end)
    assert.has_error(function() core.json_encode(t) end)
    assert.has_error(function() ms.safetensors.save("/tmp/never", t) end)
  end)

  it("tables with lists beside numbers, and tensors of many empty lists", function()
    for _, list in ipairs { { 1, {} }, { {}, 1 }, { { 1 }, { {} } }, { { {} }, {} } } do
      fails(function() ms.tensor(list) end, "tensor: ")
    end
    fails(function() ms.zeros({ 100000000, 0 }):to_table() end, "a million")
    assert.same({ {}, {} }, ms.zeros({ 2, 0 }):to_table())
  end)

  it("many arguments, many tensors, many results", function()
    local ones = {}
    for i = 1, 240 do ones[i] = 1 end
    local t = ms.ones { 1 }
    fails(function() t:view(table.unpack(ones)) end, "8")
    fails(function() t:permute(table.unpack(ones)) end)
    local many = {}
    for i = 1, 3000 do many[i] = t end
    assert.equal(3000, ms.cat(many):numel())
    assert.same({ 3000, 1 }, ms.stack(many):shape())
    assert.equal(3000, #ms.ones({ 3000 }):split(1))
    assert.equal(240, select("#", ms.no_grad(function() return table.unpack(ones) end)))
    local got = ms.recompute(function(...) return (select(1, ...)) * select("#", ...) end, t,
      table.unpack(ones))
    assert.equal(241, got:item())
    local counted = ms.custom {
      forward = function(...) return (select(1, ...)) * select("#", ...) end, backward = print,
    }
    assert.equal(241, counted(t, table.unpack(ones)):item())
    pcall(ms.custom { forward = function() return t end, backward = print },
      table.unpack(ones, 1, 100000))
    local huge = {}
    for i = 1, 200000 do huge[i] = "name" .. i end
    pcall(core.nearest, "nam", huge)
    pcall(function() t:view(table.unpack(huge)) end)
    pcall(ms.recompute, function() return t end, table.unpack(huge))
    near({ 1 }, t)
  end)

  it("near the end of Lua's stack", function()
    local x = leaf { 1 }
    local function deep(n, f) if n == 0 then return f() end return (deep(n - 1, f)) end
    for _, depth in ipairs { 150, 180, 190, 195, 198 } do
      pcall(deep, depth, function()
        return ms.no_grad(function() return ms.tensor { { 1 } }:to_table() end)
      end)
    end
    assert.is_true(deep(15000, function() (x * 2):sum():backward() return true end))
    local function endless(n) return (n % 5000 == 0 and (x * 1):sum() or 1) + endless(n + 1) end
    local ok, message = pcall(endless, 0)
    assert.is_false(ok)
    assert.truthy(tostring(message):find("overflow", 1, true), message)
    near({ 2 }, x:grad())
  end)
end)

describe("deep recursion", function()
  it("through scopes ends in an error", function()
    local function scopes() return ms.no_grad(scopes) end
    local function nested(x) return ms.recompute(nested, x) end
    local function streams() return ms.stream():run(streams) end
    local x = leaf { 1 }
    local inner
    inner = ms.custom { forward = function(t) return inner(t) end, backward = print }
    for _, f in ipairs {
      scopes, streams, function() return nested(x) end, function() return inner(x) end,
    } do
      local ok, message = pcall(f)
      assert.is_false(ok)
      assert.truthy(tostring(message):find("overflow", 1, true), tostring(message))
      assert.is_true(core.is_recording())
      assert.equal("compute", ms.stream():name())
      near({ 1 }, ms.ones { 1 })
    end
  end)

  it("of callbacks does not recurse", function()
    local count = 0
    local f = ms.all {}
    local function again()
      count = count + 1
      if count < 20000 then f:and_then(again) end
    end
    f:and_then(again)
    assert.equal(20000, count)
  end)

  it("of modules that hold each other in a chain", function()
    local top = ms.nn.List {}
    local at = top
    for _ = 1, 150 do
      at.inner = ms.nn.List {}
      at = at.inner
    end
    at.weight = ms.nn.Parameter(ms.ones { 1 })
    assert.equal(1, #top:parameters())
    assert.equal(150 * 6 + 6, #at.weight:name())
  end)

  it("of modules that call each other still names the script's line", function()
    local at = ms.nn.Linear(2, 2)
    for _ = 1, 40 do at = ms.nn.Sequential(at) end
    fails(function() at(ms.ones { 3 }) end, "linear")
  end)
end)
