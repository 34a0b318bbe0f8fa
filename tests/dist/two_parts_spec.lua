-- A backward in two parts of wrapped models: reductions belong to the rest, and weights have the
-- bits of one backward.
local command = require "command"

describe("a backward in two parts", function()
  for _, ranks in ipairs(command.some(2, { "2", "1", "3 --thread-ranks" })) do
    it("trains a ddp model as one does, on " .. ranks, function()
      command.on_ranks("two_parts", ranks, "how=ddp")
    end)
  end

  for _, ranks in ipairs(command.some(2, { "4", "1", "2 --thread-ranks" })) do
    it("trains a sharded model as one does, on " .. ranks, function()
      command.on_ranks("two_parts", ranks, "how=fsdp")
    end)
  end

  it("is refused where ranks agree on each gather", function()
    local folder = command.folder()
    local code, _, err = command.run(folder, ("run '%s/tests/dist/two_parts.lua' -n 2 \z
      how=find_unused"):format(command.source))
    command.remove(folder)
    assert.not_equal(0, code)
    assert.truthy(err:find("not with find_unused, nor in a join", 1, true), err)
  end)
end)
