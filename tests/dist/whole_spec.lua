-- Kinds of optimizers that need whole matrices, over models that fsdp has sharded. whole.lua holds
-- what each rank expects.
local command = require "command"

describe("an optimizer of whole matrices", function()
  local function job(ranks, options) command.on_ranks("whole", ranks, options) end

  it("steps a sharded model as a replicated one, bit for bit", function()
    job("2", "what=steps")
    job("3 --thread-ranks", "what=steps")
    job("4 --thread-ranks", "what=steps")
  end)

  it("leaves no trace of a step that a flag prevents", function()
    job("2 --thread-ranks", "what=flags")
  end)

  it("steps in backward and in the next forward", function()
    job("1", "what=plans")
    job("3 --thread-ranks", "what=plans")
  end)

  it("sends each piece to one owner and back, and divides the work", function()
    job("2 --thread-ranks", "what=bytes")
    job("4 --thread-ranks", "what=bytes")
  end)

  it("steps a matrix that a rank has for itself", function()
    job("2 --thread-ranks", "what=own")
  end)

  it("sends what before returns, in its dtype", function() job("2 --thread-ranks", "what=half") end)

  it("refuses what cannot be", function()
    job("1", "what=refused")
  end)

  for _, layout in ipairs { "flat", "rows" } do
    it("is saved and loaded, on any number of ranks: " .. layout, function()
      local folder = command.folder()
      local function kept(ranks, what, more)
        job(ranks, ("folder='%s' what=%s layout=%s %s"):format(folder, what, layout, more or ""))
      end
      kept("2", "save")
      kept("2 --thread-ranks", "resume")
      kept("3 --thread-ranks", "resume")
      kept("4 --thread-ranks", "resume", "replicas=2")
      kept("1", "resume")
      kept("2 --thread-ranks", "resume", "plain=true")
      kept("2 --thread-ranks", "texts")
      command.remove(folder)
    end)
  end
end)
