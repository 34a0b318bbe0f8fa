-- Training over the library of tests/stub/nccl, which has NCCL's functions and adds in rank order:
-- it has the bits of the transport "local". And what a user sees of errors.
local command = require "command"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

local runs = { { "ddp", "4 --thread-ranks" }, { "fsdp", "2" } }
if command.full then
  for _, run in ipairs {
    { "ddp", "4" }, { "ddp", "2" }, { "ddp", "2 --thread-ranks" }, { "fsdp", "2 --thread-ranks" },
  } do
    runs[#runs + 1] = run
  end
end

describe("over NCCL", function()
  for _, run in ipairs(runs) do
    it(("%s -n %s trains as over local"):format(run[1], run[2]), function()
      assert.equal(command.weights(run[1], run[2]),
        command.weights(run[1], run[2], "", "MOONSHARD_TRANSPORT=nccl"))
    end)
  end

  -- Strategies, hooks and accumulation by a recipe, as the step lines show them.
  for _, options in ipairs { "shard=full_shard accumulate=1",
      "shard=hybrid_shard hook=bf16_compress accumulate=1",
      "hook=top_k hook.fraction=0.1 accumulate=2" } do
    it(("a recipe trains as over local: %s"):format(options), function()
      local function shown(settings)
        local out = command.succeed(folder, ("run '%s/recipes/gpt2.lua' -n 2 data='%s/README.md' \z
          bytes=true vocab=256 length=16 batch=4 steps=4 dtype=bf16 model.layers=1 \z
          model.width=32 model.heads=2 every.eval=0 every.sample=0 every.save=0 run=a%d %s")
          :format(command.source, command.source, settings and 1 or 2, options), settings)
        return command.losses(out)
      end
      assert.same(shown(), shown "MOONSHARD_TRANSPORT=nccl")
    end)
  end

  it("ranks that meet by themselves ask for it in ms.init", function()
    command.write(folder .. "/meets.lua", [[
      local ms = require "moonshard"
      local cfg = ms.config { rank = 0 }
      ms.init { group = "nccl", rank = cfg.rank, world_size = 2, rendezvous = "meet", threads = 1 }
      local t = ms.ones { 3 } * (cfg.rank + 1)
      print(ms.world():all_reduce(t):value():sum():item())
    ]])
    local other = command.start(folder, "meets.lua rank=1")
    assert.equal("9.0\n", command.succeed(folder, "run meets.lua rank=0"))
    local code, out = other.finish()
    assert.equal(0, code)
    assert.equal("9.0\n", out)
  end)

  it("an error names rank and operation, and the program ends with its code", function()
    command.write(folder .. "/two.lua", [[
      local ms = require "moonshard"
      for _ = 1, 3 do ms.world():all_reduce(ms.ones { 5 }):sync() end
    ]])
    local code, _, err = command.run(folder, "run two.lua -n 2",
      "MOONSHARD_TRANSPORT=nccl MOONSHARD_STUB_NCCL=fail:ncclAllReduce:2:2@1")
    assert.not_equal(0, code)
    assert.truthy(err:find("ncclAllReduce fails on rank 1 in all_reduce #2 of world", 1, true), err)
    assert.truthy(err:find("unhandled system error", 1, true), err)
    code, _, err = command.run(folder, "run two.lua -n 2 --timeout 3",
      "MOONSHARD_TRANSPORT=nccl MOONSHARD_STUB_NCCL=never:ncclAllReduce:2@0")
    assert.equal(6, code, err)
    assert.truthy(err:find("all_reduce #2 of world", 1, true), err)
    assert.truthy(err:find("has not ended on rank ", 1, true), err)
  end)

  it("an abort that hangs ends with its processes", function()
    command.write(folder .. "/two.lua", [[
      local ms = require "moonshard"
      for _ = 1, 3 do ms.world():all_reduce(ms.ones { 5 }):sync() end
    ]])
    local code, _, err = command.run(folder, "run two.lua -n 2 --timeout 3",
      "MOONSHARD_TRANSPORT=nccl \z
        MOONSHARD_STUB_NCCL='fail:ncclAllReduce:2:3@1 hang:ncclCommAbort:1'")
    assert.not_equal(0, code)
    assert.truthy(err:find("ncclAllReduce fails on rank 1", 1, true), err)
    assert.truthy(err:find("this process can only end", 1, true), err)
  end)

  it("a library that is missing, or a name that is wrong, is one clear error", function()
    command.write(folder .. "/one.lua", [[require "moonshard".world():barrier()]])
    for settings, says in pairs {
      ["MOONSHARD_TRANSPORT=nccl MOONSHARD_NCCL=/nowhere.so"] = "need NCCL: /nowhere.so",
      ["MOONSHARD_TRANSPORT=nkkl"] = "transport \"nkkl\" is none of those",
    } do
      local code, _, err = command.run(folder, "run one.lua -n 2", settings)
      assert.not_equal(0, code)
      assert.truthy(err:find(says, 1, true), err)
    end
  end)
end)
