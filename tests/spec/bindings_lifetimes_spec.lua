-- The hazards of a C library in Lua, as far as a script can make them: whatever it does, it gets an
-- error or a value, never a crash. Here: finalizers, borrowed gradients, the collector, opening and
-- closing. Hosts with several engines are in recipes/embed.
-- luacheck: ignore 512
local ms = require "moonshard"
local hazards = require "hazards"
local core = require "moonshard.core"
local support = require "support"
local near, fails, shell = support.near, support.fails, support.shell
local leaf, training, specimens = hazards.leaf, hazards.training, hazards.specimens

describe("finalizers", function()
  it("cannot be reached by getmetatable", function()
    local dataset = assert(ms.data.bytes {
      (os.getenv "MOONSHARD_SOURCE" or ".") .. "/tests/spec/bindings_lifetimes_spec.lua",
    })
    for _, object in ipairs {
      ms.ones { 1 }, ms.stream(), core.probe(ms.ones {}), dataset,
      dataset:loader { batch = 1, length = 2 }, ms.all {},
    } do
      assert.equal("locked", getmetatable(object))
      assert.has_error(function() setmetatable(object, {}) end)
    end
  end)

  it("may run twice, on anything, before use", function()
    local t, probe = ms.ones { 4 }, core.probe(ms.ones {})
    local meta = debug.getmetatable(t)
    meta.__close(t)
    meta.__close(t)
    fails(function() t:sum() end, "was closed")
    meta.__gc(t)
    meta.__gc(t)
    assert.has_error(function() t:sum() end)
    for _, value in ms.sorted_pairs(specimens()) do
      if not core.is_tensor(value) then pcall(meta.__gc, value) end
    end
    local closing = debug.getmetatable(probe)
    closing.__close(probe)
    closing.__gc(probe)
    fails(function() probe:value() end, "closed")
    t = nil -- luacheck: ignore 311
    core.collect()
    near({ 1 }, ms.ones { 1 })
  end)
end)

describe("a borrowed gradient", function()
  it("ends with its hook, wherever it was put", function()
    local upvalue, place, routine = nil, {}, nil
    local x = leaf { 1, 2 }
    x:on_grad(function(g)
      upvalue, place[1], place[g] = g, g, true
      borrowed_global = g -- luacheck: ignore 111
      routine = coroutine.wrap(function() coroutine.yield(g:shape()) return g:sum() end)
      assert.same({ 2 }, routine())
      place.clone, place.alias, place.view = g:clone(), g:detach(), g:view(2, 1)
    end)
    ;(x * 3):sum():backward()
    for _, use in ipairs {
      function() upvalue:sum() end,
      function() place[1]:shape() end,
      function() borrowed_global:item() end, -- luacheck: ignore 113
      function() routine() end,
      function() for key in pairs(place) do if core.is_tensor(key) then key:keep() end end end,
    } do
      local ok, message = pcall(use)
      assert.is_false(ok)
      assert.truthy(message:find("only valid inside its gradient hook", 1, true), message)
    end
    borrowed_global = nil -- luacheck: ignore 111
    near({ 3, 3 }, place.clone)
    near({ 3, 3 }, place.alias)
    near({ { 3 }, { 3 } }, place.view)
  end)

  it("stays with who gave it back as the replacement", function()
    local x, kept = leaf { 1 }, nil
    x:on_grad(function(g) kept = g return g end)
    x:sum():backward()
    near({ 1 }, x:grad())
    pcall(function() kept:fill_(9) end)
    ms.synchronize()
  end)
end)

