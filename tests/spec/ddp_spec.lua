-- ddp and hooks as scripts see them on one rank: wrapped models, options, what links may and may
-- not do. Several ranks: dist/ddp_spec.lua.
local ms = require "moonshard"
local support = require "support"
local near, fails = support.near, support.fails
local hooks = ms.hooks

local function linear()
  local model = ms.nn.Linear(2, 1, { bias = false })
  ms.no_grad(function() model.weight:copy_(ms.tensor { { 1., 2 } }) end)
  return model
end

local input = ms.tensor { { 3., 4 } }
local function run(model) model(input):sum():backward() end

describe("a ddp model", function()
  it("is its module, but for its forward", function()
    local inner = ms.nn.gpt2 { vocab = 8, context = 4, layers = 1, width = 8, heads = 2 }
    local model = ms.ddp(inner)
    assert.equal(inner, model.module)
    assert.equal("wte.weight", model:parameters()[1]:name())
    assert.same(#inner:parameters(), #model:parameters())
    local live = { live = true }
    assert.equal(inner:state(live)["wte.weight"], model:state(live)["wte.weight"])
    assert.equal(model, model:eval())
    assert.is_false(inner.h[1]:is_training())
    assert.equal(model, model:train())
    assert.equal(inner.h, model.h)
    assert.equal(3, model:generate(ms.tensor { 1, 2 }, { count = 3, temperature = 0 }):numel())
    model:load_state(inner:state())
    assert.equal(inner, model:unwrap())
  end)

  it("trains as its module does", function()
    local plain, model = linear(), ms.ddp(linear())
    local a, b = ms.optim.sgd(plain, { lr = 0.1 }), ms.optim.sgd(model, { lr = 0.1 })
    for _ in ms.steps(3) do
      run(plain)
      run(model)
      near(plain:clip_grad_norm(1), model:clip_grad_norm(1), 0)
      a:step()
      b:step()
    end
    near(plain.weight:detach(), model.weight:detach(), 0)
    assert.same({ all_reduce = 1 }, model:stats().collectives)
    assert.equal(2, model:stats().step)
    assert.same({ { index = 0, bytes = 8, parameters = 1 } }, model:stats().buckets)
    ms.synchronize()
    local stats = model:stats()
    for _, name in ipairs { "forward_ms", "backward_ms", "reduce_ms", "step_ms" } do
      assert.is_true(stats[name] > 0 and stats[name] < 60000, name)
    end
    assert.is_true(stats.exposed_ms >= 0 and stats.exposed_ms < 60000)
    local link = stats.links[1]
    assert.same({ 1, "reduce", 3, true },
      { stats.world_size, stats.hook, stats.iteration, stats.rebuilt })
    assert.same({
      bucket_bytes = { 1 << 20, 25 << 20 }, find_unused = false, static_graph = false,
      init_sync = true, broadcast_buffers = true, buffer_hook = false,
    }, stats.options)
    assert.same({ "reduce", "world", 1, 8, 0 },
      { link.name, link.group, link.calls, link.payload_bytes, link.wire_bytes })
  end)

  it("gives a view of its bucket as gradient, which adds up", function()
    local model = ms.ddp(linear())
    assert.is_nil(model.weight:grad())
    run(model)
    local first = model.weight:grad()
    near({ { 3, 4 } }, first, 0)
    model:no_sync(function() run(model) end)
    near({ { 6, 8 } }, first, 0)
    assert.equal(first, model.weight:grad())
    -- A gradient that a script has set is copied into its bucket.
    model.weight:set_grad(ms.tensor { { 1., 1 } })
    run(model)
    near({ { 4, 5 } }, model.weight:grad(), 0)
  end)

  it("reduces in the last pass of accumulate only", function()
    local calls = 0
    local model = ms.ddp(linear(),
      { comm_hook = function(bucket, next) calls = calls + 1 return next(bucket) end })
    model:accumulate(3, function() run(model) end)
    assert.equal(1, calls)
    near({ { 9, 12 } }, model.weight:grad(), 0)
    fails(function() model:accumulate(2, function() end) end, "did not call backward")
  end)

  it("names what is wrong with a pass", function()
    local Two = ms.nn.class "Two"
    function Two:init() self.used, self.unused = linear(), linear() end
    function Two:forward(x) return self.used(x) end
    local model = ms.ddp(Two())
    run(model)
    assert.is_nil(model:stats().error)
    fails(function() run(model) end, "no gradient", "'unused.weight'", "find_unused")
    assert.matches("no gradient came for 'unused.weight'", model:stats().error)
    model = ms.ddp(linear())
    fails(function() run(model.module) end, "call what ddp returned")
    model = ms.ddp(linear())
    local y = model(input):sum()
    y:backward { retain_graph = true }
    fails(function() y:backward() end, "twice")
    model = ms.ddp(linear())
    y = model(input):sum()
    fails(function() model:no_sync(function() y:backward() end) end, "ran outside")
  end)

  it("tells the last error of a reduction until there is another (A19)", function()
    local wrong
    local model = ms.ddp(linear(), { comm_hook = function(bucket, next)
      if wrong then error(wrong) end
      return next(bucket)
    end })
    run(model)
    assert.is_nil(model:stats().error)
    for _, message in ipairs { "the first", "the second" } do
      wrong = message
      fails(function() run(model) end, message)
      assert.matches(message, model:stats().error)
      wrong = nil
      run(model)
      assert.matches(message, model:stats().error)
    end
  end)

  it("with find_unused lets parameters be that the loss does not depend on", function()
    local Two = ms.nn.class "Two"
    function Two:init() self.a, self.b = linear(), linear() end
    function Two:forward(x, both) return { self.a(x), { both and self.b(x) } } end
    local model = ms.ddp(Two(), { find_unused = true })
    for step in ms.steps(4) do
      model(input, step % 2 == 1)[1]:sum():backward()         -- an output that is not used, too
      near({ { 3, 4 } }, model.a.weight:grad(), 0)
      assert.is_nil(model.b.weight:grad())
      assert.equal(2, step == 0 and 2 or model:stats().collectives.all_reduce)
      model.a.weight:set_grad(nil)
    end
    local y = model(input)[1]:sum() + model.b.weight:sum()     -- used outside of the model
    fails(function() y:backward() end, "'b.weight'", "used outside")
  end)

  it("with static_graph takes what the first iteration does as given", function()
    local Two = ms.nn.class "Two"
    function Two:init() self.a, self.b = linear(), linear() end
    function Two:forward(x, which)
      local y = self.a(x)
      if which > 1 then y = y + self.b(x) end
      return y:sum()
    end
    local model = ms.ddp(Two(), { static_graph = true })
    for _ = 1, 3 do
      model(input, 1):backward()
      near({ { 3, 4 } }, model.a.weight:grad(), 0)
      assert.is_nil(model.b.weight:grad())
      model.a.weight:set_grad(nil)
    end
    local y = model(input, 2)
    fails(function() y:backward() end, "graph changed", "'b.weight'", "had none")
    model = ms.ddp(Two(), { static_graph = true })
    model(input, 2):backward()
    model(input, 1):backward()
    fails(function() model(input, 2) end, "graph changed", "fewer", "'b.weight'")
    model = ms.ddp(Two(), { static_graph = true })
    model(input, 1):backward()
    y = model(input, 1)
    y:backward { retain_graph = true }
    fails(function() y:backward() end, "graph changed", "'a.weight'", "2 times", "1")
  end)

  it("joins others when its inputs run out", function()
    local model = ms.ddp(linear())
    assert.same({ 1, nil, 3 }, { model:join({}, function()
      run(model)
      return 1, nil, 3
    end) })
    near({ { 3, 4 } }, model.weight:grad(), 0)
    assert.is_nil(model:join({ divisor = "live", stop = true }, function() run(model) end))
    fails(function() model:join({ divisor = "lives" }, run) end, "'live'")
    fails(function() model:join({ stop = 1 }, run) end, "stop must be a boolean")
    fails(function() model:join({ stops = true }, run) end, "'stop'")
    fails(function() model:join({}) end, "a function is expected")
    fails(function() model:join({}, function() model:join({}, run) end) end, "running already")
    fails(function() model:join({}, function() error "boom" end) end, "boom")
    run(model)
  end)

  it("reorders its buckets on request, by the next backward", function()
    local Two = ms.nn.class "Two"
    function Two:init()
      self.a = ms.nn.Linear(2, 2, { bias = false })
      self.b = ms.nn.Linear(2, 2, { bias = false })
    end
    function Two:forward(x, turned) return turned and self.b(self.a(x)) or self.a(self.b(x)) end
    local first
    local model = ms.ddp(Two(), { bucket_bytes = { 1, 16 }, comm_hook = function(bucket, next)
      if bucket:index() == 0 then first = bucket:parameters()[1]:name() end
      return next(bucket)
    end })
    local function backward(turned) model(input, turned):sum():backward() end
    backward()
    backward()
    assert.same({ "a.weight", 2 }, { first, #model:stats().buckets })
    backward(true)
    assert.equal("a.weight", first)
    model:rebuild_buckets()
    backward(true)
    assert.equal("a.weight", first)
    backward(true)
    assert.same({ "b.weight", 2 }, { first, #model:stats().buckets })
    fails(function() ms.ddp(Two(), { bucket_bytes = { 1, 2.5 } }) end, "bucket_bytes[2]")
  end)

  it("leaves shared buffers shared when it is unwrapped", function()
    local Part, Whole = ms.nn.class "Part", ms.nn.class "Whole"
    function Part:init(t) self:add_buffer("scale", t) end
    function Whole:init()
      local t = ms.ones { 2 }
      self.linear, self.first, self.second = ms.nn.Linear(2, 2), Part(t), Part(t)
    end
    local model = Whole()
    ms.ddp(model, { precision = { buffer = "bf16" } }):unwrap()
    assert.equal("f32", model.first.scale:dtype())
    assert.equal(model.first.scale, model.second.scale)
    model.first.scale:fill_(3)
    assert.equal(3, model.second.scale[1]:item())
  end)

  it("leaves nothing behind when it is unwrapped", function()
    local inner = linear()
    inner:add_buffer("half", ms.ones { 2 })
    for _, options in ipairs {
      {},
      { find_unused = true },
      { static_graph = true },
      { delayed = { "weight" } },
      { precision = { param = "bf16", buffer = "bf16", output = "f32" } },
      { buckets = "arrival" },
      { bucket_bytes = { 4, 8 }, comm_hook = "bf16_compress", broadcast_buffers = false },
    } do
      local model = ms.ddp(inner, options)
      for _ = 1, 3 do
        inner.weight:set_grad(nil)
        run(model)
      end
      near({ { 3, 4 } }, inner.weight:grad(), 0)
      assert.equal(inner, model:unwrap())
      fails(function() model:no_sync(run) end, "unwrapped")
      for _, method in ipairs { "stats", "join", "rebuild_buckets" } do
        fails(function() model[method](model, {}, run) end, "unwrapped")
      end
      inner.weight:set_grad(nil)
      run(inner)  -- twice, without a forward of a ddp model
      run(inner)
      near({ { 6, 8 } }, inner.weight:grad(), 0)
      assert.equal("f32", inner.half:dtype())
      assert.equal("f32", inner(input):dtype())
      inner.weight:set_grad(nil)
    end
  end)

  it("is made of a module that is wrapped once and has something to train", function()
    local inner = linear()
    local model = ms.ddp(inner)
    fails(function() ms.ddp(inner) end, "'weight'", "unwrap")
    fails(function() ms.ddp(model) end, "wrapped already")
    fails(function() ms.ddp(model:unwrap().weight) end, "a module is expected")
    fails(function() model(input) end, "unwrapped")
    run(ms.ddp(inner))
    local frozen = linear()
    frozen.weight:requires_grad_(false)
    fails(function() ms.ddp(frozen) end, "requires a gradient")
  end)

  it("is freed with its buckets when it has no reference any more", function()
    local live
    for i = 1, 5 do
      (function()
        local model = ms.ddp(linear(),
          { comm_hook = function(bucket, next) return next(bucket) end })
        run(model)
        run(model)
      end)()
      if i == 3 then live = ms.memory().live end
    end
    assert.equal(live, ms.memory().live)
  end)

  it("does not pile up what links make, bucket after bucket", function()
    local function peak(link)
      local code, text = support.recipe(([[
        local ms = require "moonshard"
        local layers = {}
        for i = 1, 6 do layers[i] = ms.nn.Linear(1024, 1024, { bias = false }) end
        local model = ms.ddp(ms.nn.Sequential(table.unpack(layers)),
          { bucket_bytes = 4 << 20, find_unused = true, comm_hook = %s })
        for _ in ms.steps(4) do
          model(ms.ones { 1, 1024 }):sum():backward()
          for _, p in ipairs(model:parameters()) do p:set_grad(nil) end
        end
        print(ms.memory().peak >> 20)
      ]]):format(link), "--device sim")
      assert.equal(0, code, text)
      return tonumber(text:match "(%d+)%s*$")
    end
    -- 16 MiB for each bucket, 96 in total; from 16 on, memory without a reference is released.
    local piled = peak "function(b, next) local t = b:buffer() * 2 return \z
      next(b):and_then(function(r) return r * 1 + t * 0 end) end"
    assert.is_true(piled <= peak "'reduce'" + 32, piled)
  end)

  it("names options that it does not have", function()
    fails(function() ms.ddp(linear(), { comm_hok = "noop" }) end, "'comm_hook'")
    fails(function() ms.ddp(linear(), { find_unused = 1 }) end, "find_unused must be a boolean")
    fails(function() ms.ddp(linear(), { delayed = "weight" }) end, "delayed is a list")
    fails(function() ms.ddp(linear(), { delayed = { "wait" } }) end, "'wait'")
    fails(function() ms.ddp(linear(), { delayed = { "[" } }) end, "delayed[1], '[', is no pattern")
    fails(function() ms.ddp(linear(), { ignored = { "weigth" } }) end, "ignored", "'weigth'")
    fails(function() ms.ddp(linear(), { ignored = { 3 } }) end, "ignored[1]", "not a number")
    fails(function() ms.ddp(linear(), { ignored = { "weight" } }) end,
      "no parameter of the model requires a gradient", "ignored")
    fails(function() ms.ddp(ms.nn.GELU()) end, "no parameter of the model requires a gradient")
    fails(function() ms.ddp(linear(), { group = "world" }) end, "group must be a group of ranks",
      "string")
    fails(function() ms.ddp(linear(), { precision = "bf16" }) end, "precision is a table")
    fails(function() ms.ddp(linear(), { precision = { params = "bf16" } }) end, "'param'")
    fails(function() ms.ddp(linear(), { precision = { param = "i64" } }) end,
      "precision.param must be f32, f16 or bf16")
    fails(function() ms.ddp(linear(), { precision = { cast_inputs = true } }) end,
      "precision.param, which is not given")
    fails(function() ms.ddp(linear(), { bucket_bytes = 0 }) end, "bucket_bytes[1]")
    fails(function() ms.ddp(linear(), { bucket_bytes = {} }) end, "bucket_bytes")
    fails(function() ms.ddp(linear(), { bucket_bytes = 1.5 }) end, "bucket_bytes[1]", "1.5")
    assert.same({ 25000000 },
      ms.ddp(linear(), { bucket_bytes = 25e6 }):stats().options.bucket_bytes)
    fails(function() ms.ddp(linear(), { broadcast_buffers = 1 }) end, "broadcast_buffers")
    fails(function() ms.ddp(linear(), { comm_hook = "fp16_compres" }) end, "'fp16_compress'")
    fails(function() ms.ddp(linear(), { comm_hook = 5 }) end, "not a number")
    fails(function() ms.ddp(linear(), { comm_hook = "no_such.lua" }) end, "no_such.lua")
    ms.ddp(linear(), { find_unused = false, init_sync = false })
  end)
end)

describe("a bucket plan", function()
  -- Three layers, used from the last to the first. Returns the sizes of buckets, in parameters,
  -- after `passes` passes with a plan.
  local Three = ms.nn.class "Three"
  function Three:init()
    self.a, self.b, self.c = ms.nn.Linear(2, 2), ms.nn.Linear(2, 2), ms.nn.Linear(2, 2)
  end
  function Three:forward(x) return self.a(self.b(self.c(x))) end
  local function layouts(plan, passes)
    local model, seen = ms.ddp(Three(), { buckets = plan }), {}
    for i = 1, passes do
      run(model)
      local sizes = {}
      for b, bucket in ipairs(model:stats().buckets) do sizes[b] = bucket.parameters end
      seen[i] = table.concat(sizes, " ")
      for _, p in ipairs(model:parameters()) do p:set_grad(nil) end
    end
    return seen, model
  end
  local function by(f, every) return ms.buckets { name = "mine", every = every, plan = f } end
  local kept = ms.zeros { 2 }:keep()

  it("sees what came when, and says which parameters go together", function()
    local views = {}
    local seen, model = layouts(by(function(view)
      views[#views + 1] = view
      return { { 1, 2 }, { 3 }, { 5, 4, 6 } }
    end, 2), 5)
    assert.same({ "6", "6", "2 1 3", "2 1 3", "2 1 3" }, seen)
    assert.same({ 2, 4 }, { views[1].step, views[2].step })
    local view, at = views[2], 0
    assert.equal(6, #view.parameters)
    assert.equal("a.", view.parameters[1].name:sub(1, 2))
    for _, p in ipairs(view.parameters) do
      assert.is_true(p.ready_ms >= at and p.ready_ms < 60000 and p.dtype == "f32"
        and (p.bytes == 16 or p.bytes == 8))
      at = p.ready_ms
    end
    assert.is_true(view.backward_ms > 0 and view.forward_ms > 0 and view.world_size == 1
      and view.latency_ms >= 0 and view.bytes_per_ms > 0)
    for _ = 1, 2 do run(model) end
    assert.equal(3, #views)
  end)

  it("is made again after two passes on request", function()
    local calls = 0
    local _, model = layouts(by(function()
      calls = calls + 1
      return { caps_bytes = { 1 } }
    end, 10), 4)
    assert.equal(1, calls)
    model:rebuild_buckets()
    for i = 1, 3 do
      run(model)
      assert.equal(i == 3 and 2 or 1, calls)
    end
  end)

  it("may give sizes, a name, a file", function()
    assert.same({ "6", "6", "1 2 2 1" },
      (layouts(by(function() return { caps_bytes = { 1, 24, 20, 1 } } end), 3)))
    local path = os.tmpname() .. ".lua"
    local file = assert(io.open(path, "w"))
    file:write 'return require "moonshard".buckets { name = "single", plan = function() return { \z
      caps_bytes = { 1 } } end }'
    file:close()
    assert.same({ "6", "6", "1 1 1 1 1 1", "1 1 1 1 1 1" }, (layouts(path, 4)))
    os.remove(path)
    assert.same({ "6", "6", "6" }, (layouts("arrival", 3)))
    assert.equal(3, #layouts("fitted", 3))
    fails(function() layouts("arival", 1) end, "'arrival'")
    fails(function() layouts(5, 1) end, "not a number")
    fails(function() layouts("no_such.lua", 1) end, "no_such.lua")
    fails(function() ms.ddp(linear(), { buckets = "arrival", bucket_bytes = 5 }) end, "both")
  end)

  for what, case in pairs {
    ["nothing"] = { function() end, "it returned nothing" },
    ["a parameter left out"] = {
      function() return { { 1, 2, 3, 4, 5 } } end,
      "parameter 6 ('c.",
      "in no bucket",
    },
    ["one twice"] = {
      function() return { { 1, 2 }, { 2 } } end,
      "bucket 1: 2 ('a.",
      "in bucket 0 already",
    },
    ["one that there is not"] = {
      function() return { { 7 } } end,
      "bucket 0: there is no parameter 7",
      "1 to 6",
    },
    ["an empty bucket"] = {
      function() return { {}, { 1, 2, 3, 4, 5, 6 } } end,
      "bucket 0 is empty",
    },
    ["a wrong size"] = { function() return { caps_bytes = { 0 } } end, "caps_bytes[1]" },
    ["an error"] = { function() error "boom" end, "boom" },
    ["a tensor's value"] = { function() return ms.ones { 1 }:item() end, "numbers only" },
    ["a collective"] = { function() return ms.world():all_reduce(kept) end, "numbers only" },
    ["a stream's work"] = { function() ms.stream():run(print) end, "numbers only" },
    ["a yield"] = { function() coroutine.yield() end, "yield" },
    ["both lists and caps"] = {
      function() return { { 1, 2, 3 }, { 4, 5, 6 }, caps_bytes = { 1 } } end, "both", "caps_bytes",
    },
    ["an unknown field"] = { function() return { cap_bytes = { 1 } } end, "'cap_bytes'", "'caps_" },
    ["lists and a field"] = { function() return { { 1, 2, 3, 4, 5, 6 }, size = 1 } end, "'size'" },
    ["a field beside sizes"] = { function() return { caps_bytes = { 1, most = 2 } } end, "'most'" },
  } do
    it("is told its line when it gives " .. what, function()
      fails(function() layouts(by(case[1]), 3) end, "bucket plan mine (", "ddp_spec.lua:",
        table.unpack(case, 2))
    end)
  end

  it("keeps dtypes apart", function()
    local model = Three()
    model.b:to "bf16"
    function model.forward(self, x) return self.a(self.b(self.c(x):to "bf16"):to "f32") end
    local wrapped = ms.ddp(model,
      { buckets = by(function(view) return { caps_bytes = { 1 << 20 } } end) })
    for _ = 1, 3 do run(wrapped) end
    assert.equal(2, #wrapped:stats().buckets)
    wrapped = ms.ddp(wrapped:unwrap(),
      { buckets = by(function() return { { 1, 2, 3, 4, 5, 6 } } end) })
    for _ = 1, 2 do run(wrapped) end
    fails(function() run(wrapped) end, "bucket 0 has", "f32", "bf16")
  end)
end)

describe("a comm hook", function()
  -- f raises a message that begins with the line of backward, has the texts, and perhaps the line
  -- of the hook.
  local function told(f, ...)
    local ok, message = pcall(f)
    assert.is_false(ok)
    assert.truthy(
      tostring(message):match "^[^ ]*ddp_spec%.lua:%d+: comm hook, bucket 0 \"weight\": ", message)
    for _, text in ipairs { ... } do assert.truthy(message:find(text, 1, true), message) end
  end

  -- Runs one backward with the hook and gives the gradient.
  local function reduced(hook)
    local model = ms.ddp(linear(), { comm_hook = hook })
    run(model)
    return model.weight:grad()
  end

  it("may be a link, a chain, a name or a file", function()
    local path = os.tmpname() .. ".lua"
    local file = assert(io.open(path, "w"))
    file:write "return function(bucket, next) bucket:buffer():mul_(10) return next(bucket) end"
    file:close()
    local function twice(bucket, next)
      return next(bucket):and_then(function(t) return t * 2 end)
    end
    for expected, hook in pairs {
      [3] = "all_reduce",
      [6] = twice,
      [12] = hooks.chain { twice, twice, hooks.reduce() },
      [30] = path,
      [60] = hooks.chain { twice, path, "bf16_compress" },
    } do
      near({ { expected, expected * 4 / 3 } }, reduced(hook), 0)
    end
    os.remove(path)
  end)

  it("runs around the links after it, in order", function()
    local order = {}
    local function link(name)
      return function(bucket, next)
        order[#order + 1] = name
        return next(bucket):and_then(function() order[#order + 1] = name .. "'" end)
      end
    end
    reduced(
      hooks.chain { link "a", hooks.chain { link "b", hooks.cast { dtype = "bf16" } }, link "c" })
    assert.same({ "a", "b", "c", "c'", "b'", "a'" }, order)
  end)

  it("sees what links before it have put into the bucket", function()
    local seen
    local model = ms.ddp(linear(),
      { comm_hook = hooks.chain { hooks.cast { dtype = "f16" }, function(bucket, next)
        seen = {
          bucket:buffer():dtype(), bucket:dtype(), bucket:gradients()[1]:dtype(),
          #bucket:gradients()[1]:shape(), bucket:parameters()[1], tostring(bucket),
        }
        bucket:set_buffer(bucket:buffer():narrow(1, 1, 1))
        assert(not pcall(bucket.gradients, bucket))
        bucket:set_buffer(ms.tensor({ 7., 8 }, "f16"))
        return next(bucket)
      end } })
    run(model)
    assert.same({ "f16", "f32", "f16", 2, model.weight, 'bucket 0 "weight"' }, seen)
    near({ { 7, 8 } }, model.weight:grad(), 0)
  end)

  local wrong = {
    { "returns nothing", function(bucket, next) next(bucket) end, "returned nothing" },
    { "returns a number", function() return 1 end, "returned a number" },
    {
      "returns a list",
      function(bucket) return ms.all { bucket:buffer() } end,
      "future of a table",
    },
    { "returns another length", function() return ms.zeros { 3 } end, "[3] f32", "[2] f32" },
    {
      "returns another dtype",
      function(bucket) return bucket:buffer():to "bf16" end,
      "[2] bf16",
      "[2] f32",
    },
    {
      "returns what is not contiguous",
      function() return ms.zeros({ 2, 2 }):select(2, 1) end,
      "not contiguous",
    },
    {
      "calls next twice",
      function(bucket, next) next(bucket) return next(bucket) end,
      "next twice",
    },
    { "raises", function() error "boom" end, ": boom", "link '" },
    { "raises what is no string", function() error {} end, "table" },
    {
      "raises after a future",
      function(bucket, next) return next(bucket):and_then(function() error "boom" end) end,
      "boom",
      "ddp_spec.lua",
    },
    {
      "raises in a later link",
      hooks.chain { function(bucket, next) return next(bucket) end, function() error "boom" end },
      "boom",
      "link '",
    },
    {
      "blocks",
      function(bucket) return bucket:buffer() * bucket:buffer():sum():item() end,
      "item",
    },
    { "waits for a future", function(bucket, next) return next(bucket):sync() end, "sync" },
    { "goes backward", function() linear()(input):sum():backward() end, "backward" },
    { "steps an optimizer", function() ms.optim.sgd(linear()):step() end, "step_param" },
    { "makes a group", function(bucket) bucket:group():split { { 0 } } end, "split" },
    { "waits at a barrier", function(bucket) bucket:group():barrier() end, "barrier" },
    { "wraps a model", function() ms.ddp(linear()) end, "hook" },
    {
      "registers a hook",
      function(bucket) bucket:parameters()[1]:on_grad(function() end) end,
      "hook",
    },
    { "begins a step", function() ms.steps(1)() end, "hook" },
    { "asks for a level that is not there", function(bucket) bucket:group "shards" end, "shard" },
    { "yields", function() coroutine.yield() end, "yield" },
    { "drops a gradient", function(bucket, next)
      bucket:parameters()[1]:set_grad(nil)
      return next(bucket)
    end, "link '", "set_grad cannot be used inside a link", "return zeros" },
    { "sets a gradient after a future", function(bucket, next)
      local p = bucket:parameters()[1]
      return next(bucket):and_then(function(t) p:set_grad(t:view(1, 2)) end)
    end, "link '", "set_grad cannot be used inside a link" },
    { "zeroes gradients", function(bucket, next)
      ms.optim.sgd(bucket:parameters()):zero_grad()
      return next(bucket)
    end, "zero_grad cannot be used inside a link" },
    { "yields after a future", function(bucket, next)
      return next(bucket):and_then(function() coroutine.yield() end)
    end, "link '", "ddp_spec.lua:", "yield" },
    { "waits for itself", function(bucket, next)
      local own
      own = next(bucket):and_then(function() return own end)
      return own
    end, "link '", "ddp_spec.lua:", "returned the future that waits for it" },
  }
  for _, case in ipairs(wrong) do
    it("that " .. case[1] .. " is told with its bucket", function()
      local model = ms.ddp(linear(), { comm_hook = case[2] })
      local y = model(input):sum()
      told(function() y:backward() end, table.unpack(case, 3))
    end)
  end

  it("that unwraps the model it reduces is refused", function()
    local model
    model = ms.ddp(linear(), { comm_hook = function() model:unwrap() end })
    local y = model(input):sum()
    told(function() y:backward() end, "unwrap")
  end)

  it("has its bucket until its result is there", function()
    local kept, buffer, gradient, future, cloned
    reduced(function(bucket, next)
      kept, buffer, gradient, cloned = bucket, bucket:buffer(), bucket:gradients()[1],
        bucket:buffer():clone():keep()
      future = next(bucket):and_then(function(t) assert(kept:index() == 0) return t end)
      return future
    end)
    for _, method in ipairs {
      "index", "buffer", "gradients", "parameters", "group", "is_last", "kind", "dtype", "divisor",
    } do
      fails(function() kept[method](kept) end, "bucket 0", "only valid")
    end
    fails(function() kept:set_buffer(ms.zeros { 2 }) end, "only valid")
    fails(function() buffer:sum() end, "only valid inside its comm hook")
    fails(function() gradient:sum() end, "only valid inside its comm hook")
    fails(function() future:value():sum() end, "only valid inside its comm hook")
    near({ 3, 4 }, cloned, 0)
    reduced(function(bucket, next)
      assert(not pcall(kept.index, kept))                  -- also while another hook runs
      return next(bucket)
    end)
  end)

  it("is built of links that can follow each other", function()
    fails(function() hooks.chain { hooks.reduce(), "noop" } end, "link 1 (reduce) reduces")
    fails(function() hooks.chain { "reduc" } end, "'reduce'")
    fails(function() hooks.cast { dtype = "i64" } end, "i64")
    fails(function() hooks.all_reduce { ops = "sum" } end, "'op'")
    fails(function() ms.ddp(linear(), { comm_hook = hooks.reduce { op = "mean" } }) end, "op")
  end)
end)

describe("a model without a reference", function()
  it("is not asked at the end of steps or for a checkpoint, also where it was part of \z
    another", function()
    local folder = os.tmpname()
    os.remove(folder)
    local wrapped = ms.ddp(ms.nn.Linear(2, 2))
    ms.nn.List { ms.ddp(ms.nn.Linear(2, 2)) }
    collectgarbage()  -- finalizes the reducer; its memory goes in the next cycle
    for _ in ms.steps(2) do end
    assert.is_truthy(ms.checkpoint.save(folder, { model = wrapped }))
    ms.checkpoint.wait()
    os.execute("rm -rf '" .. folder .. "'")
  end)
end)

describe("without data", function()
  -- Rates with which only arithmetic and messages take time.
  local RATES = [[
    local function rates(flops)
      return {
        flops_per_s = { f32 = flops, f16 = flops, bf16 = flops }, bytes_per_s = 1e15,
        links = { { latency_ns = 1e6, bytes_per_s = 1e9 } },
      }
    end
  ]]

  it("a bucket plan sees estimated times", function()
    local code, out = support.recipe(RATES .. [[
      local ms = require "moonshard"
      ms.init { device = "sim", group = "fake", rank = 0, world_size = 4, rates = rates(1e9) }
      local model = ms.ddp(ms.nn.MLP(64, 128),
        { buckets = ms.buckets { name = "told", plan = function(view)
          print(#view.parameters, view.latency_ms, view.bytes_per_ms, view.forward_ms,
            view.backward_ms, view.parameters[1].name, view.parameters[1].ready_ms)
          return { caps_bytes = { 40000 } }
        end } })
      for step in ms.steps(3) do model(ms.ones { 2, 64 }):sum():backward() end
      print(#model:stats().buckets)
    ]])
    assert.equal(0, code, out)
    local count, latency, speed, ahead, back, name, ready =
      out:match "(%d+)\t(%S+)\t(%S+)\t(%S+)\t(%S+)\t(%S+)\t(%S+)"
    assert.equal("4", count, out)
    -- The first gradient is that of the last product: of its bias or its weight.
    assert.matches("^down%.", name)
    -- Two products of 2 x 64 x 128 multiply-adds ahead, and little else; twice as many back, one of
    -- which needs no gradient of the input.
    ahead, back, ready = tonumber(ahead), tonumber(back), tonumber(ready)
    local product = 2 * 2 * 64 * 128 / 1e6
    assert.truthy(ahead > 2 * product and ahead < 2.2 * product, out)
    assert.truthy(back > 3 * product and back < 4 * product, out)
    assert.truthy(ready > 0 and ready < back, out)
    -- One bucket of 66304 bytes at first, on 4 ranks: its reduction shows latency and rate in one.
    assert.equal(0, tonumber(latency))
    near(66304 / (4 * 1 + 66304 * 2 * 3 / 4 / 1e6), tonumber(speed), 1)
    assert.truthy(out:find("\n2\n", 1, true), out)
  end)

  it("stats have estimated times, which follow the rates", function()
    local function times(flops)
      local code, out = support.recipe(RATES .. ([[
        local ms = require "moonshard"
        ms.init { device = "sim", group = "fake", rank = 0, world_size = 4, rates = rates(%s) }
        local model = ms.ddp(ms.nn.MLP(64, 128))
        local optimizer = ms.optim.sgd(model, { lr = 0.1 })
        for step in ms.steps(4) do
          model(ms.ones { 32, 64 }):sum():backward()
          optimizer:step()
        end
        local s = model:stats()
        print(s.forward_ms, s.backward_ms, s.reduce_ms, s.exposed_ms, s.step_ms, ms.memory().peak)
      ]]):format(flops))
      assert.equal(0, code, out)
      local list = {}
      for word in out:gmatch "%S+" do list[#list + 1] = tonumber(word) end
      assert.equal(6, #list, out)
      return list
    end
    local slow, fast = times "1e9", times "1e12"
    for i, what in ipairs { "forward", "backward" } do
      assert.truthy(slow[i] > 0 and fast[i] > 0, what)
      near(1000, slow[i] / fast[i], 10)
    end
    -- Reductions take as long, after backward: the last gradient completes the only bucket.
    for _, list in ipairs { slow, fast } do
      near(4 + 66304 * 2 * 3 / 4 / 1e6, list[3], 1e-3)
      near(list[3], list[4], 1e-3)
    end
    assert.truthy(slow[5] > 0)
    assert.equal(slow[6], fast[6])
  end)

  it("all of it works on the sim device in a world of any size", function()
    local code, out = support.recipe([[
      local ms = require "moonshard"
      local model = ms.ddp(
        ms.nn.gpt2 { vocab = 16, context = 8, layers = 2, width = 16, heads = 2 }, {
          bucket_bytes = { 3000, 9000 },
          comm_hook = ms.hooks.chain {
            function(bucket, next) return next(bucket):and_then(function(t) return t * 1 end) end,
            "fp16_compress",
          },
        })
      local optimizer = ms.optim.adamw(model)
      local x = ms.randint { 2, 8, low = 0, high = 16 }
      for step in ms.steps(3) do
        model:accumulate(2, function() model(x):cross_entropy(x):backward() end)
        optimizer:step()
      end
      print(#model:stats().buckets, model:stats().collectives.all_reduce)
    ]], "--device sim")
    assert.equal(0, code, out)
    local buckets, calls = out:match "(%d+)\t(%d+)"
    assert.equal(buckets, calls, out)
    assert.is_true(tonumber(buckets) > 2)
  end)
end)
