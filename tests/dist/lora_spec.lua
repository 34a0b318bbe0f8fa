-- Adapters on several ranks: lora.lua holds what each rank expects.
local command = require "command"
local ms = require "moonshard"

describe("adapters", function()
  it("train under ddp and fsdp alike, and as on one rank", function()
    local folder = command.folder()
    for _, ranks in ipairs { "1", "2 --thread-ranks", "4 --thread-ranks" } do
      command.on_ranks("lora", ranks, ("folder='%s'"):format(folder))
    end
    for _, kind in ipairs { "gpt2", "llama" } do
      local one = assert(ms.safetensors.load(("%s/%s_1.safetensors"):format(folder, kind)))
      for _, ranks in ipairs { 2, 4 } do
        local other = assert(ms.safetensors.load(("%s/%s_%d.safetensors"):format(folder, kind,
          ranks)))
        for name, t in pairs(one) do
          -- Sums of gradients in another order, and Adam's division of small ones.
          assert.near(0, (t - other[name]):abs():max():item(), 1e-4, name)
        end
      end
    end
    command.remove(folder)
  end)

  it("are trained by recipes, copied or sharded, and resumed", function()
    local folder = command.folder()
    local text = ("data='%s/README.md' bytes=true length=16 batch=4 accumulate=2 dtype=f32 \z
      every.eval=2 every.sample=0 every.save=2 steps=5 lr=1e-2 warmup=0 weights=base "):format(
      command.source)
    local function train(recipe, options)
      return command.succeed(folder, ("run '%s/recipes/%s.lua' -n 2 --thread-ranks %s %s")
        :format(command.source, recipe, text, options))
    end
    local function adapters(run)
      return assert(ms.safetensors.load(("%s/%s/adapter/adapter_model.safetensors")
        :format(folder, run)))
    end
    for recipe, names in pairs {
      gpt2 = "", llama = "adapt.names=q_proj,mlp.up_proj adapt.alpha=8 adapt.dropout=0.1",
    } do
      command.remove(folder)
      assert(ms.nn[recipe] { vocab = 256, context = 16, layers = 2, width = 32, heads = 2 }
        :save(folder .. "/base"))
      local out = train(recipe, "lora=4 run=copied " .. names)
      assert.matches("parameters, of which [%d.]+M? are trained", out)
      train(recipe, "lora=4 run=sharded shard=full_shard recompute=true " .. names)
      local copied, sharded = adapters "copied", adapters "sharded"
      local count = 0
      for name, t in pairs(copied) do
        count = count + 1
        -- Norms of gradients are summed over shards, so their last bits differ.
        assert.near(0, (t - sharded[name]):abs():max():item(), 1e-5, name)
      end
      assert.equal(recipe == "gpt2" and 4 or 8, count)
      -- The merged model is what the adapters make of the base.
      local merged = assert(ms.nn.pretrained(folder .. "/sharded/model"))
      local adapted = assert(ms.nn.pretrained(folder .. "/base"))
      assert(adapted:load_adapters(folder .. "/sharded/adapter"))
      local ids = ms.tensor({ { 1, 2, 3, 4, 5 } }, "i64")
      adapted:eval()
      assert.near(0, (merged(ids) - adapted(ids)):abs():max():item(), 1e-5)
      -- Resumed from the checkpoint before the last: the bits of the run that went through.
      command.remove(folder .. "/copied/step-00000005")
      out = train(recipe, "lora=4 resume=auto run=copied " .. names)
      assert.matches("resumed from copied/step%-00000004", out)
      for name, t in pairs(adapters "copied") do
        assert.is_true(t:eq(copied[name]):all():item(), name)
      end
      out = train(recipe, "adapters=copied/adapter run=more")
      assert.matches("the model is in more/model", out)
      assert.not_equal("", (command.succeed(folder, "generate more --prompt hi --count 4")))
    end
    command.remove(folder)
  end)
end)
