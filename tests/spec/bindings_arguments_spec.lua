-- The hazards of a C library in Lua, as far as a script can make them: whatever it does, it gets an
-- error or a value, never a crash. Here: arguments of the wrong kind, integers at the edges,
-- strings. Hosts with several engines are in recipes/embed.
-- luacheck: ignore 512
local ms = require "moonshard"
local hazards = require "hazards"
local core = require "moonshard.core"
local support = require "support"
local near, fails = support.near, support.fails
local specimens = hazards.specimens
local full = os.getenv "MOONSHARD_TEST_FULL" == "1"

describe("any value in any place", function()
  -- These would end the process, write files, wait for another process, or are switches of the
  -- engine itself.
  local left_out = {
    file_write = 1, file_append = 1, file_lock = 1, file_is_locked = 1, make_directory = 1,
    remove = 1,
    safetensors_save = 1, checkpoint_start = 1, checkpoint_begin = 1, checkpoint_remove = 1,
    checkpoint_sweep = 1, hook_enter = 1, hook_leave = 1, step_begin = 1, set_drain = 1,
    set_library = 1, configure = 1, bench_enqueue = 1,
    trace_start = 1, set_peak = 1, hosts_quit = 1,
  }

  -- Under the thread sanitizer errors leave frames in its account of calls, which ends the process
  -- at some ten thousand.
  local budget = os.getenv "MOONSHARD_SANITIZE" == "thread" and 3000 or math.huge

  local function try(name, f, ...)
    budget = budget - 1
    if budget < 0 then return false end
    local ok, message = pcall(f, ...)
    if not ok and type(message) ~= "string" then error(name .. " raised a " .. type(message)) end
    return ok
  end

  it("a dot instead of a colon, and sizes without braces, are told as such", function()
    local t = ms.ones { 2 }
    fails(function() return t.sum() end,
      "sum is a method of a tensor, not of no value: write object:sum(...), with a colon")
    fails(function() local loss = t:sum() loss.backward() end, "backward", "with a colon")
    fails(function() return t.add(2) end, "add is a method of a tensor, not of number")
    fails(function() return ms.rand(3, 8) end, "a shape is a table: write { 3, 8 }, in braces")
    fails(function() return ms.zeros(3) end, "a shape is a table: write { 3 }, in braces")
    -- What is no method, or has its object, is told as before.
    fails(function() return ms.to_bytes(1) end)
    fails(function() return t:add() end, "add: a number or a tensor is expected")
  end)

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
    local values, number = specimens(), 0
    -- Each function gets each value as its second argument; in long ranges, each pair of values.
    -- Their number does not divide by 5.
    local function try_pairs(name, f, first)
      for _, second in ms.sorted_pairs(values) do
        number = number + 1
        if full or number % 5 == 0 then try(name, f, first, second) end
      end
    end
    for name, f in ms.sorted_pairs(core) do
      if type(f) == "function" and not left_out[name] then
        for _, first in ms.sorted_pairs(values) do
          try(name, f, first)
          try_pairs(name, f, first)
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
    for _, name in ipairs {
      "file_write", "file_append", "file_lock", "file_is_locked", "make_directory", "remove",
      "safetensors_save",
      "checkpoint_start", "checkpoint_begin", "step_begin", "set_library", "configure", "set_peak",
      "checkpoint_remove", "checkpoint_sweep", "trace_start",
    } do
      for kind, value in ms.sorted_pairs(specimens()) do
        if type(value) ~= "string" and type(value) ~= "number" and kind ~= "table"
            and name ~= "trace_start" then
          assert.is_false(try(name, core[name], value, value, value), name .. " accepted " .. kind)
        end
      end
    end
  end)

  it("arithmetic, length, index and closing survive every operand", function()
    local t = ms.ones { 2, 3 }
    for _, value in ms.sorted_pairs(specimens()) do
      for _, f in ipairs {
        function(a, b) return a + b end,
        function(a, b) return a - b end,
        function(a, b) return a * b end,
        function(a, b) return a / b end,
        function(a, b) return a ^ b end,
        function(a, b) return a // b end,
        function(a, b) return a % b end,
        function(a, b) return a .. b end,
        function(a, b) return a == b end,
        function(a, b) return a < b end,
        function(a, b) return a[b] end,
        function(a) return -a end,
        function(a) return #a end, function(a) return tostring(a) end,
      } do
        pcall(f, t, value)
        pcall(f, value, t)
      end
    end
    pcall(ms.synchronize)
  end)

  it("methods of other objects raise for every self that is none", function()
    local dataset = assert(ms.data.bytes {
      (os.getenv "MOONSHARD_SOURCE" or ".") .. "/tests/spec/bindings_arguments_spec.lua",
    })
    local loader = dataset:loader { batch = 2, length = 8 }
    local objects = {
      stream = ms.stream(), probe = core.probe(ms.ones {}), dataset = dataset, loader = loader,
    }
    local names = {
      stream = { "name", "run", "sync", "wait", "_point", "_wait" },
      probe = { "value" },
      dataset = { "size", "split", "loader" },
      loader = { "next", "batches", "state", "load_state" },
    }
    local values = specimens()
    for kind, object in pairs(objects) do values["own " .. kind] = object end
    for kind, object in ms.sorted_pairs(objects) do
      for _, name in ipairs(names[kind]) do
        assert.equal("function", type(object[name]), kind .. "." .. name)
        for other, value in ms.sorted_pairs(values) do
          if other ~= "own " .. kind and other ~= kind then
            if try(name, object[name], value, value, value) then
              error(("%s of a %s accepted %s"):format(name, kind, other))
            end
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
  local function model(key, value, kind)
    return function()
      local options = { vocab = 4, context = 4, layers = 1, width = 4, heads = 2 }
      options[key] = value
      nn[kind or "llama"](options)
    end
  end
  for name, case in pairs {
    ["nn.gpt2"] = { function() nn.gpt2() end, "missing" },
    dropout = { model("dropout", 1, "gpt2"), "dropout", "below 1" },
    eps = { model("eps", "x"), "eps" },
    rotary_base = { model("rotary_base", -1), "rotary_base" },
    Linear = { function() nn.Linear(3) end, "Linear" },
    Linear0 = { function() nn.Linear(0, 1) end, "1 or more" },
    Embedding = { function() nn.Embedding() end, "Embedding" },
    LayerNorm = { function() nn.LayerNorm "x" end, "LayerNorm" },
    RMSNorm = { function() nn.RMSNorm() end, "RMSNorm" },
    Attention = { function() nn.Attention { width = 4, heads = 2, kv_heads = 0 } end, "Attention" },
    report = { function() ms.report() end, "give run" },
    loader = { function() data:loader() end, "batch" },
    loader_option = { function() data:loader { bach = 1 } end, "'batch'" },
    log = { function() ms.log() end, "a format" },
    log_d = { function() ms.log("%d", "x") end, "number expected" },
    stream = { function() ms.stream("a", 5) end, "table" },
    load_state = { function() nn.Linear(1, 1):load_state() end, "load_state" },
    load_number = { function() nn.Linear(1, 1):load_state { weight = 1, bias = 2 } end, "weight" },
    save = { function() nn.Linear(1, 1):save() end, "path" },
    accumulate = { function() nn.Linear(1, 1):accumulate(2) end, "function" },
    checkpoint = { function() ms.checkpoint.save "x" end, "checkpoint.save" },
    scaler = { function() ms.optim.scaler():load_state {} end, "scaler" },
  } do
    it("are named with the script's line: " .. name, function()
      data = assert(ms.data.bytes(debug.getinfo(1, "S").source:sub(2)))
      fails(case[1], case[2], case[3])
    end)
  end
end)

