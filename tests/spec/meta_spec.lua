-- meta_spec.lua: tensors and modules on "meta", which have a shape and no memory.
local ms = require "moonshard"
local nn = ms.nn

local function live() return ms.memory().live end

describe("the device meta", function()
  it("makes tensors of a shape without memory", function()
    local before = live()
    local t = ms.zeros { 1 << 20, 1 << 10, dtype = "bf16", device = "meta" }
    assert.equal("meta", t:device())
    assert.equal("bf16", t:dtype())
    assert.same({ 1 << 20, 1 << 10 }, t:shape())
    local y = (t:to("f32") * 2 + 1):transpose(1, 2):sum(1)
    assert.equal("meta", y:device())
    assert.same({ 1 << 20 }, y:shape())
    assert.equal(before, live())
  end)

  it("is current inside a scope, and gone after it, also after an error", function()
    assert.equal("cpu", ms.device())
    local a, b = ms.device("meta", function()
      assert.equal("meta", ms.device())
      assert.equal("cpu", ms.ones { 2, device = "cpu" }:device())
      assert.equal("cpu", ms.device("cpu", function() return ms.ones { 2 } end):device())
      return ms.randn { 2, 3 }, ms.tensor { { 1, 2 }, { 3, 4 } }
    end)
    assert.equal("meta", a:device())
    assert.equal("meta", b:device())
    assert.same({ 2, 2 }, b:shape())
    assert.error_matches(function()
      ms.device("meta", function() error("on purpose") end)
    end, "on purpose")
    assert.equal("cpu", ms.device())
    assert.equal("cpu", ms.ones { 2 }:device())
    assert.error_matches(function() ms.device("tpu", function() end) end,
      "device 'tpu': this engine runs on 'cpu'")
  end)

  it("has no values to read", function()
    local t = ms.ones { 1, device = "meta" }
    local text = 'needs the values of a tensor on "meta" %(made at .*meta_spec.lua:%d+%)'
    assert.error_matches(function() t:item() end, "read " .. text)
    assert.error_matches(function() t:to_table() end, "read " .. text)
    assert.error_matches(function() t:show() end, "read " .. text)
    assert.error_matches(function() t:to("cpu") end, 'this tensor is on "meta" and has no values')
    assert.error_matches(function() ms.world():all_reduce(t) end, "all_reduce " .. text)
    assert.equal(t, t:to("meta"))
    assert.equal("meta", ms.ones { 3 }:to("meta"):device())
  end)

  it("does not mix with memory, but for scalars", function()
    local t, real = ms.ones { 2, 2, device = "meta" }, ms.ones { 2, 2 }
    assert.error_matches(function() return t + real end,
      'add: %[2, 2%] f32 and %[2, 2%] f32: some are on "meta"')
    assert.error_matches(function() real:copy_(t) end, 'some are on "meta"')
    assert.error_matches(function() t:copy_(real) end, 'some are on "meta"')
    assert.equal("meta", (t * ms.tensor(2.0)):device())
    local tall = ms.ones { 3, 2, device = "meta" }
    assert.error_matches(function() return t:matmul(tall) end, "matmul: ")
    ms.device("meta", function() assert.equal("cpu", (real + real):device()) end)
    assert.same({ { 2, 2 }, { 2, 2 } }, (real + real):to_table())
  end)

  it("runs modules forward and backward", function()
    for _, dtype in ipairs { "f32", "bf16" } do
      local before = live()
      local model = ms.device("meta", function()
        return nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 256), nn.LayerNorm(256),
          nn.Linear(256, 1000))
      end)
      for _, p in ipairs(model:parameters()) do assert.equal("meta", p:device()) end
      local tokens = ms.zeros { 4, 16, dtype = "i64", device = "meta" }
      ms.autocast(dtype, function()
        local logits = model(tokens)
        assert.same({ 4, 16, 1000 }, logits:shape())
        assert.equal("meta", logits:device())
        assert.error_matches(function() return model(ms.zeros { 4, 16, device = "meta" }) end,
          "embedding: ")
        logits:sum():backward()
      end)
      for _, p in ipairs(model:parameters()) do
        assert.equal("meta", p:grad():device())
        assert.same(p:shape(), p:grad():shape())
      end
      assert.equal(before, live())
    end
  end)

  it("makes flat parameters", function()
    local model = ms.device("meta", function() return nn.Linear(4, 3) end)
    local flat = ms.flat(model:parameters())
    assert.equal("meta", flat:device())
    assert.same({ 15 }, flat:shape())
    assert.equal("meta", model:parameters()[1]:device())
    assert.same({ 2, 3 }, model(ms.ones { 2, 4, device = "meta" }):shape())
  end)

  it("cannot be saved", function()
    local model = ms.device("meta", function() return nn.Linear(4, 3) end)
    local path = os.tmpname()
    assert.error_matches(function() ms.safetensors.save(path, model:state()) end,
      'needs the values of a tensor on "meta"')
    os.remove(path)
  end)
end)
