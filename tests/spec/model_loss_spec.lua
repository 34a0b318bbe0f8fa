-- model:loss computes the loss of a language model without its logits. ms.train uses it unless a
-- measure reads the outputs. A hook, an adapter or another forward that needs the logits gets them.
local core = require "moonshard.core"
local ms = require "moonshard"
local command = require "command"
local fails = require "support".fails

local SIZES <const> = { vocab = 23, context = 8, layers = 2, width = 16, heads = 2 }

local function sizes(more)
  local made = {}
  for name, value in pairs(SIZES) do made[name] = value end
  for name, value in pairs(more or {}) do made[name] = value end
  return made
end

-- The same values in each model that is made.
local function make(kind, more)
  ms.seed(7)
  return ms.nn[kind](sizes(more))
end

local function batch()
  return ms.randint { 3, 8, low = 0, high = 23, seed = 1 },
    ms.randint { 3, 8, low = 0, high = 23, seed = 2 }
end

-- "one" operator, or "two", in which a call of f computes the loss.
local function way(f)
  core.trace_start()
  local loss = f()
  local found = "two"
  for _, record in ipairs(core.trace_stop()) do
    if record.name == "cross_entropy in place" then found = "one" end
  end
  return found, loss
end

local function bits(t) return t:to "f32":to_table() end

-- Loss and gradients of f(model), and the way.
local function run(model, f)
  local x, y = batch()
  local how, loss = way(function() return f(model, x, y) end)
  loss:backward()
  local found = { loss:item() }
  for _, item in ipairs(model:named_parameters()) do
    found[item.name] = bits(item.parameter:grad())
    item.parameter:set_grad(nil)
  end
  return found, how
end

local function of_logits(model, x, y) return model(x):cross_entropy(y) end
local function of_model(model, x, y) return model:loss(x, y) end

