-- ms.custom: functions whose backward is Lua.
local core = require "moonshard.core"
local ms = require "moonshard"
local support = require "support"
local fails, flat, near = support.fails, support.flat, support.near

local function leaf(...)
  local shape = { ... }
  shape.seed, shape.requires_grad = 5, true
  return ms.randn(shape)
end

-- The gradients of leaves after the backward of f(leaves...), weighed so that elements differ.
local function gradients(f, ...)
  local leaves = { ... }
  for _, x in ipairs(leaves) do x:set_grad(nil) end
  local y = f(...)
  y:mul(ms.arange(1, y:numel()):to "f32":view(table.unpack(y:shape()))):sum():backward()
  local found = {}
  for i, x in ipairs(leaves) do
    found[i] = x:grad() and flat(x:grad())
    x:set_grad(nil)
  end
  return found
end

local cube = ms.custom {
  forward = function(x) return x * x * x, { x } end,
  backward = function(d, saved) return d * (saved[1] * saved[1] * 3) end,
}

local product = ms.custom {
  forward = function(x, w) return x:matmul(w), { x = x, w = w } end,
  backward = function(d, saved)
    return d:matmul(saved.w:t()), saved.x:t():matmul(d)
  end,
}

local same = ms.custom {
  forward = function(x) return x end, backward = function(d) return d end,
}

