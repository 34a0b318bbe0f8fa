-- Gradients as scripts see them: backward, accumulation, hooks, scopes, recomputation, deep graphs,
-- and their errors.
local ms = require "moonshard"
local core = require "moonshard.core"
local support = require "support"
local near, fails = support.near, support.fails

local function leaf(values) return ms.tensor(values, "f32"):requires_grad_() end

-- The line of the caller, `offset` lines further.
local function line(offset)
  return (":%d"):format(debug.getinfo(2, "l").currentline + (offset or 0))
end

describe("backward", function()
  it("gives gradients of what requires them, and adds up", function()
    local x, y, z = leaf { 1, 2, 3 }, leaf { 4, 5, 6 }, ms.tensor { 7., 8, 9 }
    ;(x * y + x * z):sum():backward()
    near({ 11, 13, 15 }, x:grad())
    near({ 1, 2, 3 }, y:grad())
    assert.is_nil(z:grad())
    x:sum():backward()
    near({ 12, 14, 16 }, x:grad())
    x:set_grad(nil)
    assert.is_nil(x:grad())
    x:set_grad(ms.ones { 3 })
    x:sum():backward()
    near({ 2, 2, 2 }, x:grad())
    fails(function() x:set_grad(ms.ones { 2 }) end, "set_grad", "[2] f32", "[3] f32")
  end)

  it("takes a gradient for results of several elements", function()
    local x = leaf { 1, 2 }
    local y = x * x
    fails(function() y:backward() end, "[2] f32", "gradient")
    y:backward { gradient = ms.tensor { 10., 100 } }
    near({ 20, 400 }, x:grad())
    fails(function() (x * x):backward { gradient = ms.ones { 3 } } end, "[3] f32", "[2] f32")
    fails(function() (x * x):backward { gradeint = ms.ones { 2 } } end, "'gradeint'", "'gradient'")
    fails(function() ms.ones({}):backward() end, "no graph")
  end)

  it("sums a tensor's uses, and gradients of broadcasts and views", function()
    local x, b = leaf { { 1, 2 }, { 3, 4 } }, leaf { 10, 20 }
    local y = x + b
    ;(y * y[1]):sum():backward()
    -- d/dx of sum_ij y_ij y_1j: row 1 gets y_1j + sum_i y_ij, row 2 gets y_1j.
    near({ { 11 + 11 + 13, 22 + 22 + 24 }, { 11, 22 } }, x:grad())
    near({ 35 + 11, 68 + 22 }, b:grad())
  end)

  it("keeps the graph if asked, and names both lines if not", function()
    local x = leaf { 2 }
    local y = (x * x):sum()
    y:backward { retain_graph = true }
    local first = line(1)
    y:backward()
    near({ 8 }, x:grad())
    fails(function() y:backward() end, "freed", first, line(), "retain_graph")
  end)

  it("notices a saved tensor that was written in place, before anything runs", function()
    local x = leaf { 1, 2 }
    local y = x:exp()
    local z = (y * y):sum()
    y:mul_(2)
    fails(function() z:backward() end, "written in place", "mul")
    assert.is_nil(x:grad())
  end)

  it("notices a write while it runs, and names the node and the write", function()
    local x, w = leaf { 3 }, leaf { 10 }
    local y, saved = x * w:detach(), line()
    local z = (y * w):sum()
    local written = line()
    w:on_grad_ready(function() ms.no_grad(function() w:mul_(100) end) end)
    written = written:gsub("%d+", function(n) return tostring(n + 1) end)
    fails(function() z:backward() end, "backward: mul (at ", saved .. ") saved",
      "written in place since, by mul (at ", written .. ")")
    assert.is_nil(x:grad())
  end)

  it("notices that a recomputed function is to read a detached parameter that was \z
    written", function()
    local x, w = leaf { 3 }, leaf { 10 }
    local y = ms.recompute(function(t) return t * w:detach() end, x)
    local z = (y * w):sum()
    w:on_grad_ready(function() ms.no_grad(function() w:mul_(100) end) end)
    fails(function() z:backward() end, "recompute", "written in place since")
  end)

  it("goes through in-place operators", function()
    local x = leaf { 1, 2 }
    local y = x * 3
    y:add_(1)
    y:mul_(x)
    y:sum():backward()                        -- (3x + 1) x
    near({ 7, 13 }, x:grad())
    fails(function() x:add_(1) end, "leaf", "no_grad")
    ms.no_grad(function() x:add_(1) end)
    near({ 2, 3 }, x)
    fails(function() (x * 2)[1]:add_(1) end, "view")
  end)

  it("refuses a view made before a write that its history does not have", function()
    local x = leaf { 1, 2 }
    local y = x * 3
    local head = y[1]
    y:mul_(x)
    fails(function() head:sum() end, "sum", "written in place", "view")
    y[1]:sum():backward()                     -- 3x^2 of the first
    near({ 6, 0 }, x:grad())
    local rows = ms.zeros { 2, 2 }
    rows[1]:copy_(leaf { 5, 6 })
    fails(function() rows:sum() end, "written in place")
    near({ 5, 6, 0, 0 }, ms.no_grad(function() return rows:reshape(4) end))
    rows:zero_()
    near(0, rows:detach():sum())
  end)

  it("does not go through detach and no_grad", function()
    local x = leaf { 3 }
    assert.is_false(x:detach():requires_grad())
    assert.is_false(ms.no_grad(function() return x * 2 end):requires_grad())
    local y = x * x:detach()
    y:sum():backward()
    near({ 3 }, x:grad())
    -- Both share memory: a write to one shows in the other.
    x:detach():fill_(5)
    near({ 5 }, x)
    local a, b, c = ms.no_grad(function() return 1, nil, 3 end)
    assert.same({ 1, 3 }, { a, c })
    assert.is_nil(b)
  end)

  it("says that gradients of gradients are not supported", function()
    local x = leaf { 2 }
    ;(x * x * x):sum():backward()
    assert.is_false(x:grad():requires_grad())
    fails(function() (x:grad() * 2):sum():backward() end, "gradients of gradients")
    fails(function() (x * x):sum():backward { create_graph = true } end, "gradients of gradients")
    ;(x * x):sum():backward { create_graph = false }
  end)

  it("goes through a graph 20,000 deep, and frees it without one", function()
    local x = leaf { 1 }
    local y = x
    for _ = 1, 20000 do y = y + x end
    y:sum():backward()
    near({ 20001 }, x:grad())
    local z = x
    for _ = 1, 20000 do z = z * 1 end
    z = nil -- luacheck: ignore 311
    core.collect()
    near({ 20001 }, x:grad())
  end)

  it("repeats bit for bit", function()
    local function run()
      ms.seed(3)
      local x = ms.randn { 64, 64, requires_grad = true }
      local y = x:matmul(x):gelu()
      ;(y * x + y:softmax()):mean():backward()
      return core.bytes(x:grad())
    end
    local first = run()
    for _ = 1, 5 do assert.is_true(first == run()) end
  end)

  it("only float leaves can require a gradient", function()
    fails(function() ms.tensor({ 1 }):requires_grad_() end, "i64")
    local x = leaf { 1 }
    fails(function() (x * 2):requires_grad_(false) end, "leaf", "detach")
    assert.is_false(x:requires_grad_(false):requires_grad())
  end)
end)

