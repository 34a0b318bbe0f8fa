-- ema= of recipes on ranks: the same averages however the model is reduced, sharded and stepped;
-- checkpoints for other ranks; memory that check predicts.
local command = require "command"
local core = require "moonshard.core"
local ms = require "moonshard"

describe("averages of weights on ranks", function()
  local folder
  before_each(function()
    folder = command.folder()
    command.write(folder .. "/text", command.read(command.source .. "/README.md"):sub(1, 4000))
  end)
  after_each(function() command.remove(folder) end)

  -- Norms of shards are added up in another order than those of whole gradients, so nothing clips.
  local SMALL <const> = "data=text length=16 batch=4 warmup=2 every.sample=0 every.eval=4 \z
    model.layers=1 model.width=32 model.heads=2 steps=8 ema=0.8 every.save=4 clip=1e30 "
  local function launch(options)
    return (command.succeed(folder, ("%s '%s/recipes/gpt_bytes.lua' %s %s"):format(
      options:match "^%S+", command.source, SMALL, options:match "^%S+ (.*)$")))
  end
  -- The model of a run, which is its averages, and its validation losses.
  local function train(name, options)
    launch(("run %s run=%s"):format(options, name))
    local losses = {}
    for _, line in ipairs(command.metrics(("%s/%s"):format(folder, name))) do
      losses[#losses + 1] = line.val_loss
    end
    return assert(ms.safetensors.load(("%s/%s/model/model.safetensors"):format(folder, name))),
      losses
  end
  -- The largest distance of two models.
  local function distance(one, other)
    local far = 0
    for name, value in pairs(one) do
      far = math.max(far, (value:to "f32" - other[name]:to "f32"):abs():max():item())
    end
    return far
  end

  it("are the same bits under every policy, and with shards", function()
    local wanted, losses = train("plain", "-n 2 dtype=f32")
    assert.equal(2, #losses)
    for name, options in pairs {
      deferred = "overlap=deferred", early = "overlap=in_backward",
      full_shard = "shard=full_shard", shard_grad_op = "shard=shard_grad_op overlap=deferred",
      no_shard = "shard=no_shard",
    } do
      local own, others = train(name, "-n 2 dtype=f32 " .. options)
      assert.equal(0, distance(wanted, own), name)
      assert.same(losses, others, name)
    end
    -- The averages are not the weights.
    assert.is_true(distance(wanted, (train("without", "-n 2 dtype=f32 ema=0"))) > 0)
  end)

  it("go on from a checkpoint of other ranks and another strategy", function()
    local wanted, losses = train("two", "-n 2 dtype=f32 shard=full_shard")
    for name, options in pairs { other = "shard=shard_grad_op", copies = "" } do
      local own, others = train(name,
        ("-n 2 dtype=f32 %s resume=two/step-00000004"):format(options))
      assert.equal(0, distance(wanted, own), name)
      assert.same({ losses[2] }, others, name)
    end
    -- All steps are done: each saves the averages of the checkpoint. A run that was not sharded has
    -- the same.
    train("copied", "-n 2 dtype=f32")
    local first
    for name, options in pairs {
      whole = "-n 1 resume=two/step-00000004", shards = "-n 4 shard=full_shard \z
      resume=copied/step-00000004", one = "-n 1 resume=copied/step-00000004",
    } do
      local own = train(name, options .. " dtype=f32 steps=4")
      first = first or own
      assert.equal(0, distance(first, own), name)
    end
    assert.is_true(distance(first, wanted) > 0)
  end)

  it("are the same under autocast", function()
    local plain, losses = train("plain", "-n 2 dtype=bf16")
    local shards, others = train("shards", "-n 2 dtype=bf16 shard=full_shard")
    assert.equal(0, distance(plain, shards))
    assert.same(losses, others)
  end)

  it("are merged into the model where they are of adapters", function()
    command.write(folder .. "/make.lua", [[
      local ms = require "moonshard"
      assert(ms.nn.gpt2 { vocab = 256, context = 16, layers = 1, width = 32, heads = 2 }
        :save "base")]])
    command.succeed(folder, "run make.lua")
    local merged, adapter = {}, {}
    for _, how in ipairs { "-n 2", "-n 2 shard=full_shard", "-n 2 ema=0" } do
      command.remove(folder .. "/out")
      command.succeed(folder, ("run '%s/recipes/gpt2.lua' weights=base lora=2 data=text \z
        bytes=true length=16 batch=4 accumulate=1 dtype=f32 warmup=2 lr=1e-2 every.eval=4 \z
        every.sample=0 every.save=0 steps=8 ema=0.8 clip=1e30 run=out %s")
        :format(command.source, how))
      merged[#merged + 1] = assert(ms.safetensors.load(folder .. "/out/model/model.safetensors"))
      adapter[#adapter + 1] =
        assert(ms.safetensors.load(folder .. "/out/adapter/adapter_model.safetensors"))
    end
    for _, found in ipairs { merged, adapter } do
      assert.equal(0, distance(found[1], found[2]))
      assert.is_true(distance(found[1], found[3]) > 0)
    end
  end)

  it("are averages of each rank's own weights with local=", function()
    local how = "-n 2 dtype=f32 local=local_sgd local.period=3 "
    local wanted = train("apart", how)
    local again = train("again", how .. "resume=apart/step-00000004")
    assert.equal(0, distance(wanted, again))
  end)

  it("need the memory that check predicts", function()
    for _, options in ipairs { "-n 2 dtype=f32", "-n 2 dtype=bf16 shard=full_shard" } do
      local told = core.json_decode(launch("check " .. options .. " --json"):match "{.*}")
      command.remove(folder .. "/measured")
      launch("run " .. options .. " run=measured")
      local lines = command.metrics(folder .. "/measured")
      assert.equal(told.peak_bytes[1], lines[#lines].peak_bytes, options)
    end
  end)
end)
