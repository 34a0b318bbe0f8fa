-- Steps: which tensors are released at their end, which stay, and how steps may end.
local ms = require "moonshard"
-- luacheck: ignore 512

local core = require "moonshard.core"
local support = require "support"
local near, fails = support.near, support.fails

describe("a step's end", function()
  it("releases what the step made; using it later names the line that made it", function()
    local held, view, line
    for _ in ms.steps(1) do
      line = debug.getinfo(1, "l").currentline + 1
      held = ms.ones { 4 }
      view = held:view(2, 2)
      near({ 1, 1, 1, 1 }, held)
    end
    fails(function() return held:sum() end, "the tensor made at", ("step_spec.lua:%d"):format(line),
      "step ended", "keep()")
    fails(function() return view:shape() end, ("step_spec.lua:%d"):format(line + 1))
    fails(function() return ms.ones({ 4 }) + held end, "step ended")
    fails(function() held:keep() end, "step ended")
    assert.equal("tensor (released)", tostring(held))
  end)

  it("leaves what keep() marks, views of it, and what was made outside", function()
    local outside, kept, part = ms.ones { 2 }, nil, nil
    for _ in ms.steps(1) do
      outside:add_(1)
      kept = (outside * 3):keep()
      local whole = ms.arange(1, 6):view(2, 3)
      part = whole[2]:keep()                    -- keeps the memory of the whole tensor
    end
    near({ 2, 2 }, outside)
    near({ 6, 6 }, kept)
    near({ 4, 5, 6 }, part)
  end)

  it("leaves parameters, buffers, gradients and the optimizer's state", function()
    local model, optimizer, grad
    for step in ms.steps(3) do
      if step == 0 then
        model = ms.nn.Linear(3, 2)
        model:add_buffer("scale", ms.ones { 2 })
        optimizer = ms.optim.adam(model, { lr = 0.1 })
      end
      if step > 0 then optimizer:step() end
      (model(ms.ones { 4, 3 }) * model.scale):sum():backward()
      grad = model.bias:grad()
    end
    near({ 4, 4 }, grad)
    near({ 4, 4 }, model.bias:grad())
    near({ 1, 1 }, model.scale)
    assert.equal(2, optimizer:state().parameters.bias.step:item())
    near({ 2, 3 }, model.weight:shape())
  end)

  it("brings memory back to the same after each of 20 steps", function()
    local model = ms.nn.Sequential(ms.nn.Linear(32, 64), ms.nn.GELU(), ms.nn.Linear(64, 8))
    local optimizer, x, y = ms.optim.adamw(model, { lr = 1e-3 }), ms.randn { 16, 32 },
      ms.randn { 16, 8 }
    local live, peak = {}, {}
    core.collect()
    for step in ms.steps(20) do
      live[step] = ms.memory().live
      ms.reset_peak()
      local loss = model(x):mse_loss(y)
      loss:backward()
      model:clip_grad_norm(1)
      optimizer:step()
      peak[step] = ms.memory().peak
    end
    -- The optimizer's state appears in the first step.
    for step = 2, 19 do
      assert.equal(live[1], live[step])
      assert.equal(peak[1], peak[step])
    end
    assert.equal(live[1], ms.memory().live)
  end)

  it("does not depend on when Lua collects", function()
    local function run(each)
      ms.seed(1)
      local model = ms.nn.Linear(16, 16)
      local optimizer, peaks = ms.optim.sgd(model), {}
      core.collect()
      for _ in ms.steps(4) do
        local h = ms.ones { 8, 16 }
        for _ = 1, 10 do
          h = model(h):tanh()
          each()
        end
        h:sum():backward()
        optimizer:step()
        peaks[#peaks + 1] = ms.memory().live
      end
      return peaks
    end
    assert.same(run(function() end), run(function() collectgarbage() end))
  end)
end)

describe("ms.steps", function()
  it("counts from 0, or from first, and ms.step tells", function()
    local seen = {}
    for step in ms.steps(3) do
      seen[#seen + 1] = step
      assert.equal(step, ms.step())
    end
    for step in ms.steps(7, 5) do
      seen[#seen + 1] = step
      assert.equal(step, ms.step())
    end
    assert.same({ 0, 1, 2, 5, 6 }, seen)
    assert.equal(6, ms.step())
    for _ in ms.steps(3, 3) do error "there is no step left" end
    for _ in ms.steps(0) do error "there is no step" end
    fails(function() ms.steps(1.5) end, "integers")
    fails(function() ms.steps() end, "integers")
    fails(function() ms.steps(-5, -10)() end, "step")
  end)

  it("ends the step on break, return, goto and error", function()
    local held
    local function ended()
      fails(function() return held:sum() end, "step ended")
      for _ in ms.steps(1) do held = nil end        -- a new step can begin
    end
    for _ in ms.steps(5) do held = ms.ones { 2 } break end
    ended()
    local function leave() for _ in ms.steps(5) do held = ms.ones { 2 } return 5 end end
    assert.equal(5, leave())
    ended()
    for _ in ms.steps(5) do
      held = ms.ones { 2 }
      goto out
    end
    ::out::
    ended()
    local ok, failure = pcall(function()
      for _ in ms.steps(5) do
        held = ms.ones { 2 }
        error("the first error", 0)
      end
    end)
    assert.same({ false, "the first error" }, { ok, failure })
    ended()
  end)

  it("of a coroutine that was dropped, or has failed, ends with the next loop", function()
    local function count()
      local done = 0
      for _ in ms.steps(2) do done = done + 1 end
      return done
    end
    local function loop()
      for step in ms.steps(3) do coroutine.yield(step) end
    end
    local dropped = coroutine.wrap(loop)
    assert.equal(0, dropped())
    dropped = nil -- luacheck: ignore 311
    assert.equal(2, count())
    -- One that failed is dead, and its loop was never closed.
    local failed = coroutine.create(function() for _ in ms.steps(3) do error "in the step" end end)
    assert.is_false((coroutine.resume(failed)))
    assert.equal(2, count())
    -- One that may go on keeps its step.
    local waiting = coroutine.create(loop)
    assert.is_true((coroutine.resume(waiting)))
    assert.error_matches(count, "coroutine%.close")
    assert.is_true((coroutine.resume(waiting)))
    assert.is_true(coroutine.close(waiting))
    assert.equal(2, count())
    -- Nested in one is nested.
    local nested = coroutine.wrap(function() for _ in ms.steps(1) do count() end end)
    assert.error_matches(nested, "cannot be nested")
    assert.equal(2, count())
  end)

  it("cannot be nested", function()
    local count = 0
    for _ in ms.steps(2) do
      fails(function() for _ in ms.steps(1) do count = count + 1 end end, "nested")
      count = count + 10
    end
    assert.equal(20, count)
  end)

  it("cannot be begun in a hook", function()
    local x = ms.ones { 1, requires_grad = true }
    x:on_grad(function() for _ in ms.steps(1) do error "never here" end end)
    fails(function() x:sum():backward() end, "inside a hook")
  end)

  it("gives random numbers by step: a run that goes on draws the same", function()
    local function draws(from, to)
      ms.seed(4)
      local list = {}
      for step in ms.steps(to, from) do
        if step % 2 == 0 then ms.rand { 3 } end
        list[step] = ms.rand({ 1 }):item()
      end
      return list
    end
    local whole, part = draws(0, 6), draws(3, 6)
    for step = 3, 5 do assert.equal(whole[step], part[step]) end
    assert.not_equal(whole[1], whole[3])
  end)

  it("ends also when a function at its end fails", function()
    local steps, failing = require "moonshard.train.steps", true
    steps.on_end(function() if failing then failing = false error "at the end" end end)
    local held
    local ok, message = pcall(function() for _ in ms.steps(1) do held = ms.ones { 1 } break end end)
    assert.is_false(ok)
    assert.matches("at the end", message)
    assert.has_error(function() held:sum() end)
    for _ in ms.steps(1) do held = nil end
  end)

  it("raises the error of a task that failed in it", function()
    local weight = ms.randn { 4, 2 }
    local line
    local ok, message = pcall(function()
      for _ in ms.steps(4) do
        line = debug.getinfo(1, "l").currentline + 1
        local out = ms.tensor({ 7 }):embedding(weight)
        out = out * 2 -- luacheck: ignore
      end
    end)
    assert.is_false(ok)
    assert.truthy(
      message:find("embedding", 1, true) and message:find((":%d"):format(line), 1, true), message)
  end)
end)
