-- Training on several ranks: one run as users see it, resuming at other sizes, requests, numbers
-- that are not finite, checks that predict.
local command = require "command"
local core = require "moonshard.core"

local TEXT = ("The quick brown fox jumps over the lazy dog. "):rep(80)

local RECIPE = [[
local ms = require "moonshard"
local core = require "moonshard.core"
local cfg = ms.config {
  data = "text", steps = 8, resume = "never", run = "run", save = 4, dtype = "f32", poison = -1,
  on_nan = "stop", ask = "", at = 3, clip = 0.0, chain = false,
}
local train, valid = assert(ms.data.bytes(cfg.data)):split(0.8)
local model = ms.nn.gpt2 { vocab = 256, context = 16, layers = 1, width = 16, heads = 2 }
local links
if cfg.chain then
  links = ms.hooks.chain {
    ms.hooks.cast { dtype = "bf16" },
    function(bucket, next) return next(bucket) end,
    "all_reduce",
  }
end
if ms.world_size() > 1 then model = ms.ddp(model, { comm_hook = links }) end
local everyone, first, last = ms.metric "everyone", ms.metric("first", "min"),
  ms.metric("last", "max")
local count = ms.metric("count", "sum")
-- Whether the request has led to a checkpoint or to flight records.
local function is_answered()
  for _, name in ipairs(core.list(cfg.run)) do
    if name == "flight" or name:find "^step%-" then return true end
  end
  return false
end
local result = ms.train {
  model = model,
  steps = cfg.steps,
  run = cfg.run,
  resume = cfg.resume,
  dtype = cfg.dtype,
  on_nan = cfg.on_nan,
  clip = cfg.clip > 0 and cfg.clip or nil,
  optimizer = ms.optim.adamw(model, { lr = 1e-2 }),
  data = train:loader { batch = 12, length = 16, shuffle = true },
  valid = valid:loader { batch = 12, length = 16 },
  eval = { every = 4, batches = 2 },
  save = { every = cfg.save }, sample = { every = 4, count = 5 },
  loss = function(m, x, y)
    local outputs = m(x)
    local loss = outputs:cross_entropy(y)
    if ms.step() == cfg.poison and ms.rank() == ms.world_size() - 1 then loss = loss + 1 / 0 * 0 end
    return loss, outputs
  end,
  after_step = function(step)
    everyone:push(ms.rank())
    if ms.rank() == 1 then first:push(7) end
    last:push(ms.full(ms.rank(), {}))
    count:push(1)
    count:push(1)
    if cfg.ask ~= "" and step == cfg.at and ms.rank() == 1 then
      os.execute(("kill -%s $(ps -o ppid= -p $PPID)"):format(cfg.ask))
    elseif cfg.ask:find "USR" and step > cfg.at and ms.rank() == 1 and not is_answered() then
      os.execute "sleep 0.1"                                -- a busy launcher hears it later
    end
  end,
}
local sum = 0
for _, p in ipairs(model:parameters()) do sum = sum + p:detach():square():sum():item() end
print(("rank %d: loss %.17g valid %.17g weights %.17g peak %d run %s")
  :format(ms.rank(), result.loss or 0, result.valid.loss, sum, ms.memory().peak, result.run))
]]

