-- The folder of a run: which checkpoints stay, which are set aside, what resume=auto does with
-- damaged ones.
local command = require "command"
local core = require "moonshard.core"

-- A model so small that a step takes almost no time. It prints its weight, which differs between
-- branches with different data.
local RECIPE = [[
local ms = require "moonshard"
local cfg = ms.config {
  steps = 10, run = "out", resume = "never", every = 5, last = 0, keep_every = 0, target = 0.0,
  width = 2, kill = -1,
}
local model = ms.nn.Linear(cfg.width, 2)
local function batch() return ms.ones { 4, cfg.width }, ms.full(cfg.target, { 4, 2 }) end
local result = ms.train {
  by_hand = true,                                      -- ranks have equal data
  model = model,
  optimizer = ms.optim.adamw(model, { lr = 0.1 }),
  data = batch,
  steps = cfg.steps,
  run = cfg.run,
  resume = cfg.resume,
  loss = function(m, x, y) return m(x):mse_loss(y) end,
  before_step = function(step)
    if step == cfg.kill then
      io.popen("kill -TERM " .. io.open "/proc/self/stat":read "a":match "^%d+"):close()
    end
  end,
  save = {
    every = cfg.every,
    last = cfg.last > 0 and cfg.last or nil,
    keep_every = cfg.keep_every > 0 and cfg.keep_every or nil,
  },
}
print("lost " .. tostring(result.lost_save))
print(("weight %.9g"):format(model.weight:detach():sum():item()))
]]

