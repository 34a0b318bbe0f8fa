-- Runs whose number of steps follows from minutes, samples at growing distances, dtype = "auto".
local command = require "command"
local core = require "moonshard.core"

local TEXT <const> = ("a text, and again a text; "):rep(400)

local RECIPE <const> = [[
local ms = require "moonshard"
local cfg = ms.config {
  minutes = 0.02, steps = { 0, replaces = "minutes" }, seconds = 0.1, warmup = 20, own = 0,
  dtype = { "f32", choices = { "f32", "bf16", "f16", "auto" } }, resume = "never", run = "out",
  fail = -1, save = 0, weak = -1, schedule = "cosine", constant = false,
}
local core = require "moonshard.core"
if cfg.weak == ms.rank() then                       -- a rank on an older processor
  local info = core.info
  core.info = function()
    local found = info()
    found.kernels = "avx2"
    return found
  end
end
local options = { warmup = cfg.warmup, steps = cfg.own > 0 and cfg.own or nil, decay = 5 }
if cfg.schedule ~= "wsd" then options.decay = nil end
local model = ms.nn.gpt2 {
  vocab = 256, context = 16, layers = 1, width = 32, heads = 2, dropout = 0.1,
}
if ms.world_size() > 1 then model = ms.ddp(model) end
local train = assert(ms.data.bytes "text")
ms.train {
  model = model, minutes = cfg.minutes, steps = cfg.steps, dtype = cfg.dtype,
  optimizer = ms.optim.adamw(model, { lr = 1e-3, schedule = ms.optim[cfg.schedule](options) }),
  data = train:loader { batch = 4, length = 16, shuffle = true },
  sample = cfg.seconds > 0 and { seconds = cfg.seconds, count = 4 } or nil,
  save = cfg.save > 0 and { every = cfg.save, last = 2 } or nil, run = cfg.run, resume = cfg.resume,
  after_step = function(step) if step == cfg.fail then error "stopped here" end end,
}
local sum = 0
for _, p in ipairs(model:parameters()) do sum = sum + p:pow(2):sum():item() end
ms.log("weights %.17g", sum)
]]

