-- f32 copies of 16-bit parameters: masters.lua holds what each rank expects.
local command = require "command"

describe("the f32 copy of a 16-bit parameter", function()
  for _, ranks in ipairs { "1", "2" } do
    it("takes what others write, on " .. ranks, function()
      local folder = command.folder()
      command.on_ranks("masters", ranks, ("folder='%s' hooks='%s/recipes/hooks'")
        :format(folder, command.source))
      command.remove(folder)
    end)
  end
end)
