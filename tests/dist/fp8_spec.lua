-- Training in fp8 on several ranks; fp8.lua holds what each rank expects.
local command = require "command"

-- The stand-in for a driver computes on the host.
local GPUS = ("MOONSHARD_CUDA_DRIVER='%s' MOONSHARD_STAND_IN_GPUS=2"):format(
  os.getenv "MOONSHARD_STAND_IN")

describe("training in fp8", function()
  for _, ranks in ipairs(command.some(2, { "2", "1", "3 --thread-ranks", "4 --thread-ranks" })) do
    it("gives sharded models ddp's bits on " .. ranks, function()
      command.on_ranks("fp8", ranks)
    end)
    it("sends a byte for each number of a weight on " .. ranks, function()
      command.on_ranks("fp8_gathers", ranks)
    end)
  end
  for _, name in ipairs { "fp8", "fp8_gathers" } do
    it("does so on GPUs: " .. name, function()
      command.on_ranks(name, "2 --thread-ranks", "--device cuda", GPUS)
    end)
  end

  -- A CPU emulates it in any case, so the option changes nothing there.
  local SMALL <const> = "length=32 batch=2 model.layers=2 model.width=64 model.heads=4 \z
    every.eval=0 every.sample=0 data=README.md"
  for name, options in pairs {
    gpt_bytes = SMALL,
    gpt2 = SMALL .. " bytes=true accumulate=1",
    llama = SMALL .. " bytes=true accumulate=1 shard=full_shard",
    llama_fsdp = "",
  } do
    it("is an option of the recipe " .. name .. ", with and without emulate", function()
      local folder = command.folder()
      finally(function() command.remove(folder) end)
      assert(os.execute(("ln -s '%s/README.md' '%s'"):format(command.source, folder)))
      local losses = {}
      for i, emulate in ipairs { "", " emulate=true" } do
        command.succeed(folder, ("run '%s/recipes/%s.lua' -n 2 steps=2 dtype=fp8%s run=run%d %s")
          :format(command.source, name, emulate, i, options))
        local list = {}
        for _, line in ipairs(command.metrics(("%s/run%d"):format(folder, i))) do
          list[#list + 1] = line.loss
        end
        assert.equal(2, #list)
        losses[i] = list
      end
      assert.same(losses[1], losses[2])
    end)
  end
end)
