-- Text from models: the logits of kept keys and values, stop ids, ids as they come, memory.
local command = require "command"
local ms = require "moonshard"
local core = require "moonshard.core"
local support = require "support"
local fails = support.fails
local nn = ms.nn

local VOCAB <const>, CONTEXT <const> = 23, 24

local function gpt2(more)
  local options = { vocab = VOCAB, context = CONTEXT, layers = 3, width = 32, heads = 4 }
  for key, value in pairs(more or {}) do options[key] = value end
  ms.seed(3)
  return nn.gpt2(options)
end

local function llama(more)
  local options = {
    vocab = VOCAB, context = CONTEXT, layers = 3, width = 32, heads = 4, kv_heads = 2,
    rotary_scaling = {
      type = "llama3", factor = 8, low_freq_factor = 1, high_freq_factor = 4, original_context = 8,
    },
  }
  for key, value in pairs(more or {}) do options[key] = value end
  ms.seed(3)
  return nn.llama(options)
end

-- Larger weights, so that attention matters.
local function enlarged(model)
  ms.no_grad(function()
    for _, p in ipairs(model:parameters()) do if p:dim() == 2 then p:mul_(8) end end
  end)
  return model
end

local models = {
  gpt2 = function() return enlarged(gpt2()) end,
  ["gpt2 with dropout"] = function() return enlarged(gpt2 { dropout = 0.2 }) end,
  ["llama with fewer heads of keys, scaled positions"] = function() return enlarged(llama()) end,
  ["llama, linear positions, recompute"] = function()
    return enlarged(llama {
      rotary_scaling = { type = "linear", factor = 4 }, kv_heads = 1, recompute = true,
    })
  end,
}

local prompt = { 1, 7, 3, 22, 0 }

