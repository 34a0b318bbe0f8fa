-- What is told where memory ends: what the run would take, its largest parts, options that fit.
local command = require "command"
local core = require "moonshard.core"

-- `steps` is more than anybody checks.
local RECIPE = [[
local ms = require "moonshard"
local cfg = ms.config(ms.scripts.options {
  steps = 1000000, batch = 64, accumulate = 1, width = 64, layers = 8, recompute = false,
})
local function model()
  return ms.nn.gpt2 { vocab = 64, context = 32, layers = cfg.layers, width = cfg.width, heads = 2,
    recompute = cfg.recompute or nil }
end
local net, optimizer = ms.scripts.apply(cfg, model, function(m) return ms.optim.adamw(m) end)
local x = ms.zeros({ cfg.batch, 32, dtype = "i64" })
ms.train { model = net, optimizer = optimizer, steps = cfg.steps, accumulate = cfg.accumulate,
  data = function() return x, x end }
]]

describe("where memory ends", function()
  local folder
  before_each(function()
    folder = command.folder()
    command.write(folder .. "/r.lua", RECIPE)
  end)
  after_each(function() command.remove(folder) end)

  local function peak(options)
    return core.json_decode((command.succeed(folder, "check r.lua --json steps=3 " .. options)))
      .peak_bytes[1]
  end

  local function told(arguments, settings)
    local code, _, err = command.run(folder, arguments, settings)
    assert.equal(8, code)
    assert.matches("no memory for %d+ bytes: live %d+, .- limit %d+", err)
    return err
  end

  it("tells parts, and options whose peak is within the limit", function()
    local whole = peak ""
    local limit = whole * 2 // 3
    local err = told(("check r.lua --limit %d"):format(limit))
    assert.matches(("in all it would take %.1f MiB, and the limit is %.1f MiB: what steps make \z
      %%(activations%%) [%%d.]+ MiB, optimizer states [%%d.]+ MiB, [%%a]+ [%%d.]+ MiB"):format(
      whole / 2 ^ 20, limit / 2 ^ 20), err)
    local fits = err:match "what would fit, by `moonshard check`: ([^\n]*)"
    local batch, passes = fits:match "batch=(%d+) accumulate=(%d+)"
    assert.equal(64, batch * passes)
    -- The largest batch that fits.
    assert.is_true(peak(("batch=%s accumulate=%s"):format(batch, passes)) <= limit)
    assert.is_true(peak(("batch=%d accumulate=%d"):format(2 * batch, passes // 2)) > limit)
    assert.matches("; recompute=true %(", fits)
    assert.is_true(peak "recompute=true" <= limit)
  end)

  it("tells it at the end of a run, of one rank and of several", function()
    local limit = peak "batch=256" * 2 // 3
    local switches = ("--memory %d batch=256"):format(limit)
    assert.matches("what would fit, .*recompute=true", told("run r.lua " .. switches))
    for _, ranks in ipairs { "-n 2", "-n 2 --thread-ranks" } do
      local err = told(("run r.lua %s %s"):format(ranks, switches))
      assert.matches("in all it would take [%d.]+ MiB on rank 0", err)
      assert.equal(1, select(2, err:gsub("in all it would take", "")))
      assert.matches("what would fit, .*recompute=true", err)
    end
  end)

  it("proposes to shard, and to offload", function()
    local options = "batch=1 width=256"
    local limit = peak(options) * 2 // 3
    -- Parameters, gradients and states are most of it.
    assert.matches("what would fit, [^;]*: shard=full_shard %(",
      told(("check r.lua -n 4 --limit %d %s"):format(limit, options)))
    assert.matches("what would fit, [^;]*: shard=full_shard shard.offload=cpu %(",
      told(("check r.lua --device cuda --limit %d %s"):format(limit, options)))
    -- And where nothing helps.
    assert.matches("no option was found with which it would fit",
      told(("check r.lua --limit 100000 %s"):format(options)))
  end)

  it("gives up a check that does not end", function()
    command.write(folder .. "/r.lua", (RECIPE:gsub("steps = cfg.steps", "steps = 1000000000")
      :gsub("steps = 1000000, ", "")))
    local err = told("run r.lua --memory 4000000", "MOONSHARD_ADVICE_SECONDS=2")
    assert.is_nil(err:find("would", 1, true))
  end)

  it("keeps quiet about other errors, and about scripts that cannot be checked", function()
    command.write(folder .. "/r.lua", "error 'no memory for cakes'")
    local _, _, err = command.run(folder, "run r.lua")
    assert.is_nil(err:find("would", 1, true))
    command.write(folder .. "/r.lua", [[
      local ms = require "moonshard"
      if ms.info().device == "sim" then error "not here" end
      ms.zeros { 1 << 20 }
    ]])
    assert.is_nil(told("run r.lua --memory 1000000"):find("would", 1, true))
  end)
end)
