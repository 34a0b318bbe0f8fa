-- The hazards of a C library in Lua, as far as a script can make them: whatever it does, it gets an
-- error or a value, never a crash. Here: errors in hooks, scopes, workers and strange places, and
-- what hooks may not call. Hosts with several engines are in recipes/embed.
-- luacheck: ignore 512
local ms = require "moonshard"
local hazards = require "hazards"
local core = require "moonshard.core"
local support = require "support"
local near, fails = support.near, support.fails
local leaf = hazards.leaf

describe("errors in hooks and scopes", function()
  it("leave the engine as it was", function()
    local x = leaf { 1, 2 }
    local ways = {
      function(f) x:on_grad(f) x:sum():backward() end,
      function(f) ms.no_grad(f) end,
      function(f) ms.autocast("bf16", f) end,
      function(f) ms.recompute(f, x) end,
      function(f) ms.custom { forward = f, backward = f }(x) end,
      function(f)
        ms.custom { forward = function(t) return t end, backward = f }(x):sum():backward()
      end,
      function(f) ms.stream "bindings_other":run(f) end,
      function(f) ms.all { x }:and_then(f) end,
      function(f) for _ in ms.steps(1) do f() end end,
    }
    for _, way in ipairs(ways) do
      for _, value in ipairs { "text", 5, {}, true } do
        x = leaf { 1, 2 }
        local ok, failure = pcall(way, function() error(value, 0) end)
        assert.is_false(ok)
        assert.is_true(rawequal(value, failure))
        assert.is_true(core.is_recording())
        assert.is_false(core.in_hook())
        assert.equal("compute", ms.stream():name())
        assert.is_false(select(2, core.step()))
        x = leaf { 1, 2 }
        ;(x * x):sum():backward()
        near({ 2, 4 }, x:grad())
      end
    end
  end)
end)

describe("errors of workers", function()
  it("are raised at the next call that waits, with the line that asked, once", function()
    local line
    local ok, message = pcall(function()
      line = debug.getinfo(1, "l").currentline + 1
      local out = ms.tensor({ 3, 99 }):embedding(ms.ones { 4, 2 })
      return out:to_table()
    end)
    assert.is_false(ok)
    assert.truthy(message:find("embedding", 1, true) and message:find("99", 1, true), message)
    assert.truthy(message:find(("bindings_errors_spec.lua:%d"):format(line), 1, true), message)
    near({ 1 }, ms.ones { 1 })
  end)

  it("spoil what was computed from them", function()
    local after
    -- The error may be noticed as soon as the next task is enqueued.
    local first = {
      pcall(function()
        after = ms.tensor({ 77 }):embedding(ms.ones { 4, 2 })
        after = after * 2
        ms.synchronize()
      end),
    }
    assert.is_false(first[1])
    assert.truthy(first[2]:find("embedding", 1, true), first[2])
    local ok, message = pcall(function() return after:to_table() end)
    assert.is_false(ok)
    assert.truthy(message:find("never computed", 1, true), message)
    assert.is_false((pcall(function() return after * 2 end)))
    assert.is_false((pcall(function() return core.probe(after[1][1]):value() end)))
    -- Memory that was written before and after is unchanged.
    near({ 1 }, ms.ones { 1 })
    after:fill_(3)
    near({ { 3, 3 } }, after)
  end)
end)