describe("the folder of a run", function()
  local folder
  before_each(function()
    folder = command.folder()
    command.write(folder .. "/r.lua", RECIPE)
  end)
  after_each(function() command.remove(folder) end)

  local function run(options) return command.run(folder, "run r.lua " .. options) end
  local function succeed(options) return command.succeed(folder, "run r.lua " .. options) end
  local function weight(out) return assert(out:match "weight (%S+)", out) end

  -- The names in the run's folder that begin as given.
  local function names(prefix)
    local found = {}
    for _, name in ipairs(core.list(folder .. "/out")) do
      if name:sub(1, #prefix) == prefix then found[#found + 1] = name end
    end
    return found
  end

  local function damage(path, at)
    local bytes = assert(command.read(path))
    at = at < 0 and #bytes + 1 + at or at
    command.write(path,
      bytes:sub(1, at - 1) .. string.char(bytes:byte(at) ~ 1) .. bytes:sub(at + 1))
  end
  local function damage_manifest(step)
    damage(("%s/out/step-%08d/manifest.json"):format(folder, step), 30)
  end
  local function damage_data(step)
    damage(("%s/out/step-%08d/tensors.safetensors"):format(folder, step), -1)
  end

  it("keeps what a rewound run saves, and sets the branch aside that was left", function()
    succeed "steps=30 last=1 keep_every=10"
    assert.same({ "step-00000010", "step-00000020", "step-00000030" }, names "step-")
    local out = succeed "steps=25 last=1 keep_every=10 target=3 resume=out/step-00000010"
    assert.matches(
      "set aside +out/step%-00000030, now aside%-step%-00000030: the run continues from step 10\n",
      out)
    assert.matches("set aside +out/step%-00000020, now aside%-step%-00000020: ", out)
    for _, step in ipairs { 15, 20, 25 } do
      assert.matches(("saved out/step%%-000000%d\n"):format(step), out)
    end
    assert.same({ "step-00000010", "step-00000020", "step-00000025" }, names "step-")
    assert.same({ "aside-step-00000020", "aside-step-00000030" }, names "aside-")
    -- auto continues the branch that was trained last.
    local resumed = succeed "steps=25 target=3 resume=auto"
    assert.matches("resumed from out/step%-00000025", resumed)
    assert.equal(weight(out), weight(resumed))
    -- A second abandoned branch does not overwrite the first.
    succeed "steps=21 last=1 keep_every=10 target=5 resume=out/step-00000010"
    assert.same({
      "aside-2-step-00000020", "aside-step-00000020", "aside-step-00000025", "aside-step-00000030",
    }, names "aside-")
  end)

  it("gives one that was set aside its name back when it is gone on from", function()
    local whole = weight((succeed "steps=20"))
    succeed "steps=20 target=3 resume=out/step-00000010"
    assert.same({ "step-00000005", "step-00000010", "step-00000015", "step-00000020" },
      names "step-")
    local out = succeed "steps=25 every=100 resume=out/aside-step-00000020"
    assert.matches("set aside +out/step%-00000020, now aside%-2%-step%-00000020", out)
    assert.same({ "aside-2-step-00000020", "aside-step-00000015" }, names "aside-")
    assert.equal(whole, weight((succeed "steps=20 resume=out/step-00000020")))
  end)

  it("tells a checkpoint of the same step that is another one from the one that it goes on from, \z
    however that is named", function()
    succeed "steps=10"
    succeed "steps=10 target=3 run=other"
    local ours = weight((succeed "steps=12 every=100 run=copy resume=./out/step-00000010"))
    local out = succeed "steps=12 every=100 run=other resume=out/step-00000010"
    assert.equal(ours, weight(out))
    assert.matches("set aside +other/step%-00000010, now aside%-step%-00000010", out)
    out = succeed "steps=12 every=100 run=out resume=./out/../out/step-00000010/"
    assert.is_nil(out:match "set aside")
    assert.equal(ours, weight(out))
  end)

  it("leaves all as it is where there is nothing to train", function()
    succeed "steps=20"
    local metrics = command.read(folder .. "/out/metrics.jsonl")
    assert.matches("all 10 steps were done already", (succeed "steps=10 resume=out/step-00000015"))
    assert.same({}, names "aside-")
    assert.equal(metrics, command.read(folder .. "/out/metrics.jsonl"))
  end)

  it("never counts damaged checkpoints when it removes old ones", function()
    succeed "steps=20"
    damage_manifest(15)
    os.remove(folder .. "/out/step-00000010/tensors.safetensors")
    -- 15 and 10 are damaged: with 25, the three newest that can be read are 25, 20 and 5.
    succeed "steps=25 last=3 resume=auto"
    assert.same(
      { "step-00000005", "step-00000010", "step-00000015", "step-00000020", "step-00000025" },
      names "step-")
    succeed "steps=26 last=3 resume=auto"
    assert.same({ "step-00000020", "step-00000025", "step-00000026" }, names "step-")
  end)

  it("with last = 1, the checkpoint that was gone on from stays until the next is on \z
    disk", function()
    succeed "steps=10"
    damage_data(10)
    local out, err = succeed "steps=12 last=1 every=1 resume=auto"
    assert.matches("step%-00000010/tensors.safetensors.*it is skipped", err)
    assert.matches("resumed from out/step%-00000005", out)
    assert.same({ "step-00000012" }, names "step-")
    assert.same({ "aside-step-00000010" }, names "aside-")
  end)

  it("resume=auto says what it passes over, and goes on from the newest that can be \z
    read", function()
    local whole = weight((succeed "steps=20"))
    damage_manifest(20)
    assert(os.remove(folder .. "/out/step-00000015/tensors.safetensors"))
    damage_data(10)
    local out, err = succeed "steps=20 resume=auto"
    for _, file in ipairs {
      "step%-00000020/manifest.json", "step%-00000015/tensors.safetensors",
      "step%-00000010/tensors.safetensors",
    } do
      assert.matches("rank 0: 'out/" .. file .. "'[^\n]*; it is skipped\n", err)
    end
    assert.matches("resuming from out/step%-00000005", err)
    assert.matches("resumed from out/step%-00000005", out)
    assert.equal(whole, weight(out))
    -- The same where the folder was named.
    damage_manifest(20)
    local _, said = succeed "steps=20 resume=out"
    assert.matches("resuming from out/step%-00000015", said)
  end)

  it("ends with 3 where there are checkpoints and none can be read", function()
    succeed "steps=5"
    damage_manifest(5)
    local metrics = command.read(folder .. "/out/metrics.jsonl")
    for _, resume in ipairs { "auto", "out" } do
      local code, out, err = run("steps=10 resume=" .. resume)
      assert.equal(3, code, out)
      assert.matches("'out/step%-00000005/manifest.json' is damaged[^\n]*; it is skipped", err)
      assert.matches("resume: no checkpoint in 'out' can be read", err)
      assert.is_nil(out:match "step +0/")
    end
    assert.equal(3, (run "-n 2 steps=10 resume=auto"))
    -- Found damaged only when the data are read: the same.
    damage_manifest(5)
    damage_data(5)
    local code, _, err = run "steps=10 resume=auto"
    assert.equal(3, code)
    assert.matches("tensors.safetensors.*it is skipped\n.*no checkpoint in 'out' can be read",
      err)
    assert.equal(metrics, command.read(folder .. "/out/metrics.jsonl"))
    -- Without any checkpoint, training begins, and a log line says so.
    assert.matches("nothing to resume in fresh: training begins at step 0",
      (succeed "steps=1 run=fresh resume=auto"))
  end)

  it("ends with 3 where the newest is of a newer version or does not fit: it is never passed \z
    over", function()
    succeed "steps=10"
    local path = folder .. "/out/step-00000010/manifest.json"
    local text = assert(command.read(path))
    local body = text:match '^{"hash":"%x+","manifest":(.*)}\n$':gsub('"version":1', '"version":5')
    command.write(path, ('{"hash":"%016x","manifest":%s}\n'):format(core.hash(body), body))
    local code, _, err = run "steps=12 resume=auto"
    assert.equal(3, code)
    assert.matches("step%-00000010/manifest.json' has version 5; \z
      this Moonshard reads versions up to 4", err)
    assert.is_nil(err:match "it is skipped")
    command.write(path, text)
    code, _, err = run "steps=12 width=3 resume=auto"
    assert.equal(3, code)
    assert.matches("out/step%-00000010', 'model': ", err)
    assert.is_nil(err:match "it is skipped")
    assert.same({}, names "aside-")
  end)

  it("says saved only when it is so, and a lost last save ends with 3", function()
    -- A file in place of the temporary folder: the writing thread fails on it.
    local function block(step)
      command.write(("%s/out/.tmp-step-%08d"):format(folder, step), "in the way")
    end
    succeed "steps=5 every=5"
    block(15)
    local code, out, err = run "steps=15 every=5 resume=auto"
    assert.equal(3, code, err)
    assert.matches("saved out/step%-00000010\n", out)
    assert.is_nil(out:match "saved out/step%-00000015")
    assert.matches("lost [^\n]*out/.tmp%-step%-00000015", out)
    assert.matches("weight ", out)  -- the recipe's code after the training still runs
    assert.matches("rank 0: out/step%-00000015 was not saved: [^\n]*out/.tmp%-step%-00000015", err)
    assert.matches(
      "\nmoonshard: the last checkpoint was not saved: [^\n]*out/.tmp%-step%-00000015[^\n]*\n$",
      err)
    assert.same({ "step-00000005", "step-00000010" }, names "step-")
    -- A checkpoint that was not saved is reported; a later one that is saved makes the run succeed.
    block(12)
    out, err = succeed "steps=14 every=2 resume=auto"
    assert.matches("step%-00000012 was not saved", err)
    assert.is_nil(out:match "saved out/step%-00000012")
    assert.matches("saved out/step%-00000014\n", out)
    assert.matches("lost nil\n", out)
    -- A run that was requested to stop ends with 75 only if its last checkpoint is on disk.
    block(18)
    code, out, err = run "steps=40 every=100 kill=17 resume=auto"
    assert.equal(128 + 15, code, out)
    assert.matches(
      "step%-00000018 was not saved.*stopped on request after step 17; no checkpoint is saved",
      err)
    assert.equal(75, (run "steps=40 every=100 kill=18 resume=auto"))
    assert.matches("resumed at step 19%)", (succeed "steps=20 every=100 resume=auto"))
    for step = 16, 20 do command.remove(("%s/out/step-%08d"):format(folder, step)) end
    assert.same({ 3, 0 },
      { (run "-n 2 steps=15 every=5 resume=auto"), (run "-n 2 steps=16 every=2 resume=auto") })
  end)

  it("a disk that is full when the last checkpoint is written ends the run with 3, and \z
    metrics.jsonl has whole lines", function()
    -- The shell's limit of a file's size, with its signal ignored, is a disk that is full for every
    -- file at once: the tensors do not fit, and then a line of metrics.jsonl does not.
    local limited = ("sh -c 'trap \"\" XFSZ; ulimit -f %d; exec \"$@\"' sh")
    local function run_limited(blocks, options)
      local line = command.line(folder, "run r.lua " .. options, limited:format(blocks))
      local _, _, code = os.execute(("{ %s; } >'%s/.stdout' 2>'%s/.stderr'")
        :format(line, folder, folder))
      return code, command.read(folder .. "/.stdout"), command.read(folder .. "/.stderr")
    end
    succeed "steps=1 width=1024"  -- the peak is measured and kept, which needs no limit
    local code, out, err = run_limited(16, "steps=4 every=4 width=1024 run=full")
    assert.equal(3, code, out .. err)
    assert.is_nil(out:match "saved")
    assert.matches("the last checkpoint was not saved: [^\n]*File too large", err)
    assert.same({ "lock", "metrics.jsonl", "run.json" }, core.list(folder .. "/full"))
    code, out, err = run_limited(1, "steps=40 every=0 run=cut")
    assert.equal(0, code, out .. err)
    assert.matches(
      "metrics are not written: cannot write '[^\n]*cut/metrics.jsonl': File too large", err)
    local text = command.read(folder .. "/cut/metrics.jsonl")
    assert.equal("\n", text:sub(-1))
    for i, entry in ipairs(command.metrics(folder .. "/cut")) do assert.equal(i - 1, entry.step) end
  end)

  it("by hand: a lost last save ends with 3 as well, and os.exit waits for one that is being \z
    written", function()
    local by_hand = [[
      local ms = require "moonshard"
      local big = ms.ones { 1 << 20 }
      local object = { state = function() return { big } end, load_state = print }
      assert(ms.checkpoint.save("hand", { step = 1, object = object }))
      %s]]
    local function by(ending)
      command.write(folder .. "/hand.lua", by_hand:format(ending))
      return command.run(folder, "run hand.lua")
    end
    for _, ending in ipairs { "", "os.exit(0)", "os.exit(true, true)" } do
      assert.equal(0, (by(ending)), ending)
      assert.truthy(core.exists(folder .. "/hand/step-00000001/manifest.json"), ending)
      command.remove(folder .. "/hand")
      command.write(folder .. "/hand.tmp", "")
      assert(os.execute(("mkdir '%s/hand' && mv '%s/hand.tmp' '%s/hand/.tmp-step-00000001'")
        :format(folder, folder, folder)))
      local code, _, err = by(ending)
      assert.equal(3, code, ending)
      assert.matches("^moonshard: the last checkpoint was not saved: ", err)
      command.remove(folder .. "/hand")
    end
    -- A code that the recipe has chosen stays, and the checkpoint is written all the same.
    assert.equal(4, (by "os.exit(4)"))
    assert.truthy(core.exists(folder .. "/hand/step-00000001/manifest.json"))
  end)

  it("counts steps from 0 everywhere; a checkpoint's number is the step that comes next", function()
    local counting = RECIPE:gsub("local result = ms.train {", [[local result = ms.train {
      after_step = function(step) print(("ends %%d, ms.step %%d"):format(step, ms.step())) end,]])
    command.write(folder .. "/count.lua", counting .. 'print("result " .. result.step)')
    local out = command.succeed(folder, "run count.lua steps=6 every=3")
    assert.matches("ends 0, ms.step 0\n.*step +0/6 .*ends 5, ms.step 5\n.*step +5/6 .*result 5\n",
      out)
    assert.is_nil(out:match "step +6/6")
    assert.same({ "step-00000003", "step-00000006" }, names "step-")
    local seen = {}
    for i, entry in ipairs(command.metrics(folder .. "/out")) do seen[i] = entry.step end
    assert.same({ 0, 1, 2, 3, 4, 5 }, seen)
    out = command.succeed(folder, "run count.lua steps=7 resume=out/step-00000003")
    assert.matches("resumed at step 3%)", out)
    assert.equal("3", out:match "ends (%d+)")
    assert.equal("3", out:match "step +(%d+)/7")
    assert.matches("result 6\n", out)
    assert.equal(7, #command.metrics(folder .. "/out"))
    -- By hand: the number is that of the next step too.
    command.write(folder .. "/hand.lua", [[
      local ms = require "moonshard"
      assert(ms.checkpoint.save("hand", {}))
      for step in ms.steps(3) do if step == 1 then assert(ms.checkpoint.save("hand", {})) end end
      assert(ms.checkpoint.save("hand", {}))]])
    command.succeed(folder, "run hand.lua")
    assert.same({ "lock", "step-00000000", "step-00000002", "step-00000003" },
      core.list(folder .. "/hand"))
  end)

  it("has each step once in metrics.jsonl, also where a run ended before its first \z
    checkpoint", function()
    command.write(folder .. "/dies.lua", (RECIPE:gsub("save = {",
      "after_step = function(step) if step == 3 then error 'dies' end end, save = {")))
    local code = command.run(folder, "run dies.lua")
    assert.equal(1, code)
    assert.equal(4, #command.metrics(folder .. "/out"))
    local out = succeed "steps=5 resume=auto"
    assert.matches("4 lines of out/metrics.jsonl were removed: this run begins at step 0", out)
    local seen = {}
    for i, entry in ipairs(command.metrics(folder .. "/out")) do seen[i] = entry.step end
    assert.same({ 0, 1, 2, 3, 4 }, seen)
  end)

  it("does the same on several ranks, and says it once", function()
    succeed "-n 2 steps=20"
    damage_data(20)
    local out, err = succeed "-n 2 steps=16 resume=auto"
    assert.equal(1, select(2, err:gsub("it is skipped", "")))
    assert.equal(1, select(2, err:gsub("resuming from out/step%-00000015", "")))
    assert.equal(1, select(2, out:gsub("set aside", "")))
    assert.same({ "aside-step-00000020" }, names "aside-")
  end)
end)
