-- Base weights as codes on ranks: the same numbers however the model is copied or sharded;
-- checkpoints; memory that check predicts.
local command = require "command"
local core = require "moonshard.core"

describe("adapters on codes, on ranks", function()
  local folder
  before_each(function()
    folder = command.folder()
    command.write(folder .. "/text", command.read(command.source .. "/README.md"):sub(1, 4000))
    command.write(folder .. "/make.lua", [[
      local ms = require "moonshard"
      assert(ms.nn.llama { vocab = 256, context = 32, layers = 2, width = 40, heads = 4,
        kv_heads = 2 }:save "base")]])
    command.succeed(folder, "run make.lua")
  end)
  after_each(function() command.remove(folder) end)

  -- Norms of shards are added up in another order than those of whole gradients, so nothing clips.
  local SMALL <const> = "weights=base data=text bytes=true length=16 batch=4 dtype=f32 warmup=2 \z
    lr=1e-2 every.sample=0 every.eval=4 steps=8 every.save=4 clip=1e30 lora=2 adapt.base=int4 "
  local function launch(options)
    return (command.succeed(folder, ("%s '%s/recipes/llama.lua' %s %s"):format(
      options:match "^%S+", command.source, SMALL, options:match "^%S+ (.*)$")))
  end
  -- The losses of a run, and the adapters that it saves.
  local function train(name, options)
    local out = launch(("run %s run=%s"):format(options, name))
    assert.matches("its weights have 4 bits, so they are not saved again", out)
    assert.is_nil(command.read(folder .. "/" .. name .. "/model/config.json"))
    local losses = {}
    for _, line in ipairs(command.metrics(("%s/%s"):format(folder, name))) do
      losses[#losses + 1] = ("%.9g %.9g"):format(line.loss, line.val_loss or 0)
    end
    return losses,
      assert(command.read(("%s/%s/adapter/adapter_model.safetensors"):format(folder, name)))
  end

  it("train to the same bits, copied and sharded", function()
    local losses, adapter = train("plain", "-n 2")
    assert.equal(8, #losses)
    assert.not_equal(losses[1], losses[8])
    for name, options in pairs {
      full = "shard=full_shard", grad_op = "shard=shard_grad_op overlap=deferred",
      no_shard = "shard=no_shard", early = "overlap=in_backward",
      offload = "shard=full_shard shard.offload=cpu",
    } do
      local own, own_adapter = train(name, "-n 2 " .. options)
      assert.same(losses, own, name)
      assert.equal(adapter, own_adapter, name)
    end
    -- Codes travel as they are, whatever is made of other shards.
    local own = train("gathers", ("-n 2 shard=full_shard gather='%s/recipes/gathers/int8.lua'")
      :format(command.source))
    assert.near(tonumber(losses[1]:match "%S+"), tonumber(own[1]:match "%S+"), 1e-2)
    assert.is_true(train("narrow", "-n 2 dtype=bf16 shard=full_shard")[1] ~= nil)
  end)

  it("are read by generate, with the weights that they were trained on", function()
    train("run", "-n 1")
    command.write(folder .. "/r.lua", [[
      local ms = require "moonshard"
      local how = ms.config { base = "", merge = false }
      local model = assert(ms.nn.pretrained "base")
      local base
      if how.base == "false" then base = false end
      assert(model:load_adapters("run/adapter", { base = base }))
      local ids = ms.tensor({ ("One"):byte(1, -1) }, "i64")
      if how.merge then model:merge_adapters() end
      local new = model:generate(ids, { count = 12, temperature = 0 }):to_table()
      io.write("One", string.char(table.unpack(new)))]])
    local wanted = command.succeed(folder, "run r.lua")
    assert.equal(wanted, (command.succeed(folder, "run r.lua merge=true")))
    for _, path in ipairs { "run", "run/adapter" } do
      local out = command.succeed(folder, ("generate %s --greedy --prompt One --count 12"):format(
        path))
      assert.equal(wanted, (out:gsub("\n$", "")))
    end
    -- The adapters go with other weights, too, where somebody asks for it.
    command.succeed(folder, "run r.lua base=false")
    assert(os.rename(folder .. "/base", folder .. "/gone"))
    local code, _, err = command.run(folder, "generate run --prompt One")
    assert.equal(3, code)
    assert.matches("these are adapters of the model 'base', which is not here", err, 1, true)
  end)

  it("are refused where an option would change nothing", function()
    for options, wanted in pairs {
      ["lora=0"] = "option adapt.base: there are no adapters: give lora=RANK",
      ["adapters=x"] = "option lora=2: the folder 'x' says the rank",
      ["lora=0 adapters=x adapt.alpha=3"] = "option adapt.alpha: the folder 'x' says it",
    } do
      local code, _, err = command.run(folder, ("run '%s/recipes/llama.lua' %s %s"):format(
        command.source, SMALL, options))
      assert.equal(2, code)
      assert.matches(wanted, err, 1, true)
    end
  end)

  it("go on from a checkpoint of another strategy, of codes alone", function()
    local losses, adapter = train("two", "-n 2 shard=full_shard")
    for name, options in pairs { copies = "", other = "shard=shard_grad_op" } do
      local own, own_adapter = train(name, ("-n 2 resume=two/step-00000004 %s"):format(options))
      assert.same({ table.unpack(losses, 5) }, own, name)
      assert.equal(adapter, own_adapter, name)
    end
    local code, _, err = command.run(folder, ("run '%s/recipes/llama.lua' %s adapt.base= \z
      resume=two/step-00000004"):format(command.source, SMALL:gsub("adapt.base=int4", "")))
    assert.equal(3, code)
    assert.matches("wrong shape: model.layers.0.mlp.down_proj.weight", err, 1, true)
  end)

  it("need the memory that check predicts, and less than weights", function()
    for _, options in ipairs { "-n 1", "-n 2 shard=full_shard" } do
      local told = core.json_decode(launch("check " .. options .. " --json"):match "{.*}")
      command.remove(folder .. "/measured")
      train("measured", options)
      local lines = command.metrics(folder .. "/measured")
      assert.equal(told.peak_bytes[1], lines[#lines].peak_bytes, options)
      local plain = core.json_decode(launch("check " .. options .. " --json adapt.base=")
        :match "{.*}")
      assert.is_true(told.peak_bytes[1] < plain.peak_bytes[1], options)
    end
  end)

  it("compute in the dtype of a unit's precision, and merge", function()
    command.write(folder .. "/r.lua", [[
      local ms = require "moonshard"
      local function make()
        return ms.nn.lora(assert(ms.nn.pretrained "base"), { rank = 2, base = "int4" })
      end
      local x = ms.randint { 2, 16, low = 0, high = 256, seed = 1 }
      ms.seed(3)
      local model = ms.fsdp(make(), { precision = { param = "bf16" } })
      ms.seed(3)
      local whole = make()
      local function far(a, b) return (a:to "f32" - b:to "f32"):abs():max():item() end
      local logits
      ms.no_grad(function() logits = model(x) end)
      assert(logits:dtype() == "bf16")
      -- bf16 has 8 bits: logits are about 1.
      assert(far(logits, whole(x)) < 0.05 and far(logits, whole(x)) > 0)
      local optimizer = ms.optim.sgd(model, { lr = 0.1 })
      model(x):to "f32":cross_entropy(x):backward()
      optimizer:step()
      local merged = model:merge_adapters()
      assert(merged.model.layers[1].mlp.up_proj.weight:dtype() == "f32")
      assert(far(merged(x), whole(x)) > 0)
      print(("rank %d is done"):format(ms.rank()))]])
    local out = command.succeed(folder, "run r.lua -n 2")
    assert.matches("rank 0 is done", out)
    assert.matches("rank 1 is done", out)
  end)
end)
