-- Packed documents on several ranks: packed.lua holds what each rank expects.
local command = require "command"
local core = require "moonshard.core"
local ms = require "moonshard"

describe("packed documents", function()
  it("train under ddp and fsdp as on one rank", function()
    local folder = command.folder()
    for _, ranks in ipairs { "1", "2 --thread-ranks" } do
      command.on_ranks("packed", ranks, ("folder='%s'"):format(folder))
    end
    for _, kind in ipairs { "gpt2", "llama" } do
      local one = assert(ms.safetensors.load(("%s/%s_1.safetensors"):format(folder, kind)))
      local two = assert(ms.safetensors.load(("%s/%s_2.safetensors"):format(folder, kind)))
      for name, t in pairs(one) do
        -- Sums of gradients in another order, and Adam's division of small ones.
        assert.near(0, (t - two[name]):abs():max():item(), 1e-4, name)
      end
    end
    command.remove(folder)
  end)

  it("are trained by recipes, copied or sharded, with adapters, resumed, and predicted", function()
    local folder = command.folder()
    local function model(run)
      return assert(ms.safetensors.load(("%s/%s/model/model.safetensors"):format(folder, run)))
    end
    for _, recipe in ipairs { "gpt2", "llama" } do
      command.remove(folder)
      assert(core.make_directory(folder))
      local path = ("%s/recipes/%s.lua"):format(command.source, recipe)
      -- A document is a line.
      local options = ("data='%s/README.md' bytes=true vocab=256 packed=true end_of_text=10 \z
        length=32 batch=4 accumulate=2 dtype=f32 every.eval=2 every.sample=0 every.save=2 steps=5 \z
        lr=1e-3 warmup=0 model.layers=2 model.width=32 model.heads=2 %s"):format(command.source,
        recipe == "llama" and "model.kv_heads=1 " or "")
      local function train(more)
        return command.succeed(folder, ("run '%s' -n 2 --thread-ranks %s %s"):format(path, options,
          more))
      end
      train "run=copied"
      local sharded = "run=sharded shard=full_shard recompute=true"
      local told = assert(core.json_decode(command.succeed(folder,
        ("check '%s' -n 2 --json %s %s"):format(path, options, sharded))))
      train(sharded)
      local metrics = command.metrics(folder .. "/sharded")
      assert.equal(told.peak_bytes[1], metrics[#metrics].peak_bytes)
      local copied, other = model "copied", model "sharded"
      for name, t in pairs(copied) do
        -- Norms of gradients are summed over shards, so their last bits differ.
        assert.near(0, (t - other[name]):abs():max():item(), 1e-4, name)
      end
      -- Each recipe does one of these, in long ranges both.
      if recipe == "gpt2" or command.full then
        -- Resumed from the checkpoint before the last, in the middle of the first epoch.
        command.remove(folder .. "/copied/step-00000005")
        command.remove(folder .. "/copied/model")
        assert.matches("resumed from copied/step%-00000004", (train "run=copied resume=auto"))
        for name, t in pairs(model "copied") do
          assert.is_true(t:eq(copied[name]):all():item(), name)
        end
      end
      if recipe == "llama" or command.full then
        train "run=adapted weights=copied/model lora=2 shard=full_shard dtype=bf16 lr=1e-4"
      end
    end
    command.remove(folder)
  end)
end)
