-- Models that are cut over ranks, on the cuda device, over libraries of the tests in place of
-- NVIDIA's driver and of NCCL. There all messages of a rank to higher ranks are one queue, sends
-- and receives, and so are those to lower ones: a schedule that waits for a message which is after
-- another one in its queue would never end. pipeline.lua holds what each rank expects.
local command = require "command"

local SETTINGS <const> = ("MOONSHARD_CUDA_DRIVER='%s' MOONSHARD_STAND_IN_GPUS=4"):format(
  os.getenv "MOONSHARD_STAND_IN")

describe("a pipeline over NCCL", function()
  local function job(ranks, options)
    command.on_ranks("pipeline", ranks .. " --device cuda", options, SETTINGS)
  end

  it("trains as the whole model does on one rank", function()
    job(2, "schedule=1f1b")
    job(4, "schedule=zb_h1")
    job(2, "schedule=zbv each=2")
    job(4, "stages=2 each=2 schedule=interleaved wrap=ddp")
  end)

  it("gives the same bits by any schedule", function()
    job(3, "what=same microbatches=5")
    job(3, "what=random tables=" .. (command.full and 200 or 4))
  end)
end)

describe("a recipe of recipes/parallel on GPUs", function()
  local folder = command.folder()
  teardown(function() command.remove(folder) end)
  command.write(folder .. "/text", command.read(command.source .. "/README.md"):sub(1, 4000))

  local runs = 0
  local function losses(recipe, options, settings)
    runs = runs + 1
    command.succeed(folder, ("run '%s/recipes/parallel/%s.lua' -n 4 data=text length=16 batch=8 \z
      steps=3 lr=1e-3 warmup=1 model.layers=2 model.width=32 model.heads=4 run=r%d every.eval=0 \z
      %s"):format(command.source, recipe, runs, options), settings)
    local list = {}
    for i, line in ipairs(command.metrics(("%s/r%d"):format(folder, runs))) do
      list[i] = line.loss
    end
    assert.equal(3, #list)
    return list
  end

  for name, options in pairs {
    tensor = "dtype=f32 tensor=2 sequence=true", context = "dtype=f32 how=ring zigzag=true",
    experts = "dtype=f32 top=2 capacity=0", gpt2_3d = "bytes=true", pipeline = "schedule=1f1b",
  } do
    it("trains as on the CPU: " .. name, function()
      local on_gpus = losses(name, options .. " --device cuda", SETTINGS)
      -- Kernels add in another order: a few bits of f32, of bf16 in gpt2_3d.
      local bound = name == "gpt2_3d" and 1e-3 or 1e-5
      for i, loss in ipairs(losses(name, options)) do
        assert.is_true(math.abs(on_gpus[i] - loss) < bound * loss,
          ("step %d: %.9g, on the CPU %.9g"):format(i - 1, on_gpus[i], loss))
      end
    end)
  end
end)
