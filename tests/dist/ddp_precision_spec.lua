-- ddp's option precision on several ranks: ddp_precision.lua has the expectations of each rank.
local command = require "command"

for ranks = 1, 3 do
  for name, way in pairs { processes = "", threads = " --thread-ranks" } do
    it(("low precision gives the bits of casts by hand on %d ranks as %s")
      :format(ranks, name), function()
      local folder = command.folder()
      local out = command.succeed(folder,
        ("run '%s/tests/dist/ddp_precision.lua' -n %d%s"):format(command.source, ranks, way))
      for rank = 0, ranks - 1 do
        assert.truthy(out:find(("rank %d of %d is done"):format(rank, ranks), 1, true), out)
      end
      command.remove(folder)
    end)
  end
end