describe("a custom function", function()
  it("has the gradient that its backward computes", function()
    local x = leaf(3, 2)
    local values = flat(x)
    local got = gradients(cube, x)[1]
    for i, v in ipairs(values) do near(3 * v * v * i, got[i]) end
    -- Straight through a rounding, and a clamp whose gradient is 0 outside.
    local rounded = ms.custom {
      forward = function(t) return t:round() end, backward = function(d) return d end,
    }
    assert.same({ 1, 2, 3, 4, 5, 6 }, gradients(rounded, x)[1])
    assert.same(flat(x:detach():round()), flat(rounded(x)))
    local clamped = ms.custom {
      forward = function(t) return t:clamp(-0.5, 0.5), { t } end,
      backward = function(d, saved)
        return d:masked_fill(saved[1]:clamp(-0.5, 0.5):ne(saved[1]), 0)
      end,
    }
    assert.same(gradients(function(t) return t:clamp(-0.5, 0.5) end, x), gradients(clamped, x))
  end)

  it("has the bits of the tape where the operators are the same", function()
    local x, w = leaf(4, 3), leaf(3, 5)
    assert.same(gradients(function(a, b) return a:matmul(b) end, x, w), gradients(product, x, w))
    local function chain(f) return function(a, b) return f(f(a, b):tanh(), b:t():matmul(b)) end end
    local function plain(a, b) return a:matmul(b) end
    local square = leaf(3, 3)
    assert.same(gradients(chain(plain), x, square), gradients(chain(product), x, square))
  end)

  it("agrees with finite differences", function()
    local x = leaf(4)
    local values, got = flat(x), gradients(function(t) return cube(t * 2) end, x)[1]
    for i, v in ipairs(values) do
      local h = 1e-3
      local function f(at) return i * (2 * at) ^ 3 end
      near((f(v + h) - f(v - h)) / (2 * h), got[i], 1e-4)
    end
  end)

  it("takes values that are no tensors, and gives several outputs", function()
    local scaled = ms.custom {
      forward = function(a, by, name, b, nothing)
        assert(name == "name" and nothing == nil)
        return a * by, b + by, { by = by, note = { "kept", a } }
      end,
      backward = function(da, db, saved)
        assert(saved.note[1] == "kept" and saved.note[2]:numel() == 2)
        return da * saved.by, db
      end,
    }
    local a, b = leaf(2), leaf(2)
    local got = gradients(function(x, y)
      local one, two = scaled(x, 3, "name", y, nil)
      return one + two
    end, a, b)
    assert.same({ { 3, 6 }, { 1, 2 } }, got)
  end)

  it("gets zeros for an output that no gradient reached", function()
    local seen
    local two = ms.custom {
      forward = function(x) return x * 1, x:view(1, 2) end,
      backward = function(a, b)
        seen = { a:clone():keep(), b:clone():keep(), b:shape() }
        return a + b:view(2)
      end,
    }
    local x = leaf(2)
    assert.same({ { 1, 2 } }, gradients(function(t) return (two(t)) end, x))
    assert.same({ { 1, 2 }, { 0, 0 }, { 1, 2 } }, { flat(seen[1]), flat(seen[2]), seen[3] })
    assert.same({ { 1, 2 } }, gradients(function(t) return (select(2, two(t))) end, x))
    assert.same({ { 0, 0 }, { 1, 2 }, { 1, 2 } }, { flat(seen[1]), flat(seen[2]), seen[3] })
  end)

  it("gets nothing for an output of integers, and gives none to such inputs", function()
    local seen
    local picked = ms.custom {
      forward = function(x, index)
        return x:index_select(1, index), index + 1, { index, x:size(1) }
      end,
      backward = function(d, none, saved)
        seen = none
        return ms.zeros({ saved[2] }):scatter_add(1, saved[1], d), nil
      end,
    }
    local x, index = leaf(3), ms.tensor({ 2, 0 }, "i64")
    local values, more = picked(x, index)
    assert.is_false(more:requires_grad())
    assert.same({ 3, 1 }, more:to_table())
    values:mul(ms.tensor { 5.0, 7.0 }):sum():backward()
    assert.same({ 7, 0, 5 }, flat(x:grad()))
    assert.is_nil(seen)
  end)

  it("just runs where no gradient is asked for", function()
    local runs = 0
    local counted = ms.custom {
      forward = function(x)
        runs = runs + 1
        return x * 2, { x }
      end,
      backward = function() error "not called" end,
    }
    assert.is_false(counted(ms.ones { 2 }):requires_grad())
    assert.is_false(ms.no_grad(function() return counted(leaf(2)) end):requires_grad())
    assert.is_true(counted(leaf(2)):requires_grad())
    assert.equal(3, runs)
    local x, fixed = leaf(2), ms.ones { 2 }
    local mul = ms.custom {
      forward = function(a, b) return a * b, { a, b } end,
      backward = function(d, saved) return d * saved[2], d * saved[1] end,
    }
    assert.same({ { 1, 2 } }, gradients(function(t) return mul(t, fixed) end, x))
    assert.is_nil(fixed:grad())
  end)

  it("may return what it got", function()
    local x = leaf(2)
    local y = same(x)
    assert.not_equal(x, y)
    assert.is_true(x:requires_grad() and x:grad() == nil)
    assert.same(flat(x), flat(y))
    assert.same({ { 1, 2 } }, gradients(same, x))
    assert.same({ { 2, 4 } }, gradients(function(t) return same(t) + same(t) end, x))
    assert.same({ { 3, 6 } }, gradients(function(t) return same(same(t) * 3) end, x))
    local twice = ms.custom {
      forward = function(t) return t, t:view(-1) end, backward = function(a, b) return a + b end,
    }
    assert.same({ { 2, 4 } }, gradients(function(t)
      local a, b = twice(t)
      return a + b
    end, x))
    fails(function() same(x):mul_(2) end, "use the form without _")
  end)

  it("runs without a record and outside of autocast in backward", function()
    local seen
    local watched = ms.custom {
      forward = function(x, w)
        seen = { core.is_recording() }
        return x:matmul(w), { x, w }
      end,
      backward = function(d, saved)
        seen[2], seen[3] = core.is_recording(), d:dtype()
        local product_of = saved[1]:matmul(saved[2])
        seen[4], seen[5] = product_of:dtype(), product_of:requires_grad()
        d = d:to "f32"
        return d:matmul(saved[2]:t()), saved[1]:t():matmul(d)
      end,
    }
    local x, w = leaf(2, 2), leaf(2, 2)
    ms.autocast("bf16", function()
      local y = watched(x, w)
      assert.equal("bf16", y:dtype())
      y:sum():backward()
    end)
    assert.same({ false, false, "bf16", "f32", false }, seen)
    assert.equal("f32", w:grad():dtype())
  end)

  it("gets gradients that it may write", function()
    local doubled = ms.custom {
      forward = function(x) return x end, backward = function(d) return d:mul_(2) end,
    }
    local a, b = leaf(2), leaf(2)
    for _, f in ipairs {
      function(x, y) return doubled(x) + same(y) end,
      function(x, y) return same(y) + doubled(x) end,
    } do
      assert.same({ { 2, 4 }, { 1, 2 } }, gradients(f, a, b))
    end
    local total = doubled(a):sum()
    total:backward()
    assert.same({ 2, 2 }, flat(a:grad()))
  end)

  it("may write an input in place, as an operator in place may", function()
    local shifted = ms.custom {
      forward = function(x) return x:add_(1) end, backward = function(d) return d end,
    }
    local x = leaf(2)
    assert.same({ { 2, 4 } }, gradients(function(t) return shifted(t * 2) end, x))
    local y = x * 2
    shifted(y)
    fails(function() return y * 2 end, "was written in place after this was made")
    local kept = x:exp()
    local z = shifted(kept)
    fails(function() z:sum():backward() end, "saved a tensor", "written in place since")
    fails(function() shifted(x) end, "custom: forward has written input 1 in place",
      "a leaf that requires a gradient", "clone it first")
    fails(function() shifted((x * 2):view(1, 2)) end, "a view of a tensor")
    ms.no_grad(function() shifted(x) end)
    assert.same({ 2, 2 }, flat(shifted(ms.ones { 2 })))
  end)
end)