describe("minutes", function()
  local folder
  before_each(function()
    folder = command.folder()
    command.write(folder .. "/r.lua", RECIPE)
    command.write(folder .. "/text", TEXT)
  end)
  after_each(function() command.remove(folder) end)

  local function succeed(options) return (command.succeed(folder, "run r.lua " .. options)) end
  local function fails(code, options, ...)
    local found, _, err = command.run(folder, "run r.lua " .. options)
    assert.equal(code, found, err)
    for _, text in ipairs { ... } do assert.truthy(err:find(text, 1, true), err) end
  end
  -- The number of steps that a run has chosen.
  local function chosen(out)
    local steps, same = out:match "\n(%d+) steps; steps=(%d+) repeats this run"
    assert.equal(steps, same, out)
    return math.tointeger(tonumber(steps))
  end
  local function weights(out) return assert(out:match "weights (%S+)", out) end
  -- The losses of a run, step by step.
  local function losses(run)
    local list = {}
    for line in io.lines(("%s/%s/metrics.jsonl"):format(folder, run)) do
      local object = core.json_decode(line)
      list[object.step + 1] = ("%.17g"):format(object.loss)
    end
    return list
  end

  -- Runs until the minutes have room for as many steps, 14 unless given: a machine under load does
  -- fewer in the same time. Returns the exit code, the output and the minutes.
  local function timed(options, least)
    local message
    local before = options:find "resume" and folder .. "/before"
    local function shell(line) assert(os.execute(line)) end
    if before then shell(("cp -r '%s/out' '%s'"):format(folder, before)) end
    for _, minutes in ipairs { 0.004, 0.02, 0.1, 0.5, 2.5 } do
      local code, out, err =
        command.run(folder, ("run r.lua minutes=%g %s"):format(minutes, options))
      local steps = out:match "\n(%d+) steps; steps="
      if steps and tonumber(steps) >= (least or 14) then return code, out, minutes end
      assert.truthy(steps or err:find("no step fits", 1, true), err)
      message = steps and ("%s steps fit into %g minutes"):format(steps, minutes) or err
      command.remove(folder .. "/" .. (options:match "run=(%S+)" or "out"))
      if before then shell(("cp -r '%s' '%s/out'"):format(before, folder)) end
    end
    error(message)
  end

  for _, ranks in ipairs { "", "-n 2 " } do
    it("chooses steps that give the same bits when they are given" .. ranks, function()
      local code, out, minutes = timed(ranks .. "run=timed")
      assert.equal(0, code)
      local steps = chosen(out)
      assert.truthy(out:find(("\nsteps  as many as fit into %g minutes"):format(minutes), 1, true))
      assert.truthy(steps > 13)
      local again = succeed(("%srun=counted seconds=0 steps=%d"):format(ranks, steps))
      assert.equal(weights(out), weights(again))
      local first, second = losses "timed", losses "counted"
      assert.equal(steps, #first)
      assert.same(first, second)
      local about = core.json_decode(core.file_read(folder .. "/timed/run.json"))
      assert.equal(steps, about.steps)
    end)
  end

  it("keeps the number of its checkpoint, with any minutes", function()
    local code, out = timed("save=10 fail=25", 26)
    assert.equal(1, code)
    local steps = chosen(out)
    local resumed = succeed "save=10 resume=auto minutes=1000"
    assert.matches(("\nsteps  %d, the checkpoint's\n"):format(steps), resumed)
    assert.matches("run    out %(resumed at step 20%)\n", resumed)
    assert.equal(weights(succeed(("run=whole steps=%d"):format(steps))), weights(resumed))
  end)

  it("times again where the checkpoint has no number yet", function()
    local code = command.run(folder, "run r.lua save=5 fail=7 warmup=30")
    assert.equal(1, code)
    fails(1, "resume=out/step-00000005 warmup=17", "after step 18", "warm-up",
      "is 17 steps: make it 18 or more")
    local _, out = timed("save=5 resume=auto warmup=30", 31)
    assert.equal(weights(succeed(("run=whole warmup=30 steps=%d"):format(chosen(out)))),
      weights(out))
  end)

  it("gives its number to each kind of schedule", function()
    for _, kind in ipairs { "linear", "wsd" } do
      local _, out = timed("schedule=" .. kind)
      assert.equal(weights(out),
        weights(succeed(("schedule=%s own=%d steps=%d"):format(kind, chosen(out), chosen(out)))))
    end
  end)

  it("shows samples at growing distances, and one at the end", function()
    local out = succeed "seconds=0.001 steps=40 --log-every 1"
    -- All times before the thirteenth step are over then; the others double.
    local at = {}
    for step in out:gmatch "\nstep +(%d+)/40[^\n]*\n%-%-%-%- sample" do
      at[#at + 1] = math.tointeger(tonumber(step))
    end
    assert.truthy(#at >= 2, out)
    assert.equal(12, at[1])
    assert.equal(39, at[#at])
    local _, count = succeed("seconds=1e6 steps=20 run=late"):gsub("%-%-%-%- sample", "")
    assert.equal(1, count)
  end)

  it("refuses what makes no sense", function()
    fails(2, "minutes=0.00001", "minutes=1e-05: a step takes", "no step fits after the first 13")
    fails(1, "minutes=0", "minutes must be above 0, not 0")
    fails(1, "warmup=12", "chosen after step 13", "the warm-up of optim.cosine is 12 steps",
      "make it 13 or more")
    fails(1, "own=100", "optim.cosine has steps = 100 of its own", "leave steps out there")
    command.write(folder .. "/both.lua", [[
      local ms = require "moonshard"
      local m = ms.nn.Linear(1, 1)
      local o, d = ms.optim.sgd(m), function() end
      local given = { model = m, optimizer = o, data = d, steps = 20 }
      for key, value in pairs(load("return " .. ...)()) do given[key] = value end
      ms.train(given)]])
    for options, message in pairs {
      ["minutes = 1"] = "steps and minutes are both given",
      ["sample = { every = 1, seconds = 1 }"] = "sample.every and sample.seconds are both given",
      ["sample = { seconds = 0 }"] = "sample.seconds must be above 0",
      ["sample = {}"] = "sample.every is missing",
    } do
      local text = command.read(folder .. "/both.lua"):gsub('load%("return " .. ...%)%(%)',
        "{ " .. options .. " }")
      command.write(folder .. "/one.lua", text)
      local code, _, err = command.run(folder, "run one.lua")
      assert.equal(1, code, err)
      assert.truthy(err:find(message, 1, true), err)
    end
  end)

  it("assumes a number in a check, and says so", function()
    local out = command.succeed(folder, "check r.lua save=30 dtype=auto")
    assert.matches("\nsteps 31 are assumed: minutes is 0.02", out)
    assert.matches("\ndtype b?f[13][62]: ", out)
    local many = command.succeed(folder, "check r.lua -n 2 --json save=30")
    assert.matches("31 are assumed", core.json_decode(many).assumptions[1])
  end)
end)

describe("dtype = \"auto\"", function()
  local folder
  before_each(function()
    folder = command.folder()
    command.write(folder .. "/r.lua", RECIPE)
    command.write(folder .. "/text", TEXT)
  end)
  after_each(function() command.remove(folder) end)
  local function succeed(options, settings)
    return (command.succeed(folder, "run r.lua seconds=0 steps=16 " .. options, settings))
  end
  local fast = core.info().kernels == "avx512bf16" and core.info().blas:find "oneDNN"
  local own = fast and "bf16: this processor multiplies bf16" or "f32: [^\n]* not multiply bf16"

  it("is bf16 where the processor multiplies it, else f32", function()
    assert.matches("\ndtype  " .. own .. "\n", succeed "dtype=auto")
    assert.matches("\ndtype  f32: this processor does not multiply bf16\n",
      succeed("dtype=auto", "MOONSHARD_CPU=avx2"))
  end)

  it("is that of the weakest rank", function()
    assert.matches("\ndtype  f32: [^\n]* not multiply bf16\n", succeed "dtype=auto -n 2 weak=1")
    assert.matches("\ndtype  " .. own .. "\n", succeed "dtype=auto -n 2 run=alike")
  end)

  it("stays that of the checkpoint", function()
    for _, dtype in ipairs { "f16", "bf16", "f32" } do
      local options = ("run=%s save=8 "):format(dtype)
      local code = command.run(folder,
        ("run r.lua seconds=0 steps=16 fail=10 %s dtype=%s"):format(options, dtype))
      assert.equal(1, code)
      local out = succeed(options .. "dtype=auto resume=auto",
        dtype == "bf16" and "MOONSHARD_CPU=avx2" or nil)
      assert.matches(("\ndtype  %s: the checkpoint's\n"):format(dtype), out)
      local whole = succeed(("run=whole-%s dtype=%s"):format(dtype, dtype),
        dtype == "bf16" and "MOONSHARD_CPU=avx2" or nil)
      if dtype ~= "bf16" then
        assert.equal(whole:match "weights %S+", out:match "weights %S+")
      end
    end
  end)
end)
