-- The memory of sharded models is the sum of its parts (fsdp_memory.lua), and bench fsdp shows it.
local command = require "command"
local core = require "moonshard.core"

describe("the memory of a sharded model", function()
  local few, all = { "1", "2 --thread-ranks", "3" }, { "1", "2", "2 --thread-ranks", "3", "4" }
  for _, ranks in ipairs(command.full and all or few) do
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
    local result = json "bench fsdp --json --config micro --rounds 1 --steps 2 --python false -n 2"
    -- The difference of two times, which a loaded machine makes as large as it likes.
    assert.is_true(math.abs(result.us_edge) < math.huge)
    local ways = {}
    for i, row in ipairs(result.rows) do
      ways[i] = row.way
      assert.is_true(row.ms_step_min <= row.ms_step_med and row.pss_mib > 0 and row.peak_mib > 0)
    end
    assert.same({ "ddp", "full_shard", "shard_grad_op", "full_shard, autocast bf16",
      "full_shard, bf16" }, ways)
    assert.is_true(result.rows[2].peak_mib < result.rows[1].peak_mib)
  end)

  -- Over a link of 5 ms each gather takes longer than the cast before the next one.
  it("shows that shards are cast while other gathers run", function()
    local row = json "bench fsdp --here --config micro --way 5 --steps 3 -n 2 --link 1Gbit,5ms"
    assert.is_true(row.copy_overlap_ms > 0 and row.copy_overlap_ms <= row.copy_ms)
    row = json "bench fsdp --here --config micro --way 2 --steps 3 -n 2 --link 1Gbit,5ms"
    assert.equal(0, row.copy_ms)
  end)

  it("shows a strategy of one's own beside the others, over links", function()
    command.write(folder .. "/own.lua", [[
      return function(options)
        assert(options.depth == 2)
        return require "moonshard".prefetch { name = "own", plan = function() return {} end }
      end
    ]])
    local code, out, err = command.run(folder, "bench fsdp --json --config micro --steps 2 "
      .. "--rounds 2 -n 2 "
      .. "--links '1Gbit,20us 10Gbit' --units GPT2Attention,GPT2MLP --prefetch 'own.lua depth=2'")
    assert.equal(0, code, err)
    local seen, own = {}, 0
    for line in out:gmatch "[^\n]+" do
      local row = core.json_decode(line)
      seen[row.link] = (seen[row.link] or 0) + 1
      own = own + (row.strategy == "own" and 1 or 0)
      assert.is_true(row.ms_least > 0 and row.ms_step_med > 0 and row.of_best > 0)
      assert.equal(row.strategy == "tuned", row.predicted_ms ~= nil)
      assert.equal(5, row.units) -- the root, and two in each of two blocks
      -- Nothing hides the first gather and the last reduction.
      assert.is_true(row.link ~= "1Gbit,20us" or row.of_least > 0.5)
    end
    assert.is_true(seen["1Gbit,20us"] >= 7 and seen["1Gbit,20us"] == seen["10Gbit"] and own == 2)
    code, out, err = command.run(folder, "bench fsdp --links 1Gbit --units 'A; B'")
    assert.equal(2, code, out)
    assert.truthy(err:find("--units A; B: names of classes are expected", 1, true), err)
    code, out, err = command.run(folder, "bench fsdp --config micro --units Linear")
    assert.equal(2, code, out)
    assert.truthy(err:find("give --links or --prefetch", 1, true), err)
    code, out, err = command.run(folder, "bench fsdp --config micro --prefetch owm.lua")
    assert.equal(2, code, out)
    assert.truthy(err:find("did you mean 'own.lua'", 1, true), err)
  end)
end)
