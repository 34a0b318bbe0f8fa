-- The hazards of a C library in Lua (B1 to B23), as far as a script can make them: whatever it does, it gets an error or a value, never a
-- crash. Hosts with several engines are in recipes/embed.
-- luacheck: ignore 512
local ms = require "moonshard"
-- Nothing here may take much memory, whatever numbers it gets.
ms.init { memory_bytes = 1 << 28, threads = 2 }
local core = require "moonshard.core"
local support = require "support"
local near, fails, shell = support.near, support.fails, support.shell

local function leaf(values) return ms.tensor(values, "f32"):requires_grad_() end

local function training(steps, hook)
  ms.seed(1)
  local model = ms.nn.Sequential(ms.nn.Linear(4, 8), ms.nn.GELU(), ms.nn.LayerNorm(8), ms.nn.Linear(8, 2))
  local optimizer = ms.optim.adamw(model, { lr = 0.01 })
  for _ in ms.steps(steps) do
    local x = ms.randn { 5, 4, requires_grad = true }
    if hook then x:on_grad(hook) end
    local loss = ms.recompute(function(t) return model(t):square() end, x):mean()
    loss:backward()
    model:clip_grad_norm(1)
    optimizer:step()
    ms.metric("bindings.loss"):push(loss)
  end
  local bytes = {}
  for i, p in ipairs(model:parameters()) do bytes[i] = core.bytes(p:detach()) end
  return table.concat(bytes)
end

-- A value of every kind that Lua and the library know.
local function specimens()
  local closed
  do
    local t <close> = ms.ones { 2 }
    closed = t
  end
  local released
  for _ in ms.steps(1) do released = ms.ones { 2 } end
  local self_table = {}
  self_table[1] = self_table
  return {
    ["nil"] = nil, yes = true, no = false, zero = 0, minus = -1, fraction = 1.5, nan = 0 / 0, inf = math.huge, least = math.mininteger, large = 1 << 53,
    text = "x", empty = "", bytes = "a\0b", format = "%s%n", dtype = "f32", table = {}, numbers = { 1, 2, 3 }, keys = { nonsense = 1 }, nested = { {} },
    itself = self_table, f = function() end, thread = coroutine.create(function() end), file = io.stdout, light = debug.upvalueid(function() return core end, 1),
    scalar = ms.ones {}, float = ms.ones { 2, 3 }, long = ms.tensor { 1, 2 }, bool = ms.tensor { true, false }, half = ms.ones { 2, dtype = "bf16" },
    none = ms.zeros { 0 }, graph = leaf { 1, 2 } * 2, closed = closed, released = released, stream = ms.stream(), probe = core.probe(ms.ones {}),
    future = ms.all {}, module = ms.nn.Linear(2, 2), optimizer = ms.optim.sgd({ ms.ones { 1 } }), tensors = { ms.ones { 2 }, ms.ones { 2 } },
  }
end

