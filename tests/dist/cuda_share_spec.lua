-- Ranks that share a GPU (--share-gpu), over the stand-in for NVIDIA's driver: the tensors of
-- processes travel through memory of the host, those of threads stay in the GPU's, and the numbers
-- are those of the cpu device's ranks.
local command = require "command"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

local function stand_in(gpus)
  return ("MOONSHARD_CUDA_DRIVER='%s' MOONSHARD_STAND_IN_GPUS=%d"):format(
    os.getenv "MOONSHARD_STAND_IN", gpus)
end

-- One GPU, and a driver that keeps calls waiting for all work of the process where it may: no rank
-- keeps another one from calling that it waits for.
local function shared() return stand_in(1) .. " MOONSHARD_STAND_IN_WAITS=1" end

local TEXT <const> = ("'%s/README.md'"):format(command.source)
local SMALL = "model.layers=1 model.heads=2 dtype=bf16 every.eval=0 every.sample=0 "
  .. (command.full and "length=32 batch=4 model.width=64" or "length=16 batch=4 model.width=32")

-- The losses and norms of a short training.
local function train(arguments, settings, run)
  run = run or "run"
  if not arguments:find "data=" then arguments = arguments .. " data=" .. TEXT end
  os.execute(("rm -rf '%s/%s'"):format(folder, run))
  command.succeed(folder, ("run '%s/recipes/%s %s steps=5 run=%s")
    :format(command.source, arguments, SMALL, run), settings)
  local list = {}
  for i, line in ipairs(command.metrics(folder .. "/" .. run)) do
    list[i] = ("%.17g %.17g"):format(line.loss, line.grad_norm)
  end
  assert.equal(5, #list)
  return list
end

-- Runs a program of this folder on two ranks. Without long ranges its GPTs have one layer, and its
-- trainings have `steps` steps at most, for programs that do not count on more.
local function program(name, switches, options, steps)
  command.write(folder .. "/program.lua", ([[
    local ms = require "moonshard"
    if not %s then
      for _, kind in ipairs { "gpt2", "llama" } do
        local make = ms.nn[kind]
        ms.nn[kind] = function(sizes)
          sizes.layers = 1
          return make(sizes)
        end
      end
      local all = ms.steps
      ms.steps = function(count, first) return all(math.min(count, %d), first) end
    end
    dofile "%s/tests/dist/%s.lua"
  ]]):format(command.full, steps or 1000, command.source, name))
  return command.succeed(folder, ("run program.lua -n 2 --device cuda --share-gpu%s %s")
    :format(switches, options or ""), shared())
end

local function script(text) return command.write(folder .. "/script.lua", text) end

describe("ranks that share a GPU", function()
  for _, arguments in ipairs(command.some(2, {
    "gpt_bytes.lua' -n 2 hook=bf16_compress", "gpt_bytes.lua' -n 2",
    "gpt2.lua' -n 2 bytes=true vocab=256 data=README.md accumulate=2 shard=full_shard",
  })) do
    -- Two numbers are added alike in any order, so NCCL's ranks have the same bits.
    it("train as ranks with a GPU each: " .. arguments, function()
      arguments = arguments:gsub("README.md", command.source .. "/README.md")
      local apart = train(arguments .. " --device cuda", stand_in(2))
      assert.same(apart, train(arguments .. " --device cuda --share-gpu", shared()))
      assert.same(apart,
        train(arguments .. " --device cuda --share-gpu --thread-ranks", shared()))
    end)
  end

  for way, threads in ipairs { "", " --thread-ranks" } do
    -- Calls of a thread that wait for all work wait for other ranks' work, too.
    if command.full or way == 2 then
      it("take plans of what is gathered ahead" .. threads, function()
        assert.matches("done", program("fsdp_prefetch", threads, command.full and "" or "plans=1"))
      end)
    end

    it("have all the waits that they need" .. threads, function()
      local watched = stand_in(1) .. " MOONSHARD_STAND_IN_WATCH=stop"
      train("gpt_bytes.lua' -n 2 --device cuda --share-gpu" .. threads, watched)
      train("gpt_bytes.lua' -n 2 shard=full_shard --device cuda --share-gpu" .. threads, watched)
    end)

    -- Without long ranges four of these programs, each in one of the two ways.
    for i, name in ipairs { "collectives", "ddp", "hooks", "fsdp_gathers", "packed", "overlap" } do
      if command.full or i % 3 == way then
        it("do what others do: " .. name .. threads, function()
          local out = program(name, threads, "", name == "packed" and 2 or nil)
          for rank = 0, 1 do
            assert.truthy(out:find("rank " .. rank .. "[%w ]* is done"), out)
          end
        end)
      end
    end
  end

  it("say where their tensors are, and have queues for all streams", function()
    script [[
      require "moonshard".ones { 3 }:sum():item()
      print("queues: " .. tostring(os.getenv "CUDA_DEVICE_MAX_CONNECTIONS"))
    ]]
    for switches, where in pairs {
      [""] = "travel through memory of the host", ["--thread-ranks"] = "stay in its memory",
    } do
      local out, err = command.succeed(folder, "run script.lua -n 2 --device cuda --share-gpu "
        .. switches, stand_in(1) .. " MOONSHARD_LOG=info")
      assert.truthy(err:find("their tensors " .. where, 1, true), err)
      assert.truthy(out:find("queues: 32", 1, true), out)
    end
  end)

  -- Shards, gradients and states in pinned memory of the host, where steps run, too.
  for _, switches in ipairs { "-n 1", "-n 2 --share-gpu" } do
    it("have the same numbers when they offload: " .. switches, function()
      script [[
        local ms = require "moonshard"
        local cfg = ms.config { offload = false }
        ms.seed(1)
        local net = ms.nn.gpt2 { vocab = 17, context = 8, layers = 2, width = 16, heads = 2 }
        local model = ms.fsdp(net, { offload = cfg.offload and "cpu" or nil })
        local optimizer, lines = ms.optim.adamw(model, { lr = 1e-2 }), {}
        for step in ms.steps(4) do
          local x = ms.randint {
            4, 8, low = 0, high = 17, seed = 10 * step + ms.rank(), per_rank = false,
          }
          local loss = model(x):to "f32":cross_entropy(x)
          loss:backward()
          local norm = model:clip_grad_norm(0.5)
          optimizer:step()
          optimizer:zero_grad()
          lines[#lines + 1] = ("%.17g %.17g"):format(loss:item(), norm:item())
        end
        assert(cfg.offload == (ms.memory().offload_live > 0))
        print(("rank %d: %s"):format(ms.rank(), table.concat(lines, " ")))
      ]]
      local function losses(offload)
        local out, list = command.succeed(folder,
          ("run script.lua --device cuda %s offload=%s"):format(switches, offload),
          stand_in(1) .. " MOONSHARD_STAND_IN_WATCH=stop"), {}
        for line in out:gmatch "rank [^\n]+" do list[#list + 1] = line end
        table.sort(list)
        return list
      end
      local kept = losses "false"
      assert.equal(tonumber(switches:match "%d"), #kept)
      assert.same(kept, losses "true")
    end)
  end

  -- Of processes, each has its own memory of the GPU, and only its own tasks stop with it.
  for switches, said in pairs {
    [" --share-gpu"] = "rank 0 stopped because rank 1: the GPU has stopped: .*exp %(script.lua:5%)",
    [" --share-gpu --thread-ranks"] =
      "rank %d stopped because rank %d: the GPU has stopped: .*2 ranks or engines",
  } do
    it("end when it stops:" .. switches, function()
      script [[
        local ms = require "moonshard"
        local t = ms.ones { 1000 }
        for step = 1, 20 do
          local u = t
          if ms.rank() == 1 and step == 5 then u = t:exp() end
          t = ms.world():all_reduce(u, "avg"):value() * 0.5
        end
        print("sum", t:sum():item())
      ]]
      local code, out, err = command.run(folder, "run script.lua -n 2 --device cuda" .. switches,
        stand_in(1) .. " MOONSHARD_STAND_IN_FAULT=exp:1")
      assert.equal(1, code)
      assert.equal("", out)
      assert.matches(said, err)
    end)
  end

  it("take turns where there are several", function()
    script [[
      local ms = require "moonshard"
      ms.init {}
      local t = ms.ones { 3 } * (ms.rank() + 1)
      local sum = ms.world():all_reduce(t):value():sum():item()
      local fits = ms.rank() == 1 or pcall(ms.zeros, { 130 << 20 })
      print(("rank %d has %g, 520 MiB fit: %s"):format(ms.rank(), sum, fits))
    ]]
    local out, err = command.succeed(folder, "run script.lua -n 3 --device cuda --share-gpu",
      stand_in(2) .. " MOONSHARD_LOG=info")
    -- 1 GiB is free, and two ranks are on the first GPU.
    for rank = 0, 2 do
      assert.truthy(out:find(("rank %d has 18, 520 MiB fit: %s"):format(rank, rank == 1), 1, true),
        out)
    end
    assert.truthy(err:find("ranks 0, 2 share GPU 0: rank 0 may use 0.4 GiB of it", 1, true), err)
    assert.is_nil(err:find("share GPU 1", 1, true), err)
  end)

  -- A sharded model with a hook that rank 1 counts in; it does something before step `at`.
  local TRAIN = [[
    local ms = require "moonshard"
    local cfg = ms.config { steps = 12, at = -1, how = "stop", run = "run", resume = "never" }
    local ways = {
      stop = function() os.execute "kill -TERM $(ps -o ppid= -p $PPID)" end,
      die = function() os.execute "kill -KILL $PPID" end,
      hang = function() while true do end end,
      fail = function() error "the disk is full" end,
    }
    ms.seed(1)
    local buckets = 0
    local set = assert(ms.data.bytes "text")
    local net = ms.nn.gpt2 { vocab = 256, context = 16, layers = 1, width = 16, heads = 2 }
    local model = ms.fsdp(net, { comm_hook = function(bucket, next)
      buckets = buckets + 1
      return next(bucket)
    end })
    ms.train {
      model = model, optimizer = ms.optim.adamw(model, { lr = 1e-2 }), steps = cfg.steps,
      data = set:loader { batch = 4, length = 16 }, save = { every = 1000 },
      run = cfg.run, resume = cfg.resume,
      before_step = function(step)
        if step == cfg.at and ms.rank() == 1 then ways[cfg.how]() end
      end,
    }
    print(("rank %d saw %d buckets"):format(ms.rank(), buckets))
  ]]
  local function train_script(options, settings)
    script(TRAIN)
    command.write(folder .. "/text", ("All ranks share one GPU. "):rep(100))
    return command.run(folder, "run script.lua -n 2 --device cuda --share-gpu " .. options,
      stand_in(1) .. " " .. (settings or ""))
  end

  it("stop when they are asked to, and go on bit for bit", function()
    local code, out, err = train_script "run=whole"
    assert.equal(0, code, err)
    assert.truthy(out:find "rank 1 saw [1-9]%d* buckets", out)
    code, out, err = train_script "run=cut at=4"
    assert.equal(75, code, out .. err)
    code, out, err = train_script "run=cut resume=auto"
    assert.equal(0, code, out .. err)
    local whole, cut = command.metrics(folder .. "/whole"), command.metrics(folder .. "/cut")
    assert.equal(12, #cut)
    for i = 1, 12 do
      assert.equal(whole[i].loss, cut[i].loss)
      assert.equal(whole[i].grad_norm, cut[i].grad_norm)
    end
  end)

  it("leave with the cause when one of them ends", function()
    local code, out, err = train_script "at=4 how=die"
    assert.equal(7, code, out .. err)
    assert.truthy(err:find "rank 1 %(pid %d+%) killed by SIGKILL", err)
    code, out, err = train_script "at=4 how=fail"
    assert.equal(1, code, out .. err)
    assert.truthy(err:find("the disk is full", 1, true), err)
    code, out, err = train_script "at=4 how=hang --timeout 3"
    assert.equal(6, code, out .. err)
    assert.truthy(err:find "rank 1 has not come to [%w_]+ #%d+", err)
  end)

  it("are told what else they could do", function()
    script [[require "moonshard".ones { 3 }:sum():item()]]
    local function refused(code, switches, settings, text)
      local ended, _, err = command.run(folder, "run script.lua " .. switches, settings)
      assert.equal(code, ended, err)
      assert.truthy(err:find(text, 1, true), err)
    end
    refused(1, "-n 3 --device cuda", stand_in(2),
      "start 2 ranks here, show more GPUs, or let ranks share them (--share-gpu)")
    refused(2, "-n 2 --share-gpu", stand_in(1), "--share-gpu is about ranks on GPUs: add --device")
    refused(1, "-n 2 --device cuda --share-gpu", stand_in(1) .. " MOONSHARD_TRANSPORT=nccl",
      "--share-gpu: NCCL takes one rank a GPU: leave MOONSHARD_TRANSPORT unset")
  end)
end)