describe("what a custom function saves", function()
  it("is checked for writes in place", function()
    local x, w = leaf(2, 2), leaf(2, 2)
    local y = product(x * 1, w)
    ms.no_grad(function() w:add_(1) end)
    fails(function() y:sum():backward() end, "custom (at", "custom_spec.lua", "[2, 2] f32",
      "was written in place since", "by add")
    assert.is_nil(x:grad())
    local h = x * 1
    y = product(h, w)
    ms.no_grad(function() h:add_(1) end)
    fails(function() y:sum():backward() end, "custom (at", "was written in place since")
    -- What forward wrote before it returned is what backward reads.
    local own = ms.custom {
      forward = function(t)
        local e = t * 2
        e:exp_()
        return e, { e }
      end,
      backward = function(d, saved) return d * saved[1] * 2 end,
    }
    local scalar = ms.tensor { 0.5 }:requires_grad_()
    near({ 2 * math.exp(1) }, gradients(own, scalar)[1])
  end)

  it("goes with the graph, or stays with retain_graph", function()
    local x = leaf(2)
    local y = cube(x)
    local loss = y:sum()
    loss:backward { retain_graph = true }
    local first = flat(x:grad())
    x:set_grad(nil)
    loss:backward()
    assert.same(first, flat(x:grad()))
    fails(function() loss:backward() end, "was freed by the backward at", "retain_graph")
    fails(function() y:sum():backward() end, "the graph of custom (made at", "was freed")
  end)

  it("may be tables in tables, but no circle", function()
    local x, seen = leaf(2), nil
    local deep = ms.custom {
      forward = function(t)
        return t * 1, { list = { { t, 5 }, "text" }, [7] = t, state = { f = print }, yes = false }
      end,
      backward = function(d, saved)
        seen = saved
        return d * (saved.list[1][1] / saved[7])
      end,
    }
    assert.same({ { 1, 2 } }, gradients(deep, x))
    assert.same({ 5, "text", print, false },
      { seen.list[1][2], seen.list[2], seen.state.f, seen.yes })
    fails(function() return seen[7] + 1 end, "valid only inside a backward function of ms.custom")
    local circle = {}
    circle.own = circle
    local around = ms.custom { forward = function(t) return t * 1, circle end, backward = same }
    fails(function() around(x) end, "nested more than", "refers to itself")
    local kept = { x }
    local keeps = ms.custom {
      forward = function(t) return t * 1, kept end, backward = function(d) return d end,
    }
    keeps(x):sum():backward()
    assert.equal(x, kept[1])
  end)
end)

