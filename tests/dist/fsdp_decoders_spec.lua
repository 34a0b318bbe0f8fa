-- Families of language models, sharded from their files: fsdp_decoders.lua holds what each rank
-- expects.
local command = require "command"
local ms = require "moonshard"

describe("fsdp of the families of language models", function()
  for ranks, way in pairs { [2] = "", [3] = " --thread-ranks" } do
    it(("reads, trains and writes them on %d ranks"):format(ranks), function()
      local folder = command.folder()
      command.on_ranks("fsdp_decoders", ranks .. way, ("folder='%s' golden='%s'"):format(folder,
        command.source .. "/tests/golden/decoders"))
      command.remove(folder)
    end)
  end

  -- A window that is shorter than documents, in rows that hold several of them.
  it("are trained by the recipe for Llama, copied or sharded", function()
    local folder, results = command.folder(), {}
    assert(ms.nn.decoder {
      family = "mistral", vocab = 256, context = 32, layers = 2, width = 32, heads = 2,
      kv_heads = 1, head_dim = 12, window = 5,
    }:save(folder .. "/base"))
    for run, more in pairs { copied = "", sharded = "shard=full_shard recompute=true" } do
      command.succeed(folder, ("run '%s/recipes/llama.lua' -n 2 --thread-ranks \z
        data='%s/README.md' bytes=true length=32 batch=4 dtype=f32 packed=true end_of_text=10 \z
        every.eval=0 every.sample=0 every.save=0 steps=5 lr=1e-3 warmup=0 weights=base run=%s %s")
        :format(command.source, command.source, run, more))
      local path = ("%s/%s/model"):format(folder, run)
      assert.equal(5, assert(ms.nn.pretrained(path)).options.window)
      results[run] = assert(ms.safetensors.load(path .. "/model.safetensors"))
    end
    local base = assert(ms.safetensors.load(folder .. "/base/model.safetensors"))
    for name, t in pairs(results.copied) do
      -- Norms of gradients are summed over shards, so their last bits differ.
      assert.near(0, (t - results.sharded[name]):abs():max():item(), 1e-5, name)
      assert.is_true((t - base[name]):abs():max():item() > 1e-4, name)
    end
    command.remove(folder)
  end)
end)
