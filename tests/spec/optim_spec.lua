-- Optimizers as scripts see them: groups, live hyper-parameters, schedules, own kinds, saving,
-- flags, clipping, the scaler. (That each kind's formula is right is shown by the golden data.)
local ms = require "moonshard"
local core = require "moonshard.core"
local support = require "support"
local near, fails = support.near, support.fails
local optim = ms.optim

local kinds = { "sgd", "adam", "adamw", "adagrad", "adadelta", "rmsprop", "rprop", "adamax" }

local function parameter(values) return ms.nn.Parameter(ms.tensor(values, "f32")) end

-- A small model with names, the same each time.
local function network(seed)
  ms.seed(seed or 5)
  return ms.nn.Sequential(ms.nn.Linear(4, 8), ms.nn.GELU(), ms.nn.Linear(8, 2))
end

local function step(model, optimizer, at)
  ms.seed(100 + at)
  local x, y = ms.randn { 6, 4 }, ms.randn { 6, 2 }
  model(x):mse_loss(y):backward()
  optimizer:step()
end

local function bytes_of(model)
  local list = {}
  for _, p in ipairs(model:parameters()) do list[#list + 1] = core.bytes(p:detach()) end
  return table.concat(list)
end

describe("an optimizer", function()
  it("steps what has a gradient, and consumes it", function()
    local a, b = parameter { 1, 2 }, parameter { 3 }
    local optimizer = optim.sgd({ a, b }, { lr = 0.5 })
    ;(a * 4):sum():backward()
    local grad = a:grad()
    optimizer:step()
    near({ -1, 0 }, a)
    near({ 3 }, b)
    assert.is_nil(a:grad())
    fails(function() return grad:sum() end, "consumed", "clone")
    ;(a * 4):sum():backward()
    optimizer:step { keep_grads = true }
    near({ 4, 4 }, a:grad())
    optimizer:zero_grad()
    assert.is_nil(a:grad())
    optimizer:step()                              -- nothing to do
    near({ -3, -2 }, a)
  end)

  it("takes a module, a list, groups; tensors too", function()
    local model = network()
    local optimizer = optim.adam(model)
    assert.equal(4, #optimizer:groups()[1].params)
    assert.equal(1e-3, optimizer:groups()[1].lr)
    assert.same({ 0.9, 0.999 }, optimizer:groups()[1].betas)
    local groups = optim.sgd(
      { { params = { model[1].weight }, lr = 0.1 }, { params = { model[1].bias } } },
      { lr = 0.2, momentum = 0.9 }):groups()
    assert.equal(0.1, groups[1].lr)
    assert.equal(0.2, groups[2].lr)
    assert.equal(0.9, groups[1].momentum)
    local t = ms.ones { 2 }
    optim.sgd({ t }, { lr = 1 }):step_param(t, ms.full(0.25, { 2 }))
    near({ 0.75, 0.75 }, t)
    optimizer:add_group { params = { t }, lr = 7 }
    assert.equal(7, optimizer:groups()[2].lr)
    assert.equal(1e-3, optimizer:lr())
  end)

  it("reads hyper-parameters at each step", function()
    local p = parameter { 0 }
    local optimizer = optim.sgd({ p }, { lr = 1 })
    local function go() p:set_grad(ms.ones { 1 }) optimizer:step() end
    go()
    optimizer:groups()[1].lr = 10
    go()
    near({ -11 }, p)
    optimizer:groups()[1].lr = ms.tensor(100.0)
    go()
    near({ -111 }, p)
    optimizer:groups()[1].maximize = true
    go()
    near({ -11 }, p)
    optimizer:groups()[1].momentum = -1
    p:set_grad(ms.ones { 1 })
    fails(function() optimizer:step() end, "momentum")
    near({ -11 }, p)
  end)

  it("multiplies lr by the schedule, by its own count of steps", function()
    local p, seen = parameter { 0 }, {}
    local optimizer = optim.sgd({ p },
      { lr = 2, schedule = function(n) seen[#seen + 1] = n return 1 / (n + 1) end })
    assert.equal(2, optimizer:lr())
    for _ = 1, 3 do p:set_grad(ms.ones { 1 }) optimizer:step() end
    near({ -2 - 1 - 2 / 3 }, p)
    assert.same({ 0, 0, 1, 2 }, seen)
    near(0.5, optimizer:lr())
  end)

  it("refuses what it does not know, naming its own", function()
    local p = parameter { 1 }
    fails(function() optim.sgd({ p }, { momentun = 0.9 }) end, "sgd", "'momentun'", "'momentum'")
    fails(function() optim.sgd({ p }, { betas = { 0.9, 0.9 } }) end, "sgd", "'betas'", "momentum")
    fails(function() optim.adam({ p }, { lr = "1" }) end, "lr", "number")
    fails(function() optim.adam({ p }, { lr = -1 }) end, "lr")
    fails(function() optim.adam({ p }, { betas = { 0.9 } }) end, "betas")
    fails(function() optim.adam({ p }, { betas = { 0.9, 1.5 } }) end, "beta")
    fails(function() optim.adam({ p }, { betas = { 0.9, "x" } }) end, "betas[2]")
    fails(function() optim.adam({ p }, { schedule = 1 }) end, "schedule", "function")
    fails(function() optim.adam({ p }, { master = "f16" }) end, "master", "f32")
    fails(function() optim.adam({ p, p }) end, "two groups")
    fails(function() optim.adam({ { params = { p } }, { params = { p } } }) end, "two groups")
    fails(function() optim.adam({}) end, "at least one parameter")
    fails(function() optim.adam(5) end, "module")
    fails(function() optim.adam({ { lr = 1 } }) end, "params")
    fails(function() optim.adam({ { params = { 5 } } }) end, "number")
    local optimizer = optim.adam({ p })
    fails(function() optimizer:step { only_fi = 1 } end, "'only_fi'", "'only_if'")
    fails(function() optimizer:step_param(parameter { 1 }, ms.ones { 1 }) end, "no group")
    fails(function() optimizer:step_param(p) end, "no gradient")
    fails(function() optimizer:step_param(p, ms.ones { 2 }) end, "[2]", "[1]")
    p:on_grad(function() optimizer:step() end)
    fails(function() p:sum():backward() end, "inside a hook", "step_param")
  end)

  it("step_param works in hooks", function()
    local p = parameter { 1 }
    local optimizer = optim.sgd({ p }, { lr = 0.5 })
    p:on_grad_ready(function(q) optimizer:step_param(q) q:set_grad(nil) end)
    ;(p * 3):sum():backward()
    near({ -0.5 }, p)
    assert.is_nil(p:grad())
  end)
end)

describe("only_if", function()
  for _, kind in ipairs(kinds) do
    it("false changes nothing: " .. kind, function()
      local function run(flags)
        local p = parameter { 1, -2, 3 }
        local optimizer = optim[kind]({ p }, { lr = 0.1, schedule = optim.linear { steps = 20 } })
        for i, flag in ipairs(flags) do
          p:set_grad(flag and ms.tensor({ 0.5 * i, -1, 2 }, "f32") or ms.full(1e9, { 3 }))
          optimizer:step { only_if = ms.tensor(flag) }
        end
        return core.bytes(p:detach()), core.bytes(optimizer:state().parameters["#1"].step),
          optimizer:state().steps
      end
      -- Gradients of taken steps depend on the position, so leave a gap there too.
      local function taken(flags)
        local p = parameter { 1, -2, 3 }
        local optimizer = optim[kind]({ p }, { lr = 0.1 })
        for i, flag in ipairs(flags) do
          if flag then
            p:set_grad(ms.tensor({ 0.5 * i, -1, 2 }, "f32"))
            optimizer:step()
          end
        end
        return core.bytes(p:detach()), core.bytes(optimizer:state().parameters["#1"].step),
          optimizer:state().steps
      end
      local flags = { true, true, false }
      local a, b, c = run({ true, true })
      local x, y, z = run(flags)
      assert.is_true(a == x and b == y)
      assert.equal(c, z)
      assert.equal(2, z)
      assert.equal(2, select(3, taken(flags)))
      assert.is_true(b == select(2, taken(flags)))
    end)
  end

  it("false changes nothing for a kind in Lua", function()
    local kind = optim.define {
      name = "plain", defaults = { lr = 1 },
      step_param = function(p, grad, state, group)
        state.sum = state.sum or p:zeros_like()
        state.sum:add_(grad)
        p:add_(state.sum, -group.lr)
      end,
    }
    local p = parameter { 0 }
    local optimizer = kind({ p })
    for _, flag in ipairs { false, true, false, true } do
      p:set_grad(ms.ones { 1 })
      optimizer:step { only_if = ms.tensor(flag) }
    end
    near({ -1 - 2 }, p)
    near({ 2 }, optimizer:state().parameters["#1"].sum)
    assert.equal(2, optimizer:state().steps)
  end)

  it("false leaves the state of a kind in Lua as it begins, also if the first step is not taken \z
    and the gradient is nan", function()
    local kind = optim.define {
      name = "memory", defaults = { lr = 1 },
      step_param = function(p, grad, state)
        state.scale = state.scale or p:ones_like()
        state.scale:mul_(grad)                                       -- written in place
        state.sum = (state.sum or p:zeros_like()) + grad             -- another tensor each time
        -- Begins with a gradient: zeros as long as there was none.
        state.last = grad:clone()
      end,
    }
    local p = parameter { 0 }
    local optimizer = kind({ p })
    local function run(flag, value)
      p:set_grad(ms.full(value, { 1 }))
      optimizer:step { only_if = ms.tensor(flag) }
      local state = optimizer:state().parameters["#1"]
      return state.scale:to_table()[1], state.sum:to_table()[1], state.last:to_table()[1]
    end
    assert.same({ 1.0, 0.0, 0.0 }, { run(false, 0 / 0) })
    assert.same({ 3.0, 3.0, 3.0 }, { run(true, 3) })
    assert.same({ 3.0, 3.0, 3.0 }, { run(false, -1 / 0) })
    assert.same({ 6.0, 5.0, 2.0 }, { run(true, 2) })
  end)

  it("false is not counted for a kind in Lua, and only for the parameters that had a \z
    gradient", function()
    local seen = {}
    local kind = optim.define {
      name = "counting", defaults = { lr = 1 },
      step_param = function(p, _, _, _, count) seen[p:numel()] = count end,
    }
    local p, q = parameter { 0 }, parameter { 0, 0 }
    local optimizer = kind({ p, q })
    local function run(flag, with_q)
      p:set_grad(ms.ones { 1 })
      if with_q then q:set_grad(ms.ones { 2 }) end
      optimizer:step { only_if = ms.tensor(flag) }
    end
    run(true, true)
    run(false, false)
    for _ = 1, 3 do run(true, true) end
    assert.same({ 3, 3 }, seen)
    -- The same if the prevented step is subtracted only after a checkpoint. Loading replaces the
    -- counts of the other optimizer.
    run(false, false)
    local saved = optimizer:state()
    assert.equal(3, saved.parameters["#1"]["#taken"])
    assert.equal(3, saved.parameters["#2"]["#taken"])
    local fresh = kind({ p, q }):state()
    optimizer:load_state(saved)
    for _ = 1, 3 do run(true, true) end
    assert.same({ 6, 6 }, seen)
    optimizer:load_state(fresh)
    run(true, true)
    assert.same({ 0, 0 }, seen)
  end)
end)

describe("saved state", function()
  for _, kind in ipairs(kinds) do
    it("continues bit for bit: " .. kind, function()
      local function options()
        return { lr = 0.01, weight_decay = 0.01, schedule = optim.cosine { steps = 10 } }
      end
      local whole = network()
      local first = optim[kind](whole, options())
      for i = 1, 3 do step(whole, first, i) end
      local weights, saved = {}, { parameters = {} }
      for name, t in pairs(whole:state()) do weights[name] = t:detach():clone() end
      for key, value in pairs(first:state()) do
        if key ~= "parameters" then saved[key] = value end
      end
      for name, state in pairs(first:state().parameters) do
        saved.parameters[name] = {}
        for key, value in pairs(state) do
          saved.parameters[name][key] = core.is_tensor(value) and value:clone() or value
        end
      end
      for i = 4, 6 do step(whole, first, i) end
      local resumed = network(77)
      resumed:load_state(weights)
      local second = optim[kind](resumed, options())
      second:load_state(saved)
      assert.equal(3, second:state().steps)
      for i = 4, 6 do step(resumed, second, i) end
      assert.is_true(bytes_of(whole) == bytes_of(resumed))
      assert.equal(first:lr(), second:lr())
    end)
  end

  it("is by parameter name", function()
    local model = network()
    local optimizer = optim.adam(model)
    step(model, optimizer, 1)
    local names = {}
    for name, state in ms.sorted_pairs(optimizer:state().parameters) do
      names[#names + 1] = name
      for key in ms.sorted_pairs(state) do
        if name == "0.bias" then names[#names + 1] = "  " .. key end
      end
    end
    assert.same(
      { "0.bias", "  exp_avg", "  exp_avg_sq", "  step", "0.weight", "2.bias", "2.weight" }, names)
  end)

  it("is refused where it does not belong", function()
    local model = network()
    local adam, sgd = optim.adam(model), optim.sgd(network())
    step(model, adam, 1)
    fails(function() sgd:load_state(adam:state()) end, "adam", "sgd")
    fails(function() optim.adam({ parameter { 1 } }):load_state(adam:state()) end, "unknown here")
    fails(function() adam:load_state({}) end, "no state")
    fails(function() adam:load_state(5) end, "no state")
  end)
end)

describe("a kind defined in Lua", function()
  local made = {}
  local signs = optim.define {
    name = "signs", defaults = { lr = 0.1, beta = 0.5 },
    step_param = function(p, grad, state, group, count)
      made[#made + 1] = count
      state.average = state.average or p:zeros_like()
      state.average:lerp_(grad, 1 - group.beta)
      p:add_(state.average:sign(), -group.lr)
    end,
  }

  it("has groups, schedules, saving, hooks as the built-in ones", function()
    made = {}
    local p, q = parameter { 1, 1 }, parameter { 5 }
    local optimizer = signs({ { params = { p } }, { params = { q }, lr = 1 } },
      { lr = 0.25, schedule = optim.constant { warmup = 2 } })
    p:set_grad(ms.tensor { 3., -3 })
    q:set_grad(ms.tensor { 9. })
    optimizer:step()
    near({ 1 - 0.125, 1 + 0.125 }, p)
    near({ 4.5 }, q)
    p:set_grad(ms.tensor { 3., -3 })
    optimizer:step()
    near({ 1 - 0.375, 1 + 0.375 }, p)
    assert.same({ 0, 0, 1 }, made)
    local state = optimizer:state()
    near({ 1.5 + 0.75, -1.5 - 0.75 }, state.parameters["#1"].average)
    local other = signs({ parameter { 0, 0 }, parameter { 0 } })
    other:load_state(state)
    near({ 2.25, -2.25 }, other:state().parameters["#1"].average)
    assert.equal(2, other:state().steps)
    fails(function() signs({ p }, { bata = 1 }) end, "signs", "'beta'")
  end)

  it("records no graph, and keeps its state beyond the step", function()
    local p, optimizer = parameter { 1 }, nil
    for _ in ms.steps(2) do
      optimizer = optimizer or signs({ p })
      ;(p * 2):sum():backward()
      optimizer:step()
    end
    assert.is_false(optimizer:state().parameters["#1"].average:requires_grad())
    near({ 1.5 }, optimizer:state().parameters["#1"].average)
  end)

  it("needs a name and a function", function()
    fails(function() optim.define { name = "x" } end, "step_param")
    fails(function() optim.define { step_param = function() end } end, "name")
    fails(function() optim.define(5) end)
  end)
end)

-- A step that its flag prevents is as if it had not been called: neither states nor schedules know
-- of it, whichever steps these are, and whoever saves and loads in between.
describe("steps that are prevented", function()
  local own = optim.define {
    name = "steps by count", defaults = { lr = 1 },
    step_param = function(p, grad, state, group, at)
      state.sum = state.sum or p:zeros_like()
      state.sum:add_(grad)
      p:sub_(state.sum * group.lr / (at + 1))
    end,
  }
  local makers = { own = own }
  for _, name in ipairs { "sgd", "adam", "adamw", "adagrad", "adadelta", "rmsprop", "rprop",
    "adamax" } do makers[name] = optim[name] end
  local STEPS <const> = 9
  local function gradient(at, n) return ms.randn { n, seed = 31 * at + n } end

  -- lost: whether a step is prevented, by its number; saves: after this step, state and load_state
  -- into an optimizer of a copy. Returns the values after the last step.
  local function run(make, options, lost, saves, skips, scope)
    local p, q = parameter { 1, -1, 2 }, parameter { 5 }
    local function new(one, two)
      return make({ { params = { one } }, { params = { two }, lr = options.lr2 } }, {
        lr = options.lr, schedule = options.schedule,
      })
    end
    local optimizer = new(p, q)
    scope(function(at)
      if skips and lost[at] then return end
      p:set_grad(gradient(at, 3))
      q:set_grad(gradient(at, 1))
      if lost[at] then
        p:set_grad(p:grad() / 0)
        q:set_grad(q:grad() / 0)
      end
      optimizer:step(not skips and { only_if = ms.full(lost[at] and 0 or 1, {}):gt(0) } or nil)
      if at == saves then
        local state, values = optimizer:state(), { p:detach():clone(), q:detach():clone() }
        p, q = parameter { 0, 0, 0 }, parameter { 0 }
        ms.no_grad(function() p:copy_(values[1]) q:copy_(values[2]) end)
        optimizer = new(p, q)
        optimizer:load_state(state)
      end
    end)
    return ms.cat { p:detach(), q:detach() }:to_table(), optimizer:state().steps
  end

  local scopes = {
    steps = function(f) for at in ms.steps(STEPS) do f(at) end end,
    plain = function(f) for at = 0, STEPS - 1 do f(at) end end,
  }
  local patterns = {
    { [1] = true }, { [0] = true }, { [2] = true, [3] = true }, { [0] = true, [2] = true,
      [4] = true, [8] = true }, { [7] = true, [8] = true },
  }
  local function half(at) return 1 / (at + 1) end
  for name, make in ms.sorted_pairs(makers) do
    it("are as if they were not: " .. name, function()
      for number, lost in ipairs(patterns) do
        for how, scope in ms.sorted_pairs(scopes) do
          for _, saves in ipairs { -1, number, 8 } do
            local options = { lr = 0.1, lr2 = 0.3, schedule = half }
            if number % 2 == 0 then options.lr2 = ms.full(0.3, { 1 }):keep() end
            local values, steps = run(make, options, lost, saves, false, scope)
            local expected, taken = run(make, options, lost, saves, true, scope)
            assert.same(expected, values, ("%s, pattern %d, saved after %d"):format(how, number,
              saves))
            assert.equal(taken, steps)
          end
        end
      end
    end)
  end

  it("are known to a schedule that is set after them", function()
    for _, first in ipairs { "none", "other" } do
      local p = parameter { 0 }
      local optimizer = optim.sgd({ p }, { lr = 1 })
      local group = optimizer:groups()[1]
      if first == "other" then group.schedule = function() return 1 end end
      local function one(taken)
        p:set_grad(ms.tensor { -1. })
        optimizer:step { only_if = ms.full(taken and 1 or 0, {}):gt(0) }
      end
      one(true)
      if first == "other" then group.schedule = nil end
      one(false)
      group.schedule = function(at) return 10 ^ at end
      one(true)
      one(true)
      near({ 1 + 10 + 100 }, p)
    end
  end)
end)

describe("schedules", function()
  it("constant", function()
    local f = optim.constant { warmup = 4 }
    near({ 0.25, 0.5, 0.75, 1, 1, 1 }, { f(0), f(1), f(2), f(3), f(4), f(1000) })
    assert.equal(1, optim.constant()(0))
  end)

  it("linear", function()
    local f = optim.linear { steps = 10, warmup = 2, floor = 0.2 }
    near({ 0.5, 1, 1, 0.6, 0.2, 0.2 }, { f(0), f(1), f(2), f(6), f(10), f(50) })
    near({ 1, 0.5, 0 }, {
      optim.linear({ steps = 4 })(0), optim.linear({ steps = 4 })(2),
      optim.linear({ steps = 4 })(4),
    })
  end)

  it("cosine", function()
    local f = optim.cosine { steps = 12, warmup = 4, floor = 0.1 }
    near({ 0.25, 1, 1, 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2, 0.55, 0.1, 0.1 },
      { f(0), f(3), f(4), f(6), f(8), f(12), f(99) })
  end)

  it("wsd", function()
    local f = optim.wsd { steps = 20, decay = 5, warmup = 2, floor = 0.5 }
    near({ 0.5, 1, 1, 1, 0.9, 0.5, 0.5 }, { f(0), f(1), f(2), f(15), f(16), f(20), f(30) })
    assert.equal(1, optim.wsd({ steps = 5, decay = 0 })(4))
  end)

  it("have their warm-up without a number of steps, which nothing has given", function()
    for name, options in pairs {
      linear = { warmup = 2 }, cosine = { warmup = 2 }, wsd = { warmup = 2, decay = 1 },
    } do
      local f = optim[name](options)
      near({ 0.5, 1 }, { f(0), f(1) })
      fails(function() f(2) end, "optim." .. name, "give steps", "warm-up of 2")
    end
    near({ 1, 1 }, { optim.constant()(0), optim.constant()(9) })
  end)

  it("refuse options that make no sense", function()
    fails(function() optim.cosine { step = 10 } end, "optim.cosine", "'step'", "'steps'")
    fails(function() optim.wsd { steps = 10 } end, "give decay")
    fails(function() optim.linear { steps = 1.5 } end, "integer")
    fails(function() optim.linear { steps = 10, floor = 2 } end, "floor")
    fails(function() optim.wsd { steps = 10, decay = 8, warmup = 4 } end, "10 steps")
    fails(function() optim.constant { warmup = -1 } end, "warmup")
  end)
end)

describe("clipping", function()
  local function two()
    local a, b = parameter { 0, 0 }, parameter { 0 }
    a:set_grad(ms.tensor { 3., 0 })
    b:set_grad(ms.tensor { -4. })
    return a, b
  end

  it("scales all gradients by their common norm", function()
    local a, b = two()
    near(5, optim.clip_grad_norm({ a, b }, 1))
    near({ 0.6, 0 }, a:grad(), 1e-5)              -- the divisor is norm + 1e-6
    near({ -0.8 }, b:grad(), 1e-5)
    near(1, optim.clip_grad_norm({ a, b }, 2), 1e-5)
    near({ 0.6, 0 }, a:grad(), 1e-5)
    a, b = two()
    near(7, optim.clip_grad_norm({ a, b }, 3.5, 1))
    near({ 1.5, 0 }, a:grad(), 1e-5)
    a, b = two()
    near(4, optim.clip_grad_norm({ a, b }, 2, math.huge))
    near({ -2 }, b:grad(), 1e-5)
    local model = network()
    near(0, model:clip_grad_norm(1))
    fails(function() optim.clip_grad_norm({ a }, -1) end, "max")
  end)

  it("clamps by value", function()
    local a, b = two()
    optim.clip_grad_value({ a, b }, 2)
    near({ 2, 0 }, a:grad())
    near({ -2 }, b:grad())
    fails(function() optim.clip_grad_value({ a }, -1) end, "max")
    local model = network()
    model(ms.randn { 3, 4, std = 100 }):sum():backward()
    model:clip_grad_value(0.5)
    for _, p in ipairs(model:parameters()) do assert.is_true(p:grad():abs():max():item() <= 0.5) end
  end)
end)

describe("the scaler", function()
  it("scales, unscales, skips, shrinks and grows", function()
    local p = parameter { 1 }
    local optimizer, scaler = optim.sgd({ p }, { lr = 1 }),
      optim.scaler { init_scale = 8, growth_interval = 2 }
    local function run(gradient)
      local loss = (p * gradient):sum()
      near(loss:item() * scaler:state().factor:item(), scaler:scale(loss))
      scaler:scale(loss):backward()
      scaler:step(optimizer)
      return scaler:state().factor:item(), p:item()
    end
    assert.same({ 8.0, 0.75 }, { run(0.25) })
    assert.same({ 16.0, 0.5 }, { run(0.25) })       -- two good steps: doubled
    assert.same({ 8.0, 0.5 }, { run(1 / 0) })       -- overflow: skipped, halved
    assert.same({ 8.0, 0.25 }, { run(0.25) })       -- the count began again
    assert.same({ 4.0, 0.25 }, { run(0 / 0) })
    assert.equal(3, optimizer:state().steps)
  end)

  it("unscales once, so that clipping sees true gradients", function()
    local p = parameter { 0 }
    local optimizer, scaler = optim.sgd({ p }, { lr = 1 }), optim.scaler { init_scale = 1024 }
    scaler:scale((p * 3):sum()):backward()
    assert.is_true(scaler:unscale(optimizer):item())
    near(3, optim.clip_grad_norm({ p }, 1))
    scaler:step(optimizer)
    near({ -1 }, p, 1e-5)
  end)

  it("serves several optimizers in a step, each unscaled once by the factor of that \z
    step", function()
    local p, q = parameter { 1 }, parameter { 1 }
    local a, b = optim.sgd({ p }, { lr = 1 }), optim.sgd({ q }, { lr = 1 })
    local scaler = optim.scaler { init_scale = 4, growth_interval = 1 }
    for round = 1, 2 do
      scaler:scale((p * 0.25 + q * 0.5):sum()):backward()
      if round == 1 then
        scaler:unscale(a)
        scaler:unscale(b)
        fails(function() scaler:unscale(a) end, "unscaled already")
      end
      scaler:step(a)
      scaler:step(b)
      near({ 1 - 0.25 * round }, p)
      near({ 1 - 0.5 * round }, q)
    end
  end)

  it("adapts once an iteration, by what all optimizers stepped in it have seen", function()
    local p, q = parameter { 1 }, parameter { 1 }
    local a, b = optim.sgd({ p }, { lr = 0 }), optim.sgd({ q }, { lr = 0 })
    local function factors(bad, count, interval)
      local scaler, seen = optim.scaler { init_scale = 4, growth_interval = interval }, {}
      for i = 1, count do
        scaler:scale((p + q * bad):sum()):backward()
        seen[i] = scaler:state().factor:item()           -- the factor of this iteration
        scaler:step(a)
        scaler:step(b)
      end
      return seen, scaler:state().factor:item()
    end
    local seen, last = factors(1, 9, 3)
    assert.same({ 4.0, 4.0, 4.0, 8.0, 8.0, 8.0, 16.0, 16.0, 16.0 }, seen)
    assert.equal(32.0, last)                             -- saving is a moment to adapt as well
    seen, last = factors(1 / 0, 3, 3)                    -- one of two overflows: halved, once
    assert.same({ 4.0, 2.0, 1.0 }, seen)
    assert.equal(0.5, last)
    -- Losses whose gradients add up are scaled alike.
    local scaler = optim.scaler { init_scale = 4, growth_interval = 1 }
    for round = 1, 3 do
      for _ = 1, 3 do scaler:scale(p:sum()):backward() end
      near(3 * 4.0 * 2 ^ (round - 1), p:grad():item())
      scaler:unscale(a)
      near(3, p:grad():item())
      scaler:step(a)
    end
  end)

  it("grows and shrinks only where it can come back", function()
    local p = parameter { 1 }
    local optimizer = optim.sgd({ p }, { lr = 1 })
    local scaler = optim.scaler { init_scale = 2.0 ^ 124, growth_interval = 1 }
    local function run(gradient)
      scaler:scale((p * gradient):sum()):backward()
      scaler:step(optimizer)
      return scaler:state().factor:item()
    end
    local before, seen = p:item(), {}
    for i = 1, 4 do seen[i] = run(0x1p-8) end
    assert.same({ 2.0 ^ 125, 2.0 ^ 126, 2.0 ^ 126, 2.0 ^ 126 }, seen)
    near(before - 4 * 0x1p-8, p:item(), 0)               -- unscaled rightly at the end of the range
    assert.equal(2.0 ^ 125, run(1 / 0))
    scaler:load_state { factor = ms.full(2.0 ^ -124, {}), good = ms.zeros {} }
    for _ = 1, 4 do run(1 / 0) end
    assert.equal(2.0 ^ -126, scaler:state().factor:item())
    before = p:item()
    assert.equal(2.0 ^ -125, run(1))
    near(before - 1, p:item(), 0)
    for _, scale in ipairs { 1 / 0, 0x1p127, 0x1p-127 } do
      fails(function() optim.scaler { init_scale = scale } end, "init_scale")
    end
  end)

  it("marks the gradients that it multiplies: clipping and stepping them is an error", function()
    local p, q = parameter { 1 }, parameter { 1 }
    local optimizer, scaler = optim.sgd({ p, q }, { lr = 1 }), optim.scaler { init_scale = 8 }
    q:sum():backward()
    scaler:scale(ms.recompute(function(x) return p * x end, ms.ones { 1 }):sum()):backward()
    optim.clip_grad_norm({ q }, 1)                       -- not reached by the scaled loss
    local how = "multiplied by the loss scale"
    fails(function() optim.clip_grad_norm({ p, q }, 1) end, "clip_grad_norm", how, "scaler:unscale")
    fails(function() optim.clip_grad_value({ p }, 1) end, "clip_grad_value", how, "scaler:unscale")
    fails(function() optimizer:step() end, "sgd", how, "scaler:step")
    fails(function() optimizer:step_param(p) end, how)
    scaler:unscale(optimizer)
    near(1, optim.clip_grad_norm({ p }, 5))
    scaler:step(optimizer)
    near({ 0 }, p)
    scaler:scale(p:sum()):backward()
    optimizer:zero_grad()
    p:sum():backward()                                   -- a new gradient has no mark
    optim.clip_grad_norm({ p }, 1)
    scaler:scale(p:sum()):backward()
    p:set_grad(ms.ones { 1 })
    optim.clip_grad_norm({ p }, 1)
    optimizer:zero_grad()
    -- In a chain of a ddp model, too.
    for _, scope in ipairs { "global", "bucket", "lagged" } do
      local clip = ms.hooks.clip { max_norm = 1, scope = scope }
      local net = ms.ddp(ms.nn.Linear(2, 2), { comm_hook = clip })
      local loss = scaler:scale(net(ms.ones { 1, 2 }):sum())
      fails(function() loss:backward() end, "clip", "'weight'", "loss scale", "scaler:unscale")
      loss = nil                                         -- luacheck: ignore
    end
  end)

  it("saves itself, and refuses unknown options", function()
    local a, b = optim.scaler { init_scale = 32 }, optim.scaler()
    near(65536, b:state().factor)
    b:load_state(a:state())
    near(32, b:state().factor)
    fails(function() optim.scaler { init = 3 } end, "'init'", "init_scale")
    fails(function() optim.scaler { growth_factor = -1 } end, "growth_factor")
    fails(function() a:step(optim.sgd({ parameter { 1 } })) end, "no parameter has a gradient")
  end)
end)

describe("16-bit parameters", function()
  it("have an f32 master: small steps are not lost", function()
    local function run(dtype, master)
      local p = ms.nn.Parameter(ms.ones { 64, dtype = dtype })
      local optimizer = optim.sgd({ p }, { lr = 2 ^ -12, master = master })
      for _ = 1, 256 do
        p:set_grad(ms.ones { 64, dtype = dtype })
        optimizer:step()
      end
      assert.equal(dtype, p:dtype())
      return p:to("f32"):mean():item()
    end
    -- 256 steps of 2^-12 are 2^-4; each alone is far below half a unit of bf16 at 1 (2^-9).
    near(1 - 2 ^ -4, run("bf16"))
    near(1 - 2 ^ -4, run("f16"))
    -- With stochastic rounding the mean is right: the standard deviation of such a walk over 64
    -- values is below 0.002; the tolerance is five of them.
    near(1 - 2 ^ -4, run("bf16", "none"), 0.01)
  end)
end)

describe("an averager", function()
  it("names mistakes", function()
    fails(function() optim.averager {} end, "either period or periods")
    fails(function() optim.averager { period = 2, periods = { { 1, 1 } } } end,
      "either period or periods")
    fails(function() optim.averager { period = 0 } end,
      "period must be a whole number of 1 or more")
    fails(function() optim.averager { period = 2, warmup = -1 } end, "warmup")
    fails(function() optim.averager { period = 2, elastic = 0 } end, "elastic")
    fails(function() optim.averager { periods = {} } end, "a list of { period, ranks }")
    fails(function() optim.averager { periods = { { 4, 2 } } } end,
      "1 ranks do not divide into blocks of 2")
    fails(function() optim.averager { periods = { { 4, 1 }, { 2, 1 } } } end, "must ascend")
    fails(function() optim.averager { perod = 2 } end, "did you mean 'period'")
    fails(function() optim.averager { period = 2 }:step {} end, "no parameters")
    fails(function() optim.averager { period = 2 }:step { "x" } end, "params.1 is a string")
    fails(function() optim.averager { period = 2 }:load_state {} end, "no state of an averager")
    fails(function() optim.sgd(ms.nn.Linear(1, 1), { shard = 2 }) end, "shard must be a group")
  end)
end)

-- First steps that can be worked out in the head, by step() and in backward.
describe("the first step of", function()
  local cases = {
    adam = { { lr = 0.1 }, 0.5, 1 - 0.1 }, adagrad = { { lr = 0.1 }, 2, 1 - 0.1 },
    rprop = { {}, 0.5, 1 - 0.01 }, adamax = { { lr = 0.1 }, 0.5, 1 - 0.1 },
    sgd = { { lr = 0.1 }, 0.5, 1 - 0.05 },
  }
  for kind, case in pairs(cases) do
    it(kind .. " is what arithmetic says", function()
      local stepped, early = parameter { 1 }, parameter { 1 }
      local opt = optim[kind]({ stepped }, case[1])
      stepped:set_grad(ms.tensor({ case[2] }, "f32"))
      opt:step()
      optim.in_backward(optim[kind], { early }, case[1])
      early:mul(case[2]):sum():backward()
      near({ case[3] }, stepped, 1e-7)
      near({ case[3] }, early, 1e-7)
    end)
  end
end)
