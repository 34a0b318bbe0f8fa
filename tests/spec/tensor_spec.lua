-- Tensors as scripts see them: making, shape, views, values of every operator against plain Lua,
-- error texts. ctest: each-isa
local ms = require "moonshard"
local support = require "support"
local near, fails, flat = support.near, support.fails, support.flat

-- Random values, the same in every run.
local function random(shape, seed, low, high)
  local options = { seed = seed, low = low or -2, high = high or 2 }
  for i, size in ipairs(shape) do options[i] = size end
  return ms.rand(options)
end

describe("making tensors", function()
  it("takes shape and options from one table", function()
    local t = ms.zeros { 2, 3, dtype = "bf16" }
    assert.same({ 2, 3 }, t:shape())
    assert.equal("bf16", t:dtype())
    assert.same({}, ms.zeros({}):shape())
    assert.equal(0, ms.zeros({}):dim())
    assert.equal(1, ms.zeros({}):numel())
    assert.equal(0, ms.ones({ 0, 3 }):numel())
    assert.is_true(ms.zeros({ 2, requires_grad = true }):requires_grad())
    assert.is_false(ms.zeros({ 2 }):requires_grad())
    assert.equal("cpu", ms.zeros({ 2, device = "cpu" }):device())
    near({ { 1, 1 }, { 1, 1 } }, ms.ones { 2, 2 })
    near({ 2.5, 2.5 }, ms.full(2.5, { 2 }))
    assert.same({ 4, 2 }, ms.empty({ 4, 2 }):shape())
  end)

  it("finds dtype and shape of nested lists", function()
    assert.equal("i64", ms.tensor({ 1, 2 }):dtype())
    assert.equal("f32", ms.tensor({ 1, 2.5 }):dtype())
    assert.equal("bool", ms.tensor({ true, false }):dtype())
    assert.same({ 2, 1, 3 }, ms.tensor({ { { 1, 2, 3 } }, { { 4, 5, 6 } } }):shape())
    assert.equal(7, ms.tensor(7):item())
    assert.same({}, ms.tensor(7):shape())
    assert.same({ 0 }, ms.tensor({}):shape())
    assert.same({ 2, 0 }, ms.tensor({ {}, {} }):shape())
    assert.same({ { true }, { false } }, ms.tensor({ { true }, { false } }):to_table())
  end)

  it("keeps integers exact and rounds floats to the dtype", function()
    assert.same({ math.maxinteger, math.mininteger, 2 ^ 53 | 1 },
      ms.tensor({ math.maxinteger, math.mininteger, 2 ^ 53 | 1 }):to_table())
    assert.same({ 255, 0 }, ms.tensor({ 255, 0 }, "u8"):to_table())
    assert.same({ 65535 }, ms.tensor({ 65535 }, "u16"):to_table())
    assert.same({ -2 ^ 31 | 0, 2 ^ 31 - 1 | 0 },
      ms.tensor({ -2 ^ 31 | 0, 2 ^ 31 - 1 | 0 }, "i32"):to_table())
    assert.same({ 1.0, 65504.0 }, ms.tensor({ 1 + 2 ^ -12, 65504 }, "f16"):to_table())
    assert.same({ 1.0, 1.0078125 }, ms.tensor({ 1 + 2 ^ -9, 1 + 2 ^ -7 }, "bf16"):to_table())
    -- Half way goes to the even neighbour.
    assert.same({ 1.0, 1.015625 }, ms.tensor({ 1 + 2 ^ -8, 1 + 3 * 2 ^ -8 }, "bf16"):to_table())
  end)

  it("refuses values that the dtype cannot hold", function()
    fails(function() ms.tensor({ 1, 256 }, "u8") end, "256 does not fit into u8")
    fails(function() ms.tensor({ -1 }, "u16") end, "-1 does not fit into u16")
    fails(function() ms.tensor({ 2 ^ 31 | 0 }, "i32") end, "2147483648 does not fit into i32")
    fails(function() ms.tensor({ 1.5 }, "i64") end, "1.5 is not an integer")
    fails(function() ms.tensor({ 1, true }) end, "mixed")
    fails(function() ms.tensor({ { 1 }, { 1, 2 } }) end, "dimension 2", "1 and 2 items")
    fails(function() ms.tensor({ 1, { 2 } }) end, "not equally deep")
    fails(function() ms.tensor({ "1" }) end, "string")
  end)

  it("counts as Lua's for in arange", function()
    assert.same({ 1, 2, 3 }, ms.arange(1, 3):to_table())
    assert.equal("i64", ms.arange(1, 3):dtype())
    assert.same({ 5, 3, 1 }, ms.arange(5, 0, -2):to_table())
    assert.same({}, ms.arange(2, 1):to_table())
    local t = ms.arange(0, 1, 0.25)
    assert.equal("f32", t:dtype())
    near({ 0, 0.25, 0.5, 0.75, 1 }, t)
    assert.same({ math.maxinteger - 1, math.maxinteger },
      ms.arange(math.maxinteger - 1, math.maxinteger):to_table())
    assert.same({ math.mininteger },
      ms.arange(math.mininteger, math.mininteger + 5, math.maxinteger):to_table())
    fails(function() ms.arange(1, 2, 0) end, "step not 0")
    fails(function() ms.arange(math.mininteger, math.maxinteger) end, "too many")
  end)

  it("draws random numbers that repeat with their seed, within their range", function()
    local a, b = ms.rand { 1000, seed = 5 }, ms.rand { 1000, seed = 5 }
    assert.is_true(a:eq(b):all():item())
    assert.is_false(a:eq(ms.rand { 1000, seed = 6 }):all():item())
    assert.is_true(a:ge(0):all():item() and a:lt(1):all():item())
    local c = ms.rand { 1000, low = -3, high = -2 }
    assert.is_true(c:ge(-3):all():item() and c:lt(-2):all():item())
    -- The mean of 10,000 has a deviation of 0.01, that of the deviation is smaller: five
    -- deviations.
    local n = ms.randn { 10000, std = 2, seed = 1 }
    near(0, n:mean():item(), 0.1)
    near(2, math.sqrt((n * n):mean():item()), 0.1)
    local i = ms.randint { 2000, low = 3, high = 7, seed = 2 }
    assert.equal("i64", i:dtype())
    assert.same({ 500 }, { i:histogram(4, 3, 7):sum():item() // 4 })
    for _, count in ipairs(i:histogram(4, 3, 7):to_table()) do
      assert.is_true(count > 400 and count < 600)
    end
    ms.seed(9)
    local first = ms.rand { 4 }:to_table()
    ms.seed(9)
    assert.same(first, ms.rand({ 4 }):to_table())
    assert.not_same(first, ms.rand({ 4 }):to_table())
  end)

  it("joins tensors", function()
    local a, b = ms.tensor { { 1, 2 }, { 3, 4 } }, ms.tensor { { 5, 6 } }
    assert.same({ { 1, 2 }, { 3, 4 }, { 5, 6 } }, ms.cat({ a, b }):to_table())
    assert.same({ { 1, 2, 1, 2 }, { 3, 4, 3, 4 } }, ms.cat({ a, a }, 2):to_table())
    assert.same({ { 1, 2, 1, 2 }, { 3, 4, 3, 4 } }, ms.cat({ a, a }, -1):to_table())
    assert.same({ { 1, 5 }, { 2, 6 } },
      ms.stack({ ms.tensor { 1, 2 }, ms.tensor { 5, 6 } }, 2):to_table())
    assert.same({ 2, 1, 2 }, ms.stack({ b, b }):shape())
    local whole, parts = ms.pack { ms.ones { 2, 2 }, ms.zeros { 3 }, ms.full(2, {}) }
    assert.same({ 1, 1, 1, 1, 0, 0, 0, 2 }, whole:to_table())
    assert.same({ 2, 2 }, parts[1]:shape())
    assert.same({}, parts[3]:shape())
    parts[2]:fill_(7)
    assert.same({ 1, 1, 1, 1, 7, 7, 7, 2 }, whole:to_table())
    fails(function() ms.pack { ms.ones { 2 }, ms.ones { 2, dtype = "bf16" } } end,
      "tensor 1 is f32 and tensor 2 is bf16")
    fails(function() ms.cat { ms.ones { 2 }, ms.ones { 2, 2 } } end, "cat")
    fails(function() ms.cat { ms.ones { 2 }, 5 } end, "item 2", "number")
    assert.has_error(function() ms.cat {} end)
  end)

  it("chooses by a condition, and shows all three shapes when they do not fit", function()
    local condition = ms.tensor { true, false, true }
    near({ 1, 20, 3 }, ms.where(condition, ms.tensor { 1., 2, 3 }, ms.tensor { 10., 20, 30 }))
    near({ 1, 0, 3 }, ms.where(condition, ms.tensor { 1., 2, 3 }, 0))
    near({ 5, 6, 5 }, ms.where(condition, 5, 6))
    assert.same({ 2, 3 }, ms.where(condition, ms.zeros { 2, 1 }, 1):shape())
    fails(function() ms.where(condition, ms.zeros { 2 }, ms.zeros { 4 }) end, "[3]", "[2]", "[4]")
    fails(function() ms.where(ms.zeros { 3 }, 1, 2) end, "bool")
  end)

  it("names the nearest option, with the caller's line", function()
    fails(function() ms.zeros { 2, dtyp = "f32" } end, "unknown option 'dtyp'", "'dtype'")
    fails(function() ms.zeros { 2, dtype = "fp32" } end, "unknown dtype 'fp32'", "'f32'")
    fails(function() ms.rand { 2, hihg = 3 } end, "'high'")
    fails(function() ms.rand { 2, low = 3 } end, "low")
    fails(function() ms.randint { 2 } end, "high")
    fails(function() ms.zeros { -1 } end, "size -1 of dimension 1")
    fails(function() ms.zeros { 2, 1.5 } end, "integer")
    fails(function() ms.zeros { 1, 1, 1, 1, 1, 1, 1, 1, 1 } end, "at most 8 dimensions")
    fails(function() ms.zeros { 2, device = "cuda:0" } end, "cuda:0", "cpu")
  end)
end)

describe("what a tensor is", function()
  local t = ms.arange(1, 6):view(2, 3):to "f32"

  it("tells shape, size, dtype, device", function()
    assert.same({ 2, 3 }, t:shape())
    assert.equal(2, t:size(1))
    assert.equal(3, t:size(-1))
    assert.equal(2, t:dim())
    assert.equal(6, t:numel())
    assert.equal(2, #t)
    assert.equal("f32", t:dtype())
    assert.equal("cpu", t:device())
    assert.is_true(t:is_contiguous())
    assert.is_false(t:t():is_contiguous())
    assert.equal("tensor [2, 3] f32", tostring(t))
    fails(function() return t:size(3) end, "dimension 3", "2")
    fails(function() return t:size(0) end, "dimension 0", "count from 1")
    fails(function() return #ms.zeros {} end, "scalar")
  end)

  it("gives its values", function()
    assert.same({ { 1.0, 2.0, 3.0 }, { 4.0, 5.0, 6.0 } }, t:to_table())
    assert.equal(4, t[2][1]:item())
    assert.equal(6, t:sum():item() - 15)
    assert.equal(true, ms.tensor(true):item())
    assert.equal("integer", math.type(ms.tensor(3):item()))
    fails(function() return t:item() end, "[2, 3] f32", "one element")
    fails(function() return ms.zeros({ 1000001 }):to_table() end, "million")
    assert.equal("[2, 3] f32\n[[1, 2, 3],\n [4, 5, 6]]", t:show())
    assert.equal("[100] i64\n[1, 2, 3, ..., 98, 99, 100]", ms.arange(1, 100):show())
    assert.equal("[] bool\ntrue", ms.tensor(true):show())
  end)

  it("counts from 1 and from the end", function()
    near({ 4, 5, 6 }, t[2])
    near({ 4, 5, 6 }, t[-1])
    near({ 3, 6 }, t:select(2, -1))
    near(2, t[1][2])
    fails(function() return t[3] end, "index 3", "size 2")
    fails(function() return t[0] end, "index 0", "count from 1")
    fails(function() return t[-3] end, "index -3")
    fails(function() return t[1.5] end, "integer")
    fails(function() return t[1][2][1] end, "dimension 1 of a tensor with 0")
    fails(function() t[1] = 5 end, "copy_")
    fails(function() return t.colour end, "a tensor has no 'colour'")
  end)

  it("has an identity of its own", function()
    assert.is_true(t == t)
    assert.is_false(t == t:clone())
    assert.equal(false, getmetatable(t) == nil)
    assert.equal("locked", getmetatable(t))
  end)
end)

describe("views", function()
  local base
  before_each(function() base = ms.arange(1, 24):view(2, 3, 4) end)

  it("share memory", function()
    base[1][2]:fill_(0)
    base:narrow(3, 2, 2):add_(100)
    base:view(-1):narrow(1, 24, 1):zero_()
    assert.same({
      { { 1, 102, 103, 4 }, { 0, 100, 100, 0 }, { 9, 110, 111, 12 } },
      { { 13, 114, 115, 16 }, { 17, 118, 119, 20 }, { 21, 122, 123, 0 } },
    }, base:to_table())
    local c = base:clone()
    c:zero_()
    assert.equal(1, base[1][1][1]:item())
  end)

  it("have the right values", function()
    local function at(i, j, k) return (i - 1) * 12 + (j - 1) * 4 + k end
    local turned, permuted, split = base:transpose(1, 3), base:permute(2, 3, 1), base:split(2, 3)
    assert.same({ 4, 3, 2 }, turned:shape())
    assert.same({ 3, 4, 2 }, permuted:shape())
    assert.same({ 2, 3, 2 }, split[2]:shape())
    for i = 1, 2 do
      for j = 1, 3 do
        for k = 1, 4 do
          assert.equal(at(i, j, k), turned[k][j][i]:item())
          assert.equal(at(i, j, k), permuted[j][k][i]:item())
          assert.equal(at(i, j, k), split[(k + 1) // 2][i][j][(k - 1) % 2 + 1]:item())
          assert.equal(at(i, j, k), base:t()[i][k][j]:item())
        end
      end
    end
    assert.same({ 6, 4 }, base:flatten(1, 2):shape())
    assert.same({ 24 }, base:flatten():shape())
    assert.same({ 2, 12 }, base:flatten(2):shape())
    assert.same({ 1 }, ms.zeros({}):flatten():shape())
    assert.same({ 2, 3, 1, 4 }, base:unsqueeze(3):shape())
    assert.same({ 2, 3, 4, 1 }, base:unsqueeze(-1):shape())
    assert.same({ 2, 3, 4 }, base:unsqueeze(1):squeeze(1):shape())
    assert.same({ { 7, 7, 7 }, { 8, 8, 8 } }, ms.tensor({ { 7 }, { 8 } }):expand(2, 3):to_table())
    assert.same({ 4, 6 }, base:reshape(4, -1):shape())
    assert.same({ 1, 13, 5, 17, 9, 21 }, base:transpose(1, 2):reshape(6, 4):select(2, 1):to_table())
    assert.is_true(base:contiguous() == base)
    assert.is_true(base:t():contiguous():is_contiguous())
  end)

  it("split and chunk along any dimension", function()
    local function sizes(list, dim)
      local result = {}
      for i, part in ipairs(list) do result[i] = part:size(dim) end
      return result
    end
    local t = ms.arange(1, 10)
    assert.same({ 4, 4, 2 }, sizes(t:split(4), 1))
    assert.same({ 1, 0, 9 }, sizes(t:split { 1, 0, 9 }, 1))
    assert.same({ 4, 4, 2 }, sizes(t:chunk(3), 1))
    assert.same({ 5, 5 }, sizes(t:chunk(2), 1))
    assert.same({ 9, 10 }, t:chunk(3)[3]:to_table())
    assert.same({ 2, 1 }, sizes(base:chunk(2, 2), 2))
    fails(function() t:split { 4, 4 } end, "split", "8", "10")
    fails(function() t:split(0) end, "size of a part")
  end)

  it("pad_to fills with zeros up to a multiple", function()
    local t = ms.tensor { 1., 2, 3 }
    near({ 1, 2, 3, 0 }, t:pad_to(4))
    assert.is_true(t:pad_to(3) == t)
    fails(function() return base:pad_to(4) end, "pad_to", "flatten")
  end)

  it("raise where a copy would be needed", function()
    fails(function() return base:t():view(24) end, "view", "reshape")
    fails(function() return base:view(5, 5) end, "view", "[2, 3, 4]")
    fails(function() return base:view(-1, -1) end, "view")
    fails(function() return base:expand(5, 3, 4) end, "expand", "[2, 3, 4]")
    fails(function() return base:squeeze(1) end, "squeeze")
    fails(function() return base:permute(1, 1, 2) end, "permute")
    fails(function() return base:permute(1, 2) end, "permute", "2", "3")
    fails(function() return base:narrow(1, 1, 3) end, "length", "2")
    fails(function() return base:narrow(1, 0, 1) end, "start")
    fails(function() return ms.zeros({ 2 }):t() end, "two or more")
    fails(function() return base:flatten(3, 1) end, "flatten")
  end)
end)

describe("memory", function()
  it("casts, copies, fills", function()
    local t = ms.tensor { 1.5, -2.5, 3 }
    assert.is_true(t:to "f32" == t)
    assert.is_true(t:to "cpu" == t)
    assert.equal("bf16", t:to("bf16"):dtype())
    assert.same({ 1, -2, 3 }, t:to("i64"):to_table())
    assert.same({ true, true, true }, t:to("bool"):to_table())
    assert.same({ false }, ms.zeros({ 1 }):to("bool"):to_table())
    fails(function() t:to "f23" end, "'f23'", "'f32'")
    fails(function() t:to "cuda" end, "device 'cuda': this engine runs on 'cpu'")
    assert.same({ 3 }, t:empty_like():shape())
    near({ 0, 0, 0 }, t:zeros_like())
    assert.equal("i64", t:ones_like("i64"):dtype())
    near({ { 1.5, -2.5, 3 }, { 1.5, -2.5, 3 } }, ms.zeros({ 2, 3, dtype = "f16" }):copy_(t))
    fails(function() ms.zeros({ 2 }):copy_(t) end, "copy", "[2]", "[3]")
    near({ 4, 4 }, ms.zeros({ 2 }):fill_(ms.tensor(4.0)))
    near({ 0, 0, 0 }, t:clone():zero_())
  end)

  it("is freed when its handles are gone, at a fixed point", function()
    local core = require "moonshard.core"
    core.collect()
    local before = ms.memory().live
    local big = ms.zeros { 1 << 20 }
    local second = big:view(1 << 10, 1 << 10)
    assert.equal(before + (1 << 22), ms.memory().live)
    big = nil -- luacheck: ignore 311
    core.collect()
    assert.equal(before + (1 << 22), ms.memory().live)
    assert.equal(0, second[1][1]:item())
    second = nil -- luacheck: ignore 311
    core.collect()
    assert.equal(before, ms.memory().live)
    ms.reset_peak()
    assert.equal(before, ms.memory().peak)
  end)

  it("goes back when a handle is closed", function()
    local kept
    do
      local t <close> = ms.ones { 4 }
      kept = t
    end
    fails(function() return kept:sum() end, "the tensor made at", "was closed")
    assert.equal("tensor (released)", tostring(kept))
  end)
end)

-- name -> { f(x) in Lua, range of x }; each is checked on its own, in place, and against a strided
-- input.
local unary = {
  neg = { function(x) return -x end },
  exp = { math.exp },
  log = { math.log, 0.1, 5 },
  sqrt = { math.sqrt, 0, 5 },
  rsqrt = { function(x) return 1 / math.sqrt(x) end, 0.1, 5 },
  square = { function(x) return x * x end },
  abs = { math.abs },
  sign = { function(x) return x > 0 and 1 or x < 0 and -1 or 0 end },
  relu = { function(x) return math.max(x, 0) end },
  silu = { function(x) return x / (1 + math.exp(-x)) end },
  sigmoid = { function(x) return 1 / (1 + math.exp(-x)) end },
  tanh = { function(x) return (math.exp(x) - math.exp(-x)) / (math.exp(x) + math.exp(-x)) end },
  sin = { math.sin },
  cos = { math.cos },
  floor = { math.floor }, ceil = { math.ceil },
  round = { function(x) return math.floor(x + 0.5) end },
  gelu = { function(x)
    local y = math.sqrt(2 / math.pi) * (x + 0.044715 * x ^ 3)
    return 0.5 * x * (1 + (math.exp(y) - math.exp(-y)) / (math.exp(y) + math.exp(-y)))
  end },
}

-- name -> f(a, b); each with a tensor and a number on the right.
local binary = {
  add = function(a, b) return a + b end,
  sub = function(a, b) return a - b end,
  mul = function(a, b) return a * b end,
  div = function(a, b) return a / b end, maximum = math.max, minimum = math.min,
}

local compare = {
  eq = function(a, b) return a == b end,
  ne = function(a, b) return a ~= b end,
  lt = function(a, b) return a < b end,
  le = function(a, b) return a <= b end,
  gt = function(a, b) return a > b end,
  ge = function(a, b) return a >= b end,
}

describe("elementwise", function()
  for name, case in ms.sorted_pairs(unary) do
    it(name, function()
      -- 37 elements: whole vectors and a rest on every instruction set.
      local x = random({ 37 }, 3, case[2], case[3])
      local expected = {}
      for i, value in ipairs(flat(x)) do expected[i] = case[1](value) end
      near(expected, x[name](x))
      local y = x:clone()
      assert.is_true(y[name .. "_"](y) == y)
      near(expected, y)
      local strided = random({ 5, 7 }, 3, case[2], case[3]):t()
      local wanted = {}
      for i, value in ipairs(flat(strided)) do wanted[i] = case[1](value) end
      near(wanted, flat(strided[name](strided)))
      assert.same({}, x[1][name](x[1]):shape())
      assert.same({ 0, 2 }, ms.ones({ 0, 2 })[name](ms.ones { 0, 2 }):shape())
    end)
  end

  for name, f in ms.sorted_pairs(binary) do
    it(name, function()
      local a, b = random({ 4, 1, 9 }, 1), random({ 3, 1 }, 2, 0.5, 2)
      local x, y, sum = a:to_table(), b:to_table(), a[name](a, b)
      assert.same({ 4, 3, 9 }, sum:shape())
      local got = sum:to_table()
      for i = 1, 4 do
        for j = 1, 3 do for k = 1, 9 do near(f(x[i][1][k], y[j][1]), got[i][j][k]) end end
      end
      local scaled = a[name](a, 0.75)
      for i, value in ipairs(flat(a)) do near(f(value, 0.75), flat(scaled)[i]) end
      local c = random({ 4, 3, 9 }, 5)
      local before = c:to_table()
      assert.is_true(c[name .. "_"](c, b) == c)
      got = c:to_table()
      for i = 1, 4 do
        for j = 1, 3 do for k = 1, 9 do near(f(before[i][j][k], y[j][1]), got[i][j][k]) end end
      end
      c[name .. "_"](c, 0.5)
      near(f(got[1][2][3], 0.5), c[1][2][3])
    end)
  end

  for name, f in ms.sorted_pairs(compare) do
    it(name, function()
      local a, b = ms.tensor { 1, 2, 3, 4 }, ms.tensor { 4, 2, 3, 1 }
      local expected, scalar = {}, {}
      for i = 1, 4 do expected[i], scalar[i] = f(i, ({ 4, 2, 3, 1 })[i]), f(i, 2) end
      assert.same(expected, a[name](a, b):to_table())
      assert.same(scalar, a[name](a, 2):to_table())
      local floats = a:to "f32"
      assert.same(expected, floats[name](floats, b:to "f32"):to_table())
      assert.equal("bool", a[name](a, b):dtype())
    end)
  end

  it("arithmetic operators take a number on either side", function()
    local t = ms.tensor { 1., 2, 4 }
    near({ 3, 4, 6 }, t + 2)
    near({ 3, 4, 6 }, 2 + t)
    near({ -1, 0, 2 }, t - 2)
    near({ 1, 0, -2 }, 2 - t)
    near({ 3, 6, 12 }, 3 * t)
    near({ 8, 4, 2 }, 8 / t)
    near({ 0.5, 1, 2 }, t / 2)
    near({ 1, 4, 16 }, t ^ 2)
    near({ 1, 2 ^ 0.5, 2 }, t:pow(0.5))
    near({ 1, 8, 64 }, t:clone():pow_(3))
    near({ -1, -2, -4 }, -t)
    near({ 2, 4, 8 }, t + t)
    assert.has_error(function() return t + "a" end)
    assert.has_error(function() return t + {} end)
    assert.has_error(function() return 2 ^ t end)
  end)

  it("add and sub take a factor", function()
    local a, b = ms.tensor { 1., 2 }, ms.tensor { 10., 20 }
    near({ 6, 12 }, a:add(b, 0.5))
    near({ -4, -8 }, a:sub(b, 0.5))
    near({ 7, 8 }, a:add(3, 2))
    near({ -9, -18 }, a:clone():add_(b, -1))
  end)

  it("clamp, lerp, addcmul, addcdiv, masked_fill", function()
    local t, a, b = ms.tensor { -2., 0.5, 3 }, ms.tensor { 1., 2, 3 }, ms.tensor { 4., 5, 8 }
    near({ -1, 0.5, 1 }, t:clamp(-1, 1))
    near({ -2, 0.5, 1 }, t:clamp(nil, 1))
    -- Bounds in the wrong order: the upper one wins, whatever the dtype.
    near({ 1, 1, 1 }, t:clamp(2, 1))
    near({ 1, 1, 1 }, ms.tensor({ -2, 0, 3 }):clamp(2, 1))
    near({ 0, 0.5, 3 }, t:clone():clamp_(0))
    near({ -0.5, 1.625, 4.25 }, t:lerp(b, 0.25))
    near({ 4, 0.5, 5.5 }, t:lerp(b, ms.tensor { 1., 0, 0.5 }))
    near({ 0, 5.5, 15 }, t:addcmul(a, b, 0.5))
    near({ -1.75, 0.9, 3.375 }, t:addcdiv(a, b))
    near({ -1.5, 1.3, 3.75 }, t:clone():addcdiv_(a, b, 2))
    near({ 9, 0.5, 9 }, t:masked_fill(ms.tensor { true, false, true }, 9))
    near({ 0, 0.5, 3 }, t:clone():masked_fill_(ms.tensor { true, false, false }, 0))
    fails(function() t:masked_fill(a, 0) end, "masked_fill", "bool")
  end)

  it("dropout scales what it keeps", function()
    local t = ms.ones { 10000 }
    local d = t:dropout(0.25)
    local kept = d:ne(0):to("f32"):mean():item()
    near(0.75, kept, 0.03)                          -- seven deviations of the mean
    near(1 / 0.75, d:max():item())
    assert.is_true(t:dropout(0):eq(t):all():item())
    fails(function() t:dropout(1) end, "dropout", "below 1")
    fails(function() t:dropout(-0.1) end, "dropout")
  end)

  it("is_finite, any, all", function()
    assert.same({ true, false, false, false },
      ms.tensor({ 1.0, 1 / 0, -1 / 0, 0 / 0 }):is_finite():to_table())
    assert.is_true(ms.tensor({ false, true }):any():item())
    assert.is_false(ms.tensor({ false, false }):any():item())
    assert.is_false(ms.tensor({ false, true }):all():item())
    assert.is_true(ms.tensor({ true, true }):all():item())
  end)

  it("does not mix float dtypes", function()
    fails(function() return ms.zeros { 2 } + ms.zeros { 2, dtype = "bf16" } end, "add", "[2] f32",
      "[2] bf16", "cast")
    fails(function() return ms.zeros({ 2, 3 }):mul(ms.zeros { 4 }) end, "mul", "[2, 3] f32",
      "[4] f32", "broadcast")
    fails(function() return ms.zeros({ 3 }):add_(ms.zeros { 2, 3 }) end, "[3]", "[2, 3]")
    fails(function() return ms.zeros({ 2, dtype = "i64" }):exp() end, "exp", "i64")
    fails(function() return ms.zeros({ 2 }):gelu "tan" end, "'tan'", "'tanh'")
  end)

  it("computes in 16 bits", function()
    for _, dtype in ipairs { "bf16", "f16" } do
      local a, b = random({ 33 }, 1):to(dtype), random({ 33 }, 2):to(dtype)
      local sum = a + b
      assert.equal(dtype, sum:dtype())
      -- Half a unit in the last place of 8 bits.
      near((a:to "f32" + b:to "f32"):to_table(), sum:to("f32"), 2 ^ -8)
    end
  end)
end)

describe("reductions", function()
  local t = random({ 3, 5, 7 }, 11)
  local values = t:to_table()

  -- The reduction by dimension d of nested lists, with f over a list.
  local function reduce(d, f)
    local sizes, result = { 3, 5, 7 }, {}
    local size = table.remove(sizes, d)
    for i = 1, sizes[1] do
      result[i] = {}
      for j = 1, sizes[2] do
        local list = {}
        for k = 1, size do
          local at = { i, j }
          table.insert(at, d, k)
          list[k] = values[at[1]][at[2]][at[3]]
        end
        result[i][j] = f(list)
      end
    end
    return result
  end

  local function sum(list) local s = 0 for _, x in ipairs(list) do s = s + x end return s end
  local all = flat(t)
  local functions = {
    sum = sum,
    mean = function(l) return sum(l) / #l end,
    max = function(l) return math.max(table.unpack(l)) end,
    min = function(l) return math.min(table.unpack(l)) end,
  }

  for name, f in ms.sorted_pairs(functions) do
    it(name, function()
      near(f(all), t[name](t), 1e-5)
      for d = 1, 3 do
        near(reduce(d, f), t[name](t, d), 1e-5)
        near(reduce(d, f), t[name](t, d - 4), 1e-5)
        local shape = { 3, 5, 7 }
        shape[d] = 1
        assert.same(shape, t[name](t, d, true):shape())
      end
      assert.same({ 1, 1, 1 }, t[name](t, nil, true):shape())
    end)
  end

  it("norm", function()
    local function power(p)
      return function(l)
        local s = 0
        for _, x in ipairs(l) do s = s + math.abs(x) ^ p end
        return s ^ (1 / p)
      end
    end
    near(power(2)(all), t:norm(), 1e-5)
    near(power(1)(all), t:norm(1), 1e-5)
    near(power(3)(all), t:norm(3), 1e-5)
    near(math.max(-math.min(table.unpack(all)), math.max(table.unpack(all))), t:norm(math.huge))
    near(reduce(2, power(2)), t:norm(2, 2), 1e-5)
    assert.same({ 3, 1, 7 }, t:norm(2, 2, true):shape())
    fails(function() t:norm(0) end, "norm")
  end)

  it("argmax, from 0, the first of equals", function()
    assert.same({ 1, 0 }, ms.tensor({ { 1., 5, 5 }, { 2, 2, 2 } }):argmax(2):to_table())
    assert.equal(1, ms.tensor({ { 1., 5, 5 }, { 2, 2, 2 } }):argmax():item())
    assert.equal("i64", t:argmax(1):dtype())
    near(reduce(2, function(l)
      local best = 1
      for i = 2, #l do if l[i] > l[best] then best = i end end
      return best - 1
    end), t:argmax(2))
  end)

  it("cumsum, dot, quantile, histogram", function()
    near({ { 1, 2 }, { 4, 6 } }, ms.tensor({ { 1., 2 }, { 3, 4 } }):cumsum(1))
    near({ { 1, 3 }, { 3, 7 } }, ms.tensor({ { 1., 2 }, { 3, 4 } }):cumsum(2))
    near(32, ms.tensor({ 1., 2, 3 }):dot(ms.tensor { 4., 5, 6 }))
    for q, expected in pairs { [0] = 1, [0.25] = 1.75, [0.5] = 2.5, [1] = 4 } do
      near(expected, ms.tensor({ 4., 1, 3, 2 }):quantile(q))
    end
    local inf = math.huge
    assert.equal(inf, ms.tensor({ 1, inf, inf, inf }):quantile(0.6):item())
    assert.equal(-inf, ms.tensor({ -inf, 5. }):quantile(0.25):item())
    assert.equal(inf, ms.tensor({ 5., inf }):quantile(0.25):item())
    assert.same({ 2, 1, 2 }, ms.tensor({ 0., 0.5, 1, 2, 3 }):histogram(3, 0, 3):to_table())
    fails(function() t:quantile(2) end, "quantile")
    fails(function() ms.zeros({ 2 }):dot(ms.zeros { 3 }) end, "dot", "[2]", "[3]")
    fails(function() t:sum(4) end, "dimension 4 of a tensor with 3")
  end)
end)

describe("selection", function()
  it("topk takes the lower index of equals", function()
    local values, indices = ms.tensor({ { 1., 9, 9, 3 }, { 5, 4, 8, 8 } }):topk(3)
    near({ { 9, 9, 3 }, { 8, 8, 5 } }, values)
    assert.same({ { 1, 2, 3 }, { 2, 3, 0 } }, indices:to_table())
    values, indices = ms.tensor({ { 1., 9 }, { 5, 4 } }):topk(1, 1)
    near({ { 5, 9 } }, values)
    assert.same({ { 1, 0 } }, indices:to_table())
    fails(function() ms.zeros({ 3 }):topk(4) end, "k is 4")
  end)

  it("above lists what exceeds a threshold", function()
    local values, indices, count = ms.tensor({ 0.5, -3, 1, 2, -0.1 }):above(0.75, 4)
    near({ -3, 1, 2, 0 }, values)
    assert.same({ 1, 2, 3, 0 }, indices:to_table())
    assert.equal(3, count:item())
    values = ms.tensor({ 0.5, -3, 1 }):above(ms.tensor(2.0), 2)
    near({ -3, 0 }, values)
  end)

  it("gather, index_select, scatter, scatter_add", function()
    local t = ms.tensor { { 1., 2, 3 }, { 4, 5, 6 } }
    near({ { 3, 1 }, { 5, 5 } }, t:gather(2, ms.tensor { { 2, 0 }, { 1, 1 } }))
    near({ { 3, 1 }, { 6, 4 } }, t:index_select(2, ms.tensor { 2, 0 }))
    near({ { 4, 5, 6 }, { 4, 5, 6 }, { 1, 2, 3 } },
      t:index_select(1, ms.tensor({ 1, 1, 0 }, "i32")))
    near({ { 1, 9, 3 }, { 9, 5, 6 } }, t:scatter(2, ms.tensor { { 1 }, { 0 } }, 9))
    near({ { 1, 7, 3 }, { 8, 5, 6 } },
      t:clone():scatter_(2, ms.tensor { { 1 }, { 0 } }, ms.tensor { { 7. }, { 8 } }))
    near({ { 1, 2, 3 + 30 }, { 4 + 3, 5, 6 } },
      t:scatter_add(2, ms.tensor { { 2, 2 }, { 0, 0 } }, ms.tensor { { 10., 20 }, { 1, 2 } }))
    near({ 0, 6 }, ms.zeros({ 2 }):scatter_add_(1, ms.tensor { 1, 1, 1 }, ms.tensor { 1., 2, 3 }))
    -- Wrong values in a tensor are found when a task reads them. The next call that waits raises,
    -- with the line of the call that enqueued the task.
    local line = debug.getinfo(1, "l").currentline + 1
    local ok, message = pcall(function() return t:index_select(2, ms.tensor { 3 }):to_table() end)
    assert.is_false(ok)
    assert.truthy(message:find("index_select", 1, true) and message:find(":" .. line, 1, true),
      message)
  end)
end)

describe("linear algebra and layers", function()
  local function product(a, b, n, m, k)
    local result = {}
    for i = 1, n do
      result[i] = {}
      for j = 1, m do
        local s = 0
        for l = 1, k do s = s + a[i][l] * b[l][j] end
        result[i][j] = s
      end
    end
    return result
  end

  it("matmul, in two dimensions, batched, turned, with vectors", function()
    local a, b = random({ 5, 7 }, 1), random({ 7, 3 }, 2)
    near(product(a:to_table(), b:to_table(), 5, 3, 7), a:matmul(b), 1e-5)
    near(product(a:to_table(), b:to_table(), 5, 3, 7), a:t():contiguous():t():matmul(b), 1e-5)
    local x, y = random({ 2, 3, 4 }, 3), random({ 2, 4, 5 }, 4)
    for i = 1, 2 do
      near(product(x[i]:to_table(), y[i]:to_table(), 3, 5, 4), x:matmul(y)[i], 1e-5)
    end
    local shared = random({ 4, 5 }, 6)
    near(product(x[2]:to_table(), shared:to_table(), 3, 5, 4), x:matmul(shared)[2], 1e-5)
    fails(function() a:matmul(a) end, "matmul", "[5, 7] f32", "7", "5")
    fails(function() a:matmul(5) end)
  end)

  it("linear, with bias and fused gelu", function()
    local x, w, bias = random({ 2, 3, 4 }, 1), random({ 5, 4 }, 2), random({ 5 }, 3)
    local plain = product(x[1]:to_table(), w:t():to_table(), 3, 5, 4)
    near(plain, x:linear(w)[1], 1e-5)
    near((x:linear(w) + bias):to_table(), x:linear(w, bias), 1e-5)
    near((x:linear(w) + bias):gelu():to_table(), x:linear(w, bias, "gelu"), 1e-5)
    fails(function() x:linear(w, bias, "relu") end, "activation", "relu")
    fails(function() x:linear(bias) end, "linear", "[2, 3, 4]", "[5]")
  end)

  it("softmax, log_softmax", function()
    local t = random({ 3, 17 }, 1, -5, 5)
    local p, q = t:softmax():to_table(), t:log_softmax():to_table()
    for i, row in ipairs(t:to_table()) do
      local sum = 0
      for _, x in ipairs(row) do sum = sum + math.exp(x) end
      for j, x in ipairs(row) do
        near(math.exp(x) / sum, p[i][j])
        near(x - math.log(sum), q[i][j], 1e-5)
      end
    end
    near({ 1, 1, 1 }, t:t():softmax(1):sum(1))
    near({ 0.5, 0.5 }, ms.tensor({ 1e30, 1e30 }):softmax())
  end)

  it("cross_entropy: mean, sum, none, ignore_index", function()
    local logits, target = random({ 4, 6 }, 1, -3, 3), { 0, 5, -100, 2 }
    local none, sum = {}, 0
    local log = logits:log_softmax():to_table()
    for i = 1, 4 do
      none[i] = target[i] == -100 and 0 or -log[i][target[i] + 1]
      sum = sum + none[i]
    end
    local t = ms.tensor(target)
    near(sum / 3, logits:cross_entropy(t), 1e-5)
    near(sum, logits:cross_entropy(t, { reduction = "sum" }), 1e-5)
    near(none, logits:cross_entropy(t, { reduction = "none" }), 1e-5)
    near((sum - none[2]) / 2, logits:cross_entropy(ms.tensor { 0, 9, 9, 2 }, { ignore_index = 9 }),
      1e-5)
    near(sum / 3, logits:view(2, 2, 6):cross_entropy(t:view(2, 2)), 1e-5)
    fails(function() logits:cross_entropy(t, { reductoin = "sum" }) end, "'reduction'")
    fails(function() logits:cross_entropy(t, { reduction = "total" }) end, "'total'")
    fails(function() logits:cross_entropy(ms.tensor { 1, 2 }) end, "cross_entropy", "[4, 6]", "[2]")
  end)

  it("mse_loss, layer_norm, rms_norm, swiglu", function()
    local x, y = random({ 3, 8 }, 1), random({ 3, 8 }, 2)
    near(((x - y) * (x - y)):mean():item(), x:mse_loss(y))
    local w, b = random({ 8 }, 3), random({ 8 }, 4)
    local rows, weight, bias = x:to_table(), w:to_table(), b:to_table()
    local normed, rms = x:layer_norm(w, b):to_table(), x:rms_norm(w, 1e-3):to_table()
    for i, row in ipairs(rows) do
      local mean, square, var = 0, 0, 0
      for _, v in ipairs(row) do mean, square = mean + v / 8, square + v * v / 8 end
      for _, v in ipairs(row) do var = var + (v - mean) ^ 2 / 8 end
      for j, v in ipairs(row) do
        near((v - mean) / math.sqrt(var + 1e-5) * weight[j] + bias[j], normed[i][j], 1e-5)
        near(v / math.sqrt(square + 1e-3) * weight[j], rms[i][j], 1e-5)
      end
    end
    near((x:silu() * y):to_table(), y:swiglu(x))
    local sum, of_sum = x:add_layer_norm(y, w, b)
    near((x + y):to_table(), sum)
    near((x + y):layer_norm(w, b):to_table(), of_sum, 1e-5)
    sum, of_sum = x:add_rms_norm(y, w)
    near((x + y):to_table(), sum)
    near((x + y):rms_norm(w):to_table(), of_sum, 1e-5)
    fails(function() x:layer_norm(ms.zeros { 7 }) end, "layer_norm", "[3, 8]", "[7]")
  end)

  it("embedding, with every kind of index", function()
    local w = random({ 5, 3 }, 1)
    for _, dtype in ipairs { "i64", "i32", "u16" } do
      local out = ms.tensor({ { 4, 0 }, { 4, 2 } }, dtype):embedding(w)
      assert.same({ 2, 2, 3 }, out:shape())
      near(w[5]:to_table(), out[2][1])
      near(w[1]:to_table(), out[1][2])
    end
    fails(function() ms.zeros({ 2 }):embedding(w) end, "embedding", "f32")
  end)

  it("rotary turns pairs by their position", function()
    local x = random({ 2, 3, 5, 8 }, 1)
    local out, values = x:rotary(2, 100):to_table(), x:to_table()
    for b = 1, 2 do for h = 1, 3 do for t = 1, 5 do for j = 1, 4 do
      local angle = (t - 1 + 2) * 100 ^ (-2 * (j - 1) / 8)
      local u, v = values[b][h][t][j], values[b][h][t][j + 4]
      near(u * math.cos(angle) - v * math.sin(angle), out[b][h][t][j], 1e-5)
      near(v * math.cos(angle) + u * math.sin(angle), out[b][h][t][j + 4], 1e-5)
    end end end end
    fails(function() ms.zeros({ 1, 1, 2, 3 }):rotary() end, "rotary")
  end)

  it("attention: causal, not causal, grouped, scaled", function()
    local q, k, v = random({ 1, 4, 6, 8 }, 1), random({ 1, 2, 6, 8 }, 2), random({ 1, 2, 6, 8 }, 3)
    local function plain(causal, scale)
      local result = {}
      for h = 1, 4 do
        local own = (h + 1) // 2
        local scores = q[1][h]:matmul(k[1][own]:t()) * scale
        if causal then scores = scores + ms.tensor((function()
          local mask = {}
          for i = 1, 6 do mask[i] = {} for j = 1, 6 do mask[i][j] = j > i and -1e30 or 0.0 end end
          return mask
        end)(), "f32") end
        result[h] = scores:softmax():matmul(v[1][own]):to_table()
      end
      return result
    end
    near(plain(true, 1 / math.sqrt(8)), q:attention(k, v)[1], 1e-5)
    near(plain(false, 1 / math.sqrt(8)), q:attention(k, v, { causal = false })[1], 1e-5)
    near(plain(true, 0.3), q:attention(k, v, { scale = 0.3 })[1], 1e-5)
    fails(function() q:attention(k, v, { casual = true }) end, "'casual'", "'causal'")
    fails(function() q:attention(random({ 1, 3, 6, 8 }, 1), random({ 1, 3, 6, 8 }, 1)) end,
      "attention", "4", "3")
  end)

  -- Sums of other lengths differ in their rounding, hence the tolerance.
  it("attention of packed documents is that of each document alone", function()
    local lengths, time = { 3, 70, 1, 26 }, 100
    local inputs, positions, first = {}, {}, 1
    for i, heads in ipairs { 4, 2, 2 } do inputs[i] = random({ 1, heads, time, 8 }, i) end
    for _, length in ipairs(lengths) do
      for i = 0, length - 1 do positions[#positions + 1] = i end
    end
    local q, k, v = table.unpack(inputs)
    for _, x in ipairs(inputs) do x:requires_grad_() end
    local options = { positions = ms.tensor({ positions }, "i64") }
    local packed = q:attention(k, v, options)
    packed:square():sum():backward()
    for _, length in ipairs(lengths) do
      local own = {}
      for i, x in ipairs(inputs) do
        own[i] = x:detach():narrow(3, first, length):clone():requires_grad_()
      end
      local alone = own[1]:attention(own[2], own[3])
      alone:square():sum():backward()
      near(alone:to_table(), packed:narrow(3, first, length), 1e-6)
      for i, x in ipairs(inputs) do
        near(own[i]:grad():to_table(), x:grad():narrow(3, first, length), 1e-5)
      end
      first = first + length
    end
    fails(function() q:attention(k, v, { positions = positions }) end, "positions", "i64", "table")
    fails(function() q:attention(k, v, { positions = options.positions:to "i32" }) end,
      "positions must be i64 [batch, time], here [1, 100]")
    fails(function() q:attention(k, v, { positions = options.positions, causal = false }) end,
      "positions are of causal attention")
    fails(function()
      q:narrow(3, 100, 1):attention(k, v, { positions = options.positions:narrow(2, 100, 1) })
    end, "as many keys as queries")
    fails(function()
      q:attention(k, v, { positions = options.positions + 1 })
      ms.synchronize()
    end, "the position of query 0 of row 0 is 1", "within 0 .. 0")
    fails(function()
      q:attention(k, v, { positions = options.positions - 1, offset = 0 })
      ms.synchronize()
    end, "the position of query 0 of row 0 is -1", "cannot be below 0")
  end)

  it("attention over parts of the keys, joined by their lse, is that over all", function()
    local function leaf(seed)
      return ms.randn({ 2, 4, 9, 8, seed = seed }):requires_grad_()
    end
    for _, causal in ipairs { true, false } do
      local whole, parts = { leaf(1), leaf(2), leaf(3) }, { leaf(1), leaf(2), leaf(3) }
      local up = ms.randn { 2, 4, 9, 8, seed = 4 }
      local expected, all = whole[1]:attention(whole[2], whole[3], { causal = causal, lse = true })
      expected:mul(up):sum():add(all:square():sum()):backward()

      -- Keys 0 .. 3, and 4 .. 8, of which the first queries see none.
      local outs, sums = {}, {}
      for i, cut in ipairs { { 0, 4 }, { 4, 5 } } do
        outs[i], sums[i] = parts[1]:attention(parts[2]:narrow(3, cut[1] + 1, cut[2]),
          parts[3]:narrow(3, cut[1] + 1, cut[2]),
          { causal = causal, offset = causal and -cut[1] or nil, lse = true })
      end
      if causal then
        assert.equal(-math.huge, sums[2]:max():item() and sums[2]:narrow(3, 1, 4):max():item())
        assert.equal(0, outs[2]:narrow(3, 1, 4):abs():max():item())
      end
      local top = sums[1]:detach():maximum(sums[2]:detach())
      local sum = ((sums[1] - top):exp() + (sums[2] - top):exp()):log() + top
      local joined = outs[1] * (sums[1] - sum):exp():unsqueeze(4)
        + outs[2] * (sums[2] - sum):exp():unsqueeze(4)
      near(expected, joined, 1e-5)
      near(all, sum, 1e-5)
      joined:mul(up):sum():add(sum:square():sum()):backward()
      for i = 1, 3 do near(whole[i]:grad(), parts[i]:grad(), 1e-4) end
    end
  end)

  it("attention's lse alone has a gradient", function()
    local q = ms.randn({ 1, 1, 3, 4, seed = 1 }):requires_grad_()
    local k = ms.randn { 1, 1, 5, 4, seed = 2 }
    local _, lse = q:attention(k, k, { causal = false, lse = true })
    lse:sum():backward()
    local own = q:detach():clone():requires_grad_()
    local scores = own:matmul(k:t()) / 2
    scores:exp():sum(4):log():sum():backward()
    near(own:grad(), q:grad(), 1e-5)
    fails(function() q:attention(k, k, { causal = false, offset = 1 }) end, "offset is of causal")
    fails(function() q:attention(k, k, { lse = 1 }) end, "lse must be a boolean")
  end)
end)

describe("the surface", function()
  -- Every method of ms.Tensor, and in-place forms where listed.
  local names = [[shape size dim numel dtype device is_contiguous item to_table show keep clone
    contiguous to empty_like zeros_like ones_like copy_ fill_ zero_ view reshape flatten narrow
    select split chunk transpose t permute squeeze unsqueeze expand pad_to is_finite eq ne lt le gt
    ge any all sum mean max min norm argmax cumsum dot quantile histogram topk above gather
    var prod sort one_hot tril triu
    index_select matmul linear softmax log_softmax cross_entropy mse_loss layer_norm rms_norm swiglu
    embedding rotary attention conv2d max_pool2d avg_pool2d
    requires_grad requires_grad_ detach grad set_grad backward on_grad
    name full_shape on_grad_ready]]
  local twins = [[add sub mul div pow neg exp log sqrt rsqrt square abs sign clamp maximum minimum
    lerp addcmul addcdiv relu gelu silu tanh sigmoid sin cos floor ceil round dropout
    masked_fill scatter scatter_add]]

  it("has every method", function()
    local t, missing = ms.nn.Parameter(ms.zeros { 2 }), {}
    for name in names:gmatch "%S+" do
      if type(t[name]) ~= "function" then missing[#missing + 1] = name end
    end
    for name in twins:gmatch "%S+" do
      if type(t[name]) ~= "function" then missing[#missing + 1] = name end
      if type(t[name .. "_"]) ~= "function" then missing[#missing + 1] = name .. "_" end
    end
    assert.same({}, missing)
  end)

  it("has every function of one rank", function()
    local missing = {}
    for name in ([[init memory reset_peak synchronize info rank world_size step steps seed config
      log warn sorted_pairs tensor empty zeros ones full arange rand randn randint cat stack where
      pack device no_grad autocast recompute stream all metric report train]]):gmatch "%S+" do
      if type(ms[name]) ~= "function" then missing[#missing + 1] = name end
    end
    for name in ("nn optim data checkpoint safetensors trace"):gmatch "%S+" do
      if type(ms[name]) ~= "table" then missing[#missing + 1] = name end
    end
    assert.same({}, missing)
    assert.equal("string", type(ms.version))
  end)

  it("is the same by require", function()
    assert.equal(ms.nn, require "moonshard.nn")
    assert.equal(ms, require "moonshard")
  end)
end)
