-- recipes/embed/two_engines: a C program with two engines; an error in one does not affect the
-- other.
local command = require "command"

local HOST = ("'%s/tests/embed/two_engines'"):format(os.getenv "MOONSHARD_BUILD")

describe("a host with two engines", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  -- Two recipes side by side: the host's exit code, stdout, stderr.
  local function host(first, second)
    command.write(folder .. "/a.lua", first)
    command.write(folder .. "/b.lua", second)
    local _, how, code = os.execute(
      ("cd '%s' && timeout -k 5 1800 %s a.lua x=1 -- b.lua x=2 >out 2>err"):format(folder, HOST))
    assert.equal("exit", how)
    return code, command.read(folder .. "/out"), command.read(folder .. "/err")
  end

  local GOOD = [[
    local ms = require "moonshard"
    local cfg = ms.config { x = 0 }
    ms.seed(cfg.x)
    local model = ms.nn.Linear(64, 64)
    local optimizer = ms.optim.adamw(model)
    local first
    for step in ms.steps(20) do
      local loss = model(ms.randn { 32, 64 }):square():mean()
      loss:backward()
      optimizer:step()
      first = first or loss:item()
    end
    assert(model(ms.randn { 32, 64 }):square():mean():item() < first)
    print("good " .. cfg.x)]]

  it("gives each its arguments and its own engine", function()
    local code, out, err = host(GOOD, GOOD)
    assert.equal(0, code, err)
    assert.matches("good 1\n", out)
    assert.matches("good 2\n", out)
  end)

  it("gets what recipes return, and their lines", function()
    local code, out, err = host([[
      local ms = require "moonshard"
      ms.config { x = 0 }
      ms.log("a line of %d", 1)
      ms.warn "a warning"
      return { loss = 0.5, names = { "a", "b" } }]], [[
      local ms = require "moonshard"
      ms.config { x = 0 }
      local model = ms.nn.Linear(2, 2)
      local result = ms.train {
        model = model, optimizer = ms.optim.sgd(model), steps = 3, quiet = true, run = false,
        data = function() return ms.ones { 4, 2 }, ms.zeros { 4, 2 } end,
        loss = function(m, x, y) return m(x):mse_loss(y) end,
      }
      assert(result.run == nil and result.loss)
      return result.step]])
    assert.equal(0, code, err)
    assert.equal([[a.lua: a line of 1
a.lua has returned {"loss":0.5,"names":["a","b"]}
b.lua has returned 2
]], out)
    assert.matches("^a.lua: moonshard: rank 0: a warning\n$", err)
    -- Nothing was written beside what the test has.
    local names = {}
    for _, name in ipairs(require "moonshard.core".list(folder)) do names[#names + 1] = name end
    assert.same({ "a.lua", "b.lua", "err", "out" }, names)
  end)

  it("shows the lines of a training that is not quiet, and nothing of one that is", function()
    local text = [[
      local ms = require "moonshard"
      ms.config { x = 0 }
      local model = ms.nn.Linear(2, 2)
      ms.train {
        model = model, optimizer = ms.optim.sgd(model), steps = 3, run = false, quiet = QUIET,
        data = function() return ms.ones { 4, 2 }, ms.zeros { 4, 2 } end,
        loss = function(m, x, y) return m(x):mse_loss(y) end,
      }
      ms.log "after it"]]
    local code, out, err = host(text:gsub("QUIET", "false"), (text:gsub("QUIET", "true")))
    assert.equal(0, code, err)
    assert.matches("a.lua: model  Linear, 6 parameters\n", out)
    assert.matches("a.lua: step     2/3  loss ", out)
    assert.matches("a.lua: after it\n", out)
    assert.same({ "b.lua: after it" }, { out:match "b.lua: [^\n]*" })
    assert.equal(1, select(2, out:gsub("b.lua: ", "")))
  end)

  it("tells which failed and why; the other one ends well", function()
    for text, want in pairs {
      ["error 'broken'"] = { 1, "a.lua ended with 1: a.lua:1: broken" },
      ["os.exit(7)"] = { 7, "a.lua ended with 7: the recipe called os.exit" },
      ["require 'moonshard'.config { y = 1 }"] = { 2, "unknown option 'x'" },
      ["local ms = require 'moonshard' ms.init { memory_bytes = 1000000 } \z
        ms.config { x = 0 } ms.zeros { 1000000 }"] = { 8, "no memory for 4000000 bytes" },
      ["require 'moonshard'.config { x = 0 } return print"] = {
        1, "what the recipe returns is no JSON",
      },
      ["local ms = require 'moonshard' ms.config { x = 0 } local m = ms.nn.Linear(1, 1) \z
        ms.train { model = m, optimizer = ms.optim.sgd(m), data = print, steps = 1, run = false, \z
        save = { every = 1 } }"] = { 1, "run = false writes nothing" },
      ["local s = string.dump(function() end) load(s)()"] = { 1, "a.lua:1" },
    } do
      local code, out, err = host(text, GOOD)
      assert.equal(want[1], code, text .. err)
      assert.matches(want[2]:gsub("%p", "%%%0"), err)
      assert.matches("good 2\n", out)
    end
  end)
end)
