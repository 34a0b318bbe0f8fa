-- ms.train as users see it: its output and files, stopping and resuming bit for bit, inf and nan,
-- exit codes.
local command = require "command"
local core = require "moonshard.core"

local TEXT =
  ("It is a truth universally acknowledged, that a single man in possession of a good fortune. ")
    :rep(40)

-- A small model with dropout, a schedule and shuffled data. Its options let a test cause errors at
-- a step. It prints the hashes of everything at the end.
local RECIPE = [[
local ms = require "moonshard"
local core = require "moonshard.core"
local cfg = ms.config {
  steps = 12, batch = 4, accumulate = 1, length = 16, width = 32, dropout = 0.1, shuffle = true,
  recompute = false, clip = 1.0, lr = 1e-2, packed = false,
  optimizer = "adamw", dtype = "f32", resume = "never", run = "out", save = 4, last = 2, eval = 5,
  sample = 0, on_nan = "stop",
  kill = { step = -1, times = 1, signal = "TERM" },   -- sends itself a signal before this step
  poison = { step = -1, count = 1, parameter = 1, element = 1, value = "nan" },
  wait = { step = -1, fifo = "" },                    -- reads a line from a pipe before this step
}
local function read(path)
  local file = assert(io.open(path))
  local text = file:read "a"
  file:close()
  return text
end
local pid = read "/proc/self/stat":match "^%d+"
local set = assert(ms.data.bytes "text")
local train, valid = set:split(0.8)
local model = ms.nn.gpt2 {
  vocab = 256, context = cfg.length, layers = 2, width = cfg.width, heads = 2,
  dropout = cfg.dropout, recompute = cfg.recompute,
}
local make = cfg.optimizer == "lion" and assert(loadfile(os.getenv "LION"))("lion")
  or ms.optim[cfg.optimizer]
local optimizer = make(model,
  { lr = cfg.lr, schedule = ms.optim.cosine { warmup = 3, steps = 40 } })

local function hash(value, into)
  into = into or {}
  if core.is_tensor(value) then into[#into + 1] = ("%016x"):format(core.hash(core.bytes(value)))
  elseif type(value) == "table" then
    for key, item in ms.sorted_pairs(value) do into[#into + 1] = tostring(key) hash(item, into) end
  else into[#into + 1] = tostring(value) end
  return ("%016x"):format(core.hash(table.concat(into, " ")))
end
local function everything()
  local state = optimizer:state()
  state.steps = nil
  return hash(model:state()) .. hash(state.parameters)
end

local before
local result = ms.train {
  model = model,
  optimizer = optimizer,
  steps = cfg.steps,
  accumulate = cfg.accumulate,
  clip = cfg.clip > 0 and cfg.clip or nil,
  dtype = cfg.dtype,
  data = train:loader {
    batch = cfg.batch, length = cfg.length, shuffle = cfg.shuffle,
    packed = cfg.packed, end_of_text = cfg.packed and 32 or nil,       -- words
  },
  valid = valid:loader {
    batch = 4, length = cfg.length, packed = cfg.packed, end_of_text = cfg.packed and 32 or nil,
  },
  eval = { every = cfg.eval, batches = 3 },
  sample = cfg.sample > 0 and { every = cfg.sample, prompt = "It", count = 5 } or nil,
  save = cfg.save > 0 and { every = cfg.save, last = cfg.last } or nil,
  resume = cfg.resume, run = cfg.run, on_nan = cfg.on_nan,
  before_step = function(step)
    for _ = 1, step == cfg.kill.step and cfg.kill.times or 0 do
      io.popen(("kill -%s %s"):format(cfg.kill.signal, pid)):close()
    end
    if step == cfg.wait.step then
      print("waiting " .. pid)
      io.stdout:flush()
      read(cfg.wait.fifo)
    end
  end,
  after_backward = function(step)
    local first = cfg.poison.step
    if first < 0 or step < first or step >= first + cfg.poison.count then return end
    before = everything()
    local p = model:parameters()[(cfg.poison.parameter - 1) % #model:parameters() + 1]
    local element = (cfg.poison.element - 1) % p:numel() + 1
    print("poisoned " .. p:name())
    ms.no_grad(function()
      p:grad():view(-1):narrow(1, element, 1)
        :fill_(({ nan = 0 / 0, inf = math.huge, ["-inf"] = -math.huge })[cfg.poison.value])
    end)
  end,
  after_step = function()
    if not before then return end
    print(before == everything() and "unchanged" or "changed")
    before = nil
  end,
}
print("step " .. result.step .. " loss " .. tostring(result.loss))
print("final " .. everything() .. " " .. optimizer:state().steps)
]]

describe("ms.train", function()
  local folder
  before_each(function()
    folder = command.folder()
    command.write(folder .. "/text", TEXT)
    command.write(folder .. "/small.lua", RECIPE)
  end)
  after_each(function() command.remove(folder) end)

  local lion = ("LION='%s/recipes/optim/lion.lua'"):format(command.source)
  local function run(options, settings)
    return command.run(folder, "run small.lua " .. (options or ""), lion .. " " .. (settings or ""))
  end
  local function succeed(options, settings)
    return command.succeed(folder, "run small.lua " .. (options or ""),
      lion .. " " .. (settings or ""))
  end
  local function final(out) return assert(out:match "final (%x+ %d+)", out) end
  local function series(name, field)
    local values = {}
    for i, entry in ipairs(command.metrics(folder .. "/" .. name)) do
      values[i] = { entry.step, entry[field or "loss"] }
    end
    return values
  end

  --------------------------------------------------------------------------------- what a user sees

  it("shows its settings, a line a step, validation and text", function()
    local own = command.own_cache(folder)
    local out = succeed("steps=6 sample=6 run=seen", own)
    assert.matches("^model  GPT2, %d+ parameters\ndata   text\nrun    seen\ndtype  f32\n\z
      steps  6\nset    run=seen sample=6 steps=6; %-%-help lists %d+ more\n", out)
    assert.matches("peak +%d+ GFLOP/s in f32 products, measured now", out)
    local count = 0
    for line in out:gmatch "[^\n]+" do
      if line:match "^step .*  loss " then
        assert.matches(
          ("^step +%d/6  loss %%d.%%d%%d%%d%%d  .*norm %%d.%%d+  lr %%d.%%d%%de[-+]%%d%%d  ")
            :format(count), line)
        assert.matches("  mem %d+ MiB", line)
        if count > 3 then
          assert.matches("  eta %d+:%d%d  [%d.]+[kM]? tok/s  [%d.]+ ms  norm %S+  lr %S+  \z
            mfu %d+%%  mem %d+ MiB$", line)
        end
        count = count + 1
      end
    end
    assert.equal(6, count)
    assert.matches("valid +4  loss %d.%d+\n", out)
    assert.matches("valid +5  loss %d.%d+\n", out)
    assert.matches("%-%-%-%- sample\nIt.....", out)
    assert.matches("saved seen/step%-00000004\n", out)
    assert.matches("saved seen/step%-00000006\n", out)
    -- The machine's peak is measured once and kept.
    assert.is_nil((succeed("steps=1 run=again", own)):find("peak ", 1, true))
  end)

  it("goes on where metrics cannot be written, and says so once", function()
    assert(os.execute(("mkdir '%s/full' && ln -s /dev/full '%s/full/metrics.jsonl'")
      :format(folder, folder)))
    local code, out, err = run "steps=3 save=0 run=full resume=auto"
    assert.equal(0, code, err)
    assert.matches("step 2 loss", out)
    local _, told = err:gsub(
      "metrics are not written: cannot write '[^\n]*full/metrics.jsonl': No space left", "")
    assert.equal(1, told, err)
  end)

  it("writes an object a step into metrics.jsonl", function()
    succeed "steps=6 run=m"
    local metrics = command.metrics(folder .. "/m")
    assert.equal(6, #metrics)
    for i, entry in ipairs(metrics) do
      assert.equal(i - 1, entry.step)
      local fields = {}
      for name in pairs(entry) do fields[#fields + 1] = name end
      table.sort(fields)
      local wanted = "exposed_comm_ms grad_norm loss lr mfu ms_step peak_bytes step tok_s"
      if i == 5 or i == 6 then wanted = wanted .. " val_loss" end
      assert.equal(wanted .. " wire_bytes", table.concat(fields, " "))
      assert.equal(0, entry.wire_bytes)
      assert.equal(0, entry.exposed_comm_ms)
      assert.is_true(entry.ms_step > 0 and entry.tok_s > 0 and entry.peak_bytes > 0
        and entry.grad_norm > 0)
    end
    -- Warm-up over three steps, then half a cosine to step 40.
    assert.near(1e-2 / 3, metrics[1].lr, 1e-12)
    assert.near(1e-2, metrics[4].lr, 1e-12)
    assert.is_true(metrics[6].lr < 1e-2)
    assert.is_true(metrics[6].loss < metrics[1].loss)
    assert.near(math.log(256), metrics[1].loss, 0.2)     -- a model that knows nothing
  end)

  it("has each metric in each step's line, also where validation or a checkpoint come after the \z
    step", function()
    command.write(folder .. "/metrics.lua", [[
local ms = require "moonshard"
local early = ms.metric "early"
local model = ms.nn.Linear(2, 2)
local function batch() return ms.ones { 4, 2 }, ms.zeros { 4, 2 } end
for run = 1, 2 do
  ms.train {
    model = model, optimizer = ms.optim.sgd(model, { lr = 0.1 }), data = batch,
    steps = run == 1 and 4 or 1, run = "run" .. run, save = { every = 2 },
    loss = function(m, x, y) local out = m(x) return out:mse_loss(y), out end,
    after_step = function(step) early:push(step) ms.metric("late", "sum"):push(2 * step) end,
  }
end
]])
    command.succeed(folder, "run metrics.lua")
    local list = command.metrics(folder .. "/run1")
    assert.equal(4, #list)
    for i, entry in ipairs(list) do
      assert.same({ i - 1, i - 1, 2 * (i - 1) }, { entry.step, entry.early, entry.late })
    end
    list = command.metrics(folder .. "/run2")
    assert.same({ 1, 0, 0 }, { #list, list[1].early, list[1].late })
  end)

  it("keeps the last checkpoints, and the newest folder name is free unless resume is \z
    asked", function()
    succeed "steps=12 save=2 last=3 run=keep"
    local kept = {}
    for _, name in ipairs(core.list(folder .. "/keep")) do
      if name:match "^step" then kept[#kept + 1] = name end
    end
    assert.same({ "step-00000008", "step-00000010", "step-00000012" }, kept)
    assert.matches("run +keep%-2\n", (succeed "steps=2 run=keep"))
    assert.matches("run +keep%-3\n", (succeed "steps=2 run=keep"))
    assert.same({}, { core.exists(folder .. "/keep-4") or nil })
    -- Resuming never takes the next free name, whether the folder exists or not.
    local out = succeed "steps=13 save=2 last=9 run=keep resume=auto"
    assert.matches("run +keep %(resumed at step 12%)\n", out)
    assert.is_false(core.exists(folder .. "/keep-4"))
    assert.matches("run +fresh\n", (succeed "steps=2 run=fresh resume=auto"))
    assert.matches("run +keep %(resumed at step 8%)\n",
      (succeed "steps=9 save=0 run=keep resume=keep/step-00000008"))
    assert.is_false(core.exists(folder .. "/keep-4"))
  end)

  it("refuses to validate on the files that it trains on", function()
    command.write(folder .. "/a.txt", ("some text "):rep(50))
    command.write(folder .. "/b.txt", ("other text "):rep(50))
    os.execute(("mkdir -p '%s/in' && cp '%s/a.txt' '%s/in'"):format(folder, folder, folder))
    for _, name in ipairs { "train_0.bin", "val_0.bin" } do
      os.execute(("mkdir -p '%s/ids' && cp '%s/a.txt' '%s/ids/%s'"):format(folder, folder, folder,
        name))
    end
    local function try(train, valid)
      command.write(folder .. "/share.lua", ([[
        local ms = require "moonshard"
        local data, m = ms.data, ms.nn.Sequential(ms.nn.Embedding(32768, 2), ms.nn.Linear(2, 4))
        local a, b = %s, %s
        if not b then a, b = a:split(0.5) end
        local function loader(set) return set:loader { batch = 1, length = 4 } end
        ms.train { model = m, optimizer = ms.optim.sgd(m), data = loader(a), valid = loader(b),
          steps = 1, eval = { every = 1, batches = 1 },
          loss = function(net, x) return net(x):mean() end }]]):format(train, valid))
      local code, _, err = command.run(folder, "run share.lua")
      return code, err
    end
    for _, pair in ipairs {
      { 'data.bytes "a.txt"', 'data.bytes "./a.txt"', "a.txt" },
      { 'data.bytes "in"', 'data.bytes { "b.txt", "in/a.txt" }', "in/a.txt" },
      { 'data.tokens "ids/*.bin"', 'data.tokens("ids", "valid")', "ids/val_0.bin" },
      { 'data.tokens "ids"', 'data.tokens "ids/train_0.bin"', "ids/train_0.bin" },
    } do
      local code, err = try(pair[1], pair[2])
      assert.equal(1, code, err)
      local told = ("train: data and valid both read '%s'"):format(pair[3])
      assert.truthy(err:find(told, 1, true), err)
    end
    for _, pair in ipairs {
      { 'data.bytes "a.txt"', 'data.bytes "b.txt"' }, { 'data.bytes "a.txt"', "nil" },
      { 'data.tokens "ids"', 'data.tokens("ids", "valid")' },
    } do
      local code, err = try(pair[1], pair[2])
      assert.equal(0, code, err)
    end
  end)

  it("says what is wrong with what its functions return", function()
    local bad = {
      ["data = function() end"] = "train: data must give tensors x and y, not nil",
      ["data = function() return 5 end, loss = function() return 3 end"] =
        "train: the function loss must return a tensor of one element, not number",
      ["data = function() local x, y = d() return x, y, y end"] =
        "train: data gives a third value, the positions of packed documents, but forward of \z
          Sequential takes one: take (x, positions)",
      ["data = function() local x, y = d() return x, y, y end, loss = function(_, x, y) end"] =
        "train: data gives a third value, the positions of packed documents, but the function \z
          loss takes three arguments: take (model, x, y, positions)",
      ["data = d, eval = { every = 1 }, \z
        valid = { batches = function() return function() end end }"] = "train: valid gave no batch",
      ["data = d, valid = { batches = function() return d end }, \z
        eval = { every = 1, batches = 1, measure = function() return { right = 0.5 } end }"] =
        "train: eval.measure gives tensors of one element, but right is a number",
    }
    for options, message in pairs(bad) do
      command.write(folder .. "/bad.lua", ([[
        local ms = require "moonshard"
        local m = ms.nn.Sequential(ms.nn.Linear(2, 2))
        local function d() return ms.ones { 1, 2 }, ms.tensor { 1 } end
        ms.train { model = m, optimizer = ms.optim.sgd(m), steps = 1, %s }]]):format(options))
      local code, _, err = command.run(folder, "run bad.lua")
      assert.equal(1, code)
      assert.matches("bad.lua:%d+: " .. message:gsub("%p", "%%%0"), err)
    end
  end)

  it("says that data gives no targets", function()
    command.write(folder .. "/bad.lua", [[
      local ms = require "moonshard"
      local m = ms.nn.Linear(2, 2)
      ms.train {
        model = m, optimizer = ms.optim.sgd(m), steps = 1, run = "no-y",
        data = function() return ms.ones { 1, 2 } end,
      }]])
    local code, _, err = command.run(folder, "run bad.lua")
    assert.equal(1, code)
    assert.matches("bad.lua:%d+: train: data must give two tensors, x and the targets y; its \z
      second value is nil", err)
  end)

  it("says once what is wrong with its options", function()
    local bad = {
      ["{ model = m, optimizer = o, data = d }"] = "the option steps is missing",
      ["{ model = m, optimizer = o, data = d, stpes = 1 }"] =
        "unknown option 'stpes': did you mean 'steps'",
      ["{ model = m, optimizer = o, data = d, steps = 0 }"] =
        "option steps must be a count (an integer of 1 or more), not 0",
      ["{ model = m, optimizer = o, data = d, steps = 1, log_every = 0 }"] =
        "option log_every must be a count",
      ["{ model = m, optimizer = o, data = d, steps = 1, save = { every = 1, last = 0 } }"] =
        "option save.last must be a count",
      ["{ model = m, optimizer = o, data = d, steps = 1, save = { every = 1, keep_every = 0 } }"] =
        "option save.keep_every must be a count",
      ["{ model = m, optimizer = o, data = d, steps = 1.5 }"] = "option steps must be a count",
      ["{ model = 1, optimizer = o, data = d, steps = 1 }"] = "option model must be a module",
      ["{ model = m, optimizer = o, data = d, steps = 1, dtype = 'f8' }"] =
        "dtype is one of f32, bf16, f16, fp8, auto, not 'f8'",
      ["{ model = m, optimizer = o, data = d, steps = 1, eval = { every = 1 } }"] =
        "eval needs valid",
      ["{ model = m, optimizer = o, data = d, steps = 1, save = {} }"] = "save.every is missing",
    }
    for options, message in pairs(bad) do
      command.write(folder .. "/bad.lua", ([[
        local ms = require "moonshard"
        local m = ms.nn.Linear(2, 2)
        local o, d = ms.optim.sgd(m), function() end
        ms.train %s]]):format(options))
      local code, _, err = command.run(folder, "run bad.lua")
      assert.equal(1, code)
      assert.matches("bad.lua:%d+: train: .*" .. message:gsub("%p", "%%%0"), err)
      assert.is_false(core.exists(folder .. "/runs"))
    end
  end)

  ------------------------------------------------------------------------------- stopping, going on

  it("F20: goes on bit for bit after it was stopped by a signal at a random step", function()
    math.randomseed(os.time())
    for round = 1, command.full and 20 or 3 do
      local kind = ({ "adamw", "lion", "sgd" })[round % 3 + 1]
      -- A step is skipped, perhaps right before the stop; the schedule must not depend on which
      -- one.
      local options = ("steps=16 save=5 on_nan=skip optimizer=%s poison.step=%d dtype=%s")
        :format(kind, math.random(0, 15), round % 2 == 0 and "f16" or "f32")
      local whole = succeed(options .. " run=whole" .. round)
      local name = "cut" .. round
      local signal = math.random() < 0.5 and "TERM" or "INT"
      local first, second = math.random(0, 7), math.random(8, 14)
      for _, step in ipairs { first, second } do
        local code, out, err = run(("%s run=%s resume=auto kill.step=%d kill.signal=%s")
          :format(options, name, step, signal))
        assert.equal(75, code, out .. err)
        assert.matches(("stopped on request after step %d; a checkpoint is saved"):format(step),
          err)
        assert.is_nil(out:match "final")
      end
      local out = succeed(("%s run=%s resume=auto"):format(options, name))
      local where = ("%s, stopped at %d and %d"):format(options, first, second)
      assert.equal(final(whole), final(out), where)
      assert.same(series("whole" .. round), series(name), where)
      assert.same(series("whole" .. round, "lr"), series(name, "lr"), where)
      assert.same(series("whole" .. round, "val_loss"), series(name, "val_loss"), where)
    end
  end)

  it("packed documents: goes on bit for bit in mid-epoch, with recomputed blocks and in \z
    bf16", function()
    for _, options in ipairs { "recompute=true", "dtype=bf16 accumulate=2" } do
      options = options .. " packed=true steps=12 save=3 eval=3 "
      local whole = succeed(options .. "run=whole")
      assert.equal(75, (run(options .. "run=cut kill.step=4")))
      local out = succeed(options .. "run=cut resume=auto")
      assert.matches("resumed from cut/step%-00000005", out)
      assert.equal(final(whole), final(out))
      assert.same(series("whole", "val_loss"), series("cut", "val_loss"))
      command.remove(folder .. "/cut")
      -- Documents that see each other have another loss from the first step on, also in validation.
      succeed(options:gsub("packed=true", "packed=false") .. "run=plain")
      for _, field in ipairs { "loss", "val_loss" } do
        local packed, plain = series("whole", field), series("plain", field)
        local row = field == "loss" and 1 or 3
        assert.is_true(math.abs(packed[row][2] - plain[row][2]) > 1e-4, field)
      end
      command.remove(folder .. "/plain")
      command.remove(folder .. "/whole")
    end
  end)

  it("goes on where it ended by its number of steps, and makes lost steps again", function()
    local whole = succeed "steps=12 save=4 run=whole"
    succeed "steps=6 save=4 run=parts"
    os.execute(("rm -r '%s/parts/step-00000006'"):format(folder))
    local out = succeed "steps=12 save=4 run=parts resume=auto"
    assert.matches("resumed from parts/step%-00000004", out)
    assert.equal(final(whole), final(out))
    -- Steps 4 and 5 ran twice; each has one line. (Validation also ran after the step that was then
    -- the last one.)
    assert.same(series "whole", series "parts")
    out = succeed "steps=12 run=parts resume=auto"
    assert.matches("all 12 steps were done already", out)
    assert.equal(final(whole), final(out))
    assert.same(series "whole", series "parts")
  end)

  it("a signal from outside ends the step that runs; one at the last step changes \z
    nothing", function()
    assert(os.execute(("mkfifo '%s/pipe'"):format(folder)))
    local started = command.start(folder, "small.lua run=out wait.step=2 wait.fifo=pipe", lion)
    local pid
    repeat pid = assert(started.file:read "l"):match "^waiting (%d+)" until pid
    assert(os.execute("kill -TERM " .. pid))
    command.write(folder .. "/pipe", "go\n")
    local code, out, err = started.finish()
    assert.equal(75, code, out .. err)
    assert.matches("after step 2", err)
    out = succeed "steps=8 run=last kill.step=7"
    assert.equal(final(out), final(succeed "steps=8 run=plain"))
  end)

  it("a damaged checkpoint is refused when it was named, and passed over by auto", function()
    local whole = succeed "steps=12 save=4 run=whole"
    local path = folder .. "/whole/step-00000012/tensors.safetensors"
    local bytes = command.read(path)
    command.write(path, bytes:sub(1, -10) .. string.char(bytes:byte(-9) ~ 1) .. bytes:sub(-8))
    local code, _, err = run "steps=14 run=whole resume=whole/step-00000012"
    assert.equal(3, code)
    assert.matches("whole/step%-00000012/tensors.safetensors.*not those that were saved", err)
    local out
    out, err = succeed "steps=12 save=4 run=whole resume=auto"
    assert.matches("resuming from whole/step%-00000008", err)
    assert.equal(final(whole), final(out))
  end)

  it("F28: a second run in the same folder names the first and leaves it alone", function()
    assert(os.execute(("mkfifo '%s/pipe'"):format(folder)))
    local started = command.start(folder, "small.lua run=out wait.step=2 wait.fifo=pipe steps=4",
      lion)
    local pid
    repeat pid = assert(started.file:read "l"):match "^waiting (%d+)" until pid
    local code, _, err = run "run=out resume=auto"
    command.write(folder .. "/pipe", "go\n")
    local first, out = started.finish()
    assert.equal(3, code)
    assert.matches("process " .. pid .. "%f[%D]", err)
    assert.equal(0, first, out)
    assert.equal(4, #series "out")
  end)

  -------------------------------------------------------------------------------------- bad numbers

  it("F14: nan or inf in a random element of a gradient changes nothing, and the message names \z
    the parameter", function()
    -- From step 1 on: before the first step an optimizer has no state to compare with.
    math.randomseed(os.time())
    local values = { "nan", "inf", "-inf" }
    for round = 1, command.full and 100 or 3 do
      local poison = ("poison.step=%d poison.parameter=%d poison.element=%d poison.value=%s \z
        optimizer=%s dtype=%s"):format(math.random(1, 9), math.random(1, 100),
        math.random(1, 100000), values[round % 3 + 1], round % 5 == 3 and "lion" or "adamw",
        round % 4 == 1 and "f16" or "f32")
      local code, out, err = run(poison .. " on_nan=skip run=skip" .. round)
      assert.equal(0, code, poison .. err)
      assert.matches("\nunchanged\n", out, poison)
      assert.is_nil(out:match "\nchanged\n")
      -- 12 steps, one of them not taken.
      assert.matches("final %x+ 11\n", out, poison)
      if poison:match "f32" then
        local step, name = poison:match "step=(%d+)", out:match "poisoned (%S+)"
        assert.matches(("rank 0: step %s skipped: .*first bad gradient: %s%%)")
          :format(step, name:gsub("%p", "%%%0")), err)
        code, out, err = run(poison .. " run=stop" .. round)
        assert.equal(4, code, poison .. out)
        assert.matches(("step %s: loss or gradients are inf or nan %%(first bad gradient: %s%%)")
          :format(step, name:gsub("%p", "%%%0")), err)
        assert.is_nil(out:match "final")
      end
    end
  end)

  it("on_nan = ignore goes on, and 25 skipped steps in a row end the run", function()
    local out = succeed "on_nan=ignore poison.step=2 steps=5"
    assert.matches("\nchanged\n", out)
    local last = series "out"[5]
    assert.is_true(last[2] == nil, "a loss that is nan is null in JSON")
    local code, _, err = run "on_nan=skip poison.step=2 poison.count=40 steps=50 run=row"
    assert.equal(4, code)
    assert.matches("25 steps in a row had inf or nan", err)
    assert.equal(0, (run "on_nan=skip poison.step=2 poison.count=24 steps=32 run=fewer"))
  end)

  it("f16 trains as f32 does, and its scaler backs off and comes back with the \z
    checkpoint", function()
    succeed "dtype=f32 run=wide"
    succeed "dtype=f16 run=half"
    local wide, half = series "wide", series "half"
    -- f16 has 11 bits: losses of a few steps agree to about 1e-3.
    for i = 1, #wide do assert.near(wide[i][2], half[i][2], 2e-2) end
    succeed "dtype=f16 poison.step=3 run=hit"
    local ms = require "moonshard"
    local function factor(name)
      local scaler = ms.optim.scaler()
      assert(ms.checkpoint.load(("%s/%s/step-00000012"):format(folder, name), { scaler = scaler }))
      return scaler:state().factor:item()
    end
    assert.equal(65536, factor "half")
    assert.equal(32768, factor "hit")
  end)

  --------------------------------------------------------------------------------- the same numbers

  it("accumulated passes equal one big batch", function()
    local base = "dropout=0 shuffle=false optimizer=sgd lr=0.1 clip=0 steps=6 "
    succeed(base .. "batch=8 run=big")
    succeed(base .. "batch=2 accumulate=4 run=parts")
    for _, field in ipairs { "loss", "grad_norm" } do
      local big, parts = series("big", field), series("parts", field)
      -- Sums in another order: f32 rounding.
      for i = 1, 6 do assert.near(big[i][2], parts[i][2], 1e-5 * math.max(1, big[i][2])) end
    end
    local function weights(name)
      return assert(require "moonshard".safetensors.load(("%s/%s/step-00000006/tensors.safetensors")
        :format(folder, name)))
    end
    local big, parts = weights "big", weights "parts"
    for name, t in pairs(big) do
      if t:dtype() == "f32" then
        assert.is_true((t - parts[name]):abs():max():item() < 1e-5, name)
      end
    end
  end)

  it("recomputed activations give the same bits, dropout included", function()
    assert.equal(final(succeed "steps=5 run=a"), final(succeed "steps=5 run=b recompute=true"))
  end)

  it("F19: the same run has the same bits with any number of threads, in strict mode, and \z
    again", function()
    for _, dtype in ipairs { "f32", "bf16" } do
      local options = ("steps=%d width=64 length=64 batch=8 save=0 dtype=%s ")
        :format(command.full and 4 or 2, dtype)
      local first = final(succeed(options .. "--threads 1"))
      for _, threads in ipairs { 2, 3 } do
        assert.equal(first, final(succeed(options .. "--threads " .. threads)))
      end
      assert.equal(first, final(succeed(options, "MOONSHARD_STRICT=1")))
      assert.not_equal(first, final(succeed(options .. "--seed 7")))
    end
  end)

  --------------------------------------------------------------------------------------- exit codes

  describe("exit codes:", function()
    local function recipe(text)
      command.write(folder .. "/r.lua", text)
      local code, out, err = command.run(folder, "run r.lua")
      return code, err, out
    end

    it("0 done, 1 an error of the recipe with its line", function()
      assert.equal(0, (recipe [[print(require "moonshard".version)]]))
      local code, err = recipe "\nerror 'broken'"
      assert.equal(1, code)
      assert.matches("^moonshard: r.lua:2: broken", err)
      assert.equal(1, (recipe "syntax error here"))
    end)

    it("2 wrong usage", function()
      for _, arguments in ipairs {
        "frobnicate", "run", "run none.lua", "run small.lua -n 0", "run small.lua -n 2 --link fast",
        "run small.lua --threads many", "run small.lua stepz=3",
      } do
        local code, out, err = command.run(folder, arguments)
        assert.equal(2, code, arguments)
        assert.equal("", out)
        assert.matches("^moonshard: ", err)
      end
    end)

    it("3 a bad checkpoint, data or configuration", function()
      for _, options in ipairs { "resume=nowhere", "resume=.", "--config none.lua" } do
        local code, _, err = run(options)
        assert.equal(3, code, options)
        assert.matches("^moonshard: ", err)
      end
      local code, err = recipe [[assert(require "moonshard".data.tokens "none.bin")]]
      assert.equal(3, code)
      assert.matches("none.bin", err)
      succeed "steps=4 run=narrow"
      code, err = select(1, run "steps=8 run=narrow resume=auto width=64"),
        command.read(folder .. "/.stderr")
      assert.equal(3, code)
      assert.matches("wrong shape: .*32", err)
    end)

    it("8 out of memory, with sizes and owners (F15)", function()
      local code, out, err = run "--memory 700000"
      assert.equal(8, code, out .. err)
      local asked, live, peak, _, limit = err:match "no memory for (%d+) bytes: live (%d+), peak \z
        (%d+), kept by the pool (%d+), limit (%d+); largest owners: "
      assert.equal("700000", limit, err)
      assert.is_true(tonumber(asked) > 0 and tonumber(live) <= tonumber(peak)
        and tonumber(peak) <= 700000)
      assert.matches("largest owners: [1-9]%d* %w+ made at small.lua:%d+", err)
    end)

    it("75 stopped with a checkpoint, 128 + n without one", function()
      local ended, _, said = run "kill.step=3 run=a"
      assert.equal(75, ended)
      -- The command that goes on.
      local again = said:match "\ngo on with: moonshard (run small.lua [^\n]*run=a resume=auto)\n"
      assert.truthy(again, said)
      assert.matches("resumed from a/step%-00000004\n",
        (command.succeed(folder, (again:gsub("kill.step=3 ", "")))))
      for signal, number in pairs { TERM = 15, INT = 2, HUP = 1 } do
        local code, _, err = run(("save=0 kill.step=3 kill.signal=%s run=%s")
          :format(signal, signal))
        assert.equal(128 + number, code)
        assert.matches("after step 3; no checkpoint is saved", err)
      end
      -- The second request ends the process at once.
      assert.equal(128 + 15, (run "kill.step=3 kill.times=2 run=twice"))
      -- A loop by hand counts too.
      -- (io.popen, not os.execute, which ignores SIGINT while it waits.)
      local by_hand = [[
        local ms = require "moonshard"
        local pid = io.open "/proc/self/stat":read "a":match "^%d+"
        for step in ms.steps(5) do
          if step == 2 then io.popen("kill -TERM " .. pid):close() end
          last = step
        end
        assert(last == 2)
        if SAVE then assert(ms.checkpoint.save("hand", { x = ms.ones { 2 } })) end]]
      assert.equal(128 + 15, (recipe(by_hand)))
      assert.equal(75, (recipe("SAVE = true\n" .. by_hand)))
    end)

    it("1 for a saved tensor that was changed, and for a graph that is gone (F16, F17)", function()
      local code, err = recipe [[
        local ms = require "moonshard"
        local x = ms.ones { 3, requires_grad = true }
        local y = (x * 2):detach():requires_grad_()
        local z = y * y
        ms.no_grad(function() y:add_(1) end)
        z:sum():backward()]]
      assert.equal(1, code)
      assert.matches("r.lua:6: .*in place", err)
      code, err = recipe [[
        local ms = require "moonshard"
        local x = ms.ones { 3, requires_grad = true }
        local z = (x * x):sum()
        z:backward()
        z:backward()]]
      assert.equal(1, code)
      assert.matches("r.lua:5: .*r.lua:4.*retain_graph", err)
    end)

    it("1 and a message whatever the error is", function()
      local errors = {
        ["error {}"] = "not a string: table", ["error()"] = "not a string: nil",
        ["error(12)"] = "not a string: 12",
        ["error(setmetatable({}, { __tostring = function() return 'pretty' end }))"] = "pretty",
        ["error(setmetatable({}, { __tostring = function() error 'ugly' end }))"] = "ugly",
        ["error(setmetatable({}, { __tostring = function() return 7 end }))"] = "7",
        ["coroutine.wrap(function() error 'inside' end)()"] = "r.lua:1: inside",
        ["local x <close> = setmetatable({}, { __close = function() error 'closing' end })"] =
          "r.lua:1: closing",
        ["print(xpcall(error, function() error 'again' end)) error 'after'"] = "r.lua:1: after",
        ["local ms = require 'moonshard' local x = ms.ones { 1, requires_grad = true } \z
          x:on_grad(function() error {} end) x:mul(1):sum():backward()"] = "not a string",
      }
      for text, message in pairs(errors) do
        local code, err = recipe(text)
        assert.equal(1, code, text)
        assert.matches("^moonshard: .*" .. message:gsub("%p", "%%%0"), err)
      end
      local code, err, out = recipe "setmetatable({}, { __gc = function() error 'in gc' end }) \z
        collectgarbage() print 'on'"
      assert.equal(0, code)
      assert.equal("on\n", out)
      assert.matches("rank 0: .*r.lua:1: in gc", err)
    end)

    it("1 for recursion without end, and deep graphs are no recursion", function()
      local code, err = recipe "local function f() return 1 + f() end f()"
      assert.equal(1, code)
      assert.matches("r.lua:1: stack overflow", err)
      assert.is_true(#err < 2000, "the message is short")
      code, err = recipe "local t = setmetatable({}, { __index = function(t, k) return t[k + 1] \z
        end }) print(t[1])"
      assert.equal(1, code)
      assert.matches("C stack overflow", err)
      code, err =
        recipe "local t = { 1 } for _ = 1, 100000 do t = { t } end require 'moonshard'.tensor(t)"
      assert.equal(1, code)
      assert.matches("nested more than 8 deep", err)
      local deep = command.full and 200000 or 20000
      code, err = recipe(([[
        local ms = require "moonshard"
        local x = ms.ones { 2, requires_grad = true }
        local y = x
        for _ = 1, %d do y = y + 1 end
        y:sum():backward()
        assert(x:grad():sum():item() == 2)]]):format(deep))
      assert.equal(0, code, err)
    end)
  end)
end)
