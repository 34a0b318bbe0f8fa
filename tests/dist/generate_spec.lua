-- Text from models on several ranks; generate.lua has what each rank expects.
local command = require "command"

describe("generate on ranks", function()
  for _, ranks in ipairs(command.some(2, { "2 --thread-ranks", "1", "4" })) do
    it("runs forwards until the last has stopped: " .. ranks, function()
      command.on_ranks("generate", ranks)
    end)
  end
end)
