-- Links and stages on one rank: what is checked when a chain is built, files as links, what links
-- remember and how it is saved. Several ranks: dist/hooks_spec.lua.
local ms = require "moonshard"
local command = require "command"
local support = require "support"
local near, fails = support.near, support.fails
local hooks = ms.hooks

local number = 0
-- A name of a state that no other test has.
local function unique()
  number = number + 1
  return ("of hooks_spec %d"):format(number)
end

local Three = ms.nn.class "Three"
function Three:init()
  self.a, self.b, self.c = ms.nn.Parameter(ms.ones { 2 }), ms.nn.Parameter(ms.ones { 3 }),
    ms.nn.Parameter(ms.ones { 2, 2 })
end
-- Gradients: 1 for a, 2 for b, 3 for c.
function Three:forward() return self.a:sum() + self.b:sum() * 2 + self.c:sum() * 3 end

local function pass(model)
  for _, p in ipairs(model:parameters()) do p:set_grad(nil) end
  model():backward()
end

describe("a stage", function()
  it("encodes, decodes and observes", function()
    local seen = {}
    local double = hooks.stage {
      name = unique(),
      needs = "f32",
      gives = "f32",
      encode = function(buffer) return buffer * 2 end,
    }
    local plus = hooks.stage {
      name = unique(),
      decode = function(reduced, _, bucket) return reduced + bucket:index() + 1 end,
    }
    local watch = hooks.stage { name = unique(), observe = function(buffer, state, bucket)
      local own = state:of(bucket)
      own.count = (own.count or 0) + 1
      seen[#seen + 1] = { own.count, buffer:numel() }
    end }
    local model = ms.ddp(Three(), { comm_hook = hooks.chain { plus, double, watch } })
    pass(model)
    near({ 3, 3 }, model.a:grad(), 0)
    near({ 5, 5, 5 }, model.b:grad(), 0)
    pass(model)
    assert.same({ { 1, 9 }, { 2, 9 } }, seen)
  end)

  it("is checked when it is made, and with its neighbours when the chain is", function()
    fails(function() hooks.stage {} end, "name")
    fails(function() hooks.stage { name = unique(), encod = print } end, "'encode'")
    fails(function() hooks.stage { name = unique(), encode = 1 } end, "encode must be a function")
    fails(function() hooks.stage { name = unique(), needs = "f31" } end, "needs must be a dtype",
      "f31")
    local wants = hooks.stage { name = unique(), needs = "f32", encode = function(b) return b end }
    local gives =
      hooks.stage { name = unique(), gives = "f16", encode = function(b) return b:to "f16" end }
    fails(function() hooks.chain { hooks.cast { dtype = "bf16" }, wants } end, "link 2",
      "needs f32", "link 1 (cast bf16) gives bf16")
    fails(function() hooks.chain { gives, hooks.error_feedback(), wants } end, "link 3",
      "needs f32", "gives f16")
    fails(
      function() ms.ddp(Three(), { comm_hook = hooks.chain { hooks.chain { gives }, wants } }) end,
      "needs f32")
    hooks.chain { wants, gives, hooks.cast { dtype = "f32" }, wants }
  end)

  it("tells what it gave wrongly, with its name", function()
    for text, stage in pairs {
      ["encode returned nothing"] = { encode = function() end },
      ["decode returned a number"] = { decode = function() return 1 end },
      ["gives f16, but encode returned f32"] = { gives = "f16", encode = function(b) return b end },
      ["boom"] = { observe = function() error "boom" end },
      ["needs bf16, but the buffer is f32"] = { needs = "bf16" },
    } do
      stage.name = unique()
      local model = ms.ddp(Three(), { comm_hook = hooks.stage(stage) })
      fails(function() pass(model) end, "comm hook, bucket 0", text, "stage '" .. stage.name .. "'")
    end
  end)
end)

describe("a file as a link", function()
  local path = os.tmpname() .. ".lua"
  after_each(function() os.remove(path) end)
  local function write(text)
    local file = assert(io.open(path, "w"))
    file:write(text)
    file:close()
    return path
  end

  it("is loaded in a chain and by itself", function()
    write "return function(bucket, next) bucket:buffer():mul_(10) return next(bucket) end"
    for hook, expected in pairs {
      [path] = 10, [hooks.chain { path, path, "bf16_compress" }] = 100,
    } do
      local model = ms.ddp(Three(), { comm_hook = hook })
      pass(model)
      near({ expected, expected }, model.a:grad(), 0)
    end
  end)

  it("tells what is wrong with it", function()
    fails(function() hooks.chain { "no_such_folder/link.lua" } end, "link 1",
      "no_such_folder/link.lua")
    fails(function() hooks.chain { write "return 5" } end, "returned a number", path)
    fails(function() hooks.chain { write "error 'boom'" } end, "boom", path)
    fails(function() hooks.chain { write "retrun" } end, path)
    fails(function() hooks.chain { write "\27Lua" } end, path)
  end)
end)

describe("a bucket", function()
  it("has every level of groups", function()
    local sizes, sum
    local model = ms.ddp(Three(), { comm_hook = function(bucket, next)
      sizes = {
        bucket:group():size(), bucket:group("all") == bucket:group(), bucket:group("shard"):size(),
        bucket:group("replicate") == bucket:group(),
      }
      sum = bucket:group("shard"):all_reduce(ms.tensor { 1., 2 })
      return next(bucket)
    end })
    pass(model)
    assert.same({ 1, true, 1, true }, sizes)
    near({ 1, 2 }, sum:value(), 0)
  end)
end)

describe("a state", function()
  -- A link that adds the gradients up in its state, and gives the sum.
  local function adding(state)
    return function(bucket, next)
      local sum = state:flat(bucket, "sum")
      sum:add_(bucket:buffer())
      return next(bucket):and_then(function() return sum:clone() end)
    end
  end

  it("follows its parameters when buckets are rebuilt", function()
    local layouts = {}
    local state = hooks.state(unique())
    local model = ms.ddp(Three(),
      { bucket_bytes = 1, comm_hook = hooks.chain { adding(state), function(bucket, next)
        layouts[#layouts + 1] = bucket:buffer():numel()
        return next(bucket)
      end } })
    for pass_number = 1, 3 do
      pass(model)
      near({ pass_number, pass_number }, model.a:grad(), 0)
      near({ { 3 * pass_number, 3 * pass_number }, { 3 * pass_number, 3 * pass_number } },
        model.c:grad(), 0)
    end
    assert.equal(7, #layouts)                            -- one bucket, then three, then three
    model:rebuild_buckets()
    pass(model)
    near({ 8, 8, 8 }, model.b:grad(), 0)
  end)

  it("has tables of parameters, buckets and strings, which keep tensors over steps", function()
    local state, found = hooks.state(unique()), {}
    local model = ms.ddp(Three(), { bucket_bytes = 1, comm_hook = function(bucket, next)
      local of_text, of_bucket = state:of "all", state:of(bucket)
      for _, p in ipairs(bucket:parameters()) do
        local own = state:of(p)
        own.momentum = { (own.momentum and own.momentum[1] or ms.zeros { 1 }) * p:numel() + 1 }
      end
      of_text.count = (of_text.count or 0) + 1
      of_bucket.count = (of_bucket.count or 0) + 1
      found[#found + 1] = of_text.count * 10 + of_bucket.count
      return next(bucket)
    end })
    for _ in ms.steps(3) do pass(model) end
    assert.same({ 11, 21, 31, 41, 52, 62, 72 }, found)   -- for the second pass buckets were rebuilt
    assert.equal(7, state:of(model.a).momentum[1]:item())
    fails(function() state:of(5) end, "number")
    fails(function() state:of(ms.zeros { 1 }) end, "no parameter")
    fails(function() state:flat(ms.zeros { 1 }, "x") end, "a bucket is expected")
  end)

  it("has a name of its own", function()
    local name = unique()
    local state = hooks.state(name)                      -- luacheck: ignore 231
    fails(function() hooks.state(name) end, name)
    fails(function() hooks.stage { name = name } end, name)
    fails(function() hooks.state() end, "name")
    state = nil                                          -- luacheck: ignore
    hooks.state(name)                                    -- the first one has no reference any more
  end)

  it("is freed, with its memory, when it has no reference", function()
    local function train()
      local model = ms.ddp(Three(), {
        comm_hook = hooks.chain {
          adding(hooks.state "of hooks_spec, passing"), hooks.error_feedback(),
        },
      })
      pass(model)
      pass(model)
    end
    train()
    local live
    for i = 1, 4 do
      train()
      collectgarbage()
      require "moonshard.core".collect()
      if i == 2 then live = ms.memory().live end
    end
    assert.equal(live, ms.memory().live)
  end)

  it("is saved in checkpoints and restored", function()
    local folder, name = os.tmpname(), unique()
    os.remove(folder)
    local function build()
      local state = hooks.state(name)
      local link = adding(state)
      local model = ms.ddp(Three(), { comm_hook = hooks.chain { function(bucket, next)
        local own = state:of(bucket:parameters()[1])
        own.passes = (own.passes or 0) + 1
        state:of("text").half = ms.full(own.passes / 2, { 1 })
        state:of(bucket).deep = { list = { own.passes, "x" } }
        return link(bucket, next)
      end, hooks.error_feedback { decay = 0.5 }, function(bucket)
        bucket:set_sent(bucket:buffer() * 0.75)          -- a quarter of each number is lost
        return bucket:buffer()
      end } })
      return model, state
    end
    local expected
    do
      local model = build()
      for _ in ms.steps(2) do pass(model) end
      assert(ms.checkpoint.save(folder, { step = 2 }))
      pass(model)
      expected = model.c:grad():clone()
      model:unwrap()
    end
    require "moonshard.core".collect()
    for _, order in ipairs { "state first", "checkpoint first" } do
      local model, state
      if order == "state first" then
        model, state = build()
        pass(model)                                      -- loading replaces these values
      end
      assert(ms.checkpoint.load(ms.checkpoint.latest(folder), {}))
      if not model then model, state = build() end
      local passes = state:of(model.a).passes or state:of(model.c).passes
      assert.equal(2, passes, order)
      assert.equal(1, state:of("text").half:item())
      pass(model)
      near(expected, model.c:grad(), 0)
      near({ 3, 3 }, model.a:grad(), 0)
      model:unwrap()
      model, state = nil, nil                            -- luacheck: ignore
      require "moonshard.core".collect()
    end
    os.execute("rm -r '" .. folder .. "'")
  end)
end)

describe("clipping by the norm of all", function()
  it("comes first, and refuses steps before the last bucket is there", function()
    local clip = hooks.clip { max_norm = 1, scope = "global" }
    fails(function() hooks.chain { "bf16_compress", clip } end, "reduces")
    fails(function() hooks.chain { hooks.cast { dtype = "bf16" }, clip } end, "link 2 (clip)",
      "must be the first")
    fails(function() hooks.clip { max_norm = 1 } end, "scope")
    fails(function() hooks.clip { max_norm = 0, scope = "bucket" } end, "max_norm")
    local model = ms.ddp(Three(), { comm_hook = clip })
    local optimizer = ms.optim.sgd(model)
    fails(function() optimizer:overlap(model, "in_backward") end, "lagged", "policy in_backward")
    local function early(view)
      local plan = {}
      for i, b in ipairs(view.buckets) do plan[i] = { bucket = b.index, step = "on_reduced" } end
      return plan
    end
    optimizer:overlap(model, ms.overlap { name = "early", plan = early })
    fails(function() for _ in ms.steps(6) do model():backward() optimizer:step() end end, "lagged",
      "policy early (", "hooks_spec.lua:")
  end)
end)

describe("a link that remembers passes", function()
  it("serves one model at a time", function()
    for _, link in ipairs {
      hooks.clip { max_norm = 1, scope = "global" }, hooks.clip { max_norm = 1, scope = "lagged" },
      hooks.nan_check(), hooks.powersgd(),
    } do
      local first = ms.ddp(ms.nn.Linear(2, 2), { comm_hook = hooks.chain { link } })
      support.fails(function() ms.ddp(ms.nn.Linear(2, 2), { comm_hook = link }) end, link.kind,
        "serves another one already", "make one for each")
      local second = ms.ddp(first:unwrap(), { comm_hook = link })
      second(ms.ones { 1, 2 }):sum():backward()
      first, second = nil, nil                                            -- luacheck: ignore
      ms.ddp(ms.nn.Linear(2, 2), { comm_hook = link }):unwrap()
    end
    local shared = hooks.error_feedback()
    local one, two = ms.ddp(ms.nn.Linear(2, 2), { comm_hook = shared }),
      ms.ddp(ms.nn.Linear(2, 2), { comm_hook = shared })
    for _, net in ipairs { one, two } do net(ms.ones { 1, 2 }):sum():backward() end
  end)
end)

describe("error feedback", function()
  it("brings back what was lost", function()
    for _, feedback in ipairs {
      hooks.error_feedback { decay = 0.5 },
      require "moonshard.hooks.error_feedback" { decay = 0.5 },
    } do
      local inputs = {}
      local model = ms.ddp(Three(), { comm_hook = hooks.chain { feedback, function(bucket)
        inputs[#inputs + 1] = bucket:buffer():clone():keep()
        bucket:set_sent(bucket:buffer() * 0.75)
        return bucket:buffer()
      end } })
      local error = 0
      for i = 1, 4 do
        pass(model)
        local input = 1 + 0.5 * error
        near(input, inputs[i]:min():item(), 0)
        error = input * 0.25
      end
    end
  end)

  it("knows what casts lose, and says where it cannot know", function()
    local third = ms.nn.class "Third"
    function third:init() self.a = ms.nn.Parameter(ms.ones { 1 }) end
    function third:forward() return self.a:sum() / 3 end
    local model = ms.ddp(third(),
      { comm_hook = hooks.chain { hooks.error_feedback(), "bf16_compress" } })
    local sum = 0
    for _ = 1, 64 do
      pass(model)
      sum = sum + model.a:grad():item()
    end
    near(64 / 3, sum, 2e-3 / 64)  -- the error of all together is that of the last one
    model = ms.ddp(third(), {
      comm_hook = hooks.chain {
        hooks.error_feedback(),
        hooks.stage {
          name = unique(),
          encode = function(b) return ms.cat { b, b } end,
          decode = function(r) return r:narrow(1, 1, 1) end,
        },
      },
    })
    fails(function() pass(model) end, "set_sent", "1 numbers", "2 travel")
  end)

  it("refuses a link that changes numbers and does not tell what they still are", function()
    local function half(bucket) return bucket:buffer() * 0.5 end
    local function double(reduced) return reduced * 2 end
    local ways = {
      link = function(bucket, next)
        bucket:set_buffer(half(bucket))
        return next(bucket):and_then(double)
      end,
      ["link in place"] = function(bucket, next)
        bucket:buffer():mul_(0.5)
        return next(bucket):and_then(double)
      end,
      stage = hooks.stage {
        name = unique(),
        encode = function(buffer) return buffer * 0.5 end,
        decode = double,
      },
    }
    for what, way in pairs(ways) do
      for how, feedback in pairs {
        native = hooks.error_feedback(),
        twin = require "moonshard.hooks.error_feedback" { name = unique() },
      } do
        for _, behind in ipairs {
          hooks.all_reduce(), hooks.chain { hooks.cast { dtype = "bf16" }, "all_reduce" },
          hooks.int8(),
        } do
          local model = ms.ddp(Three(), { comm_hook = hooks.chain { feedback, way, behind } })
          fails(function() pass(model) end, what == "stage" and "stage" or "link '",
            "after error_feedback", "set_sent")
          assert.truthy(how)
        end
      end
      pass(ms.ddp(Three(), { comm_hook = hooks.chain { way, "all_reduce" } }))
    end
    -- Links that only read, and links that report, are allowed there.
    local told = hooks.stage {
      name = unique(), decode = double, encode = function(buffer, _, bucket)
        if bucket:wants_sent() then bucket:set_sent(buffer) end
        return buffer * 0.5
      end,
    }
    local function cast(bucket, next)
      bucket:set_buffer(bucket:buffer():to "bf16")
      return next(bucket):and_then(function(reduced) return reduced:to "f32" end)
    end
    local looks = hooks.stage {
      name = unique(),
      observe = function(buffer) buffer:norm() end,
      encode = function(buffer) return buffer end,
    }
    pass(ms.ddp(Three(),
      { comm_hook = hooks.chain { "error_feedback", looks, cast, told, "all_reduce" } }))
  end)

  it("refuses a reduction that does not tell what was sent", function()
    local function mean(bucket) return bucket:group():all_reduce(bucket:buffer(), "avg") end
    local function telling(bucket)
      if bucket:wants_sent() then bucket:set_sent(bucket:buffer()) end
      return mean(bucket)
    end
    local in_lua = require "moonshard.hooks.error_feedback"
    for _, feedback in ipairs { hooks.error_feedback(), in_lua { name = unique() } } do
      local model = ms.ddp(Three(), { comm_hook = hooks.chain { feedback, mean } })
      fails(function() pass(model) end, "has not reported what this rank sent", "set_sent")
      pass(ms.ddp(Three(), { comm_hook = hooks.chain { feedback, telling } }))
    end
    local local_only = hooks.post_local_sgd { start_step = 0, reduce_after = false }
    for _, link in ipairs { hooks.noop(), local_only } do
      pass(ms.ddp(Three(), { comm_hook = hooks.chain { "error_feedback", link } }))
    end
  end)

  it("is refused before what makes no mean, as is a second one", function()
    local function twin(name) return require("moonshard.hooks." .. name) { name = unique() } end
    local function refused(name, ...)
      local model = ms.ddp(Three(), { comm_hook = hooks.chain { ... } })
      fails(function() pass(model) end, name, "error_feedback stands before it")
    end
    local cases = {
      clip = { max_norm = 1, scope = "bucket" }, adasum = {}, sign_vote = {}, error_feedback = {},
    }
    for name, options in pairs(cases) do
      local function link() return hooks[name](options) end
      fails(function() hooks.chain { "error_feedback", link() } end, "link 2 (" .. name .. ")",
        "error_feedback (link 1)", "not the mean")
      pass(ms.ddp(Three(), { comm_hook = link() }))
      refused(name, twin "error_feedback", link())          -- in Lua, the first pass shows it
      if name ~= "clip" then refused(name, hooks.error_feedback(), twin(name)) end
    end
    refused("all_reduce", hooks.error_feedback(), hooks.all_reduce { op = "max" })
  end)

  it("is refused with a decay above 1", function()
    fails(function() hooks.error_feedback { decay = 2 } end, "decay", "2")
  end)
end)

it("links and chains that make no sense are refused where they are made", function()
  fails(function() hooks.chain { nil, "noop" } end, "a gap")
  fails(function() hooks.chain { "noop", name = "x" } end, "a field name")
  fails(function() ms.ddp(Three(), { comm_hook = { "noop" } }) end,
    "put a list of links into hooks.chain")
  fails(function() hooks.all_reduce { group = 3 } end, "group must be a group of ranks", "number")
  fails(function() hooks.post_local_sgd { start_step = 1, subgroup = "world" } end,
    "subgroup must be a group of ranks")
  fails(function() hooks.top_k { momentum = 0.5 } end, "fraction is missing")
  fails(function() hooks.clip { scope = "bucket" } end, "max_norm is missing")
  fails(function() hooks.powersgd { eps = math.huge } end, "eps", "inf")
  fails(function()
    pass(ms.ddp(Three(), { comm_hook = function(bucket, next) return next(bucket:buffer()) end }))
  end, "next takes the bucket, or nothing")
  local large = hooks.chain {
    hooks.cast { dtype = "bf16" }, hooks.int8 { per = "channel", block = 1 << 60 },
  }
  fails(function() pass(ms.ddp(Three(), { comm_hook = large })) end, 'comm hook, bucket 0 "',
    '": int8: no memory')
end)

describe("powersgd", function()
  it("tells how much travels: at any time in stats, now and then in the log", function()
    local code, text = support.recipe([[
      local ms = require "moonshard"
      for _, options in ipairs { { rank = 2 }, { batched = true } } do
        options.start_step, options.stats_every = 1, 2
        local model = ms.ddp(ms.nn.Linear(30, 40),
          { comm_hook = ms.hooks.chain { "nan_check", ms.hooks.powersgd(options) } })
        local told = {}
        for i in ms.steps(5) do
          model(ms.ones { 30 }):sum():backward()
          local c = model:stats().links[2].compression
          assert(not model:stats().links[1].compression)
          told[#told + 1] = ("%d %d %.3f"):format(c.before, c.after, c.rate)
        end
        print(table.concat(told, ", "))
      end
    ]], "")
    assert.equal(0, code, text)
    -- A vector of 40 numbers is sent uncompressed; the square is 36 x 36.
    assert.equal("0 0 0.000, 1240 180 6.889, 2480 360 6.889, 3720 540 6.889, 4960 720 6.889\n\z
      0 0 0.000, 1240 72 17.222, 2480 144 17.222, 3720 216 17.222, 4960 288 17.222\n", text)
  end)

  it("says so in the log, from its first iteration on and then at that distance", function()
    local folder = command.folder()
    local script = command.write(folder .. "/script.lua", [[
      local ms = require "moonshard"
      local model = ms.ddp(ms.nn.Linear(30, 40),
        { comm_hook = ms.hooks.powersgd { rank = 2, start_step = 1, stats_every = 2 } })
      for _ in ms.steps(5) do model(ms.ones { 30 }):sum():backward() end
    ]])
    local code, _, log = command.run(folder, ("run '%s' -n 2 --thread-ranks"):format(script),
      "MOONSHARD_LOG=info")
    command.remove(folder)
    assert.equal(0, code)
    local lines = {}
    for line in log:gmatch "powersgd: [^\n]*" do lines[#lines + 1] = line end
    assert.same({
      "powersgd: iteration 1: of 1240 numbers so far 180 were sent, 14.5 %",
      "powersgd: iteration 3: of 3720 numbers so far 540 were sent, 14.5 %",
    }, lines)
  end)

  it("refuses to tell never", function()
    fails(function() hooks.powersgd { stats_every = 0 } end, "stats_every", "0")
  end)
end)
