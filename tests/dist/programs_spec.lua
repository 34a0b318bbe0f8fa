-- Random programs: plain against ddp and fsdp. In long ranges the seeds are new ones.
local command = require "command"

describe("random training programs", function()
  local seed = command.full and os.time() or 1
  local counts = command.full and { 340, 330, 330 } or { 14, 13, 13 }
  for i, ranks in ipairs { "2", "3", "4 --thread-ranks" } do
    it(("give one process's weights, on %s (seed %d)"):format(ranks, seed), function()
      command.on_ranks("programs", ranks, ("programs=%d seed=%d"):format(counts[i], seed))
    end)
  end
end)
