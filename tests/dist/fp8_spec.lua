-- Training in fp8 on several ranks; fp8.lua holds what each rank expects.
local command = require "command"

describe("training in fp8", function()
  for _, ranks in ipairs { "1", "2", "3 --thread-ranks" } do
    it("gives sharded models ddp's bits on " .. ranks, function()
      command.on_ranks("fp8", ranks)
    end)
  end
end)
