-- Families of language models, sharded from their files: fsdp_decoders.lua holds what each rank
-- expects.
local command = require "command"

describe("fsdp of the families of language models", function()
  for ranks, way in pairs { [2] = "", [3] = " --thread-ranks" } do
    it(("reads, trains and writes them on %d ranks"):format(ranks), function()
      local folder = command.folder()
      command.on_ranks("fsdp_decoders", ranks .. way, ("folder='%s' golden='%s'"):format(folder,
        command.source .. "/tests/golden/decoders"))
      command.remove(folder)
    end)
  end
end)