describe("the loss of a language model", function()
  local kinds = {
    { "gpt2" }, { "gpt2", { tie = false } }, { "llama" }, { "llama", { tie = true } },
    { "decoder", { norm = "layer", positions = "learned", mlp = "gelu" } },
    { "gpt2", { recompute = true } },
  }
  for i, kind in ipairs(kinds) do
    it(("has the bits of that of its logits: %s %d"):format(kind[1], i), function()
      local expected, before = run(make(kind[1], kind[2]), of_logits)
      local found, how = run(make(kind[1], kind[2]), of_model)
      assert.equal("two", before)
      assert.equal("one", how)
      assert.same(expected, found)
    end)
  end

  it("is that of the model under autocast, in 16 bits, and of packed documents", function()
    for _, dtype in ipairs { "bf16", "f16" } do
      local function cast(f)
        return function(...)
          local given, loss = table.pack(...), nil
          ms.autocast(dtype, function() loss = f(table.unpack(given, 1, given.n)) end)
          return loss
        end
      end
      local expected, found = run(make "gpt2", cast(of_logits)), run(make "gpt2", cast(of_model))
      assert.equal(expected[1], found[1])
      -- Slopes of f16 have another factor, without rounding where they are not too small.
      if dtype == "bf16" then assert.same(expected, found) end
    end
    local half = run(make "llama":to "bf16", of_model)
    assert.same(run(make "llama":to "bf16", of_logits), half)
    local places = ms.tensor({ { 0, 1, 2, 0, 1, 0, 1, 2 }, { 0, 1, 2, 3, 4, 5, 6, 7 },
      { 0, 0, 1, 2, 3, 4, 0, 1 } }, "i64")
    local found, how = run(make "gpt2", function(m, x, y) return m:loss(x, y, places) end)
    assert.equal("one", how)
    assert.same(run(make "gpt2", function(m, x, y) return m(x, places):cross_entropy(y) end), found)
    assert.not_same(run(make "gpt2", of_model), found)
  end)

  it("makes its logits where something stands between", function()
    local Other = ms.nn.class "Other"
    function Other:init(inner) self.inner = inner end
    function Other:forward(x) return self.inner(x) * 2 end
    local seen
    local cases = {
      ["a hook of the model"] = function(m)
        m:hook("forward", function(_, _, outputs) seen = #outputs[1]:shape() end)
      end,
      ["a hook of the head"] = function(m)
        m.lm_head:hook("forward", function(_, _, outputs) return outputs[1] * 2 end)
      end,
      ["a forward of the object"] = function(m)
        local own = m.forward
        m.forward = function(self, x) return own(self, x) * 2 end
      end,
      ["a forward of the head"] = function(m)
        local own = m.lm_head.forward
        m.lm_head.forward = function(self, x) return own(self, x) * 2 end
      end,
      ["another head"] = function(m) m.lm_head = Other(m.lm_head) end,
      ["a function"] = function(m)
        local own = m.lm_head
        m.last = own
        m.lm_head = function(x) return own(x) / 2 end
      end,
      ["a bias"] = function(m) m.lm_head.bias = ms.nn.Parameter(ms.randn { 23, seed = 5 }) end,
      ["an adapter of the head"] = function(m)
        ms.nn.lora(m, { names = { "lm_head" }, rank = 2 })
        m.lm_head.lora_B.weight = ms.nn.Parameter(ms.randn { 23, 2, seed = 4 })
        for _, p in ipairs(m:parameters()) do p:requires_grad_() end
      end,
    }
    for name, change in pairs(cases) do
      local changed, same = make("gpt2", { tie = false }), make("gpt2", { tie = false })
      for _, model in ipairs { changed, same } do
        ms.seed(3)
        change(model)
      end
      seen = nil
      local found, how = run(changed, of_model)
      assert.equal("two", how, name)
      if name == "a hook of the model" then assert.equal(3, seen) end
      assert.same(run(same, of_logits), found, name)
    end
    -- And a model of a script, made from one of these.
    local GPT2 = getmetatable(make "gpt2").class
    local Scaled = ms.nn.class("Scaled", GPT2)
    function Scaled:forward(x) return GPT2.forward(self, x) / 2 end
    ms.seed(7)
    local scaled = Scaled(sizes())
    local x, y = batch()
    local how, loss = way(function() return scaled:loss(x, y) end)
    assert.equal("two", how)
    assert.equal((make "gpt2"(x) / 2):cross_entropy(y):item(), loss:item())
  end)

  it("follows what is replaced between two calls", function()
    local model = make "llama"
    local x, y = batch()
    assert.equal("one", (way(function() return model:loss(x, y) end)))
    local remove = model:hook("forward", function(_, _, outputs) return outputs[1] * 0 end)
    local how, loss = way(function() return model:loss(x, y) end)
    assert.equal("two", how)
    assert.near(math.log(23), loss:item(), 1e-5)
    remove()
    assert.equal("two", (way(function() return model:loss(x, y) end)))
  end)

  it("goes through ddp and fsdp", function()
    local expected = run(make "gpt2", of_logits)
    local ddp = ms.ddp(make "gpt2", {})
    local found, how = run(ddp, of_model)
    assert.equal("one", how)
    assert.same(expected, found)
    ddp:unwrap()
    for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard" } do
      local x, y = batch()
      local model = ms.fsdp(make "gpt2", { strategy = strategy })
      local own, loss = way(function() return model:loss(x, y) end)
      assert.equal("one", own)
      assert.equal(expected[1], loss:item())
      loss:backward()
      -- One rank: its shards are whole.
      for _, item in ipairs(model:named_parameters()) do
        local flat, own_grad = {}, item.parameter:grad():reshape(-1):to_table()
        local function add(v)
          if type(v) ~= "table" then flat[#flat + 1] = v return end
          for _, inner in ipairs(v) do add(inner) end
        end
        add(expected[item.name])
        assert.same(flat, own_grad, strategy .. " " .. item.name)
      end
      model:unwrap()
    end
  end)

  it("is that of logits which a wrapper rounds, or whose head is a unit", function()
    local x, y = batch()
    for output, expected in pairs { bf16 = "two", f32 = "one" } do
      local model = ms.ddp(make "gpt2", { precision = { param = "bf16", output = output } })
      local logits = model(x):cross_entropy(y):item()
      local how, loss = way(function() return model:loss(x, y) end)
      assert.equal(expected, how)
      assert.equal(logits, loss:item())
      model:unwrap()
      local sharded = ms.fsdp(make "gpt2", { precision = { param = "bf16", output = output } })
      assert.equal(expected, (way(function() return sharded:loss(x, y) end)))
      sharded:reset()
      sharded:unwrap()
    end
    local model = ms.fsdp(make("gpt2", { tie = false }), { wrap = { class = { "Linear" } } })
    local how, loss = way(function() return model:loss(x, y) end)
    assert.equal("two", how)
    assert.equal(make("gpt2", { tie = false })(x):cross_entropy(y):item(), loss:item())
    loss:backward()
    model:unwrap()
  end)

  it("says what is wrong", function()
    local model, x, y = make "gpt2", batch()
    fails(function() model:loss(x) end, "loss", "targets")
    fails(function() model:loss(x, y:narrow(2, 1, 3)) end, "the targets must have the shape")
    fails(function() model.loss(x, y) end, "loss is a method of a language model")
  end)
end)

describe("ms.train without a function loss", function()
  local TRAIN <const> = [[
local ms = require "moonshard"
local core = require "moonshard.core"
local model = ms.nn.gpt2 { vocab = 23, context = 8, layers = 1, width = 16, heads = 2 }
local seen = {}
%s
local function data()
  return ms.randint { 3, 8, low = 0, high = 23, seed = 1 },
    ms.randint { 3, 8, low = 0, high = 23, seed = 2 }
end
local result = ms.train {
  model = wrapped or model, optimizer = ms.optim.sgd(model, { lr = 0.1 }), data = data, steps = 3,
  %s
}
print(("loss %%.9g"):format(result.loss), table.concat(seen, " "))
]]
  -- What a run prints, and how many tasks of one operator its steps had.
  local function train(before, options)
    local folder = command.folder()
    command.write(folder .. "/own.lua", TRAIN:format(before or "", options or ""))
    command.write(folder .. "/text.txt", ("some words\n"):rep(40))
    local out = command.succeed(folder, "run own.lua --trace trace.json")
    local file <close> = assert(io.open(folder .. "/trace.json"))
    local _, count = file:read "a":gsub('"cross_entropy in place"', "")
    command.remove(folder)
    return tonumber(out:match "loss (%S+)"), count, out
  end

  it("makes no logits", function()
    local alone, one = train()
    local logits, two = train(nil,
      "loss = function(m, x, y) local out = m(x) return out:cross_entropy(y), out end")
    assert.is_true(one >= 3, one)
    assert.equal(0, two)
    assert.equal(logits, alone)
    for _, wrapper in ipairs { "ddp", "fsdp" } do
      local loss, count = train(("local wrapped = ms.%s(model)"):format(wrapper))
      assert.is_true(count >= 3, wrapper)
      assert.near(alone, loss, 1e-6)
    end
  end)

  it("calls no method of a script, and follows its forward", function()
    local alone = train()
    local loss, count = train("model.loss = function() error 'called' end")
    assert.is_true(count >= 3)
    assert.equal(alone, loss)
    -- From the second step on the logits are halved, which the first loss does not have.
    local halved, first = train([[
local own = model.forward
]], [[
  after_step = function(step)
    if step == 0 then model.forward = function(self, x) return own(self, x) / 2 end end
  end,]])
    local expected, none = train([[
local own, calls = model.forward, 0
model.forward = function(self, x)
  calls = calls + 1
  return calls == 1 and own(self, x) or own(self, x) / 2
end]])
    assert.is_true(first > 0 and first < count)
    assert.equal(0, none)
    assert.equal(expected, halved)
  end)

  it("gives measures the logits", function()
    local _, _, out = train([[
local valid = ms.data.bytes "text.txt":loader { batch = 2, length = 8 }
model = ms.nn.gpt2 { vocab = 256, context = 8, layers = 1, width = 16, heads = 2 }]], [[
  valid = valid, eval = { every = 1, batches = 2, measure = function(outputs, y)
    seen[#seen + 1] = table.concat(outputs:shape(), "x")
    return { right = outputs:argmax(3):eq(y):to "f32":mean() }
  end },]])
    assert.matches("2x8x256 2x8x256", out)
    assert.matches("right", out)
  end)
end)
