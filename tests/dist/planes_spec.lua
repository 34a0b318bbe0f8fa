-- Convolution and pooling on several ranks: planes.lua holds what each rank expects.
local command = require "command"

describe("a convolutional net", function()
  it("trains under ddp and fsdp alike, and as on one rank", function()
    for _, ranks in ipairs { "2", "4 --thread-ranks" } do command.on_ranks("planes", ranks) end
  end)
end)