describe("gradient hooks", function()
  it("see the whole gradient, in order of registration, and replace it", function()
    local x = leaf { 1, 2 }
    local y, seen = x * 2, {}
    y:on_grad(function(g) seen[#seen + 1] = tostring(g) return g * 10 end)
    y:on_grad(function(g) seen[#seen + 1] = "second" return g + 1 end)
    y:on_grad(function() seen[#seen + 1] = "third" end)
    ;(y + y):sum():backward()
    assert.same({ "tensor [2] f32", "second", "third" }, seen)
    near({ 42, 42 }, x:grad())                 -- ((1 + 1) * 10 + 1) * 2
  end)

  it("on a leaf come before its gradient is added up, on_grad_ready after that", function()
    local p, order = ms.nn.Parameter(ms.tensor { 1., 2 }), {}
    p:on_grad(function(g) order[#order + 1] = "grad" return g * 3 end)
    p:on_grad_ready(function(q)
      order[#order + 1] = "ready"
      assert.is_true(q == p)
      assert.truthy(q:grad())
    end)
    for _ = 1, 2 do (p * 1 + p):sum():backward() end
    assert.same({ "grad", "ready", "grad", "ready" }, order)
    near({ 12, 12 }, p:grad())
  end)

  it("can be removed, in any order and twice", function()
    local x, calls = leaf { 1 }, {}
    local removers = {}
    for i = 1, 3 do removers[i] = x:on_grad(function() calls[#calls + 1] = i end) end
    removers[2]()
    removers[2]()
    x:sum():backward()
    assert.same({ 1, 3 }, calls)
    removers[1]()
    removers[3]()
    x:sum():backward()
    assert.same({ 1, 3 }, calls)
    local remove = ms.nn.Parameter(ms.ones { 1 }):on_grad_ready(function() error "never" end)
    remove()
    -- One may remove itself while it runs.
    local once
    once = x:on_grad(function() calls[#calls + 1] = "once" once() end)
    x:sum():backward()
    x:sum():backward()
    assert.same({ 1, 3, "once" }, calls)
  end)

  it("frees the function of a removed hook", function()
    local x, weak = leaf { 1 }, setmetatable({}, { __mode = "v" })
    do
      local big = { "held by the hook" }
      weak[1] = big
      x:on_grad(function() return big and nil end)()
    end
    collectgarbage()
    collectgarbage()
    assert.is_nil(weak[1])
  end)

  it("keep their function as long as their tensor, and no longer", function()
    local weak = setmetatable({}, { __mode = "v" })
    local x = leaf { 1 }
    do
      local held = { x }                         -- refers back to the tensor: a cycle
      weak[1] = held
      x:on_grad(function() held.called = true end)
    end
    collectgarbage()
    x:sum():backward()
    assert.is_true(weak[1].called)
    x = nil -- luacheck: ignore 311
    collectgarbage()
    collectgarbage()
    assert.is_nil(weak[1])
  end)

  it("raise what they raise, as it was", function()
    local x = leaf { 1 }
    local remove = x:on_grad(function() error "boom in the hook" end)
    local at = line(-1)
    fails(function() x:sum():backward() end, "boom in the hook", at)
    remove()
    remove = x:on_grad(function() error("exactly this", 0) end)
    local ok, failure = pcall(function() x:sum():backward() end)
    assert.same({ false, "exactly this" }, { ok, failure })
    remove()
    local object = setmetatable({ 42 }, { __tostring = function() return "an object" end })
    remove = x:on_grad(function() error(object) end)
    ok, failure = pcall(function() x:sum():backward() end)
    assert.is_false(ok)
    assert.is_true(rawequal(object, failure))
    remove()
    remove = x:on_grad(function() error(nil) end)
    assert.is_false((pcall(function() x:sum():backward() end)))
    remove()
    -- The engine goes on.
    x:set_grad(nil)
    x:sum():backward()
    near({ 1 }, x:grad())
  end)

  it("must return a gradient of the same shape, or nothing", function()
    local x = leaf { 1, 2 }
    local remove = x:on_grad(function() return ms.ones { 3 } end)
    fails(function() x:sum():backward() end, "[3] f32", "[2] f32")
    remove()
    remove = x:on_grad(function() return 5 end)
    fails(function() x:sum():backward() end, "returned a number")
    remove()
    fails(function() (ms.ones { 2 } * 2):on_grad(function() end) end, "requires_grad_")
    assert.has_error(function() x:on_grad(5) end)
  end)
end)

describe("recompute", function()
  -- Runs f plainly and recomputed from the same start; gradients must be the same bits.
  local function both(f)
    local results = {}
    for i, way in ipairs { f, function(...) return ms.recompute(f, ...) end } do
      ms.seed(7)
      local x, w = ms.randn { 8, 16, requires_grad = true, seed = 1 },
        ms.randn { 16, 16, requires_grad = true, seed = 2 }
      for step in ms.steps(1) do assert.equal(0, step)
        local y, z = way(x, w, 3)
        local loss = (y * y):mean()
        if z then loss = loss + z:sum() end
        loss:backward()
        results[i] = { loss:item(), core.bytes(x:grad()), core.bytes(w:grad()) }
      end
    end
    assert.equal(results[1][1], results[2][1])
    assert.is_true(results[1][2] == results[2][2] and results[1][3] == results[2][3])
  end

  it("gives the same gradients", function()
    both(function(x, w, n) return x:matmul(w):gelu() * n end)
  end)
  it("draws the same random numbers again", function()
    both(function(x, w) return x:matmul(w):dropout(0.5):matmul(w):dropout(0.25) end)
  end)
  it("returns several results", function()
    both(function(x, w) local y = x:matmul(w) return y, y:exp() end)
  end)
  it("nests", function()
    both(function(x, w)
      local inner = ms.recompute(function(t) return t:matmul(w):tanh() end, x)
      return ms.recompute(function(t) return t:matmul(w) end, inner)
    end)
  end)

  it("stores less", function()
    local x = ms.randn { 64, 256, requires_grad = true }
    local function body(t) for _ = 1, 8 do t = t:tanh() end return t end
    local function peak(f)
      core.collect()
      ms.synchronize()
      ms.reset_peak()
      local before = ms.memory().peak
      for _ in ms.steps(1) do f():sum():backward() end
      x:set_grad(nil)
      return ms.memory().peak - before
    end
    local plain = peak(function() return body(body(body(x))) end)
    local less = peak(function()
      return ms.recompute(body, ms.recompute(body, ms.recompute(body, x)))
    end)
    -- Without recomputation the 24 results are kept; with it, the inputs of three parts, eight
    -- results of the part that runs, and some gradients.
    local one = x:numel() * 4
    assert.is_true(plain >= 24 * one, ("%d"):format(plain))
    assert.is_true(less <= 14 * one + 64, ("%d against %d"):format(less, plain))
  end)

  it("releases what the function made on its way", function()
    local stashed, kept
    local x = leaf { 1 }
    local y = ms.recompute(function(t) stashed, kept = t * 2, (t * 3):keep() return t * 4 end, x)
    near({ 4 }, y)
    near({ 3 }, kept)
    fails(function() return stashed:sum() end, "recomputed function", "keep()")
  end)

  it("raises what the function raises", function()
    local x = leaf { 1 }
    fails(function() ms.recompute(function() error "in the function" end, x) end, "in the function")
    fails(function() ms.recompute(function() return 5 end, x) end, "value 1", "number")
    fails(function() ms.recompute(function() end, x) end, "0 values")
    assert.has_error(function() ms.recompute(5) end)
    -- An error in the second run only.
    local runs = 0
    local y = ms.recompute(
      function(t) runs = runs + 1 if runs == 2 then error "second run" end return t * 2 end, x)
    fails(function() y:sum():backward() end, "second run")
  end)
end)

describe("linear", function()
  it("sums the bias gradient of many rows without losing small ones", function()
    local rows, width = 20000, 5
    local x, w, b = ms.randn { rows, 3, seed = 1 }, ms.randn { width, 3, seed = 2 },
      ms.zeros({ width }):requires_grad_()
    local g = ms.randn { rows, width, seed = 3 } + 100
    ;(x:linear(w, b) * g):sum():backward()
    local sums, values = {}, g:to_table()
    for i = 1, width do
      sums[i] = 0
      for row = 1, rows do sums[i] = sums[i] + values[row][i] end
    end
    -- 2e6 in f32 has steps of 0.125; adding row by row in f32 would be off by some hundred.
    near(sums, b:grad(), 0.5)
  end)
end)

describe("autocast", function()
  it("computes products in bf16, and gives f32 gradients", function()
    local x, w = ms.randn { 16, 32, seed = 1, requires_grad = true },
      ms.randn { 8, 32, seed = 2, requires_grad = true }
    local exact = x:linear(w):to_table()
    local cast = ms.autocast("bf16", function() return x:linear(w) end)
    assert.not_same(exact, cast:to_table())
    -- 8 bits a factor, 32 products of size about 1: 32 * 2^-8 is far beyond what is seen; the usual
    -- error is sqrt(32) * 2^-8.
    near(exact, cast:to "f32", 0.1)
    cast:sum():backward()
    assert.equal("f32", w:grad():dtype())
    assert.equal("f32", x:grad():dtype())
    near(ms.ones({ 16, 8 }):t():matmul(x):to_table(), w:grad(), 0.1)
    -- Norms and softmax compute in f32, and norms round their result once.
    near(x:softmax():to_table(), ms.autocast("bf16", function() return x:softmax() end), 0)
    local normed = ms.autocast("bf16", function() return x:rms_norm() end)
    near(x:rms_norm():to "bf16":to_table(), normed, 0)
  end)

  -- What comes before a product has 16 bits. The product takes it as it is, and an f32 tensor of
  -- the same values gives the same bits.
  local before_products = {
    layer_norm = function(x, w) return x:layer_norm(w, w) end,
    rms_norm = function(x, w) return x:rms_norm(w) end,
    add_rms_norm = function(x, w) return select(2, x:add_rms_norm(x, w)) end,
    gelu = function(x, w) return x:linear(ms.randn { 40, 40, seed = 5 }, w, "gelu") end,
    attention = function(x)
      local heads = x:view(2, 6, 4, 10):transpose(2, 3)
      return heads:attention(heads, heads):transpose(2, 3):reshape(2, 6, 40)
    end,
  }
  local same_values = function(t) return ms.tensor(t:to_table(), "f32") end
  for name, f in pairs(before_products) do
    it("gives products the operand in 16 bits, as the result of " .. name, function()
      local x, w, v = ms.randn { 2, 6, 40, seed = 1 }, ms.randn { 40, seed = 2 },
        ms.randn { 7, 40, seed = 3 }
      for _, dtype in ipairs { "bf16", "f16" } do
        ms.autocast(dtype, function()
          local y = f(x, w)
          assert.equal(dtype, y:dtype())
          local function product_of(t) return t:linear(v):to_table() end
          local fresh = same_values(y)
          assert.same(product_of(fresh), product_of(y))
          assert.same(product_of(fresh:narrow(2, 2, 3)), product_of(y:narrow(2, 2, 3)))
          assert.same(product_of(fresh:view(12, 40)), product_of(y:view(12, 40)))
          assert.same(fresh:select(1, 2):t():matmul(ms.ones { 6, 2 }):to_table(),
            y:select(1, 2):t():matmul(ms.ones { 6, 2 }):to_table())
          local view = y:view(12, 40)
          y:mul_(3)
          assert.same(product_of(same_values(y)), product_of(y))
          assert.same(product_of(same_values(view)), product_of(view))
        end)
      end
    end)
  end

  it("casts only weights in a pass of their own where a norm or an activation comes before each \z
    product", function()
    local model = ms.nn.gpt2 { vocab = 16, context = 8, layers = 2, width = 16, heads = 2 }
    local x = ms.randint { 2, 8, low = 0, high = 16, seed = 1 }
    local weights = 0
    for _, entry in ipairs(model:named_parameters()) do
      weights = weights + (#entry.parameter:shape() == 2 and entry.name ~= "wpe.weight" and 1 or 0)
    end
    core.trace_start()
    ms.autocast("bf16", function() return model(x):cross_entropy(x) end):backward()
    local casts = 0
    for _, record in ipairs(core.trace_stop()) do
      casts = casts + (record.name == "cast" and 1 or 0)
    end
    assert.equal(weights, casts)
  end)

  it("ends with its function, also by an error", function()
    local x = ms.randn { 4, 33, seed = 1 }
    local exact = x:matmul(x:t()):to_table()
    pcall(ms.autocast, "bf16", function() error "out" end)
    assert.same(exact, x:matmul(x:t()):to_table())
    pcall(ms.no_grad, function() error "out" end)
    assert.is_true(core.is_recording())
    fails(function() ms.autocast("i64", function() end) end, "bf16")
    fails(function() ms.autocast("bf61", function() end) end, "'bf61'", "'bf16'")
    local a, b = ms.autocast("bf16", function() return 1, 2 end)
    assert.same({ 1, 2 }, { a, b })
  end)
end)

describe("flat", function()
  it("moves parameters into one tensor that they are views of", function()
    local model = ms.nn.Sequential(ms.nn.Linear(3, 2), ms.nn.Linear(2, 1))
    local parameters, before = model:parameters(), {}
    for i, p in ipairs(parameters) do before[i] = p:to_table() end
    local x = ms.randn { 4, 3, seed = 1 }
    local expected = model(x):to_table()
    local flat = ms.flat(parameters)
    assert.same({ 11 }, flat:shape())
    for i, p in ipairs(parameters) do assert.same(before[i], p:to_table()) end
    assert.same(expected, model(x):to_table())
    flat:fill_(0.5)
    assert.same({ { 0.5, 0.5, 0.5 }, { 0.5, 0.5, 0.5 } }, parameters[1]:to_table())
    -- They train as before, and the flat tensor sees it.
    model(x):sum():backward()
    ms.optim.sgd(parameters, { lr = 1 }):step()
    local at = 0
    for _, p in ipairs(parameters) do
      assert.same(p:flatten():to_table(), flat:narrow(1, at + 1, p:numel()):to_table())
      at = at + p:numel()
    end
    assert.is_false(flat:eq(0.5):any():item() and flat:eq(0.5):all():item())
    -- A second call gives the same memory.
    ms.flat(parameters):fill_(2)
    assert.is_true(flat:eq(2):all():item())
  end)

  it("can be stepped as a whole, as each parameter would be", function()
    local function trained(whole)
      ms.seed(3)
      local model = ms.nn.Linear(3, 2)
      local flat = ms.flat(model:parameters())
      local opt = ms.optim.adamw(whole and { flat } or model:parameters(), { lr = 0.1 })
      for _ = 1, 3 do
        model(ms.ones { 2, 3 }):square():sum():backward()
        if whole then
          local grads = {}
          for i, p in ipairs(model:parameters()) do grads[i] = p:grad() end
          opt:step_param(flat, (ms.pack(grads)))
          for _, p in ipairs(model:parameters()) do p:set_grad(nil) end
        else opt:step() end
      end
      return flat:to_table()
    end
    assert.same(trained(false), trained(true))
  end)

  it("refuses what cannot be flat", function()
    local a, b = ms.nn.Linear(2, 2), ms.nn.Linear(2, 2):to "bf16"
    fails(function() ms.flat {} end, "a list of one or more tensors")
    fails(function() ms.flat { a.weight, b.weight } end, "flat", "f32", "bf16")
    fails(function() ms.flat { a.weight, a.weight } end, "1 and 2 are the same")
    fails(function() ms.flat { a.weight * 2 } end, "result of an operator")
    fails(function() for _ in ms.steps(1) do ms.flat(a:parameters()) end end, "inside a step")
    ms.ddp(a)
    fails(function() ms.flat(a:parameters()) end, "before wrapping")
  end)
end)