describe("a model that was dropped", function()
  for name, wrap in pairs { ddp = ms.ddp, fsdp = ms.fsdp } do
    for hook, make in pairs {
      ["a link in Lua"] = function(count)
        return function(bucket, next) count() return next(bucket) end
      end,
      ["a chain"] = function(count)
        return ms.hooks.chain { function(bucket, next) count() return next(bucket) end,
          "bf16_compress" }
      end,
    } do
      it("goes with its parameters and its hook: " .. name .. ", " .. hook, function()
        local weak, calls = setmetatable({}, { __mode = "v" }), 0
        do
          local link = make(function() calls = calls + 1 end)
          local model = wrap(ms.nn.Linear(2, 2), { comm_hook = link })
          local optimizer = ms.optim.sgd(model, { lr = 0.1 })
          model(ms.ones { 1, 2 }):sum():backward()
          optimizer:step()
          weak.link, weak.model, weak.module = link, model, model.module
          weak.parameter = model:parameters()[1]
        end
        for _ = 1, 3 do core.collect() end
        assert.is_true(calls > 0)
        assert.is_nil(next(weak))
      end)
    end
  end
end)

describe("the collector, at every step", function()
  for _, mode in ipairs { "incremental", "generational" } do
    it("changes nothing: " .. mode, function()
      local steps = os.getenv "MOONSHARD_TEST_FULL" == "1" and 4 or 2
      local plain = training(steps)
      local before = collectgarbage(mode)
      -- Between every 3 instructions of Lua, also in hooks.
      debug.sethook(function() collectgarbage("step", 0) end, "", 3)
      local ok, stressed = pcall(training, steps, function(g) return g:clone() end)
      debug.sethook()
      collectgarbage(before)
      assert.is_true(ok, tostring(stressed))
      assert.is_true(plain == stressed)
    end)
  end

  it("whole collections neither", function()
    local plain = training(2)
    debug.sethook(function() collectgarbage() end, "", 50)
    local ok, stressed = pcall(training, 2)
    debug.sethook()
    assert.is_true(ok, tostring(stressed))
    assert.is_true(plain == stressed)
  end)

  it("frees nothing that a stream still reads", function()
    for _ = 1, 20 do
      local sum = ms.zeros { 1 << 12 }
      for i = 1, 50 do
        sum:add_(ms.full(i, { 1 << 12 }))
        if i % 10 == 0 then core.collect() end
      end
      assert.equal(1275, sum:max():item())
    end
  end)
end)

-- Runs a program text in an interpreter of its own; it must end by itself with this code.
local function alone(text, expected)
  local path = os.tmpname()
  local file = assert(io.open(path, "w"))
  file:write(text)
  file:close()
  local interpreter = arg and arg[-1] or "lua5.4"
  for i = -1, -20, -1 do if arg and arg[i] then interpreter = arg[i] end end
  -- A program that exits inside a hook does not unwind the engine's frames, so it may leak; all
  -- others must free everything.
  local quiet = text:find("os.exit(0, true) end) x:sum", 1, true)
    and "ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=0 " or ""
  local code, output = shell(("%s'%s' '%s'"):format(quiet, interpreter, path))
  os.remove(path)
  assert.equal(expected or 0, code, output)
  return output
end

