-- ms.codec and orthonormalize_ as scripts see them; tests/unit/codec.c has the format,
-- tests/unit/orthonormalize.c the numbers.
local ms = require "moonshard"

describe("a codec", function()
  it("gives back what it was given, but for its error", function()
    for _, kind in ipairs { "int8", "int4", "int2", "fp8", "fp4", "sign" } do
      local codec = ms.codec(kind, { block = 64 })
      local t = ms.randn { 3, 200, seed = 5 }
      local payload, left = codec:encode(t, { error = true })
      assert.same({ 3, codec:bytes(200) }, payload:shape())
      assert.equal("u8", payload:dtype())
      assert.is_true((codec:decode(payload, 200) + left - t):abs():max():item() < 1e-6)
      assert.is_true(
        ((codec:decode(payload, 200):sum(1) - codec:decode_sum(payload, 200)):abs():max():item())
          < 1e-5)
      assert.equal(1, select("#", codec:encode(t)))
    end
  end)

  it("counts its bytes", function()
    assert.equal(4 * 1 + 100, ms.codec("int8"):bytes(100))
    assert.equal(4 * 2 + 129, ms.codec("int4"):bytes(257))
    assert.equal(4 * 2 + 65, ms.codec("int2"):bytes(257))
    assert.equal(13, ms.codec("sign", { scale = false }):bytes(100))
  end)

  it("draws anew at each call when it rounds stochastically, and the same again from the same \z
    seed", function()
    local codec, t = ms.codec("int4", { rounding = "stochastic" }), ms.randn { 1000, seed = 1 }
    local function twice()
      ms.seed(9)
      return codec:encode(t), codec:encode(t)
    end
    local a, b = twice()
    local again = twice()
    assert.is_false(a:eq(b):all():item())
    assert.is_true(a:eq(again):all():item())
  end)

  it("names mistakes", function()
    assert.error_matches(function() ms.codec "int9" end,
      "unknown kind of codec .int9.: did you mean .int8.")
    assert.error_matches(function() ms.codec("int8", { blok = 8 }) end, "did you mean 'block'")
    assert.error_matches(function() ms.codec("int8", { block = 12 }) end, "multiple of 8")
    assert.error_matches(function() ms.codec("int4", { scale = false }) end, "only 'sign'")
    local codec = ms.codec("int8", { block = 8 })
    assert.error_matches(function() codec:decode(codec:encode(ms.ones { 16 }), 17) end,
      "n = 16 would fit")
    assert.error_matches(function() codec:encode(ms.tensor { 1, 2 }) end, "f32, f16 or bf16")
  end)
end)

describe("orthonormalize_", function()
  it("makes columns orthonormal, in place", function()
    local t = ms.randn { 2, 30, 4, seed = 3 }
    assert.equal(t, t:orthonormalize_())
    local products = t:t():matmul(t):to_table()
    for _, matrix in ipairs(products) do
      for i, row in ipairs(matrix) do
        for j, x in ipairs(row) do assert.near(i == j and 1 or 0, x, 1e-5) end
      end
    end
  end)

  it("has no gradient", function()
    local x = ms.randn { 4, 2, seed = 1 }:requires_grad_()
    assert.error_matches(function() (x * 1):orthonormalize_():sum():backward() end, "no gradient")
    assert.error_matches(function() ms.ones { 2, 3 }:orthonormalize_() end, "r <= n")
  end)
end)
