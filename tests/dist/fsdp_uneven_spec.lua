-- Sharded models on ranks that do not do the same: fsdp_uneven.lua holds what each rank expects.
local command = require "command"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

local function line(ranks, arguments)
  return ("run '%s/tests/dist/fsdp_uneven.lua' -n %d %s"):format(command.source, ranks,
    arguments or "")
end

describe("fsdp with uneven ranks", function()
  for _, ranks in ipairs { 1, 3, 4, command.full and 2 or nil } do
    it(("trains as one process does, on %d ranks"):format(ranks), function()
      command.weights("fsdp_uneven", ranks == 3 and "3 --thread-ranks" or tostring(ranks))
    end)
  end

  local reports = {
    forwards = { "rank 1 has begun forward 2 while rank 0 is in the forward or backward",
      "run the same forwards and backwards on all ranks" },
    order = { "all_gather", [["experts.0"]], [["experts.1"]], "rank 0", "rank 1" },
    steps = { "join: ranks 1 and 0 do different things" },
  }
  for case, parts in pairs(reports) do
    it("ends the job where ranks differ in their " .. case, function()
      local code, out, err = command.run(folder, line(case == "order" and 2 or 3, "case=" .. case))
      assert.not_equal(0, code)
      for _, part in ipairs(parts) do
        assert.truthy((out .. err):find(part, 1, true), out .. err)
      end
    end)
  end
end)
