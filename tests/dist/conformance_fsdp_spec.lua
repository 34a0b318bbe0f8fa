-- PyTorch's own tests of sharded training: one spec for each case of conformance_fsdp.lua.
-- tests/README.md lists all of PyTorch's files, with where each is tested.
local command = require "command"

local ways = { { 1, "" }, { 2, " --thread-ranks" }, { 4, "" } }
local folder, said = nil, {}
setup(function() folder = command.folder() end)
teardown(function() command.remove(folder) end)

-- The output of the job on so many ranks, which is run once.
local function output(ranks, way)
  said[ranks] = said[ranks] or select(2, command.run(folder,
    ("run '%s/tests/dist/conformance_fsdp.lua' -n %d%s"):format(command.source, ranks, way)))
  return said[ranks]
end

local names, file = {}, assert(io.open(command.source .. "/tests/dist/conformance_fsdp.lua"))
for line in file:lines() do names[#names + 1] = line:match '^case%("([^"]+)"' end
file:close()

describe("PyTorch's sharded", function()
  it("tests are found", function() assert.is_true(#names > 30, #names) end)
  for _, name in ipairs(names) do
    it(name, function()
      for _, way in ipairs(ways) do
        local out = output(way[1], way[2])
        for rank = 0, way[1] - 1 do
          assert.truthy(out:find(("ok: %s on rank %d\n"):format(name, rank), 1, true),
            out:match "FAILED[^\n]*" or "it did not run")
        end
      end
    end)
  end
end)
