-- Losses of language models without logits in ddp and fsdp: model_loss.lua holds what each rank
-- expects.
local command = require "command"

describe("the loss of a language model without logits", function()
  for ranks, way in pairs { [2] = "", [3] = " --thread-ranks" } do
    it(("has the bits of that of its logits on %d ranks"):format(ranks), function()
      command.on_ranks("model_loss", ranks .. way, "")
    end)
  end
end)
