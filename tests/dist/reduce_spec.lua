-- reduce() of ddp and fsdp models: reduce.lua holds what each rank expects.
local command = require "command"

describe("reduce() after passes without synchronization", function()
  for _, wrap in ipairs { "ddp", "fsdp" } do
    it("is the end of a backward that reduces: " .. wrap, function()
      command.on_ranks("reduce", "2", "wrap=" .. wrap)
      command.on_ranks("reduce", "3 --thread-ranks", "wrap=" .. wrap)
      for _, hook in ipairs { "fp16", "powersgd", "top_k" } do
        command.on_ranks("reduce", "2 --thread-ranks", ("wrap=%s hook=%s"):format(wrap, hook))
      end
      for _, policy in ipairs { "in_backward", "deferred" } do
        command.on_ranks("reduce", "2 --thread-ranks", ("wrap=%s policy=%s"):format(wrap, policy))
      end
    end)
  end
end)
