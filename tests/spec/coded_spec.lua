-- Base weights of adapters as codes (nn.lora { base = "int4" }): the bits of weights that were
-- encoded and decoded; models on "meta" and their files; what is refused.
local command = require "command"
local ms = require "moonshard"
local support = require "support"
local fails, nn = support.fails, ms.nn

local CODEC = ms.codec("int4", { block = 64 })

local function largest(a, b) return (a - b):abs():max():item() end

local makers = {
  gpt2 = function()
    return nn.gpt2 { vocab = 32, context = 12, layers = 2, width = 48, heads = 2 }
  end,
  llama = function()
    return nn.llama { vocab = 32, context = 12, layers = 2, width = 48, heads = 4, kv_heads = 2 }
  end,
  qwen3 = function()
    return nn.decoder { vocab = 32, context = 12, layers = 2, width = 40, heads = 2, head_dim = 16,
      bias = true, qk_norm = "head" }
  end,
}

-- A model, and its adapters with values that change what it computes.
local function make(kind, options)
  ms.seed(3)
  local model = makers[kind]()
  if options then nn.lora(model, options) end
  return model
end
local function fill(model)
  ms.seed(7)
  for _, item in ipairs(model:named_parameters()) do
    if item.name:find("lora_", 1, true) then
      ms.no_grad(function() item.parameter:copy_(ms.randn(item.parameter:shape()):mul(0.1)) end)
    end
  end
  return model
end

-- The same with weights that were encoded and decoded, of those layers that the other has as codes.
local function decoded(kind, options, like)
  local model, codes = make(kind), {}
  for _, item in ipairs(like:named_parameters()) do
    codes[item.name] = item.parameter:dtype() == "u8" or nil
  end
  ms.no_grad(function()
    for _, item in ipairs(model:named_parameters()) do
      local p = item.parameter
      if codes[item.name] then
        p:copy_(CODEC:decode(CODEC:encode(p:detach()), p:shape()[2]))
        codes[item.name] = nil
      end
    end
  end)
  assert.is_nil(next(codes))
  return fill(nn.lora(model, options))
end

describe("linear with a codec", function()
  it("gives the bits of a decoded weight, and its gradients", function()
    for _, how in ipairs { "f32", "bf16", "autocast" } do
      local dtype = how == "bf16" and "bf16" or "f32"
      for name, shape in pairs { linear = { 24, 100 }, linear_t = { 100, 24 } } do
        for _, codec in ipairs { CODEC, ms.codec "int8" } do
          local weight, bias = ms.randn(shape), ms.randn({ 24 }):to(dtype)
          local codes = codec:encode(weight)
          local function run(...)
            local x = ms.randn({ 3, 5, 100, seed = 3 }):to(dtype):detach():requires_grad_()
            local given, y = table.pack(...), nil
            local function forward() y = x[name](x, table.unpack(given, 1, given.n)) end
            if how == "autocast" then ms.autocast("bf16", forward) else forward() end
            y:to("f32"):pow(2):sum():backward()
            return y, x:grad()
          end
          for _, activation in ipairs { "gelu", false } do
            local y, grad = run(codec:decode(codes, shape[2]):to(dtype), bias, activation or nil)
            local own, own_grad = run(codes, bias, activation or nil, codec, 24)
            assert.equal(0, largest(y, own))
            assert.equal(0, largest(grad, own_grad))
            assert.is_true(grad:abs():max():item() > 0)
          end
        end
      end
    end
  end)

  it("refuses other codes", function()
    local codes = CODEC:encode(ms.ones { 4, 100 })
    fails(function() ms.ones({ 2, 100 }):linear(codes) end, "all must have the same float dtype")
    fails(function() ms.ones({ 2, 90 }):linear(codes, nil, nil, CODEC) end,
      "rows of 90 numbers have 53 bytes, not 58")
    fails(function() ms.ones({ 2, 4 }):linear_t(codes, nil, nil, CODEC, 90) end,
      "rows of 90 numbers have 53 bytes")
    fails(function() ms.ones({ 2, 3 }):linear_t(codes, nil, nil, CODEC, 100) end,
      "the input's last dimension is 3")
    fails(function() ms.ones({ 2, 100 }):linear(codes, nil, nil, "int4") end, "ms.Codec expected")
  end)
end)

