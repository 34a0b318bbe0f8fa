-- nn.cut: cut.lua holds what each rank expects.
local command = require "command"

describe("nn.cut", function()
  it("makes chunks that train, save and load as the whole model", function()
    for _, ranks in ipairs(command.some(2, { "2", "1", "3 --thread-ranks" })) do
      local folder = command.folder()
      command.on_ranks("cut", ranks, ("folder='%s'"):format(folder))
      command.remove(folder)
    end
  end)
end)