describe("calls that are not allowed in hooks", function()
  local model = ms.nn.Linear(2, 2)
  local optimizer = ms.optim.sgd(model)
  local t, future = ms.ones { 1 }, ms.all { ms.ones { 1 } }
  local x = ms.ones { 1, 2, requires_grad = true }

  -- Those that wait, walk the graph, or register.
  local refused = {
    backward = function() model(x):sum():backward() end,
    step = function() optimizer:step() end,
    steps = function() for _ in ms.steps(1) do return end end,
    item = function() return t:item() end,
    to_table = function() return t:to_table() end,
    show = function() return t:show() end,
    bytes = function() return core.bytes(t) end,
    synchronize = function() ms.synchronize() end,
    sync = function() future:sync() end,
    stream = function() ms.stream():sync() end,
    on_grad = function() x:on_grad(print) end,
    on_grad_ready = function() model.weight:on_grad_ready(print) end,
    save = function() ms.safetensors.save("/tmp/never", { t = t }) end,
    to_text = function() ms.data.to_text(ms.tensor { 65 }) end,
  }
  -- Those that only enqueue, or touch what the walk may hold.
  local allowed = {
    zero_grad = function() optimizer:zero_grad() end,
    set_grad = function() model.weight:set_grad(nil) end,
    collect = function() core.collect() end,
    add = function() return t + 1 end,
    no_grad = function() return ms.no_grad(function() return t * 2 end) end,
    graph = function() return x:matmul(x:t()) end,
    freeze = function() model.weight:requires_grad_(false) model.weight:requires_grad_() end,
    load = function() model:load_state(model:state()) end,
    close = function() local c <close> = ms.ones { 2 } end, -- luacheck: ignore 211
    memory = function() ms.memory() end,
    gc = function() collectgarbage() end,
    and_then = function() future:and_then(function() end) end,
    keep = function() return (t * 2):keep() end,
    recompute = function() return ms.recompute(function(y) return y * 2 end, x) end,
    custom = function()
      return ms.custom {
        forward = function(y) return y * 2, { y } end, backward = function(d) return d end,
      }(x)
    end,
  }

  local function in_hook(name, f)
    local points = {
      on_grad = function()
        local u = leaf { 1 }
        u:on_grad(function() f() end)
        u:sum():backward()
      end,
      inner = function()
        local u = leaf { 1 } * 2
        u:on_grad(function() f() end)
        u:sum():backward()
      end,
      on_grad_ready = function()
        local p = ms.nn.Parameter(ms.ones { 1 })
        p:on_grad_ready(function() f() end)
        p:sum():backward()
      end,
      model = function()
        local r = model.weight:on_grad(function() f() end)
        local ok, e = pcall(function() model(x):sum():backward() end)
        r()
        if not ok then error(e, 0) end
      end,
      and_then = function() future:and_then(function() f() end) end,
      module = function()
        local r = model:hook("backward", function() f() end)
        local ok, e = pcall(function() model(x):sum():backward() end)
        r()
        if not ok then error(e, 0) end
      end,
    }
    local results = {}
    for point, run in ms.sorted_pairs(points) do
      results[#results + 1] = { point .. "/" .. name, pcall(run) }
    end
    optimizer:zero_grad()
    return results
  end

  for name, f in ms.sorted_pairs(refused) do
    it("refuses " .. name, function()
      for _, result in ipairs(in_hook(name, f)) do
        assert.is_false(result[2], result[1])
        assert.truthy(tostring(result[3]):find("inside a hook", 1, true),
          result[1] .. ": " .. tostring(result[3]))
      end
    end)
  end

  for name, f in ms.sorted_pairs(allowed) do
    it("survives " .. name, function()
      for _, result in ipairs(in_hook(name, f)) do
        assert.is_true(result[2], result[1] .. ": " .. tostring(result[3]))
      end
      ms.synchronize()
    end)
  end

  it("survives hooks that remove each other, and themselves", function()
    local u, removers, calls = leaf { 1 }, {}, 0
    for i = 1, 6 do
      removers[i] = u:on_grad(function()
        calls = calls + 1
        removers[i]()
        removers[7 - i]()
        collectgarbage()
      end)
    end
    u:sum():backward()
    u:sum():backward()
    assert.is_true(calls >= 1 and calls <= 6)
  end)
end)

describe("errors in strange places", function()
  it("in an error handler", function()
    local ok, failure = xpcall(ms.no_grad, function() error "handler" end, function()
      error "inner"
    end)
    assert.is_false(ok)
    assert.not_nil(failure)
    ok = xpcall(function() ms.zeros { 2, wrong = 1 } end, function()
      return ms.zeros({ 2 }) + ms.zeros { 3 }
    end)
    assert.is_false(ok)
    near({ 1 }, ms.ones { 1 })
  end)

  it("in __close inside a scope", function()
    local function failing()
      return setmetatable({}, { __close = function() error "closing" end })
    end
    fails(function()
      ms.no_grad(function() local c <close> = failing() end) -- luacheck: ignore 211
    end, "closing")
    fails(function()
      ms.no_grad(function() local c <close> = failing() error "body" end) -- luacheck: ignore 211
    end, "closing")
    fails(function()
      for _ in ms.steps(2) do local c <close> = failing() break end -- luacheck: ignore 211 512
    end, "closing")
    assert.is_true(core.is_recording())
    assert.is_false(select(2, core.step()))
  end)

  it("with values that are no strings", function()
    for _, value in ipairs {
      5, true, {}, print, io.stdout, coroutine.create(print), ms.ones { 1 },
    } do
      local ok, failure = pcall(ms.no_grad, function() error(value) end)
      assert.is_false(ok)
      assert.is_true(rawequal(value, failure))
    end
    local ok, failure = pcall(ms.no_grad, function() error() end)
    assert.is_false(ok)
    -- The error value nil has no message; this message at least has the place.
    assert.truthy(failure:find("not a string", 1, true))
    local bad = setmetatable({}, { __tostring = function() error "tostring" end })
    ok, failure = pcall(ms.no_grad, function() error(bad) end)
    assert.is_false(ok)
    assert.is_true(rawequal(bad, failure))
  end)

  it("in a coroutine, inside a step and a scope", function()
    for _ in ms.steps(1) do
      local routine = coroutine.create(function()
        ms.no_grad(function() error "in the coroutine" end)
      end)
      local ok, message = coroutine.resume(routine)
      assert.is_false(ok)
      assert.truthy(message:find("in the coroutine", 1, true))
      assert.is_true(core.is_recording())
    end
  end)
end)