describe("nn.lora { base = \"int4\" }", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  for kind in pairs(makers) do
    it("computes with the codes, bit for bit: " .. kind, function()
      local options = { rank = 2, alpha = 3 }
      local coded = fill(make(kind, { rank = 2, alpha = 3, base = "int4" }))
      local model = decoded(kind, options, coded)
      local x = ms.randint { 2, 12, low = 0, high = 32, seed = 1 }
      local found, count = {}, 0
      for _, one in ipairs { model, coded } do
        for _, dtype in ipairs { "f32", "bf16" } do
          local logits
          local function forward() logits = one(x) end
          if dtype == "f32" then forward() else ms.autocast(dtype, forward) end
          logits:cross_entropy(x):backward()
          table.insert(found, logits)
        end
      end
      assert.equal(0, largest(found[1], found[3]))
      assert.equal(0, largest(found[2], found[4]))
      local others = {}
      for _, item in ipairs(model:named_parameters()) do others[item.name] = item.parameter end
      for _, item in ipairs(coded:named_parameters()) do
        local grad = item.parameter:grad()
        assert.equal(item.name:find("lora_", 1, true) ~= nil, grad ~= nil, item.name)
        if grad then
          count = count + 1
          assert.equal(0, largest(grad, others[item.name]:grad()), item.name)
        end
      end
      assert.is_true(count >= 4)
      -- In blocks only.
      for _, item in ipairs(coded:named_parameters()) do
        local is_matrix = item.name:find "%.%d+%..*weight$" and not item.name:find "lora_"
          and item.parameter:dim() == 2
        assert.equal(is_matrix and "u8" or "f32", item.parameter:dtype(), item.name)
      end
      assert.same(model:generate(ms.tensor({ 1, 2 }, "i64"), { count = 6, temperature = 0 })
        :to_table(), coded:generate(ms.tensor({ 1, 2 }, "i64"), { count = 6, temperature = 0 })
        :to_table())
      coded:merge_adapters()
      model:merge_adapters()
      assert.equal(0, largest(model(x), coded(x)))
      for _, item in ipairs(coded:named_parameters()) do
        assert.equal("f32", item.parameter:dtype())
        assert.is_true(item.parameter:requires_grad())
      end
      assert(coded:save(folder .. "/model"))
    end)
  end

  it("is told of", function()
    local model = make("gpt2", { base = "int4" })
    local plain = tostring(make("gpt2", {})):match "^[^%(]*"
    assert.equal(plain, tostring(model):match "^[^%(]*")
    assert.matches("c_fc: Conv1D[^\n]*weight %[48, 192%] in codec%(int4, block 64%) frozen",
      tostring(model))
    fails(function() model:save(folder .. "/model") end, "save_adapters")
    model:to "bf16"
    assert.equal("u8", model.h[1].mlp.c_fc.weight:dtype())
    model:merge_adapters()
    assert.equal("bf16", model.h[1].mlp.c_fc.weight:dtype())
  end)

  it("reads a model on meta in parts", function()
    for i, kind in ipairs { "gpt2", "llama", "llama" } do
      -- Files may have 16 bits.
      local saved = make(kind)
      if i == 3 then saved:to "bf16" end
      assert(saved:save(folder .. "/" .. kind))
      local function open()
        local model = assert(nn.pretrained(folder .. "/" .. kind))
        ms.seed(5)
        return nn.lora(model, { rank = 2, base = "int4" })
      end
      local here, later = open(), ms.device("meta", open)
      assert.equal("meta", later:parameters()[1]:device())
      later:materialize()
      local x = ms.randint { 2, 12, low = 0, high = 32, seed = 1 }
      assert.equal(0, largest(fill(here)(x), fill(later)(x)))
      -- Values that were drawn, too.
      local drawn = ms.device("meta", function()
        return make(kind, { rank = 2, base = "int4" })
      end)
      drawn:materialize()
      assert.equal(0, largest(fill(make(kind, { rank = 2, base = "int4" }))(x), fill(drawn)(x)))
    end
  end)

  it("never has more than one f32 weight while it reads", function()
    command.write(folder .. "/r.lua", [[
      local ms = require "moonshard"
      local cfg = ms.config { how = "save" }
      if cfg.how == "save" then
        return assert(ms.nn.llama { vocab = 32, context = 8, layers = 3, width = 256, heads = 4 }
          :save "model")
      end
      local model = ms.device("meta", function()
        return ms.nn.lora(assert(ms.nn.pretrained "model"), { rank = 2, base = "int4" })
      end)
      model:materialize()
      ms.synchronize()
      local own = 0
      for _, t in pairs(model:state { live = true }) do
        own = own + t:numel() * (t:dtype() == "u8" and 1 or 4)
      end
      print(ms.memory().peak, own)]])
    command.succeed(folder, "run r.lua")
    local out = command.succeed(folder, "run r.lua how=read")
    local peak, own = out:match "(%d+)%s+(%d+)"
    -- The largest weight has 704 x 256 numbers; beside it are its codes, a seventh of them.
    local most = math.tointeger(tonumber(own)) + 2 * 4 * 256 * 1024
    assert.is_true(math.tointeger(tonumber(peak)) < most, out)
    local whole = #assert(command.read(folder .. "/model/model.safetensors"))
    assert.is_true(most < whole / 2, out)
  end)

  it("goes with adapters of a folder, and not with others", function()
    local model = fill(make("llama", { rank = 2 }))
    assert(model:save_adapters(folder .. "/adapter"))
    local plain = make("llama")
    assert(plain:load_adapters(folder .. "/adapter"))
    assert.equal("f32", plain.model.layers[1].mlp.up_proj.weight:dtype())
    local coded = make("llama")
    assert(coded:load_adapters(folder .. "/adapter", { base = "int4" }))
    local x = ms.randint { 2, 12, low = 0, high = 32, seed = 1 }
    local other = fill(make("llama", { rank = 2, base = "int4" }))
    assert.equal(0, largest(coded(x), other(x)))
    fails(function() coded:load_adapters(folder .. "/adapter", { base = "int4" }) end,
      "base is for a model that has no adapters yet")
    assert(coded:load_adapters(folder .. "/adapter"))
    -- A folder tells the base, unless somebody else does.
    assert(coded:save_adapters(folder .. "/adapter"))
    for base, dtype in pairs { [true] = "u8", [false] = "f32" } do
      local again = make("llama")
      assert(again:load_adapters(folder .. "/adapter", not base and { base = false } or nil))
      assert.equal(dtype, again.model.layers[1].mlp.up_proj.weight:dtype())
    end
    assert(plain:save_adapters(folder .. "/adapter"))
    local last = make("llama")
    assert(last:load_adapters(folder .. "/adapter"))
    assert.equal("f32", last.model.layers[1].mlp.up_proj.weight:dtype())
    fails(function() make("llama", { base = "int8" }) end, "base is \"int4\", or left out")
    -- A file that cannot be read leaves the weights as they were.
    local file = folder .. "/adapter/adapter_model.safetensors"
    local text = command.read(file)
    command.write(file, text:sub(1, -9))
    local whole = make("llama")
    assert.is_nil((whole:load_adapters(folder .. "/adapter", { base = "int4" })))
    for name, value in pairs(make("llama"):state()) do
      assert.equal(0, largest(value, whole:state()[name]), name)
    end
    for _, p in ipairs(whole:parameters()) do assert.is_true(p:requires_grad()) end
    command.write(file, text)
    -- A folder that does not fit leaves the model as it was.
    local narrow = nn.llama { vocab = 32, context = 12, layers = 2, width = 24, heads = 4 }
    assert.is_nil((narrow:load_adapters(folder .. "/adapter", { base = "int4" })))
    for _, p in ipairs(narrow:parameters()) do
      assert.equal("f32", p:dtype())
      assert.is_true(p:requires_grad())
    end
  end)

  it("refuses to train codes, and weights that others use", function()
    local model = make("llama", { base = "int4" })
    for _, p in ipairs(model:parameters()) do
      if p:dtype() == "u8" then
        fails(function() p:requires_grad_(true) end, "a tensor of u8 has no gradient")
      end
    end
    fails(function() make("llama"):load_state(model:state()) end, "wrong shape")
    local one = nn.Linear(4, 4)
    local tied = nn.Sequential(one, nn.Linear(4, 4))
    tied[2].weight = one.weight
    fails(function() nn.lora(tied, { names = { "0" }, base = "int4" }) end,
      "is used by another module, too")
  end)
end)