describe("a custom function with others", function()
  local x, w = leaf(3, 3), leaf(3, 3)
  local function net(f) return function(a, b) return f(f(a, b):relu(), b) end end
  local plain = gradients(net(function(a, b) return a:matmul(b) end), x, w)

  it("is recomputed", function()
    assert.same(plain, gradients(function(a, b)
      return ms.recompute(net(product), a, b)
    end, x, w))
    assert.same(plain, gradients(function(a, b)
      return ms.recompute(function(t) return net(product)(t, b) end, a)
    end, x, w))
    local h = w * 1
    local y = ms.recompute(function(t) return product(t, h) end, x)
    ms.no_grad(function() h:add_(1) end)
    fails(function() y:sum():backward() end, "was written in place since")
  end)

  it("has hooks", function()
    local got
    local y = product(x, w)
    y:on_grad(function(d)
      got = d:clone():keep()
      return d * 2
    end)
    y:sum():backward()
    assert.equal(1, flat(got)[1])
    near(flat(ms.full(2, { 3, 3 }):matmul(w:detach():t())), flat(x:grad()))
    x:set_grad(nil)
    w:set_grad(nil)
  end)

  it("runs on meta, and in the simulation", function()
    ms.device("meta", function()
      local a, b = ms.ones { 3, 2, requires_grad = true }, ms.ones { 2, 4, requires_grad = true }
      local y = product(a, b)
      assert.equal("meta", y:device())
      y:sum():backward()
      assert.equal("meta", a:grad():device())
      assert.same({ 2, 4 }, b:grad():shape())
      local two = ms.custom {
        forward = function(t) return t * 1, t * 2 end, backward = function(d, e) return d + e end,
      }
      two(a):sum():backward()
    end)
  end)

  it("trains in ddp and fsdp", function()
    local Layer = ms.nn.class "Layer"
    function Layer:init() self.weight = ms.nn.Parameter(ms.randn { 3, 3, seed = 2 }) end
    function Layer:forward(t) return product(t, self.weight) end
    local Plain = ms.nn.class "Plain"
    Plain.init = Layer.init
    function Plain:forward(t) return t:matmul(self.weight) end
    local found = {}
    for i, class in ipairs { Plain, Layer } do
      for j, wrap in ipairs { function(m) return m end, ms.ddp, ms.fsdp } do
        local model = wrap(ms.nn.Sequential(class(), ms.nn.ReLU(), class()))
        local optimizer = ms.optim.sgd(model, { lr = 0.1 })
        for _ = 1, 3 do
          optimizer:zero_grad()
          model(ms.ones { 2, 3 }):square():sum():backward()
          optimizer:step()
        end
        found[i] = found[i] or {}
        found[i][j] = flat(model(ms.ones { 2, 3 }))
      end
    end
    assert.same(found[1], found[2])
  end)

  it("calls collectives and other functions of its kind", function()
    local world = ms.world()
    local reduced = ms.custom {
      forward = function(t) return world:all_reduce(t:clone()):value(), { t } end,
      backward = function(d) return world:all_reduce(d):value() end,
    }
    assert.same({ { 1, 2, 3, 4, 5, 6, 7, 8, 9 } }, gradients(reduced, leaf(3, 3)))
    local outer = ms.custom {
      forward = function(t) return cube(t), { t } end,
      backward = function(d, saved) return d * saved[1]:square() * 3 end,
    }
    local t = leaf(3)
    near(gradients(cube, t)[1], gradients(outer, t)[1])
  end)
end)

