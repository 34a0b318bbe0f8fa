-- ms.optim.ema: averages of weights by their formula, as weights for a while, in checkpoints.
local ms = require "moonshard"
local command = require "command"

-- Trains a small layer for some steps. before(i): called before step i.
local function train(model, optimizer, ema, steps, before)
  for i = 1, steps do
    if before then before(i) end
    model(ms.full(i, { 2, 3 }):to(model.weight:dtype())):sum():backward()
    optimizer:step()
    if ema then ema:step() end
  end
end

local function make(dtype)
  ms.seed(5)
  local model = ms.nn.Linear(3, 2)
  if dtype then model = model:to(dtype) end
  return model, ms.optim.sgd(model, { lr = 0.01 })
end

local function values(t) return t:to("f32"):reshape(-1):to_table() end

-- The averages that the formula gives, in the numbers of Lua: decay(n) in step n, from 0 on.
local function expected(steps, decay)
  local model, optimizer = make()
  local average, n = values(model.weight), 0
  for _ = 1, steps do
    model(ms.full(n + 1, { 2, 3 })):sum():backward()
    optimizer:step()
    for i, w in ipairs(values(model.weight)) do
      average[i] = decay(n) * average[i] + (1 - decay(n)) * w
    end
    n = n + 1
  end
  return average, model
end

-- Up to the rounding of f32 in each of a few steps.
local function near(wanted, t)
  for i, value in ipairs(values(t)) do assert.near(wanted[i], value, 1e-6) end
end

