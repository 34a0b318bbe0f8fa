-- Methods of tensors that are made of operators, and ms.einsum: edges, dtypes, memory and errors.
-- (Values and gradients against PyTorch: golden.composed, also on the stand-in of a GPU.)
-- ctest: each-isa
local core = require "moonshard.core"
local ms = require "moonshard"
local command = require "command"
local support = require "support"
local near, fails, flat = support.near, support.fails, support.flat

local inf, nan = math.huge, 0 / 0

-- The values as text, since NaN equals nothing and -0.0 equals 0.0.
local function text(t)
  local list = {}
  for i, x in ipairs(flat(t)) do
    list[i] = x ~= x and "nan" or x == 0 and (1 / x < 0 and "-0" or "0") or ("%.7g"):format(x)
  end
  return table.concat(list, " ")
end

-- The gradient of f at the values, against central differences.
local function check_gradient(values, f)
  local x = values:clone():requires_grad_()
  f(x):backward()
  local got, at = flat(x:grad()), flat(values)
  local function moved(i, by)
    local list = table.move(at, 1, #at, 1, {})
    list[i] = list[i] + by
    return f(ms.tensor(list):view(values:shape())):item()
  end
  for i = 1, #at do near((moved(i, 1 / 64) - moved(i, -1 / 64)) * 32, got[i], 2e-3) end
end

describe("var", function()
  local x = ms.tensor { { 1., 2, 6 }, { 0, 3, 3 } }

  it("divides by the count minus the correction", function()
    near(7, x:narrow(1, 1, 1):var(), 1e-6)
    near({ 7, 3 }, x:var(2), 1e-6)
    near({ { 14 / 3 }, { 2 } }, x:var(-1, true, 0), 1e-6)
    near({ { 22.75 * 4 / 9 } }, x:var(nil, true, -3), 1)
    assert.same({ 1, 1 }, x:var(nil, true):shape())
    assert.equal("nan", text(ms.ones({ 1 }):var()))
    assert.equal("0", text(ms.ones({ 1 }):var(nil, false, 0)))
    assert.equal("nan nan", text(ms.zeros({ 2, 0 }):var(2)))
    assert.equal("nan 0", text(ms.tensor({ { 1., inf }, { 2, 2 } }):var(2)))
  end)

  it("loses nothing where the mean is large", function()
    near(7, (x:narrow(1, 1, 1) + 2 ^ 20):var(), 1e-6)
  end)

  it("of 16 bits is computed in f32 and rounded once", function()
    local long = ms.randn({ 3000, seed = 1 }):to "bf16"
    assert.equal("bf16", long:var():dtype())
    assert.equal(text(long:to "f32":var():to "bf16"), text(long:var()))
  end)

  it("has gradients", function()
    check_gradient(x, function(t) return t:var() end)
    check_gradient(x, function(t) return (t:var(1) * ms.tensor { 1., 2, 3 }):sum() end)
  end)

  it("names what does not fit", function()
    fails(function() x:var(3) end, "var: dimension 3 of tensor [2, 3] f32: it has 2")
    fails(function() x:var(0) end, "var: dimension 0")
    fails(function() x:var(1.5) end, "var: dim must be an integer")
    fails(function() x:var(1, 2) end, "var: keep_dim must be a boolean")
    fails(function() ms.tensor({ 1, 2 }):var() end, "var", "it needs f32, f16 or bf16: cast first")
    fails(function() x.var(1) end, "write object:var(...), with a colon")
  end)
end)

describe("prod", function()
  it("multiplies all, or along a dimension", function()
    local x = ms.tensor { { 1., 2, 3 }, { 4, 5, 6 } }
    near(720, x:prod())
    near({ 4, 10, 18 }, x:prod(1))
    near({ { 6 }, { 120 } }, x:prod(-1, true))
    near({ 6, 120 }, x:t():contiguous():t():prod(2))
    near(3, ms.tensor(3.):prod())
    assert.same({}, x:prod():shape())
    assert.same({ 1, 1 }, x:prod(nil, true):shape())
    for n = 1, 17 do
      local want = 1
      for i = 1, n do want = want * (1 + i / 8) end
      near(want, (ms.arange(1, n):to "f32" / 8 + 1):prod(), 1e-5)
    end
  end)

  it("is a new tensor also of one element", function()
    local x = ms.ones { 2, 1 }
    x:prod(2):fill_(7)
    near({ { 1 }, { 1 } }, x)
  end)

  it("of nothing is 1", function()
    near({ 1, 1, 1 }, ms.zeros({ 0, 3 }):prod(1))
    assert.same({ 0 }, ms.zeros({ 0, 3 }):prod(2):shape())
    assert.equal(1, ms.zeros({ 0, dtype = "i32" }):prod():item())
  end)

  it("of integers and bool is i64, which wraps", function()
    local y = ms.tensor({ 3, 5, 200, 1 }, "u8"):prod()
    assert.equal("i64", y:dtype())
    assert.equal(3000, y:item())
    assert.equal(math.maxinteger * 3, ms.tensor({ math.maxinteger, 3 }):prod():item())
    assert.equal(0, ms.tensor({ true, false }):prod():item())
  end)

  it("keeps NaN, infinity and signs; 16 bits are rounded once", function()
    assert.equal("nan", text(ms.tensor({ 0., inf }):prod()))
    assert.equal("-inf -0", text(ms.tensor({ { -2., inf }, { -2., 0. } }):prod(2)))
    assert.equal("nan", text(ms.tensor({ 1, nan, 0. }):prod()))
    local x = (ms.rand({ 33, seed = 2 }) + 0.5):to "f16"
    assert.equal(text(x:to "f32":prod():to "f16"), text(x:prod()))
  end)

  it("has gradients, also with zeros", function()
    check_gradient(ms.tensor { 2., -1, 3, 0.5, 1.5 }, function(t) return t:prod() end)
    local function gradient(values)
      local x = ms.tensor(values):requires_grad_()
      x:prod():backward()
      return x:grad():to_table()
    end
    near({ 0, 210, 0, 0, 0 }, gradient { 2., 0, 3, 5, 7 })
    near({ 0, 0, 0 }, gradient { 2., 0, 0 })
  end)

  it("names what does not fit", function()
    fails(function() ms.ones({ 2 }):prod(2) end, "prod: dimension 2 of tensor [2] f32: it has 1")
  end)
end)

describe("one_hot", function()
  it("has 1 at each index", function()
    local want = { { 0, 0, 1 }, { 1, 0, 0 } }
    for _, dtype in ipairs { "i64", "i32", "u16" } do
      local y = ms.tensor({ 2, 0 }, dtype):one_hot(3)
      assert.same(want, y:to_table())
      assert.equal("i64", y:dtype())
    end
    assert.same({ 0, 1 }, ms.tensor(1):one_hot(2):to_table())
    assert.same({ 2, 0, 4 }, ms.zeros({ 2, 0, dtype = "i64" }):one_hot(4):shape())
  end)

  it("names what does not fit", function()
    fails(function() ms.tensor({ 0 }):one_hot() end, "one_hot: classes must be an integer")
    fails(function() ms.tensor({ 0 }):one_hot(0) end, "one_hot: classes is 0")
    fails(function() ms.tensor({ 3 }):one_hot(3):to_table() end, "index 3 outside 0..2")
    fails(function() ms.tensor({ 1. }):one_hot(3) end)
  end)
end)

describe("tril, triu", function()
  it("keep one side of a diagonal, of any dtype and in each matrix", function()
    local x = ms.tensor { { 1, 2, 3 }, { 4, 5, 6 } }
    assert.same({ { 1, 0, 0 }, { 4, 5, 0 } }, x:tril():to_table())
    assert.same({ { 1, 2, 0 }, { 4, 5, 6 } }, x:tril(1):to_table())
    assert.same({ { 0, 2, 3 }, { 0, 0, 6 } }, x:triu(1):to_table())
    assert.same({ { 0, 0, 0 }, { 4, 0, 0 } }, x:tril(-1):to_table())
    assert.same({ { true, false } }, ms.tensor({ { true, true } }):tril():to_table())
    assert.same({ { { 1, 0 }, { 1, 1 } }, { { 1, 0 }, { 1, 1 } } },
      ms.ones({ 2, 2, 2, dtype = "i32" }):tril():to_table())
    assert.same({ 0, 3 }, ms.zeros({ 0, 3 }):triu():shape())
    assert.equal("-0 0 nan -0",
      text(ms.tensor({ { -0., inf }, { nan, -0. } }):tril()))
  end)

  it("pass no gradient to the other side", function()
    local x = ms.ones({ 2, 2 }):requires_grad_()
    x:triu():backward { gradient = ms.tensor { { 2., 3 }, { inf, 5 } } }
    near({ { 2, 3 }, { 0, 5 } }, x:grad())
  end)

  it("name what does not fit", function()
    fails(function() ms.ones({ 2 }):tril() end, "tril: tensor [2] f32: it needs two dimensions")
    fails(function() ms.ones({ 2, 2 }):triu(0.5) end, "triu: diagonal must be an integer")
  end)
end)

describe("sort", function()
  it("orders values, equal ones as they were, NaN as the greatest", function()
    local x = ms.tensor { 3., nan, -0., 1, 0., 1, -inf }
    local values, ids = x:sort()
    assert.equal("-inf -0 0 1 1 3 nan", text(values))
    assert.same({ 6, 2, 4, 3, 5, 0, 1 }, ids:to_table())
    values, ids = x:sort(1, true)
    assert.equal("nan 3 1 1 -0 0 -inf", text(values))
    assert.same({ 1, 0, 3, 5, 2, 4, 6 }, ids:to_table())
  end)

  it("along each dimension, of each dtype and length", function()
    for _, dtype in ipairs { "f32", "bf16", "f16", "i64", "i32", "u16", "u8" } do
      for _, n in ipairs { 0, 1, 2, 31, 1025, 3000 } do
        local x = ms.randint({ 2, n, high = 200, seed = n + 1 }):to(dtype)
        for _, descending in ipairs { false, true } do
          local values, ids = x:sort(2, descending)
          local turned = x:t():sort(1, descending)
          assert.equal(dtype, values:dtype())
          assert.equal("i64", ids:dtype())
          assert.same({ n, 2 }, turned:shape())
          for row = 1, 2 do
            local own, places, want = x[row]:to_table(), ids[row]:to_table(), {}
            for i = 1, n do want[i] = i - 1 end
            table.sort(want, function(a, b)
              if own[a + 1] == own[b + 1] then return a < b end
              return (own[a + 1] < own[b + 1]) ~= descending
            end)
            assert.same(want, places)
          end
          assert.same(x:gather(2, ids):to_table(), values:to_table())
          assert.same(values:t():to_table(), turned:to_table())
        end
      end
    end
  end)

  it("passes the gradient back to where values were", function()
    local x = ms.tensor({ { 3., 1, 2 } }):requires_grad_()
    x:sort():backward { gradient = ms.tensor { { 10., 20, 30 } } }
    near({ { 30, 10, 20 } }, x:grad())
  end)

  it("names what does not fit", function()
    fails(function() ms.tensor(1.):sort() end, "sort: a scalar has no dimension")
    fails(function() ms.tensor({ true }):sort() end, "sort: it does not work on bool")
    fails(function() ms.ones({ 2 }):sort(2) end, "2")
    fails(function() ms.ones({ 2 }):sort(1, 1) end, "boolean expected")
  end)
end)

describe("einsum", function()
  local function random(shape, seed)
    shape.seed = seed
    return ms.randn(shape)
  end
  local a, b = random({ 2, 3, 4 }, 1), random({ 4, 5 }, 2)

  it("of strided and empty tensors", function()
    local turned = a:transpose(1, 3)
    near(a:matmul(b):to_table(), ms.einsum("jib,jk->bik", turned, b), 1e-5)
    near({ { 0, 0, 0 }, { 0, 0, 0 } }, ms.einsum("ij,jk->ik", ms.zeros { 2, 0 }, ms.zeros { 0, 3 }))
    assert.same({ 0, 3 }, ms.einsum("ij,jk", ms.zeros { 0, 2 }, ms.zeros { 2, 3 }):shape())
    near({ 0, 0 }, ms.einsum("ij->i", ms.zeros { 2, 0 }))
    near(6, ms.einsum(",", ms.tensor(2.), ms.tensor(3.)))
    near({ 2, 4 }, ms.einsum("i, -> i", ms.tensor { 1., 2 }, ms.tensor(2.)))
  end)

  it("is a new tensor", function()
    local x = ms.ones { 2, 2 }
    ms.einsum("ij->ji", x):fill_(7)
    ms.einsum("ij->ij", x):fill_(7)
    near({ { 1, 1 }, { 1, 1 } }, x)
  end)

  it("keeps dtypes, and multiplies in bf16 under autocast", function()
    local c, d = a:to "bf16", b:to "bf16"
    assert.equal("bf16", ms.einsum("bij,jk->bik", c, d):dtype())
    assert.equal(text(c:matmul(d)), text(ms.einsum("bij,jk->bik", c, d)))
    local y = ms.autocast("bf16", function() return ms.einsum("bij,jk->bik", a, b) end)
    assert.equal("bf16", y:dtype())
    assert.is_true((y:to "f32" - a:matmul(b)):abs():max():item() > 1e-4)
    near({ 3, 3 }, ms.einsum("ij->i", ms.ones { 2, 3, dtype = "i64" }))
  end)

  it("has gradients", function()
    check_gradient(b, function(t) return ms.einsum("bij,jk->bk", a, t):square():sum() end)
    check_gradient(b, function(t) return ms.einsum("ij->j", t):square():sum() end)
  end)

  it("names what does not fit", function()
    local function refused(equation, x, y, ...)
      fails(function() ms.einsum(equation, x, y) end, ("einsum '%s'"):format(equation), ...)
    end
    refused("...i->i", b, nil, "an ellipsis (...) is not supported")
    refused("ii->i", b, nil, "'i' is twice in operand 1: diagonals are not supported")
    refused("ij->ii", b, nil, "'i' is twice in the result")
    refused("ij->k", b, nil, "'k' is in the result only")
    refused("ij,jk->ik", b, nil, "it has 2 operands, and 1 tensors are given")
    refused("ij->ij", b, b, "it has 1 operands, and 2 tensors are given")
    refused("ij,jk->ik", b, b, "'j' has sizes 5 and 4")
    refused("i->i", b, nil, "operand 1 has 1 letters, and the tensor 2 dimensions")
    refused("i1->i", b, nil, "'1' is not a letter")
    fails(function() ms.einsum(b, b) end, "einsum: equation must be a string")
    fails(function() ms.einsum("i", 3) end, "einsum: a must be a tensor")
  end)
end)

-- Each is called twice, then its gradient is computed.
local CASES <const> = [[
  local cases = {
    function(x) return x:var() end, function(x) return x:var(1) end,
    function(x) return x:prod() end, function(x) return x:prod(2, true) end,
    function(x) return x:tril() end, function(x) return x:triu(3) end,
    function(x) return (x:sort(1)) end, function(x) return x:round() end,
    function(x) return ms.einsum("ij->j", x) end,
    function(x) return ms.einsum("ij,kj->ki", x, x) end,
    function(x) return ms.nn.GroupNorm(4, 96)(x:view(-1, 96, 2)) end,
    function(x) return ms.nn.BatchNorm(96)(x:view(-1, 96, 2)) end,
  }
]]

describe("memory", function()
  it("is that of the result without a gradient", function()
    local x = ms.randn { 96, 192 }
    local function kept(f)
      core.collect()
      local before = ms.memory().live
      local y = f(x)
      core.synchronize() -- closed tensors go with the next call that reaches the engine
      local more = ms.memory().live - before
      assert.is_true(y:numel() > 0)
      return more
    end
    local one, all = kept(function(t) return t:sum() end), kept(function(t) return t:clone() end)
    assert.equal(one, kept(function(t) return t:var() end))
    assert.equal(one, kept(function(t) return t:prod() end))
    assert.equal(all, kept(function(t) return t:tril() end))
    assert.equal(all, kept(function(t) return ms.einsum("ij->ji", t) end))
  end)

  it("has the same peak on sim", function()
    local folder = command.folder()
    command.write(folder .. "/peak.lua", "local ms = require 'moonshard'\n" .. CASES .. [[
      for i, f in ipairs(cases) do
        for step in ms.steps(2) do
          if step == 1 then ms.reset_peak() end
          local x = ms.ones { 96, 192, requires_grad = true }
          f(x):sum():backward()
        end
        print(i, ms.memory().peak)
      end]])
    local real = command.succeed(folder, "run peak.lua")
    assert.matches("\n12\t%d+\n$", real)
    assert.equal(real, (command.succeed(folder, "run peak.lua --device sim")))
    command.remove(folder)
  end)
end)