describe("mistakes in a custom function", function()
  local x
  before_each(function() x = leaf(2) end)

  local function with(backward, ...)
    local f = ms.custom { forward = function(a, b) return a * (b or 1) end, backward = backward }
    return f(...):sum():backward()
  end

  it("are told with the line, and the position", function()
    fails(function() with(function() end, x) end, "custom (at", "custom_spec.lua:",
      "backward returned 0 values; it must return 1")
    fails(function() with(function(d) return d end, x, x) end, "returned 1 values",
      "it must return 2")
    fails(function() with(function(d) return d, d end, x) end, "returned 2 values",
      "it must return 1")
    fails(function() with(function(d) return d, 5 end, x, x) end,
      "value 2 that backward returned is a number; a gradient or nil is expected")
    fails(function() with(function() return ms.ones { 3 } end, x) end,
      "backward gave [3] f32 as the gradient of input 1, which is [2] f32")
    fails(function() with(function(d) return d, d:to "bf16" end, x, x) end,
      "backward gave [2] bf16 as the gradient of input 2, which is [2] f32")
    fails(function() with(function(d) return d, d:to "bf16" end, x, ms.ones { 2 }) end,
      "gradient of input 2")
    local gone
    with(function(d)
      gone = d
      return d
    end, x)
    fails(function() with(function() return gone end, x) end,
      "value 1 that backward returned is a tensor that is gone (the tensor made at",
      "valid only inside a backward function")
    local index = ms.tensor({ 1, 0 }, "i64")
    local picked = ms.custom {
      forward = function(a, i) return a:index_select(1, i) end,
      backward = function(d, saved)
        assert(saved == nil)
        return d, d
      end,
    }
    fails(function() picked(x, index):sum():backward() end, "input 2, which is of i64")
  end)

  it("of forward are told, too", function()
    local function of(f)
      return function()
        local y = ms.custom { forward = f, backward = function(d) return d end }(x)
        return y
      end
    end
    fails(of(function() end), "forward returned 0 tensors; 1 to 8")
    fails(of(function() return {} end), "forward returned 0 tensors")
    fails(of(function(t) return t, 5 end), "value 2 that forward returned is a number")
    fails(of(function(t) return { t }, t end), "value 1 that forward returned is a table")
    fails(of(function(t) return ms.world():all_reduce(t:clone()) end),
      "value 1 that forward returned is a table")
    fails(of(function(t) return t, t, t, t, t, t, t, t, t end), "returned 9 tensors")
    local gone
    for _ in ms.steps(1) do gone = ms.ones { 2 } end
    fails(of(function() return gone end), "is a tensor that is gone", "when its step ended")
    fails(of(function(t) return t * 1, { gone } end), "the tensor made at", "when its step ended")
    fails(function() same(gone) end, "when its step ended")
    fails(function() ms.custom { forward = same } end, "backward is missing")
    fails(function() ms.custom { backward = same } end, "forward is missing")
    fails(function() ms.custom() end, "forward is missing")
    fails(function() ms.custom { forward = 5, backward = same } end, "must be a function")
    fails(function() ms.custom { forward = same, backwards = same } end, "did you mean 'backward'")
  end)

  it("that would lose a gradient are refused", function()
    local w = leaf(2)
    local captured = ms.custom {
      forward = function(t) return t * w end, backward = function(d) return d * w:detach() end,
    }
    fails(function() captured(x) end, "forward used a tensor [2] f32 that requires a gradient",
      "pass it as an argument, or detach it")
    fails(function() captured(ms.ones { 2 }) end, "would get none")
    local given = ms.custom { forward = function() return w end, backward = same }
    fails(function() given(x) end, "is no argument")
    ms.no_grad(function() captured(x) end)
    local detached = ms.custom {
      forward = function(t) return t * w:detach() end,
      backward = function(d) return d * w:detach() end,
    }
    assert.same({ { 1 * flat(w)[1], 2 * flat(w)[2] } }, gradients(detached, x))
    -- An argument may be used by name, too.
    local by_name = ms.custom {
      forward = function() return x * 2 end, backward = function(d) return d * 2 end,
    }
    assert.same({ { 2, 4 } }, gradients(by_name, x))
  end)

  it("of Lua stay what they were, and the engine goes on", function()
    local object = {}
    local function broken(where)
      return ms.custom {
        forward = function(t)
          if where == "forward" then error(object) end
          return t * 1, { t }
        end,
        backward = function(d)
          if where == "backward" then error "broken here" end
          return d
        end,
      }
    end
    local ok, why = pcall(broken "forward", x)
    assert.is_false(ok)
    assert.equal(object, why)
    assert.is_true(core.is_recording())
    ok, why = pcall(function() broken("backward")(x):sum():backward() end)
    assert.is_false(ok)
    assert.truthy(why:find("custom_spec.lua:%d+: broken here"))
    assert.is_nil(x:grad())
    assert.same({ { 1, 2 } }, gradients(broken(nil), x))
  end)

  it("in backward are those of hooks", function()
    for what, f in pairs {
      item = function(d) return d:sum():item() end,
      backward = function() return leaf(1):sum():backward() end,
      on_grad = function() return x:on_grad(print) end,
      sync = function(d) return ms.world():all_reduce(d):sync() end,
    } do
      fails(function() with(function(d) f(d) return d end, x) end, "hook")
      assert.is_nil(x:grad(), what)
    end
    fails(function() with(function(d) return d end, x):backward { create_graph = true } end)
  end)
end)

