-- part.state and part.fresh of gathers: gather_state.lua holds what each rank expects.
local command = require "command"

describe("what before_gather keeps", function()
  for _, layout in ipairs { "flat", "rows" } do
    it("is saved with the model, for any number of ranks: " .. layout, function()
      local folder = command.folder()
      local function job(ranks, what, more)
        command.on_ranks("gather_state", ranks, ("folder='%s' what=%s layout=%s %s"):format(folder,
          what, layout, more or ""))
      end
      job("2", "save")
      job("2 --thread-ranks", "resume")
      job("3 --thread-ranks", "other")
      job("4 --thread-ranks", "other", "replicas=2")
      job("4 --thread-ranks", "other", "tensor=2")
      command.remove(folder)
    end)
  end
end)
