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

  it("tells which failed and why; the other one ends well", function()
    for text, want in pairs {
      ["error 'broken'"] = { 1, "a.lua ended with 1: a.lua:1: broken" },
      ["os.exit(7)"] = { 7, "a.lua ended with 7: the recipe called os.exit" },
      ["require 'moonshard'.config { y = 1 }"] = { 2, "unknown option 'x'" },
      ["local ms = require 'moonshard' ms.init { memory_bytes = 1000000 } \z
        ms.config { x = 0 } ms.zeros { 1000000 }"] = { 8, "no memory for 4000000 bytes" },
      ["local s = string.dump(function() end) load(s)()"] = { 1, "a.lua:1" },
    } do
      local code, out, err = host(text, GOOD)
      assert.equal(want[1], code, text .. err)
      assert.matches(want[2]:gsub("%p", "%%%0"), err)
      assert.matches("good 2\n", out)
    end
  end)
end)