describe("opening and closing", function()
  it("twice in one state gives the same module", function()
    local first = package.loaded["moonshard.core"]
    package.loaded["moonshard.core"] = nil
    local second = require "moonshard.core"
    assert.is_true(first == second)
    near({ 1 }, ms.ones { 1 })
  end)

  it("changes no global and no standard table", function()
    alone [=[
      local before = {}
      for _, t in ipairs { _G, string, table, math, io, os, debug, coroutine, package } do
        for k, v in pairs(t) do before[#before + 1] = { t, k, v } end
      end
      local ms = require "moonshard"
      local _ = ms.nn, ms.optim, ms.data, ms.train, ms.config, ms.all, ms.metric, ms.checkpoint,
        ms.trace, ms.report
      for _, item in ipairs(before) do assert(item[1][item[2]] == item[3], item[2]) end
      for _, t in ipairs { _G, string, table, math, io, os, debug, coroutine, package } do
        for k in pairs(t) do
          local found
          for _, item in ipairs(before) do found = found or item[1] == t and item[2] == k end
          assert(found, "new: " .. tostring(k))
        end
      end
      assert(getmetatable("").__index == string)
    ]=]
  end)

  it("closes in any order", function()
    local scripts = {
      "t = ms.ones { 1000 } u = t:view(10, 100) p = require('moonshard.core').probe(t:sum())",
      "for _ in ms.steps(5) do x = ms.ones { 2 } os.exit(0, true) end",
      "x = ms.ones { 2, requires_grad = true } y = x * 2 y:on_grad(function() return y end) z = \z
        ms.recompute(function(t) return t * y end, x)",
      "x = ms.ones { 2, requires_grad = true } f = ms.custom { forward = function(t) \z
        return t * 2, { t } end, backward = function(d) return y and d end } y = f(x) z = f(x) * 2",
      "x = ms.ones { 2, requires_grad = true } ms.custom { forward = function(t) return t end, \z
        backward = function() os.exit(0, true) end }(x):sum():backward()",
      "x = ms.ones { 2, requires_grad = true } ms.custom { forward = function() \z
        os.exit(0, true) end, backward = print }(x)",
      "x = ms.ones { 2, requires_grad = true } x:on_grad(function() os.exit(0, true) end) \z
        x:sum():backward()",
      "setmetatable({}, { __gc = function() local ok, e = pcall(function() return ms.ones { 2 \z
        }:sum() end) print('gc', ok, e) end }) t = ms.ones { 3 }",
      "t = ms.ones { 3 } setmetatable({}, { __gc = function() print(pcall(t.shape, t)) \z
        print(pcall(tostring, t)) saved = t end })",
      "s = ms.stream 'side' s:run(function() for i = 1, 200 do ms.ones { 10000 }:exp() end end)",
      "c = coroutine.wrap(function() local t <close> = ms.ones { 2 } coroutine.yield() end) c()",
      "f = ms.all { ms.ones { 2 } }:and_then(function(l) return l[1] end) m = ms.metric 'x' for _ \z
        in ms.steps(2) do m:push(ms.ones {}) end",
      "model = ms.nn.gpt2 { vocab = 9, context = 4, layers = 1, width = 8, heads = 2 } o = \z
        ms.optim.adam(model) model(ms.tensor { { 1, 2 } }):sum():backward()",
      "ms.tensor({ 99 }):embedding(ms.ones { 2, 2 })",
      "error_object = setmetatable({}, { __gc = function() error 'in gc' end })",
      "d = ms.data.bytes { arg[0] } l = d:loader { batch = 1, length = 4, shuffle = true } \z
        l:next()",
      "local t <close> = ms.ones { 2 } local u <close> = setmetatable({}, { __close = function() \z
        error({}) end }) pcall(error)",
    }
    for i, script in ipairs(scripts) do
      local ok, message = pcall(alone, "ms = require 'moonshard' " .. script,
        i == #scripts and 1 or 0)
      assert.is_true(ok, script .. "\n" .. tostring(message))
    end
  end)
end)

describe("Lua's finalizers", function()
  it("cannot use tensors in the middle of another call", function()
    local tried, refused = 0, 0
    local p = ms.nn.Parameter(ms.ones { 8 })
    local optimizer = ms.optim.sgd({ p })
    local function trap()
      setmetatable({}, { __gc = function()
        tried = tried + 1
        for _, f in ipairs {
          function() optimizer:zero_grad() end,
          function() core.step_end() end,
          function() return p * 2 end,
          function() core.collect() end,
          function() p:set_grad(nil) end,
        } do
          local ok, message = pcall(f)
          if not ok and message:find("finalizer", 1, true) then refused = refused + 1 end
        end
        local closing <close> = p -- luacheck: ignore 211
      end })
    end
    debug.sethook(function() trap() collectgarbage() end, "", 40)
    local ok, message = pcall(function()
      for _ in ms.steps(3) do
        local loss = (p * p):sum()
        loss:backward()
        optimizer:step()
      end
    end)
    debug.sethook()
    assert.is_true(ok, tostring(message))
    assert.is_true(tried > 3)
    assert.equal(5 * tried, refused)
    near({ 8 }, p:shape())
  end)
end)