describe("B1: any value in any place", function()
  -- These would end the process, write files, wait for another process, or are switches of the engine itself.
  local left_out = {
    file_write = 1, file_append = 1, file_lock = 1, make_directory = 1, remove = 1, safetensors_save = 1, checkpoint_start = 1, checkpoint_remove = 1,
    checkpoint_sweep = 1, hook_enter = 1, hook_leave = 1, step_begin = 1, set_drain = 1, set_library = 1, configure = 1, bench_enqueue = 1,
    trace_start = 1, set_peak = 1,
  }

  -- Under the thread sanitizer errors leave frames in its account of calls, which ends the process at some ten thousand.
  local budget = os.getenv "MOONSHARD_SANITIZE" == "thread" and 3000 or math.huge

  local function try(name, f, ...)
    budget = budget - 1
    if budget < 0 then return false end
    local ok, message = pcall(f, ...)
    if not ok and type(message) ~= "string" then error(name .. " raised a " .. type(message)) end
    return ok
  end

  it("methods of tensors raise for every self that is none", function()
    local values = specimens()
    for name, method in ms.sorted_pairs(core.tensor_methods) do
      for kind, value in ms.sorted_pairs(values) do
        if not core.is_tensor(value) or kind == "closed" or kind == "released" then
          local ok = try(name, method, value)
          -- name() and full_shape() are Lua's; all else checks.
          if ok and name ~= "name" then error(("%s accepted %s as self"):format(name, kind)) end
        end
      end
    end
  end)

  it("methods of tensors survive every argument, at every position", function()
    local values = specimens()
    for name, method in ms.sorted_pairs(core.tensor_methods) do
      for _, value in ms.sorted_pairs(values) do
        for _, self in ipairs { ms.ones { 2, 3 }, ms.tensor { 1, 0 }, ms.ones {} } do
          for position = 1, 4 do
            local arguments = { 1, 1, 1, 1 }
            if position > 1 and core.is_tensor(value) then arguments[1] = value end
            arguments[position] = value
            try(name, method, self, table.unpack(arguments, 1, position))
          end
        end
      end
    end
    pcall(ms.synchronize)
    near({ 1, 1 }, ms.ones { 2 })
  end)

  it("functions of the core survive every argument", function()
    local values = specimens()
    for name, f in ms.sorted_pairs(core) do
      if type(f) == "function" and not left_out[name] then
        for _, first in ms.sorted_pairs(values) do
          try(name, f, first)
          for _, second in ms.sorted_pairs(values) do try(name, f, first, second) end
          try(name, f, ms.ones { 2 }, 1, first)
          try(name, f, "f32", first, {}, {}, {})
          try(name, f, {}, first, first, first, first, first)
        end
      end
    end
    pcall(ms.synchronize)
    assert.is_false(core.in_hook())
  end)

  it("functions of files and switches survive wrong types", function()
    for _, name in ipairs { "file_write", "file_append", "file_lock", "make_directory", "remove", "safetensors_save", "checkpoint_start", "step_begin",
      "set_library", "configure", "set_peak", "checkpoint_remove", "checkpoint_sweep", "trace_start" } do
      for kind, value in ms.sorted_pairs(specimens()) do
        if type(value) ~= "string" and type(value) ~= "number" and kind ~= "table" and name ~= "trace_start" then
          assert.is_false(try(name, core[name], value, value, value), name .. " accepted " .. kind)
        end
      end
    end
  end)

  it("arithmetic, length, index and closing survive every operand", function()
    local t = ms.ones { 2, 3 }
    for _, value in ms.sorted_pairs(specimens()) do
      for _, f in ipairs {
        function(a, b) return a + b end, function(a, b) return a - b end, function(a, b) return a * b end, function(a, b) return a / b end,
        function(a, b) return a ^ b end, function(a, b) return a // b end, function(a, b) return a % b end, function(a, b) return a .. b end,
        function(a, b) return a == b end, function(a, b) return a < b end, function(a, b) return a[b] end, function(a) return -a end,
        function(a) return #a end, function(a) return tostring(a) end,
      } do
        pcall(f, t, value)
        pcall(f, value, t)
      end
    end
    pcall(ms.synchronize)
  end)

  it("methods of other objects raise for every self that is none", function()
    local dataset = assert(ms.data.bytes { (os.getenv "MOONSHARD_SOURCE" or ".") .. "/tests/spec/bindings_spec.lua" })
    local loader = dataset:loader { batch = 2, length = 8 }
    local objects = { stream = ms.stream(), probe = core.probe(ms.ones {}), dataset = dataset, loader = loader }
    local names = {
      stream = { "name", "run", "sync", "wait", "_point", "_wait" }, probe = { "value" }, dataset = { "size", "split", "loader" },
      loader = { "next", "batches", "state", "load_state" },
    }
    local values = specimens()
    for kind, object in pairs(objects) do values["own " .. kind] = object end
    for kind, object in ms.sorted_pairs(objects) do
      for _, name in ipairs(names[kind]) do
        assert.equal("function", type(object[name]), kind .. "." .. name)
        for other, value in ms.sorted_pairs(values) do
          if other ~= "own " .. kind and other ~= kind then
            if try(name, object[name], value, value, value) then error(("%s of a %s accepted %s"):format(name, kind, other)) end
          end
        end
        for _, value in ms.sorted_pairs(values) do
          try(name, object[name], object, value)
          try(name, object[name], object, 1, value)
        end
      end
    end
    pcall(ms.synchronize)
  end)
end)