describe("integers at the edges", function()
  local edges = {
    -1, 0, 1 << 31, 1 << 32, 1 << 53, 1 << 62, math.maxinteger, math.mininteger, -(1 << 31),
    (1 << 31) - 1, 2.0 ^ 53, 2.0 ^ 63, -2.0 ^ 63, 1e300, 0.5,
  }

  local t, ids = ms.ones { 2, 3 }, ms.tensor { 1, 0 }
  local dataset = assert(ms.data.bytes {
    (os.getenv "MOONSHARD_SOURCE" or ".") .. "/tests/spec/bindings_arguments_spec.lua",
  })
  local uses = {
    zeros = function(n) return ms.zeros { n } end,
    zeros2 = function(n) return ms.zeros { n, n } end,
    zeros0 = function(n) return ms.zeros { 0, n, n, n } end,
    tensor = function(n) return ms.tensor({ n }, "i32") end,
    u8 = function(n) return ms.tensor({ n }, "u8") end,
    f32 = function(n) return ms.tensor({ n }, "f32") end,
    full = function(n) return ms.full(n, { 2, dtype = "i32" }) end,
    arange = function(n) return ms.arange(n, n) end,
    arange3 = function(n) return ms.arange(0, n, n) end,
    arange2 = function(n) return ms.arange(n, n + 3) end,
    seed = function(n) ms.seed(n) ms.seed(1) end,
    rand = function(n) return ms.rand { 2, seed = n } end,
    randint = function(n) return ms.randint { 2, low = 0, high = n } end,
    randint2 = function(n) return ms.randint { 2, low = n, high = n } end,
    size = function(n) return t:size(n) end,
    index = function(n) return t[n] end,
    select = function(n) return t:select(1, n) end,
    dim = function(n) return t:select(n, 1) end,
    narrow = function(n) return t:narrow(1, n, 1) end,
    narrow2 = function(n) return t:narrow(1, 1, n) end,
    narrow3 = function(n) return t:narrow(1, n, n) end,
    view = function(n) return t:view(n) end,
    view2 = function(n) return t:view(n, n) end,
    view3 = function(n) return t:view(n, -1) end,
    reshape = function(n) return t:reshape(n, 2) end,
    expand = function(n) return ms.ones({ 1 }):expand(n) end,
    expand2 = function(n) return ms.ones({ 1 }):expand(n, 1) end,
    split = function(n) return t:split(n) end,
    split2 = function(n) return t:split { n, n } end,
    split3 = function(n) return t:split { n, 2 - (math.type(n) == "integer" and n or 0) } end,
    chunk = function(n) return t:chunk(n) end,
    transpose = function(n) return t:transpose(n, 1) end,
    permute = function(n) return t:permute(n, n) end,
    squeeze = function(n) return t:squeeze(n) end,
    unsqueeze = function(n) return t:unsqueeze(n) end,
    flatten = function(n) return t:flatten(n, n) end,
    pad_to = function(n) return ms.ones({ 3 }):pad_to(n) end,
    sum = function(n) return t:sum(n) end,
    argmax = function(n) return t:argmax(n) end,
    cumsum = function(n) return t:cumsum(n) end,
    softmax = function(n) return t:softmax(n) end,
    topk = function(n) return t:topk(n) end,
    topk2 = function(n) return t:topk(1, n) end,
    above = function(n) return ms.ones({ 3 }):above(0, n) end,
    histogram = function(n) return t:histogram(n, 0, 1) end,
    gather = function(n) return t:gather(n, ms.tensor { { 0 } }) end,
    cat = function(n) return ms.cat({ t, t }, n) end,
    stack = function(n) return ms.stack({ t, t }, n) end,
    rotary = function(n) return ms.ones({ 1, 1, 2, 4 }):rotary(n) end,
    cross_entropy = function(n) return t:cross_entropy(ids, { ignore_index = n }) end,
    embedding = function(n) return ms.tensor({ n }):embedding(t):to_table() end,
    target = function(n) return t:cross_entropy(ms.tensor { n, 0 }):item() end,
    scatter = function(n) return ms.zeros({ 3 }):scatter(1, ms.tensor { n }, 1):to_table() end,
    index_select = function(n) return t:index_select(1, ms.tensor { n }):to_table() end,
    steps = function(n) for _ in ms.steps(n, n) do return end end,
    steps2 = function(n) for _ in ms.steps(n) do return end end,
    lag = function(n) return ms.metric("edge"):lag(n) end,
    loader = function(n) return dataset:loader { batch = n, length = 4 } end,
    loader2 = function(n) return dataset:loader { batch = 1, length = n } end,
    loader3 = function(n) return dataset:loader({ batch = 1, length = 4 }):batches(n) end,
    split_data = function(n) return dataset:split(n) end,
    loader4 = function(n)
      dataset:loader({ batch = 1, length = 4 })
        :load_state { seed = n, epoch = n, position = n, samples = n }
    end,
    random = function(n) core.set_random_state(n, n, n) core.set_random_state(1, 0, 0) end,
    peak = function(n) core.set_peak(n) ms.reset_peak() end,
    point = function(n) return core.point_sync(n, 0) end,
    point2 = function(n) return ms.stream():_wait(n, 0) end,
    linear = function(n) return ms.nn.Linear(n, n) end,
    embedding2 = function(n) return ms.nn.Embedding(n, n) end,
    model = function(n)
      return ms.nn.gpt2 { vocab = n, context = 4, layers = 1, width = 4, heads = n }
    end,
    schedule = function(n) return ms.optim.cosine({ steps = n })(n) end,
    hash = function(n) return core.hash("x", n) end,
    json = function(n) return core.json_decode(core.json_encode(n)) end,
    cast = function(n) return ms.tensor({ n * 1.0 }, "f32"):to("u8"):to_table() end,
    cast2 = function(n) return ms.tensor({ n * 1.0 }, "f32"):to("i64"):to_table() end,
    fill = function(n) return ms.zeros({ 2, dtype = "u8" }):fill_(n):to_table() end,
    pow = function(n) return ms.tensor({ 2 }):pow(n):to_table() end,
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

describe("strings", function()
  it("with zero bytes are refused as paths and names", function()
    for _, f in ipairs {
      core.file_read, core.list, core.exists, core.safetensors_open, ms.data.bytes,
      ms.safetensors.header,
    } do
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