describe("training on several ranks", function()
  local folder
  before_each(function()
    folder = command.folder()
    command.write(folder .. "/r.lua", RECIPE)
    command.write(folder .. "/text", TEXT)
  end)
  after_each(function() command.remove(folder) end)

  -- Returns the last output of each rank, from rank 0 on, and all output.
  local function train(arguments)
    local out, err = command.succeed(folder, "run r.lua " .. arguments)
    local ranks = {}
    for rank, text in out:gmatch "rank (%d+): ([^\n]*)\n" do ranks[tonumber(rank) + 1] = text end
    return ranks, out, err
  end

  local function metrics(run)
    local list = command.metrics(folder .. "/" .. run)
    -- Times differ from run to run.
    for _, entry in ipairs(list) do
      entry.ms_step, entry.tok_s, entry.mfu, entry.exposed_comm_ms = nil, nil, nil, nil
    end
    return list
  end

  local function near(a, b, tolerance)
    assert.truthy(math.abs(a - b) <= tolerance * math.abs(a), ("%.9g is not %.9g"):format(b, a))
  end

  it("tells in metrics.jsonl what each link of a chain took", function()
    command.succeed(folder, "run r.lua -n 2 --thread-ranks chain=true save=0")
    local file, lines = assert(io.open(folder .. "/run/metrics.jsonl")), 0
    for line in file:lines() do
      local links = core.json_decode(line).links
      if links then
        lines = lines + 1
        assert.equal(3, #links)
        assert.equal("cast bf16", links[1].name)
        assert.equal("all_reduce", links[3].name)
        assert.is_true(links[3].calls > 0 and links[3].payload_bytes > 0 and links[3].ms >= 0
          and links[3].exposed_ms >= 0)
        assert.equal(0, links[1].payload_bytes)
      end
    end
    file:close()
    assert.is_true(lines >= 7, tostring(lines))
  end)

  it("is one run: same end on all ranks, as processes and as threads, every time", function()
    local processes, out, err = train "-n 3"
    assert.equal("", err)
    assert.equal(3, #processes)
    for rank = 2, 3 do assert.equal(processes[1], processes[rank]) end
    -- Lines, samples and files are rank 0's.
    assert.equal(8, select(2, out:gsub("step +%d+/8", "")))
    assert.equal(2, select(2, out:gsub("%-%-%-%- sample", "")))
    local files = core.list(folder .. "/run")
    table.sort(files)
    assert.same({ "lock", "metrics.jsonl", "run.json", "step-00000004", "step-00000008" }, files)
    local threads = train "-n 3 --thread-ranks run=threads"
    assert.same(processes, (function(list)
      for i, text in ipairs(list) do list[i] = text:gsub("run threads", "run run") end
      return list
    end)(threads))
    assert.same(metrics "run", metrics "threads")
    for _, name in ipairs { "step-00000008/tensors.safetensors", "step-00000008/manifest.json" } do
      assert.equal(command.read(folder .. "/run/" .. name),
        command.read(folder .. "/threads/" .. name), name)
    end
    local third = train "-n 3 --threads 2 run=third"
    assert.equal(processes[1]:match "weights (%S+)", third[1]:match "weights (%S+)")
  end)

  it("is what one rank would do", function()
    train "-n 1 run=one"
    train "-n 2 run=two"
    train "-n 4 run=four"
    local one = metrics "one"
    for _, run in ipairs { "two", "four" } do
      for i, entry in ipairs(metrics(run)) do
        near(one[i].loss, entry.loss, 1e-5)
        near(one[i].grad_norm, entry.grad_norm, 1e-4)
        if one[i].val_loss then near(one[i].val_loss, entry.val_loss, 1e-5) end
      end
    end
  end)

  it("ends before the first step where validation data have fewer windows than ranks", function()
    command.write(folder .. "/short", TEXT:sub(1, 200))  -- a fifth of it: 40 bytes, 2 windows of 16
    local code, out, err = command.run(folder, "run r.lua -n 3 data=short")
    assert.equal(1, code, out)
    assert.matches("r.lua:%d+: train: valid: loader: 2 windows of 16 tokens for 3 ranks; each \z
      rank needs at least one", err)
    assert.is_nil(out:match "step +0/")
    assert.matches("valid +7  loss", (command.succeed(folder, "run r.lua -n 2 data=short run=two")))
  end)

  it("combines metrics over ranks", function()
    train "-n 3 --link 20ms"
    local list = command.metrics(folder .. "/run")
    assert.equal(8, #list)
    -- A step waits for the link; a later step reports its figures.
    assert.truthy(list[8].exposed_comm_ms > 1)
    for _, entry in ipairs(list) do
      assert.equal(1, entry.everyone)
      assert.equal(7, entry.first)
      assert.equal(2, entry.last)
      assert.equal(6, entry.count)
      assert.truthy(entry.wire_bytes > 0)
    end
  end)

  it("goes on bit for bit at the same size, and at any other without losing or repeating \z
    data", function()
    train "-n 2 run=whole steps=8 save=100"
    local whole = metrics "whole"
    train "-n 2 run=begun steps=5 save=5"
    for _, ranks in ipairs { 2, 1, 3, 4 } do
      assert(os.execute(("cp -r '%s/begun' '%s/r%d'"):format(folder, folder, ranks)))
      local _, out = train(("-n %d run=r%d steps=8 save=100 resume=auto"):format(ranks, ranks))
      assert.matches("resumed from r%d/step%-00000005", out)
      local resumed = metrics("r" .. ranks)
      assert.equal(8, #resumed)
      for i = 6, 8 do
        if ranks == 2 then
          assert.equal(whole[i].loss, resumed[i].loss)
        else
          near(whole[i].loss, resumed[i].loss, 1e-4)
        end
      end
      assert.truthy(ranks ~= 2 or whole[8].grad_norm == resumed[8].grad_norm)
    end
    -- 12 samples do not divide by 5 ranks.
    local code, _, err = command.run(folder, "run r.lua -n 5 run=r2 resume=auto steps=9")
    assert.equal(1, code)
    assert.matches("a batch of 12 does not divide by 5 ranks", err)
  end)

  it("stops on request with a checkpoint from which it goes on, and saves on request", function()
    train "-n 2 run=whole steps=12 save=100"
    for _, signal in ipairs { "INT", "TERM", "HUP" } do
      local code, out, err = command.run(folder,
        ("run r.lua -n 2 run=%s steps=100000 save=100000 ask=%s"):format(signal, signal))
      assert.equal(75, code, err)
      local step = tonumber(
        err:match "^moonshard: stopped on request after step (%d+); a checkpoint is saved in ")
      assert.equal(1, select(2, err:gsub("stopped on request", "")))
      assert.truthy(step and step >= 3, err)
      assert.truthy(core.exists(("%s/%s/step-%08d/manifest.json"):format(folder, signal, step + 1)),
        out)
    end
    local list = metrics "whole"
    for i, entry in ipairs(metrics "INT") do
      if i <= 3 then assert.equal(list[i].loss, entry.loss) end
    end
    local _, out = train "-n 2 run=usr steps=40 save=1000 ask=USR1"
    local saved = {}
    for name in out:gmatch "saved usr/(step%-%d+)" do saved[#saved + 1] = name end
    assert.equal(2, #saved, out)
    assert.equal("step-00000040", saved[2])
    -- By hand, the first loss after that checkpoint is that of the run.
    local step = tonumber(saved[1]:match "%d+")
    assert.truthy(step >= 5 and step <= 40)
    train "-n 2 run=usr2 steps=40 save=1000 ask=USR2"
    assert.truthy(command.read(folder .. "/usr2/flight/rank-1.jsonl"):find('"rank":1', 1, true))
  end)

  it("takes the same decision everywhere when one rank's numbers are not finite", function()
    local code, _, err = command.run(folder, "run r.lua -n 3 poison=2")
    assert.equal(4, code)
    assert.matches("step 2: loss or gradients are inf or nan", err)
    for _, more in ipairs { "on_nan=skip", "dtype=f16" } do
      local ranks = train(("-n 3 poison=2 %s run=skip"):format(more))
      for rank = 2, 3 do
        assert.equal(ranks[1]:match "weights (%S+)", ranks[rank]:match "weights (%S+)")
      end
      assert.falsy(ranks[1]:find "weights %-?nan")
    end
  end)

  -- The command that is printed is tried as it is: it goes on with this run, and not with the
  -- one that had the folder before.
  it("tells how to go on where its folder was numbered, named, or has spaces", function()
    command.write(folder .. "/numbered.lua", [[
      local ms = require "moonshard"
      local cfg = ms.config { run = "", resume = "never", note = "" }
      local model = ms.ddp(ms.nn.Linear(2, 1))
      ms.train { model = model, optimizer = ms.optim.sgd(model, { lr = 0.1 }), steps = 20,
        run = cfg.run ~= "" and cfg.run or nil, resume = cfg.resume, save = { every = 5 },
        data = function() return ms.ones { 2, 2 }, ms.ones { 2, 1 } end,
        loss = function(m, x, y) return ((m(x) - y) ^ 2):mean() end,
        after_step = function(step)
          if step == 12 and ms.rank() == 1 then
            io.popen("kill -KILL " .. io.open "/proc/self/stat":read "a":match "^%d+"):close()
          end
        end }]])
    for _, case in ipairs {
      { "", "runs/numbered" }, { "", "runs/numbered-2" }, { "run=mine", "mine" },
      { "run=mine", "mine-2" }, { "run='my run' note='a  b'", "my run" },
      { "run='my run' resume=never", "my run-2" },
      { "run=mine resume=mine/step-00000005", "mine" },
    } do
      local options, run = table.unpack(case)
      local code, _, err = command.run(folder, "run numbered.lua -n 2 " .. options)
      assert.equal(7, code, err)
      local again = err:match "%(resume: moonshard ([^\n]*)%)\n"
      assert.truthy(again, err)
      local out
      code, out, err = command.run(folder, again)
      assert.equal(7, code, err)
      assert.truthy(out:find(("resumed from %s/step-00000010"):format(run), 1, true),
        again .. "\n" .. out)
    end
  end)

  it("tells what is not as in the run that it goes on with", function()
    command.write(folder .. "/changed.lua", [[
      local ms = require "moonshard"
      local cfg = ms.config { run = "run", resume = "never", batch = 8, lr = 0.1, hook = "",
        steps = 4 }
      local hook = cfg.hook ~= "" and ms.hooks[cfg.hook]() or nil
      local model = ms.ddp(ms.nn.Linear(2, 1), { comm_hook = hook })
      ms.train { model = model, optimizer = ms.optim.sgd(model, { lr = cfg.lr }), steps = cfg.steps,
        run = cfg.run, resume = cfg.resume, save = { every = 2 },
        data = function() return ms.ones { cfg.batch, 2 }, ms.ones { cfg.batch, 1 } end,
        loss = function(m, x, y) return ((m(x) - y) ^ 2):mean() end }]])
    local function resumed(options)
      local out = command.succeed(folder, "run changed.lua " .. options)
      return out:match "differs from the checkpoint's run: ([^\n]*)", out
    end
    assert.is_nil((resumed "-n 2 hook=error_feedback"))
    assert.is_nil((resumed "-n 2 hook=error_feedback resume=auto"))
    assert.equal("batch 8 -> 4; hook error_feedback -> none (its state is not loaded); \z
      steps 4 -> 6", (resumed "-n 2 batch=4 steps=6 resume=auto"))
    -- The run before it is that one.
    assert.equal("batch 4 -> 8; lr 0.1 -> 0.05; steps 6 -> 8; ranks 2 -> 1",
      (resumed "-n 1 lr=0.05 steps=8 resume=auto"))
    assert.is_nil((resumed "-n 1 lr=0.05 steps=8 resume=auto run=run"))
  end)

  it("leaves flight records and tells how to go on when it ends badly", function()
    -- That kills the launcher.
    assert.equal(137, (command.run(folder, "run r.lua -n 2 steps=100000 save=5 ask=KILL at=12")))
    command.write(folder .. "/dies.lua", (RECIPE:gsub("%$%(ps %-o ppid= %-p %$PPID%)", "$PPID")))
    local code, _, err = command.run(folder,
      "run dies.lua -n 2 run=dies save=5 steps=1000 ask=KILL at=12")
    assert.equal(7, code)
    assert.matches("^moonshard: rank 1 %(pid %d+%) killed by SIGKILL [^\n]*at step 12\n", err)
    assert.matches("last committed checkpoint: dies/step%-00000010 %(resume: moonshard run \z
      dies.lua %-n 2 run=dies save=5 steps=1000 ask=KILL at=12 resume=auto%)\n", err)
    for rank = 0, 1 do
      local lines = 0
      for line in io.lines(("%s/dies/flight/rank-%d.jsonl"):format(folder, rank)) do
        local flight = assert(core.json_decode(line))
        assert.equal(rank, flight.rank)
        assert.equal("world", flight.group)
        lines = lines + 1
      end
      assert.truthy(lines > 36 and lines <= 128)
    end
    -- A run that resumes from there ends as if it had not been stopped.
    train "-n 2 run=whole save=100 steps=20"
    local _, warnings = command.succeed(folder,
      "run dies.lua -n 2 run=dies save=5 steps=20 resume=auto")
    assert.equal("", warnings)
    local whole, resumed = metrics "whole", metrics "dies"
    assert.equal(20, #resumed)
    for i = 1, 20 do
      assert.equal(whole[i].loss, resumed[i].loss)
      assert.equal(whole[i].grad_norm, resumed[i].grad_norm)
    end
  end)

  it("is predicted by check: peak and bytes, to the byte", function()
    local ranks_of = { [""] = { 2, 3 }, ["dtype=bf16"] = { 3 } }
    for _, options in ipairs { "", "dtype=bf16", "dtype=f16 clip=1.0 steps=5" } do
      for _, ranks in ipairs(command.full and { 2, 3 } or ranks_of[options] or { 2 }) do
        local predicted = assert(core.json_decode((command.succeed(folder,
          ("check r.lua -n %d --json %s"):format(ranks, options)))))
        assert.equal(ranks, predicted.ranks)
        assert.equal(ranks, #predicted.peak_bytes)
        local run = ("c%d%s"):format(ranks, options:gsub("%W", ""))
        local said = train(("-n %d run=%s %s"):format(ranks, run, options))
        for rank = 1, ranks do
          assert.equal(said[rank]:match "peak (%d+)", tostring(predicted.peak_bytes[rank]), options)
        end
        assert.equal("all_reduce", predicted.collectives[1].op)
        assert.equal(predicted.wire_bytes, predicted.groups[1].wire_bytes)
      end
    end
    local a = core.json_decode((command.succeed(folder, "check r.lua -n 2 --json")))
    local b = core.json_decode((command.succeed(folder, "check r.lua -n 2 --json")))
    local c = core.json_decode(
      (command.succeed(folder, "check r.lua -n 2 --json clip=1.0 steps=3")))
    assert.same(a, b)
    assert.truthy(c.order_hash)
  end)

  it("is predicted by check: bytes and collectives of the last step", function()
    command.write(folder .. "/hand.lua", [[
local ms = require "moonshard"
local world = ms.world()
world:all_reduce(ms.ones { 17 })
local before
for step in ms.steps(3) do
  local _, payload, wire = world:_traffic()
  before = { payload, wire }
  world:all_reduce(ms.ones { 1000 + step })
  world:channel(2):all_gather(ms.ones { 10, dtype = "bf16" })
  world:broadcast(ms.ones { 3, dtype = "i64" }, 1)
end
local _, payload, wire = world:_traffic()
print(payload - before[1], wire - before[2])
]])
    local predicted = core.json_decode((command.succeed(folder, "check hand.lua -n 4 --json")))
    local payload, wire = command.succeed(folder, "run hand.lua -n 4"):match "^(%d+)%s(%d+)\n"
    assert.equal(tonumber(payload), predicted.payload_bytes)
    assert.equal(tonumber(wire), predicted.wire_bytes)
    local ops = {}
    for i, call in ipairs(predicted.collectives) do
      ops[i] = ("%s %s %d %s/%d"):format(call.op, call.dtype, call.count, call.group, call.channel)
    end
    assert.same(
      { "all_reduce f32 1002 world/1", "all_gather bf16 40 world/2", "broadcast i64 3 world/1" },
      ops)
    assert.equal(64,
      core.json_decode((command.succeed(folder, "check hand.lua -n 64 --json"))).ranks)
  end)
end)