-- The likeliest ids, each of a forward of the whole window.
local function by_full_forwards(model, ids, count)
  local all = { table.unpack(ids) }
  model:eval()
  for _ = 1, count do
    local window = { table.unpack(all, math.max(1, #all - CONTEXT + 1)) }
    local logits = ms.no_grad(function() return model(ms.tensor { window }) end)
    all[#all + 1] = logits[1][-1]:argmax():item()
  end
  model:train()
  return { table.unpack(all, #ids + 1) }
end

-- Notes of each forward of generate how many positions it runs, and its logits.
local function watched(model)
  local original, seen = model.last_logits, { positions = {}, logits = {} }
  model.last_logits = function(self, tokens, cache)
    local logits = original(self, tokens, cache)
    seen.positions[#seen.positions + 1] = tokens:size(2)
    seen.logits[#seen.logits + 1] = logits:to("f32"):view(-1):clone():keep()
    return logits
  end
  return seen
end

-- Largest difference of the noted logits from those of full forwards over the same ids.
local function difference(model, seen, ids)
  local worst = 0
  model:eval()
  ms.no_grad(function()
    for i, logits in ipairs(seen.logits) do
      local last = #prompt + i - 1
      local window = { table.unpack(ids, math.max(1, last - CONTEXT + 1), last) }
      local full = model(ms.tensor { window })[1][-1]:to "f32"
      worst = math.max(worst, (full - logits):abs():max():item() / full:abs():max():item())
    end
  end)
  return worst
end

local function joined(a, b)
  return table.move(b, 1, #b, #a + 1, { table.unpack(a) })
end

describe("kept keys and values", function()
  for name, make in pairs(models) do
    it(("give a full forward's logits: %s"):format(name), function()
      local model = make()
      local count = CONTEXT + 4
      local expected = by_full_forwards(model, prompt, count)
      local seen = watched(model)
      local new = model:generate(ms.tensor(prompt), { count = count, temperature = 0 })
      assert.same(expected, new:to_table())
      assert.is_true(model:is_training())
      -- One forward of the prompt, then single positions; past the context, the window.
      local positions = { #prompt }
      for i = 2, count do
        positions[i] = #prompt + i - 1 <= CONTEXT and 1 or CONTEXT
      end
      assert.same(positions, seen.positions)
      assert.is_true(difference(model, seen, joined(prompt, expected)) < 1e-5)
    end)
  end

  for _, dtype in ipairs { "bf16", "f16" } do
    it("do in " .. dtype, function()
      for _, make in ipairs { gpt2, llama } do
        local model = make():to(dtype)
        local seen = watched(model)
        local new = model:generate(ms.tensor(prompt), { count = 12, temperature = 0 })
        assert.equal(1, seen.positions[12])
        local worst = difference(model, seen, joined(prompt, new:to_table()))
        assert.is_true(worst < (dtype == "bf16" and 4e-2 or 5e-3), tostring(worst))
      end
    end)
  end

  it("do under autocast, inside a step, in a ddp model", function()
    for _, make in ipairs { gpt2, llama } do
      local model = enlarged(make())
      local expected = by_full_forwards(model, prompt, 30)
      local how, ids = { count = 30, temperature = 0 }, ms.tensor(prompt)
      local wrapped = ms.ddp(model)
      assert.same(expected, wrapped:generate(ids, how):to_table())
      assert.is_true(wrapped:is_training())
      wrapped:unwrap()
      local kept
      for _ in ms.steps(2) do kept = model:generate(ms.tensor(prompt), how):keep() end
      assert.same(expected, kept:to_table())
      ms.autocast("bf16", function()
        assert.equal(30, model:generate(ids, how):numel())
      end)
    end
  end)

  it("are not asked of a model that computes whole windows", function()
    local model = enlarged(gpt2())
    local expected, whole = by_full_forwards(model, prompt, 30), 0
    model.last_logits = function(self, tokens)
      whole = whole + 1
      return self:forward(tokens):narrow(2, tokens:size(2), 1)
    end
    assert.same(expected,
      model:generate(ms.tensor(prompt), { count = 30, temperature = 0 }):to_table())
    assert.equal(30, whole)
  end)

  it("hold the last `context` ids of a longer prompt", function()
    for _, make in pairs(models) do
      local model, long = make(), {}
      for i = 1, CONTEXT + 9 do long[i] = i * 7 % VOCAB end
      for _, length in ipairs { CONTEXT - 1, CONTEXT, CONTEXT + 9 } do
        local ids = { table.unpack(long, 1, length) }
        local expected = by_full_forwards(model, ids, 3)
        assert.same(expected,
          model:generate(ms.tensor(ids), { count = 3, temperature = 0 }):to_table())
      end
    end
  end)

  it("take ids of any integer dtype, also a view", function()
    local model = enlarged(gpt2())
    local expected = by_full_forwards(model, prompt, 4)
    local how = { count = 4, temperature = 0 }
    assert.same(expected, model:generate(ms.tensor(prompt, "i32"), how):to_table())
    local row = ms.tensor { { 5, 5, 5, 5, 5 }, prompt }
    assert.same(expected, model:generate(row[2], how):to_table())
  end)

  it("take no more memory with each id", function()
    local model = gpt2 { context = 512, vocab = 4096, width = 64 }
    ms.seed(1)
    local live = {}
    model:generate(ms.tensor { 1 }, {
      count = 400, on_token = function(id)
        live[#live + 1] = core.memory().live
        return id >= 0
      end,
    })
    -- What is dropped is collected by 16 MiB.
    local first, most = live[1], 0
    for _, bytes in ipairs(live) do most = math.max(most, bytes) end
    assert.is_true(most - first < 17 << 20, ("%d bytes more"):format(most - first))
    -- Without that, 400 ids would have dropped this many.
    assert.is_true((live[11] - live[1]) / 10 * 400 > 20 << 20, tostring(live[11] - live[1]))
  end)
end)

describe("generate", function()
  it("ends with an id that ends a text", function()
    local model = enlarged(gpt2())
    local all = by_full_forwards(model, prompt, 20)
    local function first(...)
      local list = {}
      for i, id in ipairs(all) do
        list[i] = id
        for _, stop in ipairs { ... } do if id == stop then return list end end
      end
      return list
    end
    local function made(how)
      how.count, how.temperature = 20, 0
      return model:generate(ms.tensor(prompt), how):to_table()
    end
    assert.same(all, made {})
    local a, b = all[9], all[6]
    assert.is_true(#first(a) < 20)
    assert.same(first(a), made { stop = a })
    assert.same(first(a, b), made { stop = { a, b } })
    model.stop = { b }
    assert.same(first(b), made {})
    assert.same(first(a), made { stop = a })
    assert.same(all, made { stop = false })
    assert.same(all, made { stop = {} })
    model.stop = nil
    fails(function() made { stop = "end" } end, "generate: stop", "list of ids", "end")
    fails(function() made { stop = { 1.5 } } end, "generate: stop", "1.5")
    fails(function() made { stop = { eos = 1 } } end, "generate: stop")
  end)

  it("tells each id as it comes, until it is told to end", function()
    local model, seen = enlarged(llama()), {}
    local all = by_full_forwards(model, prompt, 20)
    local how = { count = 20, temperature = 0 }
    how.on_token = function(id) seen[#seen + 1] = id end
    assert.same(all, model:generate(ms.tensor(prompt), how):to_table())
    assert.same(all, seen)
    seen = {}
    how.on_token = function(id)
      seen[#seen + 1] = id
      return #seen < 5
    end
    assert.same({ table.unpack(all, 1, 5) }, model:generate(ms.tensor(prompt), how):to_table())
    assert.equal(5, #seen)
    how.on_token = function() error "broken pipe" end
    fails(function() model:generate(ms.tensor(prompt), how) end, "broken pipe")
    assert.is_true(model:is_training())
    how.on_token = 3
    fails(function() model:generate(ms.tensor(prompt), how) end, "on_token must be a function")
  end)

  it("draws what a loop of full forwards draws, with a seed and without", function()
    local model = gpt2()
    local function draw(how)
      how.count = 30
      return model:generate(ms.tensor(prompt), how):to_table()
    end
    local whole_window = model.last_logits
    for _, how in ipairs { { seed = 5 }, { seed = 6, top_k = 5 }, { seed = 7, top_p = 0.8 }, {} } do
      ms.seed(11)
      local kept = draw(how)
      model.last_logits = function(self, tokens) return whole_window(self, tokens) end
      ms.seed(11)
      local whole = draw(how)
      model.last_logits = nil
      assert.same(whole, kept)
    end
  end)

  -- One bad logit anywhere, first, in the middle, or last; -inf alone only forbids an id.
  it("refuses logits that are no finite numbers, and names the position", function()
    for _, value in ipairs { 0 / 0, math.huge } do
      for _, how in ipairs {
        { temperature = 0 }, { temperature = 1e-38 }, { temperature = 1e-9 }, {}, { top_k = 3 },
        { top_p = 0.5 }, { stop = VOCAB + 1 }, { on_token = function() end }, { seed = 2 },
      } do
        for position = 1, 6, 5 do
          local model, calls = gpt2(), 0
          local inner = model.last_logits
          model.last_logits = function(self, ...)
            local logits = inner(self, ...):clone()
            calls = calls + 1
            local one = logits:view(-1):narrow(1, 4 * position - 3, 1)
            if calls == position then one:fill_(value) end
            return logits
          end
          how.count = 6
          fails(function() model:generate(ms.tensor(prompt), how) end, "generate: the logits of",
            ("position %d (new id %d)"):format(#prompt + position, position), "not finite",
            value ~= value and "nan" or "inf")
        end
      end
    end
    local model = gpt2()
    local inner = model.last_logits
    model.last_logits = function(self, ...)
      local logits = inner(self, ...):clone()
      logits:view(-1):narrow(1, 1, VOCAB - 2):fill_(-math.huge)
      return logits
    end
    for _, temperature in ipairs { 0, 1e-40, 1e-9, 1 } do
      local ids = model:generate(ms.tensor(prompt), { count = 9, temperature = temperature })
      assert.is_true(ids:min():item() >= VOCAB - 2)
    end
  end)

  it("draws the likeliest ids at a tiny temperature", function()
    local model = enlarged(gpt2())
    local want = by_full_forwards(model, prompt, 12)
    for _, temperature in ipairs { 0x1p-1074, 1e-46, 1e-38, 1e-31, 1e-30, 1e-20, 1e-6 } do
      for _, more in ipairs { {}, { top_k = 5 }, { top_p = 0.9 } } do
        more.count, more.temperature, more.seed = 12, temperature, 4
        assert.same(want, model:generate(ms.tensor(prompt), more):to_table())
      end
    end
  end)

  it("says which id is not in the vocabulary", function()
    local model = gpt2()
    fails(function() model:generate(ms.tensor { 1, VOCAB, 2 }, { count = 1 }) end,
      "the prompt has the id 23", "the ids 0 to 22")
    fails(function() model:generate(ms.tensor { -1, 2 }, { count = 1 }) end, "the id -1")
    assert.is_true(model:is_training())
  end)
end)

describe("ids that end a text", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  local function write(name, value)
    command.write(folder .. "/" .. name, core.json_encode(value))
  end

  it("are those of generation_config.json, else of config.json", function()
    local model = gpt2()
    assert.is_nil(model.stop)
    assert(model:save(folder .. "/"))
    assert.is_nil(assert(nn.pretrained(folder)).stop)
    local config = core.json_decode(command.read(folder .. "/config.json"))
    config.eos_token_id = 3
    write("config.json", config)
    assert.same({ 3 }, assert(nn.pretrained(folder)).stop)
    write("generation_config.json", { temperature = 0.5 })
    assert.same({ 3 }, assert(nn.pretrained(folder)).stop)
    write("generation_config.json", { eos_token_id = { 4, 5 } })
    local read = assert(nn.pretrained(folder))
    assert.same({ 4, 5 }, read.stop)
    assert.same({ 4, 5 }, ms.ddp(read).stop)
    local peer = assert(nn.pretrained(command.source .. "/tests/golden/peer/llama_sharded"))
    assert.same({ 3, 5 }, peer.stop)
  end)

  it("must be ids", function()
    assert(gpt2():save(folder .. "/"))
    for given, text in pairs {
      ['{ "eos_token_id": "</s>" }'] = "eos_token_id has </s>",
      ['{ "eos_token_id": [1, 2.5] }'] = "has 2.5",
      ["{"] = "generation_config.json", ["7"] = "an object is expected",
    } do
      command.write(folder .. "/generation_config.json", given)
      local model, message, code = nn.pretrained(folder)
      assert.is_nil(model)
      assert.equal("corrupt", code)
      assert.truthy(message:find("generation_config.json", 1, true), message)
      assert.truthy(message:find(text, 1, true), message)
    end
  end)
end)

describe("the comparison with full forwards", function()
  it("sees a forward whose positions begin at 0 again", function()
    local model = enlarged(llama())
    local seen = watched(model)
    local inner = model.last_logits
    model.last_logits = function(self, tokens, cache)
      if tokens:size(2) == 1 then return inner(self, tokens) end
      return inner(self, tokens, cache)
    end
    local new = model:generate(ms.tensor(prompt), { count = 5, temperature = 0 })
    assert.is_true(difference(model, seen, joined(prompt, new:to_table())) > 1e-3)
  end)

end)
