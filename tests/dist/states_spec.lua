-- States are copies: states.lua holds what each rank expects.
local command = require "command"

describe("a state", function()
  for _, ranks in ipairs { "1", "2" } do
    it("stays what it was, on " .. ranks, function() command.on_ranks("states", ranks) end)
  end
end)
