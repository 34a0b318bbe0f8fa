-- The memory of sharded models is the sum of its parts (fsdp_memory.lua), and bench fsdp shows it.
local command = require "command"
local core = require "moonshard.core"

describe("the memory of a sharded model", function()
  for _, ranks in ipairs { "1", "2", "2 --thread-ranks", "3", "4" } do
    it("is the sum of its parts on " .. ranks, function()
      local folder = command.folder()
      finally(function() command.remove(folder) end)
      local out = command.succeed(folder, ("run '%s/tests/dist/fsdp_memory.lua' -n %s"):format(
        command.source, ranks))
      for rank = 0, tonumber(ranks:match "%d") - 1 do
        assert.truthy(out:find(("rank %d: memory is the sum"):format(rank), 1, true), out)
      end
    end)
  end
end)

describe("moonshard bench fsdp", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)
  local function json(options) return core.json_decode((command.succeed(folder, options))) end

  it("shows steps and memory under each strategy, and the cost of an edge", function()
    local result = json "bench fsdp --json --config tiny --rounds 1 --steps 2 --python false -n 2"
    assert.is_true(result.us_edge > 0 and result.us_edge < 1000)
    local ways = {}
    for i, row in ipairs(result.rows) do
      ways[i] = row.way
      assert.is_true(row.ms_step_min <= row.ms_step_med and row.pss_mib > 0 and row.peak_mib > 0)
    end
    assert.same({ "ddp", "full_shard", "shard_grad_op" }, ways)
    assert.is_true(result.rows[2].peak_mib < result.rows[1].peak_mib)
  end)
end)
