-- nan and inf in gradients and metrics of several ranks: not_finite.lua holds what each rank
-- expects.
local command = require "command"

describe("numbers that are not finite", function()
  for _, ranks in ipairs(command.some(2, { "2", "1", "3 --thread-ranks", "4 --thread-ranks" })) do
    it("are in norms, gradients and metrics of all ranks, on " .. ranks, function()
      command.on_ranks("not_finite", ranks)
    end)
  end
end)