describe("wrong arguments of what is written in Lua", function()
  local nn, data = ms.nn, nil
  local function model(key, value)
    return function()
      local options = { vocab = 4, context = 4, layers = 1, width = 4, heads = 2 }
      options[key] = value
      nn.llama(options)
    end
  end
  for name, case in pairs {
    ["nn.gpt2"] = { function() nn.gpt2() end, "missing" }, dropout = { model("dropout", 1), "dropout", "below 1" }, eps = { model("eps", "x"), "eps" },
    rotary_base = { model("rotary_base", -1), "rotary_base" }, Linear = { function() nn.Linear(3) end, "Linear" }, Linear0 = { function() nn.Linear(0, 1) end, "1 or more" },
    Embedding = { function() nn.Embedding() end, "Embedding" }, LayerNorm = { function() nn.LayerNorm "x" end, "LayerNorm" }, RMSNorm = { function() nn.RMSNorm() end, "RMSNorm" },
    Attention = { function() nn.Attention { width = 4, heads = 2, kv_heads = 0 } end, "Attention" }, report = { function() ms.report() end, "give run" },
    loader = { function() data:loader() end, "batch" }, loader_option = { function() data:loader { bach = 1 } end, "'batch'" },
    log = { function() ms.log() end, "a format" }, log_d = { function() ms.log("%d", "x") end, "number expected" }, stream = { function() ms.stream("a", 5) end, "table" },
    load_state = { function() nn.Linear(1, 1):load_state() end, "load_state" }, load_number = { function() nn.Linear(1, 1):load_state { weight = 1, bias = 2 } end, "weight" },
    save = { function() nn.Linear(1, 1):save() end, "path" }, accumulate = { function() nn.Linear(1, 1):accumulate(2) end, "function" },
    checkpoint = { function() ms.checkpoint.save "x" end, "checkpoint.save" }, scaler = { function() ms.optim.scaler():load_state {} end, "scaler" },
  } do
    it("are named with the script's line: " .. name, function()
      data = assert(ms.data.bytes(debug.getinfo(1, "S").source:sub(2)))
      fails(case[1], case[2], case[3])
    end)
  end
end)

