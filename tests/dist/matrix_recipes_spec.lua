-- The optimizers of recipes/ that step whole matrices. matrix_recipes.lua holds what each rank
-- expects.
local command = require "command"

describe("optimizers of whole matrices among the recipes", function()
  local function job(ranks, options)
    command.on_ranks("matrix_recipes", ranks, ("source='%s' %s"):format(command.source, options))
  end

  it("do the same on replicas, with divided work, and over shards", function()
    job("2", "what=same")
    job("3 --thread-ranks", "what=same")
  end)

  it("orthonormalize, and take roots", function() job("1", "what=forms") end)

  it("average factors, and keep what these leave out: Dion", function()
    job("2 --thread-ranks", "what=dion")
  end)

  it("resume bit for bit where each rank has its own momentum: Dion", function()
    local folder = command.folder()
    job("2 --thread-ranks", ("what=save folder='%s'"):format(folder))
    job("2", ("what=resume folder='%s'"):format(folder))
    command.remove(folder)
  end)
end)