describe("averages of weights", function()
  it("follow them", function()
    local model, optimizer = make()
    local ema = ms.optim.ema(model, { decay = 0.75, warmup = false })
    train(model, optimizer, ema, 5)
    local wanted, whole = expected(5, function() return 0.75 end)
    assert.same(values(whole.weight), values(model.weight))
    near(wanted, ema:state().parameters.weight.average)
    ema:averaged(function() near(wanted, model.weight) end)
  end)

  it("forget the weights with which they began, as the first steps keep less", function()
    local model, optimizer = make()
    local ema = ms.optim.ema(model, { decay = 0.4 })
    train(model, optimizer, ema, 9)
    near(expected(9, function(n) return math.min(0.4, (1 + n) / (10 + n)) end),
      ema:state().parameters.weight.average)
  end)

  it("have a decay of each group, which may change", function()
    local model, optimizer = make()
    local ema = ms.optim.ema({ { params = { model.weight }, decay = 0 },
      { params = { model.bias } } }, { decay = 0.5, warmup = false })
    train(model, optimizer, ema, 2, function(i) ema:groups()[1].decay = i == 1 and 0 or 0.25 end)
    local first = values((select(2, expected(1, function() return 0 end))).weight)
    local last = values(model.weight)
    local wanted = {}
    for i in ipairs(first) do wanted[i] = 0.25 * first[i] + 0.75 * last[i] end
    near(wanted, ema:state().parameters.weight.average)
    ema:groups()[2].decay = 1
    assert.error_matches(function() ema:step() end, "decay must be 0 or more and below 1, not 1")
  end)

  it("are of what is trained", function()
    local model = make()
    model.bias:requires_grad_(false)
    assert.equal(1, #ms.optim.ema(model):groups()[1].params)
    model.weight:requires_grad_(false)
    assert.error_matches(function() ms.optim.ema(model) end, "no parameter that is trained")
  end)

  it("are the weights for a while, which then come back bit for bit", function()
    for _, dtype in ipairs { "f32", "bf16" } do
      local model, optimizer = make(dtype)
      local ema = ms.optim.ema(model, { decay = 0.9 })
      train(model, optimizer, ema, 4)
      local weights, average = values(model.weight), ema:state().parameters.weight.average
      local one, none, three = ema:averaged(function(a, b)
        assert.same(values(average:to(dtype)), values(model.weight))
        return a, nil, b
      end, 1, 3)
      assert.same({ 1, nil, 3 }, { one, none, three })
      assert.same(weights, values(model.weight))
      assert.same(values(average), values(ema:state().parameters.weight.average))
      assert.error_matches(function() ema:averaged(function() error "now" end) end, "now")
      assert.same(weights, values(model.weight))
      assert.not_same(weights, values(average))
      -- What is trained on is not what was shown.
      train(model, optimizer, ema, 1)
    end
  end)

  it("are no weights while they are", function()
    local model = make()
    local ema = ms.optim.ema(model)
    for _, name in ipairs { "step", "state", "averaged" } do
      assert.error_matches(function() ema:averaged(function() ema[name](ema, print) end) end,
        ("ema:%s: the weights are averages now"):format(name))
    end
    for _, name in ipairs { "step_param", "zero_grad", "lr", "overlap" } do
      assert.error_matches(function() ema[name](ema) end,
        ("ema:%s: an ema steps no weights"):format(name))
    end
    assert.error_matches(function() ms.optim.ema(model, { decay = 1 }) end, "decay must be")
    assert.error_matches(function() ms.optim.ema(model, { decay = "1" }) end, "decay")
    assert.error_matches(function() ms.optim.ema(model, { deacy = 0.9 }) end, "decay")
    assert.error_matches(function() ema.step(model) end, "with a colon")
  end)

  -- The model's own optimizer, made before or after, does not matter: it may be gone.
  it("keep others from changing the weights that they follow", function()
    for _, order in ipairs { "alone", "before", "after" } do
      local model = ms.nn.Linear(3, 2)
      if order == "after" then ms.optim.sgd(model, { lr = 0.01 }) end
      local ema = ms.optim.ema(model)
      if order == "before" then ms.optim.sgd(model, { lr = 0.01 }) end
      collectgarbage()
      assert.error_matches(function() ms.fsdp(model) end, "belongs to an optimizer already")
      assert.error_matches(function() model:to("bf16") end, "belongs to an optimizer")
      assert.error_matches(function() ms.nn.lora(model) end, "belongs to an optimizer already")
      assert.equal(0, ema:state().steps)
      ema = nil -- luacheck: ignore 311
      ms.fsdp(model)
    end
  end)

  it("go on from a state, which fits no optimizer", function()
    local model, optimizer = make()
    local ema = ms.optim.ema(model, { decay = 0.9 })
    train(model, optimizer, ema, 3)
    local weights, state = model:state(), ema:state()
    train(model, optimizer, ema, 3)
    local wanted = values(ema:state().parameters.weight.average)
    local again, other = make()
    again:load_state(weights)
    local own = ms.optim.ema(again, { decay = 0.9 })
    own:load_state(state)
    assert.equal(3, own:state().steps)
    for i = 4, 6 do
      again(ms.full(i - 3, { 2, 3 })):sum():backward()
      other:step()
      own:step()
    end
    assert.same(wanted, values(own:state().parameters.weight.average))
    assert.error_matches(function() optimizer:load_state(state) end, "the state is of ema")
    assert.error_matches(function() ema:load_state(optimizer:state()) end, "the optimizer is ema")
  end)
end)

describe("ms.train { ema = }", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  -- A run of so many steps, and the weights and averages after it.
  local function run(steps, options)
    ms.seed(9)
    local model = ms.nn.Sequential(ms.nn.Linear(3, 4), ms.nn.GELU(), ms.nn.Linear(4, 1))
    local n = 0
    local o = {
      model = model, optimizer = ms.optim.adamw(model, { lr = 0.01 }), steps = steps, quiet = true,
      data = { next = function()
        n = n + 1
        return ms.full(n % 3, { 2, 3 }), ms.full(n % 2, { 2, 1 })
      end, state = function() return { n = n } end, load_state = function(_, t) n = t.n end },
      loss = function(net, x, y) return net(x):mse_loss(y) end, run = folder .. "/run",
    }
    for name, value in pairs(options or {}) do o[name] = value end
    local result = ms.train(o)
    return model, result, result.ema and result.ema:averaged(function() return model:state() end)
  end

  it("validates and shows samples with the averages, and trains without them", function()
    local plain = run(12)
    local held = { batches = function()
      local given = false
      return function()
        if given then return nil end
        given = true
        return ms.full(2, { 4, 3 }), ms.full(1, { 4, 1 })
      end
    end }
    local shown
    local model, result, averages = run(12, {
      ema = 0.9, valid = held, eval = { every = 12 }, run = folder .. "/other",
      sample = { every = 12, run = function(net) shown = net:state() return "text" end },
    })
    for name, value in pairs(plain:state()) do
      assert.same(values(value), values(model:state()[name]), name)
      assert.same(values(averages[name]), values(shown[name]), name)
    end
    local other = ms.nn.Sequential(ms.nn.Linear(3, 4), ms.nn.GELU(), ms.nn.Linear(4, 1))
    other:load_state(averages)
    assert.equal(other(ms.full(2, { 4, 3 })):mse_loss(ms.full(1, { 4, 1 })):item(),
      result.valid.loss)
    assert.not_equal(model(ms.full(2, { 4, 3 })):mse_loss(ms.full(1, { 4, 1 })):item(),
      result.valid.loss)
  end)

  it("goes on bit for bit after a resume, also where a run begins to average", function()
    local _, _, wanted = run(10, { ema = { decay = 0.9 }, save = { every = 4 } })
    local _, _, again = run(10, { ema = 0.9, resume = folder .. "/run/step-00000004",
      run = folder .. "/again" })
    for name, value in pairs(wanted) do assert.same(values(value), values(again[name]), name) end
    -- Averages may be left out, and begin later.
    local plain = run(6, { resume = folder .. "/run/step-00000004", run = folder .. "/plain",
      save = { every = 2 } })
    local _, late, averages = run(6, { ema = 0.9, resume = folder .. "/plain/step-00000006",
      run = folder .. "/late" })
    assert.equal(0, late.ema:state().steps)
    for name, value in pairs(plain:state()) do
      assert.same(values(value), values(averages[name]), name)
    end
  end)

  it("refuses what it cannot be", function()
    assert.error_matches(function() run(1, { ema = 1.0 }) end, "ema: decay must be")
    assert.error_matches(function() run(1, { ema = { decy = 0.5 } }) end, "ema.decay")
    assert.error_matches(function() run(1, { ema = true }) end, "ema must be a number or table")
  end)
end)
