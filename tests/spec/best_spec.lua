-- The best validation of a run: its checkpoint stays; a run may stop when none gets better; both
-- after a resume. And --tensorboard, on any recipe.
local command = require "command"
local core = require "moonshard.core"

-- Validations have the losses of PLAN, one after the other.
local RECIPE <const> = [[
local ms = require "moonshard"
local cfg = ms.config {
  steps = 14, resume = "never", last = 1, best = true, patience = 0, by = "", fail = -1, from = 0,
  plan = "5 4 4.5 3 3.1 3.2 3.3",
}
local plan, seen, now = {}, cfg.from, nil
for word in cfg.plan:gmatch "%S+" do plan[#plan + 1] = word == "nan" and 0 / 0 or tonumber(word) end
local function batch() return ms.ones { 4, 2 }, ms.zeros { 4, 2 } end
local valid = {
  batches = function()
    local given = false
    return function()
      if given then now = nil return nil end
      given, seen = true, seen + 1
      now = plan[seen]
      return batch()
    end
  end,
}
local stop = cfg.patience > 0 and { patience = cfg.patience } or nil
if cfg.by ~= "" then
  stop = function(_, values) return ms.rank() == 0 and values.loss == 3 end
end
local model = ms.nn.Linear(2, 2)
local result = ms.train {
  by_hand = true, model = model, optimizer = ms.optim.sgd(model, { lr = 0.01 }), data = batch,
  loss = function(m, x, y)
    if now then return ms.full(now, {}) end
    return m(x):mse_loss(y)
  end,
  valid = valid, eval = { every = 2 }, steps = cfg.steps, run = "out", resume = cfg.resume,
  save = { every = 100, last = cfg.last, best = cfg.best and "valid" or nil }, stop = stop,
  before_step = function(step) if step == cfg.fail then error "stopped here" end end,
}
local found = result.best
ms.log("result %d %s %s %s", result.step, found and found.loss, found and found.step,
  found and found.path)
]]

describe("the best validation", function()
  local folder
  before_each(function()
    folder = command.folder()
    command.write(folder .. "/r.lua", RECIPE)
  end)
  after_each(function() command.remove(folder) end)

  local function succeed(options) return (command.succeed(folder, "run r.lua " .. options)) end
  local function checkpoints()
    local found = {}
    for _, name in ipairs(core.list(folder .. "/out")) do
      found[#found + 1] = tonumber(name:match "^step%-(%d+)$")
    end
    return found
  end

  it("has a checkpoint that stays", function()
    local out = succeed ""
    assert.same({ 8, 14 }, checkpoints())
    assert.matches("best validation loss 3.0000, after 8 steps: out/step%-00000008\n", out)
    assert.matches("result 13 3.0 8 out/step%-00000008\n", out)
    command.remove(folder .. "/out")
    assert.matches("result 13 3.0 8 nil\n", succeed "best=false")
    assert.same({ 14 }, checkpoints())
    -- The last one may be the best.
    command.remove(folder .. "/out")
    succeed "steps=8"
    assert.same({ 8 }, checkpoints())
  end)

  it("ends the run after so many others, also one that was resumed", function()
    local out = succeed "patience=2"
    assert.matches("stops after step 11: 2 validations without a better one than 3.0000 at \z
      step 8\n", out)
    assert.same({ 8, 12 }, checkpoints())
    assert.matches("result 11 3.0 8 ", out)
    assert.equal(12, core.json_decode(command.read(folder .. "/out/run.json")).steps)
    -- It has ended: nothing is left to do.
    out = succeed "patience=2 resume=auto from=6"
    assert.matches("\nsteps  12, where the run has stopped\n", out)
    assert.matches("all 12 steps were done already\n", out)
    -- Without stop it goes on.
    assert.matches("result 13 3.0 8 ", succeed "resume=auto from=6")

    command.remove(folder .. "/out")
    local code = command.run(folder, "run r.lua patience=2 fail=10")
    assert.equal(1, code)
    -- The error may come before the one of step 4 was removed.
    assert.equal(8, checkpoints()[#checkpoints()])
    out = succeed "patience=2 resume=auto from=4"
    assert.matches("stops after step 11: 2 validations", out)
    assert.matches("result 11 3.0 8 ", out)
    assert.same({ 8, 12 }, checkpoints())
  end)

  it("may be judged by a function, whose word on rank 0 counts", function()
    for _, ranks in ipairs { "", "-n 2 " } do
      local out = succeed(ranks .. "by=function")
      assert.matches("stops after step 7: the recipe's function stop says so\n", out)
      assert.matches("result 7 3.0 8 ", out)
      command.remove(folder .. "/out")
    end
  end)

  it("is none where no loss is a number", function()
    local out = succeed "patience=2 'plan=nan nan nan'"
    assert.matches("stops after step 3: ", out)
    assert.matches("result 3 nil nil nil\n", out)
    command.remove(folder .. "/out")
    assert.matches("result 13 1.0 4 ", succeed "'plan=nan 1 nan 2 3 4 5'")
  end)

  it("needs validations, and options that make sense", function()
    local function fails(text, message)
      command.write(folder .. "/bad.lua", ([[
        local ms = require "moonshard"
        local m = ms.nn.Linear(2, 2)
        ms.train { model = m, optimizer = ms.optim.sgd(m), steps = 1, data = function() end, %s }
      ]]):format(text))
      local code, _, err = command.run(folder, "run bad.lua")
      assert.equal(1, code, err)
      assert.truthy(err:find(message, 1, true), err)
    end
    local eval = "valid = { batches = print }, eval = { every = 1 }, "
    fails("stop = { patience = 1 }", "stop needs eval and valid")
    fails("save = { every = 1, best = 'valid' }", "save.best needs eval and valid")
    fails(eval .. "stop = { patience = 0 }", "stop.patience must be a count")
    fails(eval .. "stop = {}", "stop.patience is missing")
    fails(eval .. "save = { every = 1, best = 'loss' }", "save.best is \"valid\"")
  end)

  it("is among what --tensorboard writes for any recipe", function()
    succeed "--tensorboard steps=4"
    local files = core.list(folder .. "/out/tensorboard")
    assert.equal(1, #files)
    assert.truthy(command.read(folder .. "/out/tensorboard/" .. files[1]):find("val_loss", 1, true))
    command.remove(folder .. "/out")
    succeed "steps=4"
    assert.falsy((core.exists(folder .. "/out/tensorboard")))
  end)
end)
