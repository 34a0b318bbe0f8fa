-- shard= on recipes: the losses and weights of ddp, what goes together with it, and what does not.
local command = require "command"
local ms = require "moonshard"
local folder
before_each(function()
  folder = command.folder()
  command.write(folder .. "/text", command.read(command.source .. "/README.md"):sub(1, 4000))
end)
after_each(function() command.remove(folder) end)

local text = "data=text "
local small = text .. "length=16 batch=4 dtype=f32 every.eval=2 every.sample=0 every.save=0 "
  .. "model.layers=2 model.width=32 model.heads=2 "
local recipes = {
  gpt_bytes = small, gpt2 = small .. "bytes=true vocab=256 accumulate=2",
  llama = small .. "bytes=true vocab=256 model.kv_heads=1 accumulate=3", mnist = "data=. batch=10",
  ddp_by_hand = text .. "length=16 batch=4",
}

local function run(recipe, options, switches)
  return command.run(folder, ("run '%s/recipes/%s.lua' -n 2 %s %s steps=5 %s"):format(
    command.source, recipe, switches or "--thread-ranks", recipes[recipe], options))
end

-- Trains, and gives the losses of each step, of the validations, and the model that was saved.
local function train(recipe, options, switches)
  os.execute(("rm -rf '%s/out'"):format(folder))
  local code, out, err = run(recipe, options .. " run=out", switches)
  assert.equal(0, code, out .. err)
  local losses = {}
  for i, line in ipairs(command.metrics(folder .. "/out")) do
    losses[i] = { line.loss, line.grad_norm, line.val_loss }
  end
  assert.equal(5, #losses)
  return losses, recipe ~= "mnist" and recipe ~= "ddp_by_hand"
    and assert(ms.safetensors.load(folder .. "/out/model/model.safetensors")), out .. err
end

-- The same without options, which several tests compare with: each recipe is trained so once.
local plain = {}
local function train_plainly(recipe)
  plain[recipe] = plain[recipe] or { train(recipe, "") }
  return table.unpack(plain[recipe])
end

local function same(expected, own)
  for i, values in ipairs(expected) do
    for k, value in pairs(values) do
      assert.is_true(math.abs(own[i][k] - value) <= 1e-5 * math.abs(value),
        ("step %d: %g, ddp has %g"):format(i - 1, own[i][k], value))
    end
  end
end

describe("shard=", function()
  it("reads given weights straight into shards, and writes them again", function()
    assert(ms.nn.llama { vocab = 256, context = 16, layers = 4, width = 32, heads = 2 }
      :save(folder .. "/given", { dtype = "bf16" }))
    local expected, model = train("llama", "weights=given")
    local own, sharded = train("llama", "weights=given shard=full_shard")
    same(expected, own)
    for key, t in pairs(model) do
      assert.equal("bf16", sharded[key]:dtype())
      -- A number that is between two may go either way: they are 2^-8 apart.
      assert.is_true((t:to "f32" - sharded[key]:to "f32"):abs():max():item()
        <= 2 ^ -8 * t:to("f32"):abs():max():item(), key)
    end
  end)
  -- In short ranges two recipes represent two of the strategies.
  local strategies = { mnist = "hybrid_shard", ddp_by_hand = "hybrid_shard_zero2" }
  for name in pairs(recipes) do
    it(("of %s gives the losses of ddp, and saves the same model"):format(name), function()
      command.write_digits(folder)
      -- gpt_bytes shows samples, and runs as the manual says: processes.
      local sample = name == "gpt_bytes" and " every.sample=5" or ""
      local expected, model = train_plainly(name)
      local strategy = command.full and "full_shard" or strategies[name] or "full_shard"
      local own, sharded = train(name, "shard=" .. strategy .. sample, sample ~= "" and "")
      same(expected, own)
      for weight, t in pairs(model or {}) do
        local most = (t - sharded[weight]):abs():max():item()
        assert.is_true(most <= 1e-4, ("%s differs by %g"):format(weight, most))
      end
    end)
  end

  it("takes every strategy, options of ms.fsdp, hooks and lower precision", function()
    local expected = train_plainly "gpt2"
    for _, how in ipairs {
      "shard=shard_grad_op shard.accumulate=local", "shard=no_shard",
      "shard=zero3 shard.prefetch=none recompute=true",
      command.full and "shard=hybrid_shard" or nil,
      command.full and "shard=hybrid_shard_zero2" or nil,
    } do
      same(expected, (train("gpt2", how)))
    end
    local rounded = train("gpt2", "shard=full_shard hook=bf16_compress")
    -- A loss may be equal by chance; norms of rounded gradients differ.
    assert.is_true(math.abs(rounded[5][1] - expected[5][1]) < 0.02)
    assert.not_equal(expected[1][2], rounded[1][2])
    for _, dtype in ipairs { "bf16", "f16" } do
      local lower = train("gpt2", "shard=full_shard dtype=" .. dtype)
      assert.is_true(math.abs(lower[5][1] - expected[5][1]) < 0.05)
    end
  end)

  it("saves checkpoints, from which any ranks and strategies go on", function()
    local whole = train("gpt_bytes", "shard=full_shard every.save=3")
    assert.is_truthy(command.read(folder .. "/out/step-00000003/rank-00001.safetensors"))
    -- The peak is what check predicts, to the byte.
    local told = command.succeed(folder, ("check '%s/recipes/gpt_bytes.lua' -n 2 --json %s")
      :format(command.source, "shard=full_shard run=out steps=5 " .. small .. "every.save=3"))
    local saving = command.metrics(folder .. "/out")
    local predicted = require "moonshard.core".json_decode(told:match "{.*}").peak_bytes
    assert.equal(saving[#saving].peak_bytes, predicted[1])
    local function resume(ranks, options)
      os.execute(("rm -rf '%s/again'; cp -r '%s/out' '%s/again'; rm -rf '%s'/again/step-00000005")
        :format(folder, folder, folder, folder))
      local code, out, err = command.run(folder,
        ("run '%s/recipes/gpt_bytes.lua' -n %d --thread-ranks %s steps=5 resume=auto run=again %s")
        :format(command.source, ranks, small, options))
      assert.equal(0, code, out .. err)
      assert.matches("resumed from again/step%-00000003", out)
      local lines = command.metrics(folder .. "/again")
      assert.equal(5, #lines)
      return lines
    end
    -- The same ranks: the same bits. Others add up in another order.
    local same_ranks = resume(2, "shard=full_shard every.save=2")
    for step = 4, 5 do
      assert.equal(whole[step][1], same_ranks[step].loss)
      assert.equal(whole[step][2], same_ranks[step].grad_norm)
    end
    local others = {
      { 1, "" }, { 2, "" }, { 2, "shard=no_shard" }, { 4, "shard=hybrid_shard shard.layout=rows" },
    }
    if command.full then
      table.move({ { 4, "shard=hybrid_shard" }, { 4, "shard=full_shard shard.layout=rows" } }, 1, 2,
        5, others)
    end
    for _, how in ipairs(others) do
      local lines = resume(how[1], how[2])
      for step = 4, 5 do
        assert.is_true(math.abs(whole[step][1] - lines[step].loss) <= 1e-5 * whole[step][1], how[2])
      end
    end
    -- And from ddp to shards.
    train("gpt_bytes", "every.save=3")
    local lines = resume(2, "shard=shard_grad_op")
    assert.is_true(math.abs(whole[5][1] - lines[5].loss) <= 1e-5 * whole[5][1])
  end)

  local function refused(code, options, ...)
    local ended, out, err = run("gpt_bytes", options)
    assert.equal(code, ended, out .. err)
    for _, part in ipairs { ... } do assert.truthy(err:find(part, 1, true), err) end
    assert.equal(1, select(2, err:gsub(((...):gsub("%p", "%%%0")), "")), err)
  end

  it("refuses what it cannot do, in one message with the remedy", function()
    refused(2, "shard=ful_shard", "there is no strategy 'ful_shard': did you mean 'full_shard'?",
      "strategies: full_shard, shard_grad_op, no_shard, hybrid_shard, hybrid_shard_zero2")
    refused(2, "shard=zero1", "shard = ms.world() among the optimizer's options")
    refused(2, "shard.prefetch=none", "shard.prefetch is given, but no shard=")
    refused(2, "shard=full_shard shard.prefech=none", "unknown option 'prefech'", "'prefetch'")
    refused(2, "shard=full_shard buckets=fitted", "there are no buckets to cut")
  end)

  it("stops a run with bad numbers, and names the parameter whose gradient is bad", function()
    command.write(folder .. "/r.lua", [[
      local ms = require "moonshard"
      local cfg = ms.config { on_nan = "stop", clip = 0.0 }
      local net = ms.fsdp(ms.nn.Sequential(ms.nn.Linear(4, 4), ms.nn.Linear(4, 3)))
      local bad = net.module[2].bias
      ms.train {
        model = net, optimizer = ms.optim.sgd(net, { lr = 0.1 }), steps = 6, run = "out",
        on_nan = cfg.on_nan, clip = cfg.clip > 0 and cfg.clip or nil,
        data = function() return ms.ones { 2, 4 }, ms.zeros { 2 } end,
        loss = function(m, x) return m(x):square():mean() end,
        after_backward = function(step)
          -- Of all ranks, one has the last number of all parameters.
          local grad = bad:grad()
          if step == 2 and grad and grad:numel() > 0 then
            ms.no_grad(function() grad:narrow(1, grad:numel(), 1):mul_(1 / 0) end)
          end
        end,
      }
      net:summon({ writeback = false }, function(parameters)
        local sum = parameters[1]:sum():item()
        print("weights", ms.rank(), sum == sum)
      end)
    ]])
    local code, out, err = command.run(folder, "run r.lua -n 3")
    assert.equal(4, code, out .. err)
    assert.matches("step 2: loss or gradients are inf or nan %(first bad gradient: 1.bias%)", err)
    local told
    out, told = command.succeed(folder, "run r.lua -n 3 on_nan=skip clip=1")
    assert.equal(3, select(2, out:gsub("weights%s%d%strue", "")), out .. told)
    assert.matches("step 2 skipped: inf or nan %(first bad gradient: 1.bias%)", told)
  end)
end)

describe("the recipe", function()
  local tiny = " steps=2 batch=4 length=16 run=out data=text "
  local function shown(recipe, options)
    return command.succeed(folder, ("run '%s/recipes/%s.lua' %s"):format(command.source, recipe,
      options .. tiny))
  end

  it("llama_fsdp shows units and memory, and half of the states are on one of two ranks", function()
    local model = " model.layers=2 model.width=32 model.heads=2 model.kv_heads=1"
    local one, two = shown("llama_fsdp", model), shown("llama_fsdp", "-n 2 prefetch=none" .. model)
    for index, name in ipairs { "%(root%)", "model.layers.0", "model.layers.1" } do
      assert.matches(("unit %d +%s +[%%d.]+ MiB, of which"):format(index - 1, name), two)
    end
    local whole, own = two:match "AdamW: ([%d.]+) MiB whole, ([%d.]+) MiB of them on this rank"
    local all = one:match "AdamW: ([%d.]+) MiB whole"
    assert.is_true(math.abs(whole - all) < 0.02 and math.abs(own / whole - 0.5) < 0.05, two)
    local between, peak = two:match "this rank: ([%d.]+) MiB between steps, ([%d.]+) MiB at"
    -- Between steps there are the shards, and nothing else of this size.
    assert.is_true(math.abs(between - own) < 0.05 and tonumber(peak) > tonumber(between), two)
    assert.matches("validation loss [%d.]+ nats per byte, the model is in out%S*/model", two)
  end)

  it("gpt2_hybrid sends half as much between blocks in 16 bits", function()
    local model = " model.layers=2 model.width=32 model.heads=2"
    local function sent(options)
      local out = shown("gpt2_hybrid", options .. model)
      return tonumber((out:match "and ([%d.]+) MiB to other blocks")), out
    end
    local half, out = sent "-n 4 --thread-ranks"
    local all, full = sent "-n 4 between=f32 reshard=false"
    assert.matches("share a copy of the parameters: 2, copies: 2", out)
    assert.is_true(half > 0 and math.abs(half / all - 0.5) < 0.05, out .. full)
    assert.equal(0, sent "-n 2")
    assert.equal(0, sent "")
  end)
end)
