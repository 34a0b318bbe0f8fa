-- What a library's model has made and needs no more is released at once, and not when Lua collects;
-- what a script can see stays.
local command = require "command"
local core = require "moonshard.core"
local ms = require "moonshard"

local TOKENS <const> = { 2, 8, low = 0, high = 16, seed = 1 }
local SIZES <const> = { vocab = 16, context = 8, layers = 3, width = 16, heads = 2 }
local NAMES <const> = {
  gpt2 = { blocks = "h", attention = "attn", mlp = "mlp", first = "ln_1", second = "ln_2",
    last = "ln_f" },
  llama = { body = "model", blocks = "layers", attention = "self_attn", mlp = "mlp",
    first = "input_layernorm", second = "post_attention_layernorm", last = "norm" },
}

local function bits(t) return t:to "f32":to_table() end

-- A model, its blocks, what holds them, and the names of its parts.
local function make(kind)
  local names = NAMES[kind]
  ms.seed(1)
  local model = ms.nn[kind](SIZES)
  local body = names.body and model[names.body] or model
  return model, body[names.blocks], body, names
end

-- The loss, and then the gradients.
local function loss_and_gradients(model)
  local x = ms.randint(TOKENS)
  local loss = model(x):cross_entropy(x)
  loss:backward()
  local found = { loss:item() }
  for _, p in ipairs(model:parameters()) do
    for _, value in ipairs(p:grad():view(-1):to_table()) do found[#found + 1] = value end
    p:set_grad(nil)
  end
  return found
end

-- A norm that is called by itself adds its gradient to the stream's in a pass of its own: the sums
-- of two or three f32 numbers below 1 are rounded in another place.
local ROUNDED <const> = 1e-6

local function same(expected, found, what, tolerance)
  assert.equal(#expected, #found, what)
  local worst = 0
  for i, value in ipairs(expected) do worst = math.max(worst, math.abs(value - found[i])) end
  assert.is_true(worst <= (tolerance or 0), ("%s: off by %g"):format(what, worst))
end

-- The peak of three steps with the core's collection after each block, or without one.
local function peak(sizes, mode, collects)
  local folder = command.folder()
  command.write(folder .. "/steps.lua", [[
local ms = require "moonshard"
local core = require "moonshard.core"
local given = ms.config { kind = "gpt2", layers = 1, width = 64, heads = 1, batch = 1,
  mode = { "autocast", choices = { "autocast", "bf16", "f32" } }, collects = false }
local model = ms.nn[given.kind] { vocab = 50304, context = 1024, layers = given.layers,
  width = given.width, heads = given.heads }
if given.mode == "bf16" then model:to "bf16" end
local optimizer = ms.optim.adamw(model, { lr = 1e-4 })
local tokens = { given.batch, 1024, low = 0, high = 50304, seed = 1 }
local x, y = ms.randint(tokens):keep(), ms.randint(tokens):keep()
if given.collects then
  for name, part in model:modules() do
    if name:match "%.%d+$" then part:hook("forward", function() core.collect() end) end
  end
end
local function loss_of() return model(x):cross_entropy(y) end
for _ in ms.steps(3) do
  local loss = given.mode == "autocast" and ms.autocast("bf16", loss_of) or loss_of()
  loss:backward()
  optimizer:step()
end
]])
  local out = command.succeed(folder, ("check steps.lua --json --device cuda %s mode=%s%s")
    :format(sizes, mode, collects and " collects=true" or ""))
  command.remove(folder)
  return core.json_decode(out).peak_bytes[1]
end

describe("the peak of a step", function()
  for name, case in pairs {
    ["GPT-2 124M"] = { "layers=12 width=768 heads=12 batch=64", "autocast", "bf16", "f32" },
    ["GPT-2 1558M"] = { "layers=48 width=1600 heads=25 batch=32", "autocast" },
    ["a Llama"] = { "kind=llama layers=16 width=1024 heads=16 batch=32", "autocast" },
  } do
    it("is within 1% of that with a collection after each block: " .. name, function()
      local sizes = case[1]
      for _, mode in ipairs { table.unpack(case, 2) } do
        local alone, collected = peak(sizes, mode), peak(sizes, mode, true)
        assert.is_true(alone <= 1.01 * collected, ("%s: %.2f GiB, collected %.2f"):format(mode,
          alone / 2 ^ 30, collected / 2 ^ 30))
      end
    end)
  end
end)

for kind in pairs(NAMES) do
  describe("a model of nn." .. kind, function()
    it("leaves what hooks keep, with its values", function()
      local model, blocks, _, names = make(kind)
      local alone = loss_and_gradients(model)
      -- Each is alone in a model of its own, as a hook changes what the model may release.
      local places = {
        block = function() return blocks[2] end,
        attention = function() return blocks[2][names.attention] end,
        mlp = function() return blocks[2][names.mlp] end,
        second = function() return blocks[2][names.second] end,
        first = function() return blocks[2][names.first] end,
      }
      for place, of in pairs(places) do
        for _, when in ipairs { "forward", "pre_forward" } do
          model, blocks = make(kind)
          local kept, values = {}, {}
          of():hook(when, function(_, inputs, outputs)
            for _, t in ipairs(outputs or inputs) do
              kept[#kept + 1], values[#values + 1] = t, bits(t)
            end
          end)
          local is_norm = place == "first" or place == "second"
          same(alone, loss_and_gradients(model), place, is_norm and ROUNDED)
          assert.is_true(#kept > 0, place)
          for i, t in ipairs(kept) do assert.same(values[i], bits(t), place) end
        end
      end
    end)

    it("leaves what a hook keeps that removes itself", function()
      local model, blocks = make(kind)
      for _, i in ipairs { 1, 2, 3 } do
        local kept, remove = {}, nil
        remove = blocks[i]:hook("forward", function(_, inputs, outputs)
          for _, list in ipairs { inputs, outputs } do
            for _, t in ipairs(list) do kept[#kept + 1] = t end
          end
          remove()
        end)
        model(ms.randint(TOKENS))
        assert.is_true(#kept > 2)
        for _, t in ipairs(kept) do bits(t) end
      end
    end)

    it("leaves what a part of another class keeps", function()
      local alone = loss_and_gradients((make(kind)))
      for _, place in ipairs { "attention", "mlp", "second" } do
        local model, blocks, _, names = make(kind)
        local inner, kept = blocks[2][names[place]], {}
        local Keeper = ms.nn.class "Keeper"
        function Keeper:init() self.inner = inner end
        function Keeper:forward(...)
          local y = self.inner(...)
          kept[1], kept[2] = (...), y
          return y
        end
        blocks[2][names[place]] = Keeper()
        same({ alone[1] }, { loss_and_gradients(model)[1] }, place)
        assert.equal(2, #kept)
        for _, t in ipairs(kept) do assert.equal(2 * 8 * 16, t:numel()) bits(t) end
      end
    end)

    it("leaves what a forward that replaces a part's own keeps, and calls it", function()
      local model, blocks, body, names = make(kind)
      local alone = loss_and_gradients(model)
      for _, of in ipairs {
        function() return blocks[1] end, function() return blocks[3] end,
        function() return blocks[2][names.attention] end,
        function() return blocks[2][names.first] end,
        function() return blocks[2][names.second] end, function() return body[names.last] end,
      } do
        model, blocks, body = make(kind)
        local part, kept = of(), {}
        local own = part.forward
        part.forward = function(self, ...)
          kept = table.pack(own(self, ...))
          return table.unpack(kept, 1, kept.n)
        end
        same(alone, loss_and_gradients(model), "a forward", ROUNDED)
        assert.is_true(#kept > 0)
        for _, t in ipairs(kept) do bits(t) end
      end
    end)

    it("leaves what goes into a block that a script calls", function()
      local _, blocks = make(kind)
      local stream, change = ms.randn { 2, 8, 16, seed = 1 }, ms.randn { 2, 8, 16, seed = 2 }
      for _ in ms.steps(1) do
        local values = { bits(stream), bits(change) }
        local out = blocks[1](stream, change)
        assert.same({ 2, 8, 16 }, out:shape())
        assert.same(values, { bits(stream), bits(change) })
      end
    end)

    it("gives the same with recompute, without recording, and in steps", function()
      local model = make(kind)
      local alone = loss_and_gradients(model)
      model.options.recompute = true
      same(alone, loss_and_gradients(model), "recompute")
      model.options.recompute = nil
      local found, x = nil, ms.randint(TOKENS):keep()
      for _ in ms.steps(1) do found = loss_and_gradients(model) end
      same(alone, found, "a step")
      assert.same(bits(model(x)), ms.no_grad(function() return bits(model(x)) end))
    end)
  end)
end
