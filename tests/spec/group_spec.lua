-- Process groups as scripts see them, of one rank: values, arguments, errors, gradients.
local ms = require "moonshard"
local support = require "support"
local near, fails = support.near, support.fails

local world = ms.world()

describe("the world of one rank", function()
  it("is always there", function()
    assert.equal(0, ms.rank())
    assert.equal(1, ms.world_size())
    assert.same({ 0, 1, "world" }, { world:rank(), world:size(), world:name() })
    assert.is_true(world == ms.world())
    assert.is_false(world == world:channel(2))
    fails(function() world:channel(3) end, "channel")
  end)

  it("gives each collective's result of one rank", function()
    local t = ms.tensor { { 1., 2 }, { 3, 4 } }
    local want = t:to_table()
    for _, f in ipairs {
      function() return world:all_reduce(t) end,
      function() return world:all_reduce(t, "avg") end,
      function() return world:reduce(t, 0, "max") end,
      function() return world:reduce_scatter(t) end,
      function() return world:reduce_scatter(t, "sum", { 2 }) end,
      function() return world:all_gather(t) end,
      function() return world:all_gather(t, { 2 }) end,
      function() return world:all_to_all(t) end,
      function() return world:all_to_all(t, { 2 }, { 2 }) end,
      function() return world:broadcast(t, 0) end,
      function() return world:gather(t, 0) end,
      function() return world:scatter(t, 0) end,
      function() return world:scatter(t, 0, { 2 }) end,
    } do
      near(want, f():value(), 0)
    end
    near({ { 0.5, 1 }, { 1.5, 2 } }, world:all_reduce(t, { premul_sum = 0.5 }):value(), 0)
    near({ { 0.5, 1 }, { 1.5, 2 } }, t, 0)
  end)

  it("works on tensors that are not contiguous", function()
    local whole = ms.tensor { { 1., 2 }, { 3, 4 } }
    world:all_reduce(whole:t(), { premul_sum = 2 })
    near({ { 2, 4 }, { 6, 8 } }, whole, 0)
    near({ { 2, 6 }, { 4, 8 } }, world:all_gather(whole:t()):value(), 0)
  end)

  it("takes tensors that lie where its collectives reach them", function()
    local t = ms.ones { 3, 5, dtype = "bf16", group = world }
    near(ms.ones({ 3, 5 }):to_table(), world:all_reduce(t):value():to "f32", 0)
    fails(function() ms.ones { 3, group = 1 } end, "ms.Group")
  end)

  it("splits into itself", function()
    local part = world:split { { 0 } }
    assert.same({ 0, 1 }, { part:rank(), part:size() })
    local within, across = world:levels()
    assert.same({ 1, 1 }, { within:size(), across:size() })
    world:barrier()
  end)

  it("says what does not fit", function()
    local t = ms.ones { 2, 2 }
    fails(function() world:all_reduce(1) end, "all_reduce: a tensor is expected, not number")
    fails(function() world:all_reduce(t, "mix") end, "unknown op 'mix'")
    fails(function() world:all_reduce(t, "premul_sum") end, "{ premul_sum = 0.5 }")
    fails(function() world:all_reduce(t, { premulsum = 1 }) end, "premul_sum")
    fails(function() world:all_reduce(ms.ones { 2, dtype = "i32" }, "avg") end, "avg")
    fails(function() world:reduce(t) end, "which rank is the root")
    fails(function() world:broadcast(t, 1) end, "rank")
    fails(function() world:reduce_scatter(ms.ones {}) end, "dimension 1")
    fails(function() world:reduce_scatter(t, "sum", { 1 }) end,
      "add up to 1 rows, the tensor has 2")
    fails(function() world:all_gather(t, { 1, 1 }) end, "list of 1 numbers")
    fails(function() world:all_gather(t, { 1 }) end,
      "counts say 1 rows for rank 0, its tensor has 2")
    fails(function() world:all_to_all(t, { 2 }) end, "both, send and receive")
    fails(function() world:split { { 0, 0 } } end, "split")
    fails(function() world:split { {} } end, "part 1 is empty")
    fails(function() world:levels(2) end, "do not divide into blocks of 2")
    fails(function() world:barrier(0) end, "timeout_ms")
    local x = ms.ones({ 2 }):requires_grad_()
    x:on_grad(function() world:barrier() end)
    fails(function() (x * 1):sum():backward() end, "barrier cannot be used inside a hook")
  end)

  it("has gradients", function()
    local x = ms.tensor({ 1., 2, 3, 4 }):requires_grad_()
    local weights = ms.tensor { 1., 10, 100, 1000 }
    for _, f in ipairs {
      function(t) return world:all_reduce(t) end,
      function(t) return world:all_reduce(t, "avg") end,
      function(t) return world:broadcast(t, 0) end,
      function(t) return world:all_gather(t) end,
      function(t) return world:reduce_scatter(t, "avg") end,
      function(t) return world:all_to_all(t, { 4 }, { 4 }) end,
    } do
      local y = x * 2
      local z = f(y):value()
      assert.is_true(z:requires_grad())
      near({ 2, 4, 6, 8 }, y, 0)
      ;(z * weights):sum():backward()
      near({ 2, 20, 200, 2000 }, x:grad(), 0)
      x:set_grad(nil)
    end
    ;(world:all_reduce(x * 2, { premul_sum = 3 }):value() * weights):sum():backward()
    near({ 6, 60, 600, 6000 }, x:grad(), 0)
    fails(function() world:all_reduce(x * 2, "max") end, "all_reduce with op max has no gradient")
    fails(function() world:gather(x * 2, 0) end, "gather has no gradient")
    ms.no_grad(function() assert.is_false(world:all_reduce(x, "max"):value() ~= x) end)
  end)
end)
