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
end)
