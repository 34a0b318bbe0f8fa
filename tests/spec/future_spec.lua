-- Futures and streams: values, callbacks and their order, errors.
local ms = require "moonshard"
local support = require "support"
local near, fails = support.near, support.fails

local function ready(values) return ms.all { ms.tensor(values, "f32") } end

describe("a future", function()
  it("has a value, as often as it is asked", function()
    local t = ms.tensor { 1., 2 }
    local f = ms.all { t, ms.tensor { 3. } }
    assert.is_true(f:value()[1] == t)
    near({ 3 }, f:value()[2])
    near({ 1, 2 }, f:sync()[1])
  end)

  it("keeps its tensors beyond their step", function()
    local f
    for _ in ms.steps(1) do
      f = ms.all { ms.ones { 2 } }:and_then(function(list) return list[1] * 5 end)
    end
    near({ 5, 5 }, f:sync())
  end)

  it("and_then gives the value of the function; nothing means the same value", function()
    local f = ready { 2 }:and_then(function(list) return list[1] * 3 end)
    near({ 6 }, f:value())
    local g = f:and_then(function() end)
    assert.is_true(g:value() == f:value())
    local list = f:and_then(function(t) return { t, t + 1 } end):value()
    near({ 7 }, list[2])
    near({ 12 }, f:and_then(function(t)
      return ms.all { t * 2 }:and_then(function(l) return l[1] end)
    end):value())
  end)

  it("ends with the step in which its value is taken", function()
    local early, kept, late, held, live = nil, nil, nil, nil, {}
    local outside, own = ms.ones { 4 }, nil
    for step in ms.steps(6) do
      local world = ms.world()
      -- What lives on by itself, or is kept, does so in a future, too.
      own = own or ms.ones({ 4 }):keep()
      world:all_reduce(outside):value():add_(1)
      world:all_reduce(own):value():add_(1)
      -- Values that are not kept free their memory at the end of the step, without a collection.
      world:all_reduce(ms.ones { 1024 }):value():sum()
      world:all_gather(ms.ones { 1024 }):sync()
      ms.all { world:all_reduce(ms.ones { 1024 }), ms.ones { 1024 } }:value()
      if step == 0 then
        early = world:all_reduce(ms.full(2, { 4 }))
        early:value()
        kept = world:all_reduce(ms.full(3, { 4 })):value():keep()
        late = world:all_reduce(ms.full(4, { 4 }))
        held = world:all_reduce(ms.full(5, { 4 }))
      elseif step == 1 then
        assert.equal(4, late:value():max():item()) -- two steps hold it
        assert.equal(5, held:and_then(function(t) return t:clone() end):value():max():item())
      end
      live[step] = ms.memory().live
    end
    assert.equal(live[3], live[5])
    assert.equal(3, kept:max():item())
    assert.equal(7, outside:max():item())
    assert.equal(7, own:max():item())
    for _, one in ipairs { early, late } do
      local ok, message = pcall(function() return one:value():max() end)
      assert.is_false(ok)
      assert.matches("was the value of a future, and was released at the end of the step", message)
    end
  end)

  it("flattens futures that are not known yet", function()
    local f = ready { 1 }:and_then(function(list)
      return ms.all { list[1] + 1 }:and_then(function(l)
        return ms.all { l[1] * 10 }:and_then(function(m) return m[1] + 5 end)
      end)
    end)
    near({ 25 }, f:value())
  end)

  it("runs callbacks flat, in order of registration", function()
    local order, f = {}, ready { 1 }
    f:and_then(function()
      order[#order + 1] = "a"
      local inner = f:and_then(function() order[#order + 1] = "a1" end)
      inner:and_then(function() order[#order + 1] = "a11" end)
      f:and_then(function() order[#order + 1] = "a2" end)
      order[#order + 1] = "a ends"
    end):and_then(function() order[#order + 1] = "after a" end)
    f:and_then(function() order[#order + 1] = "b" end)
    assert.same({ "a", "a ends", "a1", "a11", "a2", "after a", "b" }, order)
  end)

  it("runs what a gradient hook registers when the hook has returned", function()
    local order, x, seen = {}, ms.ones { 2, requires_grad = true }, nil
    local y = x * 2
    y:on_grad(function(g)
      local f = ms.all { g:clone() }
      f:and_then(function(list) order[#order + 1] = "callback" seen = (list[1] * 7):keep() end)
      assert.has_error(function() f:and_then(function() end):value() end)
      order[#order + 1] = "hook"
    end)
    y:on_grad(function() order[#order + 1] = "second hook" end)
    y:sum():backward()
    assert.same({ "hook", "callback", "second hook" }, order)
    near({ 7, 7 }, seen)
  end)

  it("all waits for callbacks that have not run", function()
    local x, result = ms.ones { 1, requires_grad = true }, nil
    x:on_grad(function(g)
      local a = ms.all { g:clone() }:and_then(function(list) return list[1] + 1 end)
      local b = a:and_then(function(t) return t * 10 end)
      ms.all { b, a, g:clone() }:and_then(function(list) result = list end)
    end)
    x:sum():backward()
    near({ 20 }, result[1])
    near({ 2 }, result[2])
    near({ 1 }, result[3])
  end)

  it("runs on its own stream, and orders the work", function()
    local side, result = ms.stream "future_side", nil
    local t = ms.zeros { 1 << 18 }
    local f
    side:run(function()
      for _ = 1, 20 do t:add_(1) end
      f = ms.all { t }
    end)
    f:and_then(function(list)
      assert.equal("future_side", ms.stream():name())
      result = list[1]:mean()
    end)
    assert.not_equal("future_side", ms.stream():name())
    near(20, result)
    near(20, f:value()[1]:max())
    local other = ms.stream "future_other"
    other:wait(f)
    other:wait(t)
    side:sync()
    assert.is_true(ms.stream "future_other" == other)
    assert.is_false(side == other)
    local a, b = side:run(function() return 1, 2 end)
    assert.same({ 1, 2 }, { a, b })
  end)

  it("passes on what a callback raises, and goes on", function()
    local f, ran = ready { 1 }, false
    fails(function() f:and_then(function() error "in the callback" end) end, "in the callback")
    local object = {}
    local ok, failure = pcall(f.and_then, f, function() error(object) end)
    assert.is_false(ok)
    assert.is_true(rawequal(object, failure))
    f:and_then(function() ran = true end)
    assert.is_true(ran)
    -- A wait for a value that will not come raises the reason.
    local dependent
    pcall(function()
      f:and_then(function()
        local bad = f:and_then(function() error "first" end)
        dependent = bad:and_then(function() end)
      end)
    end)
    fails(function() dependent:value() end, "first")
    fails(function() dependent:and_then(function() end) end, "first")
  end)

  it("says in which callback a yield was", function()
    local line = debug.getinfo(1, "l").currentline + 2
    local message = fails(function()
      ready { 1 }:and_then(function() coroutine.yield() end)
    end, "and_then", "yield")
    assert.truthy(message:find(("future_spec.lua:%d: "):format(line), 1, true), message)
  end)

  it("explains wrong use", function()
    local f = ready { 1 }
    fails(function() f:and_then(5) end, "function", "number")
    fails(function() ms.all(5) end, "list")
    fails(function() ms.all { 5 } end, "item 1", "number")
    fails(function() ms.stream():wait(5) end, "future", "number")
    fails(function() f:and_then(function() f:sync() end) end, "inside a hook", "value()")
    fails(function() f:and_then(function(list) return list[1]:item() end) end, "inside a hook")
    fails(function() f:and_then(function() ms.synchronize() end) end, "inside a hook")
    assert.error_matches(function() f:and_then(function() coroutine.yield() end) end,
      "attempt to yield")
    fails(function() f:and_then(function() f:and_then(function() end):value() end) end,
      "not run yet")
    fails(function()
      local own
      f:and_then(function()
        own = f:and_then(function() return own end)
      end)
    end, "waits for it")
    fails(function() ms.stream("x", { prio = "high" }) end, "priority")
    fails(function() ms.stream("x", { priority = "highest" }) end, "highest", "high")
    assert.equal("locked", getmetatable(f))
  end)

  it("in a hook that failed, what it had registered is given up", function()
    local x, dependent, ran = ms.ones { 1, requires_grad = true }, nil, false
    x:on_grad(function(g)
      dependent = ms.all { g:clone() }:and_then(function() ran = true end)
      error "the hook failed"
    end)
    fails(function() x:sum():backward() end, "the hook failed")
    ready { 1 }:and_then(function() end)
    assert.is_false(ran)
    fails(function() dependent:value() end, "failed")
  end)
end)

describe("a stream", function()
  it("gives back what failed on it, with the line that asked", function()
    local stream = ms.stream "future_failing"
    local line
    local ok, message = pcall(function()
      stream:run(function()
        line = debug.getinfo(1, "l").currentline + 1
        ms.tensor({ 9 }):embedding(ms.ones { 3, 2 })
      end)
      stream:sync()
    end)
    assert.is_false(ok)
    assert.truthy(
      message:find("embedding", 1, true) and message:find((":%d"):format(line), 1, true), message)
  end)

  it("keeps the priority with which it was made", function()
    local high = ms.stream("future_high", { priority = "high" })
    assert.is_true(ms.stream "future_high" == high)
    assert.is_true(ms.stream("future_high", { priority = "high" }) == high)
    fails(function() ms.stream("future_high", { priority = "normal" }) end, "future_high",
      "another priority")
    fails(function() ms.stream(nil, { priority = "high" }) end, "another priority")
    assert.is_true(ms.stream(nil, { priority = "normal" }) == ms.stream())
  end)

  it("stays the current one only inside run, also after an error", function()
    local before = ms.stream():name()
    fails(function() ms.stream "future_side":run(function() error "out" end) end, "out")
    assert.equal(before, ms.stream():name())
  end)
end)