describe("B2: finalizers", function()
  it("cannot be reached by getmetatable", function()
    local dataset = assert(ms.data.bytes { (os.getenv "MOONSHARD_SOURCE" or ".") .. "/tests/spec/bindings_spec.lua" })
    for _, object in ipairs { ms.ones { 1 }, ms.stream(), core.probe(ms.ones {}), dataset, dataset:loader { batch = 1, length = 2 }, ms.all {} } do
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

describe("B3: a borrowed gradient", function()
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
      function() upvalue:sum() end, function() place[1]:shape() end, function() borrowed_global:item() end, function() routine() end, -- luacheck: ignore 113
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

describe("B4: the collector, at every step", function()
  for _, mode in ipairs { "incremental", "generational" } do
    it("changes nothing: " .. mode, function()
      local plain = training(4)
      local before = collectgarbage(mode)
      -- Between every 3 instructions of Lua, also in hooks.
      debug.sethook(function() collectgarbage("step", 0) end, "", 3)
      local ok, stressed = pcall(training, 4, function(g) return g:clone() end)
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

describe("B6, B7: errors in hooks and scopes", function()
  it("leave the engine as it was", function()
    local x = leaf { 1, 2 }
    local ways = {
      function(f) x:on_grad(f) x:sum():backward() end, function(f) ms.no_grad(f) end, function(f) ms.autocast("bf16", f) end,
      function(f) ms.recompute(f, x) end, function(f) ms.stream "bindings_other":run(f) end, function(f) ms.all { x }:and_then(f) end,
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

describe("B9: errors of workers", function()
  it("are raised at the next call that waits, with the line that asked, once", function()
    local line
    local ok, message = pcall(function()
      line = debug.getinfo(1, "l").currentline + 1
      local out = ms.tensor({ 3, 99 }):embedding(ms.ones { 4, 2 })
      return out:to_table()
    end)
    assert.is_false(ok)
    assert.truthy(message:find("embedding", 1, true) and message:find("99", 1, true), message)
    assert.truthy(message:find(("bindings_spec.lua:%d"):format(line), 1, true), message)
    near({ 1 }, ms.ones { 1 })
  end)

  it("spoil what was computed from them", function()
    local after
    -- The error may be noticed as soon as the next task is enqueued.
    local first = { pcall(function() after = ms.tensor({ 77 }):embedding(ms.ones { 4, 2 }) after = after * 2 ms.synchronize() end) }
    assert.is_false(first[1])
    assert.truthy(first[2]:find("embedding", 1, true), first[2])
    local ok, message = pcall(function() return after:to_table() end)
    assert.is_false(ok)
    assert.truthy(message:find("never computed", 1, true), message)
    assert.is_false((pcall(function() return after * 2 end)))
    assert.is_false((pcall(function() return core.probe(after[1][1]):value() end)))
    -- What was written before and after is as it was.
    near({ 1 }, ms.ones { 1 })
    after:fill_(3)
    near({ { 3, 3 } }, after)
  end)
end)

describe("B10: calls that are not allowed in hooks", function()
  local model = ms.nn.Linear(2, 2)
  local optimizer = ms.optim.sgd(model)
  local t, future = ms.ones { 1 }, ms.all { ms.ones { 1 } }
  local x = ms.ones { 1, 2, requires_grad = true }

  -- Those that wait, walk the graph, or register.
  local refused = {
    backward = function() model(x):sum():backward() end, step = function() optimizer:step() end, steps = function() for _ in ms.steps(1) do return end end,
    item = function() return t:item() end, to_table = function() return t:to_table() end, show = function() return t:show() end,
    bytes = function() return core.bytes(t) end, synchronize = function() ms.synchronize() end, sync = function() future:sync() end,
    stream = function() ms.stream():sync() end, on_grad = function() x:on_grad(print) end, on_grad_ready = function() model.weight:on_grad_ready(print) end,
    save = function() ms.safetensors.save("/tmp/never", { t = t }) end, to_text = function() ms.data.to_text(ms.tensor { 65 }) end,
  }
  -- Those that only enqueue, or touch what the walk may hold.
  local allowed = {
    zero_grad = function() optimizer:zero_grad() end, set_grad = function() model.weight:set_grad(nil) end, collect = function() core.collect() end,
    add = function() return t + 1 end, no_grad = function() return ms.no_grad(function() return t * 2 end) end, graph = function() return x:matmul(x:t()) end,
    freeze = function() model.weight:requires_grad_(false) model.weight:requires_grad_() end,
    load = function() model:load_state(model:state()) end, close = function() local c <close> = ms.ones { 2 } end, memory = function() ms.memory() end, -- luacheck: ignore 211
    gc = function() collectgarbage() end, and_then = function() future:and_then(function() end) end, keep = function() return (t * 2):keep() end,
    recompute = function() return ms.recompute(function(y) return y * 2 end, x) end,
  }

  local function in_hook(name, f)
    local points = {
      on_grad = function() local u = leaf { 1 } u:on_grad(function() f() end) u:sum():backward() end,
      inner = function() local u = leaf { 1 } * 2 u:on_grad(function() f() end) u:sum():backward() end,
      on_grad_ready = function() local p = ms.nn.Parameter(ms.ones { 1 }) p:on_grad_ready(function() f() end) p:sum():backward() end,
      model = function() local r = model.weight:on_grad(function() f() end) local ok, e = pcall(function() model(x):sum():backward() end) r() if not ok then error(e, 0) end end,
      and_then = function() future:and_then(function() f() end) end,
      module = function()
        local r = model:hook("backward", function() f() end)
        local ok, e = pcall(function() model(x):sum():backward() end)
        r()
        if not ok then error(e, 0) end
      end,
    }
    local results = {}
    for point, run in ms.sorted_pairs(points) do results[#results + 1] = { point .. "/" .. name, pcall(run) } end
    optimizer:zero_grad()
    return results
  end

  for name, f in ms.sorted_pairs(refused) do
    it("refuses " .. name, function()
      for _, result in ipairs(in_hook(name, f)) do
        assert.is_false(result[2], result[1])
        assert.truthy(tostring(result[3]):find("inside a hook", 1, true), result[1] .. ": " .. tostring(result[3]))
      end
    end)
  end

  for name, f in ms.sorted_pairs(allowed) do
    it("survives " .. name, function()
      for _, result in ipairs(in_hook(name, f)) do assert.is_true(result[2], result[1] .. ": " .. tostring(result[3])) end
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

describe("B12: yields", function()
  it("across the engine are errors", function()
    local x = leaf { 1 }
    local ways = {
      hook = function() x:on_grad(coroutine.yield) x:sum():backward() end, no_grad = function() ms.no_grad(coroutine.yield) end,
      autocast = function() ms.autocast("bf16", coroutine.yield) end, recompute = function() ms.recompute(coroutine.yield, x) end,
      stream = function() ms.stream():run(coroutine.yield) end, and_then = function() ms.all { x }:and_then(coroutine.yield) end,
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
    local routine = coroutine.create(function() for _ in ms.steps(3) do held = ms.ones { 1 } coroutine.yield() end end)
    coroutine.resume(routine)
    assert.is_true(select(2, core.step()))
    coroutine.close(routine)
    assert.is_false(select(2, core.step()))
    fails(function() held:sum() end, "step ended")
  end)
end)

describe("B13: deep and wide", function()
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
    for _, list in ipairs { { 1, {} }, { {}, 1 }, { { 1 }, { {} } }, { { {} }, {} } } do fails(function() ms.tensor(list) end, "tensor: ") end
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
    local got = ms.recompute(function(...) return (select(1, ...)) * select("#", ...) end, t, table.unpack(ones))
    assert.equal(241, got:item())
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
      pcall(deep, depth, function() return ms.no_grad(function() return ms.tensor { { 1 } }:to_table() end) end)
    end
    assert.is_true(deep(15000, function() (x * 2):sum():backward() return true end))
    local function endless(n) return (n % 5000 == 0 and (x * 1):sum() or 1) + endless(n + 1) end
    local ok, message = pcall(endless, 0)
    assert.is_false(ok)
    assert.truthy(tostring(message):find("overflow", 1, true), message)
    near({ 2 }, x:grad())
  end)
end)

describe("B14: integers at the edges", function()
  local edges = { -1, 0, 1 << 31, 1 << 32, 1 << 53, 1 << 62, math.maxinteger, math.mininteger, -(1 << 31), (1 << 31) - 1, 2.0 ^ 53, 2.0 ^ 63, -2.0 ^ 63, 1e300, 0.5 }

  local t, ids = ms.ones { 2, 3 }, ms.tensor { 1, 0 }
  local dataset = assert(ms.data.bytes { (os.getenv "MOONSHARD_SOURCE" or ".") .. "/tests/spec/bindings_spec.lua" })
  local uses = {
    zeros = function(n) return ms.zeros { n } end, zeros2 = function(n) return ms.zeros { n, n } end, zeros0 = function(n) return ms.zeros { 0, n, n, n } end,
    tensor = function(n) return ms.tensor({ n }, "i32") end, u8 = function(n) return ms.tensor({ n }, "u8") end, f32 = function(n) return ms.tensor({ n }, "f32") end,
    full = function(n) return ms.full(n, { 2, dtype = "i32" }) end, arange = function(n) return ms.arange(n, n) end, arange3 = function(n) return ms.arange(0, n, n) end,
    arange2 = function(n) return ms.arange(n, n + 3) end, seed = function(n) ms.seed(n) ms.seed(1) end, rand = function(n) return ms.rand { 2, seed = n } end,
    randint = function(n) return ms.randint { 2, low = 0, high = n } end, randint2 = function(n) return ms.randint { 2, low = n, high = n } end,
    size = function(n) return t:size(n) end, index = function(n) return t[n] end, select = function(n) return t:select(1, n) end, dim = function(n) return t:select(n, 1) end,
    narrow = function(n) return t:narrow(1, n, 1) end, narrow2 = function(n) return t:narrow(1, 1, n) end, narrow3 = function(n) return t:narrow(1, n, n) end,
    view = function(n) return t:view(n) end, view2 = function(n) return t:view(n, n) end, view3 = function(n) return t:view(n, -1) end,
    reshape = function(n) return t:reshape(n, 2) end,
    expand = function(n) return ms.ones({ 1 }):expand(n) end,
    expand2 = function(n) return ms.ones({ 1 }):expand(n, 1) end, split = function(n) return t:split(n) end,
    split2 = function(n) return t:split { n, n } end,
    split3 = function(n) return t:split { n, 2 - (math.type(n) == "integer" and n or 0) } end, chunk = function(n) return t:chunk(n) end,
    transpose = function(n) return t:transpose(n, 1) end, permute = function(n) return t:permute(n, n) end, squeeze = function(n) return t:squeeze(n) end,
    unsqueeze = function(n) return t:unsqueeze(n) end, flatten = function(n) return t:flatten(n, n) end, pad_to = function(n) return ms.ones({ 3 }):pad_to(n) end,
    sum = function(n) return t:sum(n) end, argmax = function(n) return t:argmax(n) end, cumsum = function(n) return t:cumsum(n) end, softmax = function(n) return t:softmax(n) end,
    topk = function(n) return t:topk(n) end, topk2 = function(n) return t:topk(1, n) end, above = function(n) return ms.ones({ 3 }):above(0, n) end,
    histogram = function(n) return t:histogram(n, 0, 1) end, gather = function(n) return t:gather(n, ms.tensor { { 0 } }) end,
    cat = function(n) return ms.cat({ t, t }, n) end, stack = function(n) return ms.stack({ t, t }, n) end,
    rotary = function(n) return ms.ones({ 1, 1, 2, 4 }):rotary(n) end, cross_entropy = function(n) return t:cross_entropy(ids, { ignore_index = n }) end,
    embedding = function(n) return ms.tensor({ n }):embedding(t):to_table() end, target = function(n) return t:cross_entropy(ms.tensor { n, 0 }):item() end,
    scatter = function(n) return ms.zeros({ 3 }):scatter(1, ms.tensor { n }, 1):to_table() end, index_select = function(n) return t:index_select(1, ms.tensor { n }):to_table() end,
    steps = function(n) for _ in ms.steps(n, n) do return end end, steps2 = function(n) for _ in ms.steps(n) do return end end,
    lag = function(n) return ms.metric("edge"):lag(n) end,
    loader = function(n) return dataset:loader { batch = n, length = 4 } end, loader2 = function(n) return dataset:loader { batch = 1, length = n } end,
    loader3 = function(n) return dataset:loader({ batch = 1, length = 4 }):batches(n) end, split_data = function(n) return dataset:split(n) end,
    loader4 = function(n) dataset:loader({ batch = 1, length = 4 }):load_state { seed = n, epoch = n, position = n, samples = n } end,
    random = function(n) core.set_random_state(n, n, n) core.set_random_state(1, 0, 0) end, peak = function(n) core.set_peak(n) ms.reset_peak() end,
    point = function(n) return core.point_sync(n, 0) end, point2 = function(n) return ms.stream():_wait(n, 0) end, linear = function(n) return ms.nn.Linear(n, n) end,
    embedding2 = function(n) return ms.nn.Embedding(n, n) end, model = function(n) return ms.nn.gpt2 { vocab = n, context = 4, layers = 1, width = 4, heads = n } end,
    schedule = function(n) return ms.optim.cosine({ steps = n })(n) end, hash = function(n) return core.hash("x", n) end,
    json = function(n) return core.json_decode(core.json_encode(n)) end,
    cast = function(n) return ms.tensor({ n * 1.0 }, "f32"):to("u8"):to_table() end,
    cast2 = function(n) return ms.tensor({ n * 1.0 }, "f32"):to("i64"):to_table() end,
    fill = function(n) return ms.zeros({ 2, dtype = "u8" }):fill_(n):to_table() end, pow = function(n) return ms.tensor({ 2 }):pow(n):to_table() end,
  }

  for name, use in ms.sorted_pairs(uses) do
    it(name, function()
      for _, n in ipairs(edges) do
        local ok, message = pcall(use, n)
        if not ok and type(message) ~= "string" then error(name .. " raised no text") end
      end
      pcall(ms.synchronize)
      assert.equal(3, (ms.ones { 1 } + 2):item())
    end)
  end

  it("are compared exactly, and named in the error", function()
    fails(function() t:narrow(1, math.maxinteger, 1) end, "9223372036854775807")
    fails(function() t:narrow(1, 1, math.mininteger) end, "-9223372036854775808")
    fails(function() return t[math.mininteger] end, "-9223372036854775808")
    fails(function() t:size(1 << 32) end, "4294967296")                 -- not 0 of 32 bits
    fails(function() t:size((1 << 32) + 1) end, "4294967297")
    fails(function() ms.zeros { 1 << 62, 4 } end)
    fails(function() ms.zeros { 1 << 62, 2, 0 } end)
    fails(function() t:view(2 ^ 53, 3) end)
    assert.same({ 1 << 62, -(1 << 62) }, ms.tensor({ 1 << 62, -(1 << 62) }):to_table())
  end)

  it("a limit of memory is an error that says so, and leaves everything usable", function()
    local ok, message = pcall(ms.zeros, { 1 << 28 })
    assert.is_false(ok)
    assert.truthy(message:find("memory", 1, true), message)
    near({ 1 }, ms.ones { 1 })
  end)
end)

describe("B15, B16: strings", function()
  it("with zero bytes are refused as paths and names", function()
    for _, f in ipairs { core.file_read, core.list, core.exists, core.safetensors_open, ms.data.bytes, ms.safetensors.header } do
      local ok, message = pcall(f, "/tmp/a\0b")
      assert.is_false(ok)
      assert.truthy(message:find("zero byte", 1, true), message)
    end
    assert.has_error(function() ms.tensor({ 1 }, "f32\0x") end)
  end)

  it("are never formats", function()
    fails(function() ms.zeros { 2, ["%s%n%d"] = 1 } end, "%s%n%d")
    fails(function() ms.zeros { 2, dtype = "%n%n%s" } end, "%n%n%s")
    fails(function() ms.zeros { 2, device = "%s%n" } end, "%s%n")
    fails(function() ms.zeros({ 2 }):to "%s%s" end, "%s%s")
    fails(function() ms.metric("%d%n", "avg"):push "x" end, "%d%n")
    fails(function() ms.optim.sgd({ ms.ones { 1 } }, { ["%s"] = 1 }) end, "%s")
    fails(function() ms.no_grad(function() error "%s%n%d" end) end, "%s%n%d")
    local long = ("%s"):rep(100000)
    fails(function() ms.zeros { 2, [long] = 1 } end)
    fails(function() ms.no_grad(function() error(long) end) end, long)
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
  -- Who leaves in the middle of a hook leaves the engine's frames behind; all else must free what it has.
  local quiet = text:find("os.exit(0, true) end) x:sum", 1, true) and "ASAN_OPTIONS=detect_leaks=0 " or ""
  local code, output = shell(("%s'%s' '%s'"):format(quiet, interpreter, path))
  os.remove(path)
  assert.equal(expected or 0, code, output)
  return output
end

describe("B17, B18: opening and closing", function()
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
      for _, t in ipairs { _G, string, table, math, io, os, debug, coroutine, package } do for k, v in pairs(t) do before[#before + 1] = { t, k, v } end end
      local ms = require "moonshard"
      local _ = ms.nn, ms.optim, ms.data, ms.train, ms.config, ms.all, ms.metric, ms.checkpoint, ms.trace, ms.report
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
      "x = ms.ones { 2, requires_grad = true } y = x * 2 y:on_grad(function() return y end) z = ms.recompute(function(t) return t * y end, x)",
      "x = ms.ones { 2, requires_grad = true } x:on_grad(function() os.exit(0, true) end) x:sum():backward()",
      "setmetatable({}, { __gc = function() local ok, e = pcall(function() return ms.ones { 2 }:sum() end) print('gc', ok, e) end }) t = ms.ones { 3 }",
      "t = ms.ones { 3 } setmetatable({}, { __gc = function() print(pcall(t.shape, t)) print(pcall(tostring, t)) saved = t end })",
      "s = ms.stream 'side' s:run(function() for i = 1, 200 do ms.ones { 10000 }:exp() end end)",
      "c = coroutine.wrap(function() local t <close> = ms.ones { 2 } coroutine.yield() end) c()",
      "f = ms.all { ms.ones { 2 } }:and_then(function(l) return l[1] end) m = ms.metric 'x' for _ in ms.steps(2) do m:push(ms.ones {}) end",
      "model = ms.nn.gpt2 { vocab = 9, context = 4, layers = 1, width = 8, heads = 2 } o = ms.optim.adam(model) model(ms.tensor { { 1, 2 } }):sum():backward()",
      "ms.tensor({ 99 }):embedding(ms.ones { 2, 2 })",
      "error_object = setmetatable({}, { __gc = function() error 'in gc' end })",
      "d = ms.data.bytes { arg[0] } l = d:loader { batch = 1, length = 4, shuffle = true } l:next()",
      "local t <close> = ms.ones { 2 } local u <close> = setmetatable({}, { __close = function() error({}) end }) pcall(error)",
    }
    for i, script in ipairs(scripts) do
      local ok, message = pcall(alone, "ms = require 'moonshard' " .. script, i == #scripts and 1 or 0)
      assert.is_true(ok, script .. "\n" .. tostring(message))
    end
  end)
end)

describe("B19: Lua's finalizers", function()
  it("cannot use tensors in the middle of another call", function()
    local tried, refused = 0, 0
    local p = ms.nn.Parameter(ms.ones { 8 })
    local optimizer = ms.optim.sgd({ p })
    local function trap()
      setmetatable({}, { __gc = function()
        tried = tried + 1
        for _, f in ipairs {
          function() optimizer:zero_grad() end, function() core.step_end() end, function() return p * 2 end, function() core.collect() end, function() p:set_grad(nil) end,
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

describe("F33: errors in strange places", function()
  it("in an error handler", function()
    local ok, failure = xpcall(ms.no_grad, function() error "handler" end, function() error "inner" end)
    assert.is_false(ok)
    assert.not_nil(failure)
    ok = xpcall(function() ms.zeros { 2, wrong = 1 } end, function() return ms.zeros({ 2 }) + ms.zeros { 3 } end)
    assert.is_false(ok)
    near({ 1 }, ms.ones { 1 })
  end)

  it("in __close inside a scope", function()
    local function failing() return setmetatable({}, { __close = function() error "closing" end }) end
    fails(function() ms.no_grad(function() local c <close> = failing() end) end, "closing") -- luacheck: ignore 211
    fails(function() ms.no_grad(function() local c <close> = failing() error "body" end) end, "closing") -- luacheck: ignore 211
    fails(function() for _ in ms.steps(2) do local c <close> = failing() break end end, "closing") -- luacheck: ignore 211 512
    assert.is_true(core.is_recording())
    assert.is_false(select(2, core.step()))
  end)

  it("with values that are no strings", function()
    for _, value in ipairs { 5, true, {}, print, io.stdout, coroutine.create(print), ms.ones { 1 } } do
      local ok, failure = pcall(ms.no_grad, function() error(value) end)
      assert.is_false(ok)
      assert.is_true(rawequal(value, failure))
    end
    local ok, failure = pcall(ms.no_grad, function() error() end)
    assert.is_false(ok)
    assert.truthy(failure:find("not a string", 1, true))        -- nil says nothing; this at least says where
    local bad = setmetatable({}, { __tostring = function() error "tostring" end })
    ok, failure = pcall(ms.no_grad, function() error(bad) end)
    assert.is_false(ok)
    assert.is_true(rawequal(bad, failure))
  end)

  it("in a coroutine, inside a step and a scope", function()
    for _ in ms.steps(1) do
      local routine = coroutine.create(function() ms.no_grad(function() error "in the coroutine" end) end)
      local ok, message = coroutine.resume(routine)
      assert.is_false(ok)
      assert.truthy(message:find("in the coroutine", 1, true))
      assert.is_true(core.is_recording())
    end
  end)
end)

describe("F34: deep recursion", function()
  it("through scopes ends in an error", function()
    local function scopes() return ms.no_grad(scopes) end
    local function nested(x) return ms.recompute(nested, x) end
    local function streams() return ms.stream():run(streams) end
    local x = leaf { 1 }
    for _, f in ipairs { scopes, streams, function() return nested(x) end } do
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
