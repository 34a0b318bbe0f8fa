-- State that a resumed run restores besides weights and data: written learning rates, and the
-- numbers of math.random.
local ms = require "moonshard"
local core = require "moonshard.core"
local command = require "command"
local optim = ms.optim

describe("hyper-parameters written to groups", function()
  local function make(options)
    local model = ms.nn.Sequential(ms.nn.Linear(2, 2), ms.nn.Linear(2, 2))
    return optim.adamw({ { params = model[1] }, { params = model[2], lr = 0.5 } },
      options or { lr = 0.1 })
  end
  local function reload(optimizer, other)
    local folder = command.folder()
    finally(function() command.remove(folder) end)
    local path = assert(ms.checkpoint.save(folder, { step = 1, optimizer = optimizer }))
    local loaded, message, code = ms.checkpoint.load(path, { optimizer = other })
    return loaded and other, message, code
  end

  it("come back, in their group; what was not written is what the new optimizer was \z
    given", function()
    local optimizer = make()
    local groups = optimizer:groups()
    groups[2].lr, groups[2].betas, groups[1].weight_decay = 0.25, { 0.5, 0.75 }, 0
    local other = assert(reload(optimizer, make { lr = 0.3, eps = 1e-4 })):groups()
    assert.same({ 0.3, 0.25 }, { other[1].lr, other[2].lr })
    assert.same({ { 0.9, 0.999 }, { 0.5, 0.75 } }, { other[1].betas, other[2].betas })
    assert.same({ 0, 0.01, 1e-4 }, { other[1].weight_decay, other[2].weight_decay, other[2].eps })
    -- They are still written: the next save has them too. The copy is no alias.
    groups[2].betas[1] = 0.125
    assert.equal(0.5, other[2].betas[1])
    local third = assert(reload(optimizer, make())):groups()
    assert.same({ 0.125, 0.75 }, third[2].betas)
  end)

  it("are those of the state that was loaded, whatever was written since", function()
    local optimizer = make()
    local before = optimizer:state()
    assert.is_nil(before.groups)
    optimizer:groups()[1].lr = 7
    optimizer:groups()[1].betas[1] = 0.5  -- in place, in a table that is the defaults' own
    local after = optimizer:state()
    optimizer:load_state(before)
    assert.same({ 0.1, 0.5, 0.9 },
      { optimizer:groups()[1].lr, optimizer:groups()[2].lr, optimizer:groups()[1].betas[1] })
    optimizer:load_state(after)
    assert.same({ 7, 0.5 }, { optimizer:groups()[1].lr, optimizer:groups()[1].betas[1] })
    for _, group in ipairs { optimizer:groups()[2], make():groups()[1] } do
      assert.equal(0.9, group.betas[1])
    end
  end)

  it("may be a tensor that the device writes", function()
    local optimizer = make { lr = ms.tensor(0.5) }
    optimizer:groups()[1].lr:fill_(0.125)
    local other = assert(reload(optimizer, make { lr = ms.tensor(2.0) })):groups()
    assert.equal(0.125, other[1].lr:item())
    optimizer:groups()[1].lr:fill_(3)
    assert.equal(0.125, other[1].lr:item())
  end)

  it("that do not fit are a mismatch, and nothing is changed", function()
    local optimizer = make()
    optimizer:groups()[2].lr = 0.25
    local model = ms.nn.Linear(2, 2)
    local single = optim.adamw(model, { lr = 0.1 })
    local state = single:state()
    state.groups = { [2] = { lr = 0.25 } }
    assert.error_matches(function() single:load_state(state) end,
      "the state has values of group 2; here there are 1 groups")
    state.groups = { { lr = 3, momentum = 0.9 } }
    assert.error_matches(function() single:load_state(state) end,
      "load_state: group 1 cannot take momentum = 0.9")
    assert.equal(0.1, single:groups()[1].lr)
  end)
end)

describe("a resumed run", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  it("goes on with the learning rate that was written, bit for bit", function()
    command.write(folder .. "/r.lua", [[
local ms = require "moonshard"
local cfg = ms.config { steps = 9, run = "out", resume = "never" }
local model = ms.nn.Linear(2, 2)
local optimizer = ms.optim.adamw(model, { lr = 0.1 })
ms.train {
  model = model, optimizer = optimizer, steps = cfg.steps, run = cfg.run, resume = cfg.resume,
  save = { every = 3 },
  data = function() return ms.randn { 4, 2 }, ms.ones { 4, 2 } end,
  loss = function(m, x, y) return m(x):mse_loss(y) end,
  after_step = function(step) if step == 4 then optimizer:groups()[1].lr = 0.01 end end,
}
print(("result lr %g weight %.17g"):format(optimizer:lr(), model.weight:detach():sum():item()))
]])
    local whole = command.succeed(folder, "run r.lua run=whole"):match "result [^\n]*"
    assert.matches("^result lr 0.01 ", whole)
    command.succeed(folder, "run r.lua steps=6")
    local resumed = command.succeed(folder, "run r.lua resume=auto")
    assert.equal(whole, resumed:match "result [^\n]*")
  end)

  it("draws from math.random what the seed and the step say, on all ranks", function()
    command.write(folder .. "/r.lua", [[
local ms = require "moonshard"
local cfg = ms.config { resume = "" }
local function draw() return ("%d %.17g"):format(math.random(1 << 60), math.random()) end
print("begin " .. draw())
if cfg.resume ~= "" then
  assert(ms.checkpoint.load(cfg.resume, {}))
else
  assert(ms.checkpoint.save("out", { step = 5 }))
  assert(ms.checkpoint.save("out", { step = 6 }))
end
print("then " .. draw())
]])
    local function run(arguments)
      local begin, after = {}, {}
      local out = command.succeed(folder, "run r.lua " .. arguments)
      for text in out:gmatch "begin ([^\n]*)" do begin[#begin + 1] = text end
      for text in out:gmatch "then ([^\n]*)" do after[#after + 1] = text end
      for i = 2, #begin do assert.same({ begin[1], after[1] }, { begin[i], after[i] }) end
      return begin[1], after[1], #begin
    end
    local begin, after = run ""
    assert.same({ begin, after, 1 }, { run "" })
    assert.same({ begin, after, 3 }, { run "-n 3" })
    assert.same({ begin, after, 2 }, { run "-n 2 --thread-ranks" })
    assert.same({ begin, after, 1 }, { run "--seed 0" })
    assert.not_equal(begin, (run "--seed 1"))
    local _, at_five = run "resume=out/step-00000005"
    local _, again = run "-n 2 resume=out/step-00000005"
    local _, at_six = run "resume=out/step-00000006"
    assert.equal(at_five, again)
    assert.not_equal(at_five, at_six)
    assert.not_equal(at_five, begin)
    assert.not_equal(at_five, after)
  end)

  it("leaves math.random alone in a Lua state that is not the program's", function()
    math.randomseed(11)
    local expected = math.random(1 << 60)
    math.randomseed(11)
    assert(ms.checkpoint.load(assert(ms.checkpoint.save(folder .. "/out", { step = 1 })), {}))
    assert.equal(expected, math.random(1 << 60))
    assert.truthy(core.exists(folder .. "/out/step-00000001/manifest.json"))
  end)
end)
