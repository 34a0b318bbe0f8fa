-- recipes/parallel/experts.lua: losses, norms, gradients and saved tensors of a model that has all
-- experts on one rank, written with plain modules (plain_experts.lua); and what runs go on from.
local command = require "command"
local trained = require "trained"
local some, falls, same = command.some, trained.falls, trained.same

local recipe <const>, plain <const> = "parallel/experts", "tests/dist/experts"
local SMALL <const> = "data=text length=24 batch=8 lr=1e-3 warmup=1 experts=4 model.width=48 \z
  model.heads=4 model.hidden=64 "
local OPTIONS <const> = {
  [recipe] = SMALL .. "dtype=f32 model.layers=2 every.eval=2 ", [plain] = SMALL,
}
local runs
setup(function()
  runs = trained.runs(OPTIONS)
  -- A tenth is for validation: 32 sequences, which all numbers of ranks divide.
  command.write(runs.folder .. "/text", command.read(command.source .. "/README.md"):sub(1, 7700))
end)
teardown(function() runs:remove() end)

describe("recipes/parallel/experts.lua", function()
  it("gives losses, norms and tensors of plain modules on one rank", function()
    for top = 1, 2 do
      local whole = runs:train(plain, "1", "top=" .. top)
      falls(whole)
      -- 4 / top even shares are all tokens: nothing is dropped.
      for _, how in ipairs(some(3, {
        { "4 --thread-ranks", "capacity=0 experts_over=2" }, { "1", "capacity=4" },
        { "1", "capacity=0" }, { "2 --thread-ranks", "capacity=4 shard=full_shard" },
        { "2", "capacity=0" }, { "4 --thread-ranks", "capacity=4" },
        { "4 --thread-ranks", "capacity=0 experts_over=1" },
        { "4 --thread-ranks", "capacity=0 shard=full_shard experts_over=2" },
        { "4 --thread-ranks", "capacity=0 shard=shard_grad_op" },
      }, top)) do
        local own = runs:train(recipe, how[1], ("%s top=%d"):format(how[2], top))
        same(whole, own, ("%s, top %d"):format(how[2], top))
        -- Those of all experts, wherever these are.
        assert.matches("GPT, 94304 parameters", own.out)
      end
    end
  end)

  it("has the gradients of plain modules for the whole batch", function()
    command.on_ranks("experts_gradients", "2")
    command.on_ranks("experts_gradients", "4 --thread-ranks")
  end)

  it("drops what is beyond each rank's capacity", function()
    for _, how in ipairs(some(2, {
      { 4, "capacity=1.25 top=2" }, { 1, "capacity=1 top=2" },
      { 4, "capacity=0.5 top=1", " experts_over=2 shard=full_shard" },
    })) do
      local whole = runs:train(plain, "1", ("%s ranks=%d"):format(how[2], how[1]))
      local own = runs:train(recipe, how[1] .. " --thread-ranks", how[2] .. (how[3] or ""))
      same(whole, own, how[2])
    end
  end)

  it("makes experts get equally many tokens", function()
    local function balance(weight)
      local one = runs:train(recipe, "2 --thread-ranks", "balance=" .. weight)
      return one.lines[5][1]
    end
    -- The loss of balance is at least 1 for each of the two blocks.
    assert.is_true(balance(1) - balance(0) > 1.99)
  end)

  it("goes on from a checkpoint, bit for bit, or on other ranks", function()
    for _, how in ipairs(some(3, {
      "capacity=4 shard=full_shard experts_over=2", "capacity=4 experts_over=2", "capacity=0",
    })) do
      local one = runs:train(recipe, "4 --thread-ranks", how .. " every.save=3")
      runs:equal_bits(one, runs:resume(recipe, "4 --thread-ranks", how .. " resume=auto", one))
      same(one, runs:resume(recipe, "2 --thread-ranks", "capacity=0 resume=auto", one), how)
      same(one, runs:resume(recipe, "1", "capacity=4 shard=full_shard resume=auto", one), how)
      -- Without steps the weights are those of the checkpoint, to the bit.
      local kept = runs:resume(recipe, "4 --thread-ranks", how .. " resume=auto lr=0", one)
      for _, ranks in ipairs { "2 --thread-ranks", "1" } do
        local other = runs:resume(recipe, ranks, "capacity=0 resume=auto lr=0", one)
        for name, t in pairs(kept.saved) do
          assert.is_true(t:eq(other.saved[name]):all():item(), name)
        end
      end
      assert.is_false(kept.saved["head.weight"]:eq(one.saved["head.weight"]):all():item())
    end
  end)

  it("runs in 16 bits", function()
    local whole = runs:train(recipe, "1", "")
    for _, how in ipairs(some(2, {
      "dtype=f16 capacity=0", "dtype=bf16", "dtype=bf16 shard=full_shard",
    })) do
      local own = runs:train(recipe, "4 --thread-ranks", how)
      falls(own)
      assert.is_true(math.abs(own.lines[5][1] - whole.lines[5][1]) < 0.1, how)
    end
  end)

  it("needs the memory that check says", function()
    local one = runs:train(recipe, "2", "")
    assert.equal(runs:predicted(recipe, 2, "", one.run)[1], one.metrics[5].peak_bytes)
    assert.is_true(runs:predicted(recipe, 4, "capacity=0", one.run)[1] > 0)
  end)

  it("refuses sizes that cannot be", function()
    for options, message in pairs {
      ["experts=6"] = "4 ranks do not divide 6 experts",
      ["experts_over=3"] = "experts_over = 3 does not divide 4 ranks",
      ["experts=4 top=5"] = "top = 5: a token goes to 1 to 4 experts",
      ["capacity=-1"] = "capacity = -1: 1 is an even share, 0 drops nothing",
    } do
      runs:refuses(recipe, "4 --thread-ranks", "steps=1 run=no " .. options, message)
    end
  end)
end)