describe("the memory of custom functions", function()
  local function live()
    core.collect()
    core.collect()
    return ms.memory().live
  end

  it("comes back after backward, errors, and without a backward", function()
    local x = leaf(1000)
    x:sum():backward()
    local before = live()
    for i = 1, 5 do
      local y = cube(x)
      if i > 1 then y:sum():backward() end
      pcall(function()
        ms.custom { forward = function(t) return t * 1, { t * 2 } end,
          backward = function() error "no" end }(x):sum():backward()
      end)
      pcall(ms.custom { forward = function(t) return t * 1, error(t * 2) end, backward = same }, x)
      y = nil -- luacheck: ignore y
    end
    assert.equal(before, live())
  end)

  it("of what backward has saved and made comes back with it", function()
    local x = leaf(1000)
    x:sum():backward()
    local during
    local big = ms.custom {
      forward = function(t) return t * 1, { t:expand(100, 1000):clone() } end,
      backward = function(d, saved)
        local twice = saved[1] * 2
        during = ms.memory().live
        return d * twice:select(1, 1)
      end,
    }
    local before = live()
    local loss = big(x):sum()
    assert.is_true(ms.memory().live - before >= 400000)
    loss:backward()
    assert.is_true(during - before >= 800000)
    assert.is_true(ms.memory().live - before < 50000)
  end)

  it("comes back where a function refers to the result, or to the model", function()
    local before = live()
    local function circle(drop_early)
      local x = ms.ones { 1000, requires_grad = true }
      local y
      local f = ms.custom {
        forward = function(t) return t * 2, { t } end,
        backward = function(d) return y and d * 2 or d end,
      }
      y = f(x)
      if drop_early then
        local z = y * 3
        y = nil
        core.collect()
        core.collect()
        z:sum():backward()
        assert.equal(3, x:grad():to_table()[1])
      end
    end
    for i = 1, 20 do circle(i % 2 == 0) end
    assert.equal(before, live())
    local Model = ms.nn.class "Model"
    function Model:init()
      self.weight = ms.nn.Parameter(ms.ones { 1000 })
      self.f = ms.custom {
        forward = function(t, w) return t * w, { t, w } end,
        backward = function(d, saved)
          self.calls = (self.calls or 0) + 1
          return d * saved[2], d * saved[1]
        end,
      }
    end
    function Model:forward(t)
      self.last = self.f(t, self.weight)
      return self.last
    end
    for i = 1, 20 do
      local model = Model()
      local y = model(ms.ones { 1000 })
      if i % 2 == 0 then y:sum():backward() end
      assert.equal(i % 2 == 0 and 1 or nil, model.calls)
    end
    assert.equal(before, live())
  end)

  local function graph(x)
    return ms.custom {
      forward = function(t) return t * 2, { t } end, backward = function(d) return d * 5 end,
    }(x) * 3
  end

  -- The handle of the result is garbage, and the graph is not.
  it("stays as long as a graph needs it", function()
    local x = ms.ones { 4, requires_grad = true }
    local old = collectgarbage "incremental"
    local heap = {}
    for i = 1, 200000 do heap[i] = {} end
    for i = 1, 10 do
      local z = graph(x)
      -- Lua empties tables of weak values in the middle of a collection, and calls finalizers
      -- later.
      local seen = setmetatable({ {} }, { __mode = "v" })
      collectgarbage "stop"
      while seen[1] do collectgarbage("step", 0) end
      for _ = 2, i do collectgarbage("step", 0) end
      z:sum():backward()
      collectgarbage "restart"
      assert.equal(15, x:grad():to_table()[1])
      x:set_grad(nil)
    end
    assert.equal(200000, #heap)
    collectgarbage "generational"
    for i = 1, 50 do
      local z = graph(x)
      for _ = 1, i % 7 do collectgarbage("step", 0) end
      z:sum():backward()
      assert.equal(15, x:grad():to_table()[1])
      x:set_grad(nil)
    end
    collectgarbage(old)
  end)
end)
