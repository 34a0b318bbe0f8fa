-- Several ranks on the cuda device, over libraries of the tests in place of NVIDIA's driver and of
-- NCCL: training gives the losses of the cpu device, and each rank has a GPU of its own.
local command = require "command"
local core = require "moonshard.core"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

local function stand_in(gpus)
  return ("MOONSHARD_CUDA_DRIVER='%s' MOONSHARD_STAND_IN_GPUS=%d"):format(
    os.getenv "MOONSHARD_STAND_IN", gpus)
end

local TEXT <const> = ("'%s/README.md'"):format(command.source)
local SIZE = command.full and "length=32 batch=4 model.width=64"
  or "length=16 batch=4 model.width=32"

-- The losses of a short training, in order.
local function losses(arguments, settings)
  local steps = tonumber(arguments:match "steps=(%d+)") or 5
  if not arguments:find "steps=" then arguments = arguments .. " steps=5" end
  if not arguments:find "data=" then arguments = arguments .. " data=" .. TEXT end
  if not arguments:find "layers=" then arguments = arguments .. " model.layers=1" end
  local out = command.succeed(folder, ("run '%s/recipes/%s %s model.heads=2 \z
    dtype=bf16 every.eval=0 every.sample=0 every.save=0 run=a%d")
    :format(command.source, arguments, SIZE, settings and 1 or 2), settings)
  local list = {}
  for loss in out:gmatch "loss ([%d.]+)  [en]" do list[#list + 1] = tonumber(loss) end
  assert.equal(steps, #list, out)
  return list
end

local SUM = [[
  local ms = require "moonshard"
  ms.init {}
  local t = ms.ones { 3 } * (ms.rank() + 1)
  print(("rank %d has %g"):format(ms.rank(), ms.world():all_reduce(t):value():sum():item()))
]]

describe("ranks on GPUs", function()
  for _, arguments in ipairs(command.some(2, {
    "gpt_bytes.lua' -n 2 --thread-ranks", "gpt_bytes.lua' -n 2",
    "gpt2.lua' -n 2 bytes=true vocab=256 data=README.md accumulate=2 shard=full_shard",
    "gpt2.lua' -n 2 bytes=true vocab=256 data=README.md accumulate=1 hook=bf16_compress",
  })) do
    it("train as on the cpu: " .. arguments, function()
      arguments = arguments:gsub("README.md", command.source .. "/README.md")
      local on_cpu = losses(arguments)
      local on_gpu = losses(arguments .. " --device cuda", stand_in(2))
      for i, loss in ipairs(on_cpu) do assert.near(loss, on_gpu[i], 1e-3) end
    end)
  end

  -- What hooks do may be part of graphs. Reductions of buckets are, and other collectives are not.
  it("train to the same numbers with graph = true", function()
    for _, arguments in ipairs(command.some(2, {
      "gpt2.lua' -n 2 steps=10 bytes=true vocab=256 data=README.md accumulate=2 shard=full_shard",
      "gpt_bytes.lua' -n 2 steps=10",
      "gpt2.lua' -n 2 steps=10 bytes=true vocab=256 data=README.md accumulate=1 \z
        hook=bf16_compress",
    })) do
      arguments = arguments:gsub("README.md", command.source .. "/README.md") .. " --device cuda"
      local watched = stand_in(2) .. " MOONSHARD_STAND_IN_WATCH=stop"
      assert.same(losses(arguments, command.full and watched or stand_in(2)),
        losses(arguments .. " graph=true", watched))
    end
  end)

  -- A script that keeps what a future gives, or a tensor of its own, for as long as its step. All
  -- tensors of a step then have the addresses of the step before, those of fsdp as they have rooms.
  -- Ranks that share a GPU launch some of a step later, so several steps are looked at.
  it("launch most of a step as graphs", function()
    local function launched(model, keeps, switches, settings)
      command.write(folder .. "/graphs.lua", ([[
        local ms = require "moonshard"
        local layers = {}
        for i = 1, 8 do layers[i] = ms.nn.Linear(16, 16) end
        local model = %s
        local optimizer = ms.optim.adamw(model, { lr = 0.01 })
        local x, kept = ms.ones { 4, 16 }:keep(), {}
        local before
        for step in ms.steps(24, 0, { graph = true }) do
          if step == 16 then before = ms.info().graph end
          local loss = model(x):sum()
          loss:backward()
          local mean = ms.world():all_reduce(loss:detach():reshape(1):clone(), "avg"):value()
          if %s then kept[#kept + 1] = mean:keep() end
          optimizer:step()
          optimizer:zero_grad()
        end
        local graph = ms.info().graph
        print(("rank %%d: %%d of %%d%%s"):format(ms.rank(), graph.replayed - before.replayed,
          graph.replayed - before.replayed + graph.alone - before.alone,
          graph.differs and ", differs" or ""))
      ]]):format(model, keeps))
      local out = command.succeed(folder, ("run graphs.lua -n 2 --device cuda") .. (switches or ""),
        (settings or stand_in(2)) .. " MOONSHARD_STAND_IN_WATCH=stop")
      local told = out:match "graph: [^\n]*" or ""
      for rank = 0, 1 do
        local replayed, all, rest = out:match(("rank %d: (%%d+) of (%%d+)(%%C*)"):format(rank))
        replayed, all = tonumber(replayed), tonumber(all)
        if keeps then
          assert.truthy(replayed * 2 < all and rest == ", differs", out)
        else
          assert.truthy(all > 0 and replayed * 4 >= all * 3, out)
        end
      end
      return told
    end
    assert.matches("^graph: of %d+ tasks of a step %d+ are launched as %d graphs$",
      launched("ms.ddp(ms.nn.Sequential(table.unpack(layers)))", false))
    local sharded = "ms.fsdp(ms.nn.Sequential(table.unpack(layers)))"
    launched(sharded, false)
    launched(sharded, false, nil, stand_in(2) .. " MOONSHARD_COMM_GRAPHS=off")
    launched(sharded, false, " --share-gpu", stand_in(1))
    launched(sharded, false, " --share-gpu --thread-ranks", stand_in(1))
    assert.matches("other addresses or shapes in each step has %a+ %(at [^)]*graphs.lua:%d+%)",
      launched("ms.ddp(ms.nn.Sequential(table.unpack(layers)))", true))
  end)

  -- Buckets stay where they are, so their reductions become graphs, too, on all ranks at once.
  it("launch reductions as graphs", function()
    command.write(folder .. "/reductions.lua", [[
      local ms = require "moonshard"
      local layers = {}
      for i = 1, 8 do layers[i] = ms.nn.Linear(16, 16) end
      local model = ms.ddp(ms.nn.Sequential(table.unpack(layers)), { bucket_bytes = 4096 })
      local optimizer = ms.optim.adamw(model, { lr = 0.01 })
      local x = ms.ones { 4, 16 }:keep()
      for _ in ms.steps(20, 0, { graph = true }) do
        model(x):sum():backward()
        optimizer:step()
        optimizer:zero_grad()
      end
      print(("rank %d: %.9g"):format(ms.rank(), model(x):sum():item()))
    ]])
    local function run(settings)
      local out = command.succeed(folder, "run reductions.lua -n 2 --device cuda",
        stand_in(2) .. " MOONSHARD_STAND_IN_WATCH=stop" .. settings)
      local all, replayed = out:match "graph: of (%d+) tasks of a step (%d+) are launched"
      return tonumber(all), tonumber(replayed), out:match "rank 0: %S+", out:match "rank 1: %S+"
    end
    local all, replayed, first, second = run ""
    assert.equal(all, replayed)
    assert.same({ all, all - 3, first, second }, { run " MOONSHARD_COMM_GRAPHS=off" })
  end)

  -- In a join the rank without inputs makes its calls outside of steps; a hook in Lua may put
  -- another buffer in the bucket's place on one rank only.
  it("may do in one rank what others do not, with reductions as graphs", function()
    command.write(folder .. "/alone.lua", [[
      local ms = require "moonshard"
      local joined = ms.ddp(ms.nn.Linear(64, 64))
      local function train(model, count)
        local optimizer = ms.optim.sgd(model, { lr = 0.01 })
        for step in ms.steps(count, 0, { graph = true }) do
          model(ms.ones { 4, 64 } * (step + ms.rank())):sum():backward()
          optimizer:step()
          optimizer:zero_grad()
        end
      end
      local calls = 0
      local own = ms.hooks.stage {
        name = "test.own",
        encode = function(buffer)
          calls = calls + 1
          return ms.rank() == 0 and calls > 6 and calls % 2 == 0 and buffer:mul(0.5) or buffer
        end,
      }
      local staged = ms.ddp(ms.nn.Linear(64, 64), { comm_hook = own })
      joined:join({}, function() train(joined, ms.rank() == 0 and 2 or 14) end)
      train(staged, 14)
      print(("rank %d: %.9g %.9g"):format(ms.rank(), joined(ms.ones { 1, 64 }):sum():item(),
        staged(ms.ones { 1, 64 }):sum():item()))
    ]])
    local function run(settings)
      local out = command.succeed(folder, "run alone.lua -n 2 --device cuda",
        stand_in(2) .. settings)
      return out:match "rank 0: ([^\n]*)", out:match "rank 1: ([^\n]*)"
    end
    local first, second = run ""
    assert.equal(first, second)
    assert.same({ first, second }, { run " MOONSHARD_COMM_GRAPHS=off" })
  end)

  -- What fsdp gathers and reduces is in rooms, so its collectives become graphs; on all ranks,
  -- also where one keeps memory, reads losses and copies parameters that others do not.
  for options, calls in pairs {
    [ [[{ wrap = wrap }]] ] = 15,
    [ [[{ wrap = wrap, precision = { param = "bf16" } }]] ] = 15,
    [ [[{ wrap = wrap, layout = "rows", max_in_flight = 1 }]] ] = 10,
  } do
    it("launch collectives of fsdp as graphs: " .. options, function()
      command.write(folder .. "/sharded.lua", ([[
        local ms = require "moonshard"
        local layers = {}
        for i = 1, 6 do layers[i] = ms.nn.Linear(32, 32) end
        local wrap = { class = "Linear" }
        local model = ms.fsdp(ms.nn.Sequential(table.unpack(layers)), %s)
        local optimizer = ms.optim.adamw(model, { lr = 0.01 })
        local kept = {}
        for step in ms.steps(20, 0, { graph = true }) do
          local loss = model(ms.ones { 4, 32 }):pow(2):sum()
          loss:backward()
          optimizer:step()
          optimizer:zero_grad()
          if ms.rank() == 0 and step %% 4 == 3 then
            for i = 1, 3 do kept[step * 4 + i] = ms.zeros { 700 * i } end
            for _, p in ipairs(model:parameters()) do kept[step * 4] = p:detach():clone() end
            loss:item()
          end
          if step %% 8 == 5 then
            ms.no_grad(function() model(ms.ones { 1, 32 }) end)
            local offload = step == 13 and "cpu" or nil
            model:summon({ rank0_only = true, writeback = false, offload = offload },
              function() end)
          end
        end
        print(("rank %%d: %%.9g"):format(ms.rank(), model(ms.ones { 1, 32 }):sum():item()))
      ]]):format(options))
      local function run(settings)
        local out = command.succeed(folder, "run sharded.lua -n 2 --device cuda",
          stand_in(2) .. " MOONSHARD_STAND_IN_WATCH=stop" .. settings)
        return tonumber(out:match "are launched as (%d+) graph"),
          out:match "rank 0: %S+", out:match "rank 1: %S+"
      end
      local with, first, second = run ""
      local without, first_before, second_before = run " MOONSHARD_COMM_GRAPHS=off"
      assert.same({ first_before, second_before }, { first, second })
      assert.is_true(with - without >= calls, ("%d and %d"):format(with, without))
    end)
  end

  it("have all the waits that they need", function()
    losses("gpt_bytes.lua' -n 2 --device cuda", stand_in(2) .. " MOONSHARD_STAND_IN_WATCH=stop")
  end)

  -- The check runs on no GPU and without NCCL, whose barriers add numbers that no tensor holds.
  it("have the peaks that check predicts, to the byte", function()
    command.write(folder .. "/peak.lua", [[
      dofile(os.getenv "RECIPE")
      local ms = require "moonshard"
      io.stdout:write(("rank %d peak %d\n"):format(ms.rank(), ms.memory().peak))
    ]])
    local recipe = command.source .. "/recipes/gpt2.lua"
    for _, shard in ipairs { "", "shard=full_shard" } do
      local options = ("--device cuda -n 2 steps=2 %s model.layers=1 model.heads=2 every.eval=0 \z
        every.sample=0 every.save=0 accumulate=2 bytes=true vocab=256 data='%s/README.md' %s")
        :format(SIZE, command.source, shard)
      local predicted = core.json_decode((command.succeed(folder,
        ("check '%s' --json %s"):format(recipe, options)))).peak_bytes
      local out = command.succeed(folder, "run peak.lua " .. options,
        ("%s RECIPE='%s'"):format(stand_in(2), recipe))
      for rank = 0, 1 do
        local peak = out:match(("rank %d peak (%%d+)"):format(rank))
        assert.equal(predicted[rank + 1], math.tointeger(tonumber(peak)), shard)
      end
    end
  end)

  -- A block is gathered while backward goes through the one after it.
  it("leave multiprocessors to collectives that are under way", function()
    local function limits(ranks)
      os.remove(folder .. "/log")
      losses(("gpt2.lua' -n %d --device cuda bytes=true vocab=256 data=%s/README.md \z
        accumulate=1 shard=full_shard model.layers=2"):format(ranks, command.source),
        stand_in(ranks) .. " MOONSHARD_STAND_IN_CUBLASLT_LOG=log")
      return select(2, command.read(folder .. "/log"):gsub("limits 1\n", ""))
    end
    assert.is_true(limits(2) > 1)
    assert.equal(0, limits(1))
  end)

  it("have a GPU each, in the order of their places", function()
    command.write(folder .. "/sum.lua", SUM)
    local out = command.succeed(folder, "run sum.lua -n 3 --device cuda", stand_in(4))
    for r = 0, 2 do assert.truthy(out:find(("rank %d has 18"):format(r), 1, true), out) end
  end)

  it("are no more than there are GPUs", function()
    command.write(folder .. "/sum.lua", SUM)
    local code, _, err = command.run(folder, "run sum.lua -n 3 --device cuda",
      stand_in(2) .. " CUDA_VISIBLE_DEVICES=0,1")
    assert.equal(1, code, err)
    assert.truthy(err:find("3 ranks on this host and 2 GPUs (CUDA_VISIBLE_DEVICES=0,1): each rank "
      .. "needs a GPU of its own: start 2 ranks here, show more GPUs, or let ranks share "
      .. "them (--share-gpu)", 1, true), err)
  end)

  it("need NCCL, which a rank alone does not", function()
    command.write(folder .. "/sum.lua", SUM)
    local settings = stand_in(2) .. " MOONSHARD_NCCL=/nowhere/libnccl.so.2"
    local code, _, err = command.run(folder, "run sum.lua -n 2 --device cuda", settings)
    assert.equal(3, code, err)
    assert.truthy(err:find("several ranks on GPUs need NCCL: /nowhere/libnccl.so.2", 1, true), err)
    assert.truthy(err:find("MOONSHARD_NCCL names it: unset that, or set it to the path of NCCL "
      .. "2.28 or later; one rank needs none, --share-gpu works without it on one host, and the "
      .. "device cpu on any", 1, true), err)
    local out = command.succeed(folder, "run sum.lua -n 1 --device cuda", settings)
    assert.truthy(out:find("rank 0 has 3", 1, true), out)
  end)

  it("end together when one fails", function()
    command.write(folder .. "/fails.lua", [[
      local ms = require "moonshard"
      ms.init {}
      local t = ms.ones { 3 }
      ms.world():all_reduce(t)
      if ms.rank() == 1 then error "the disk is full" end
      for _ = 1, 1000 do ms.world():all_reduce(t) end
      print(t:sum():item())
    ]])
    local code, _, err = command.run(folder, "run fails.lua -n 2 --device cuda", stand_in(2))
    assert.equal(1, code, err)
    assert.truthy(err:find("the disk is full", 1, true), err)
  end)
end)
