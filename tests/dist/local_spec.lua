-- local= on recipes: methods with which each rank trains its own weights. Their results, exact
-- resume, what they do not go with.
local command = require "command"
local ms = require "moonshard"

describe("local=", function()
  local folder
  before_each(function()
    folder = command.folder()
    command.write(folder .. "/text", command.read(command.source .. "/README.md"):sub(1, 4000))
  end)
  after_each(function() command.remove(folder) end)

  local SMALL <const> = "data=text length=16 batch=4 dtype=f32 every.eval=0 every.sample=0 \z
    model.layers=1 model.width=32 model.heads=2 "
  local function run(options, recipe)
    return command.run(folder, ("run '%s/recipes/%s.lua' %s %s"):format(command.source,
      recipe or "gpt_bytes", SMALL, options))
  end
  local function train(options, name)
    local code, out, err = run(options .. " run=" .. name)
    assert.equal(0, code, out .. err)
    local losses = {}
    for i, line in ipairs(command.metrics(folder .. "/" .. name)) do losses[i] = line.loss end
    return losses, assert(ms.safetensors.load(("%s/%s/model/model.safetensors"):format(folder,
      name))), out
  end
  local function same(expected, own, tolerance)
    for name, value in pairs(expected) do
      local far = (value - own[name]):abs():max():item()
      assert.is_true(far <= tolerance, ("%s differs by %g"):format(name, far))
    end
  end

  it("averages weights as the methods say", function()
    -- A DiLoCo whose outer optimizer takes the whole step is the mean of the weights, up to
    -- rounding: anchor - (anchor - mean).
    local how = " steps=9 warmup=1 every.save=0"
    local losses, mean = train("-n 2 local=local_sgd local.period=3" .. how, "mean")
    local own, model = train("-n 2 local=diloco local.period=3 local.lr=1 local.momentum=0"
      .. how, "diloco")
    assert.equal(9, #losses)
    for i, loss in ipairs(losses) do assert.near(loss, own[i], 1e-4) end
    same(mean, model, 1e-5)
    -- Ranks that never meet have other weights, whose mean is saved.
    local _, apart = train("-n 2 local=local_sgd local.period=100" .. how, "apart")
    local far = 0
    for name, value in pairs(mean) do
      far = math.max(far, (value - apart[name]):abs():max():item())
    end
    assert.is_true(far > 1e-3, tostring(far))
  end)

  it("goes on bit for bit after a resume", function()
    for _, method in ipairs {
      "diloco local.period=4", "slowmo local.period=4", "local_sgd local.period=4",
      "streaming_diloco local.period=4 local.delay=2 local.pieces=2", "sparta local.fraction=0.3",
      "noloco local.period=4", "eager_diloco local.period=4",
      "sparseloco local.period=4 local.k=256",
      "des_loc local.period=2 local.first=3 local.second=4",
    } do
      local options = ("-n 2 local=%s steps=10 every.save=5 "):format(method)
      local name = method:match "%S+"
      local _, whole = train(options, name)
      local _, resumed, out = train(options .. ("resume=%s/step-00000005"):format(name),
        name .. "-again")
      assert.matches("resumed from", out)
      same(whole, resumed, 0)
    end
  end)

  it("takes a file, on any training recipe, and tells of options that nobody reads", function()
    command.write(folder .. "/own.lua", [[
      return function(options)
        local ms = require "moonshard"
        ms.nn.alone(options.model, { merge = "mean" })
        return { after_step = function(step) print("met", step, options.by) end }
      end
    ]])
    local code, out, err = run("bytes=true vocab=256 accumulate=1 steps=2 every.save=0 \z
      local=own.lua local.by=3 local.bye=4", "gpt2")
    assert.equal(0, code, out .. err)
    assert.matches("met\t1\t3", out)
    assert.matches("local.bye is given, but 'own.lua' has not read it", err)
  end)

  it("refuses what makes no sense", function()
    local function fails(options, ...)
      local code, out, err = run(options .. " steps=2")
      assert.equal(2, code, out .. err)
      for _, text in ipairs { ... } do assert.truthy(err:find(text, 1, true), err) end
    end
    fails("local=diloko", "there is no method 'diloko': did you mean", "hooks/diloco.lua'")
    fails("local=diloco hook=bf16_compress",
      "option local=diloco: each rank trains its own weights",
      "hook=bf16_compress has nothing to do")
    fails("local=diloco shard=full_shard", "shard=full_shard has nothing to do")
    fails("local.period=3", "local.period is given, but no local=")
    fails("local=random_k local.fraction=0.5", "is no method", "a link is for hook=")
    fails("local=streaming_diloco local.period=4", "delay must be below period")
    fails("local=noloco local.period=0", "noloco: period must be a positive integer")
  end)
end)
