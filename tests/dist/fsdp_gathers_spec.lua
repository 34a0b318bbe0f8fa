-- before_gather and after_gather of fsdp on several ranks: fsdp_gathers.lua has the expectations of
-- each rank.
local command = require "command"

describe("what travels in fsdp's gathers", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  for _, ranks in ipairs(command.some(2, { "2", "1", "3 --thread-ranks" })) do
    it("is what before_gather gives, on " .. ranks, function()
      command.on_ranks("fsdp_gathers", ranks)
    end)
  end

  -- What functions give is wrong -> parts of the error of each rank, and of the one report.
  local mistakes = {
    { "after_gather = function(t) return t:narrow(1, 1, t:numel() - 1) end",
      'after_gather of unit "0": it gave [71] f32; a 1-D float tensor of 72 elements is expected' },
    { "after_gather = function(t) return t:narrow(1, 1, t:numel() - ms.rank()) end",
      'after_gather of unit "0": it gave [71] f32; a 1-D float tensor of 72 elements is expected' },
    { "after_gather = function() return 1 end", "after_gather: it returned a number" },
    { "after_gather = function(t) return t:to 'i64' end", 'after_gather of unit "0"', "float" },
    { "before_gather = function(t) return t:view(1, -1) end", 'before_gather of unit "0"',
      "a 1-D, contiguous tensor" },
    { "before_gather = function(t) return t:narrow(1, 1, 2) end",
      "before_gather, without after_gather," },
    { "before_gather = function() end", "before_gather: it returned a nil" },
    { "before_gather = function() return gone end",
      "before_gather: it returned a tensor that is gone (the tensor made at", "when its step" },
    { "after_gather = function() return gone end",
      "after_gather: it returned a tensor that is gone (the tensor made at", "when its step" },
    { "before_gather = function() error 'broken' end", "broken" },
    { "before_gather = function(t) if ms.rank() == 1 then error 'broken' end return t end",
      "broken" },
    { "before_gather = function(t) return t:narrow(1, 1, 4 + ms.rank()) end, "
      .. "after_gather = function() return ms.zeros { 72 } end",
      "ranks disagree in call #1", "rank 0: all_gather #1", '[f32 x 8, "before_gather: 0"',
      '[f32 x 10, "before_gather: 0"' },
    { "before_gather = function(t) return ms.rank() == 0 and t or t:to 'bf16' end",
      "ranks disagree in call #1", '[f32 x 72, "before_gather: 0"',
      '[bf16 x 72, "before_gather: 0"' },
  }
  for _, case in ipairs(mistakes) do
    it("ends the job for " .. case[1], function()
      local file = folder .. "/recipe.lua"
      command.write(file, ([[
        local ms = require "moonshard"
        local gone
        for _ in ms.steps(1) do gone = ms.ones { 72 } end
        -- A rank may meet the error of another one before it has made its model.
        local ok, message = pcall(function()
          local model = ms.fsdp(ms.nn.Sequential(ms.nn.Linear(8, 8), ms.nn.Linear(8, 8)), {
            wrap = { class = "Linear" }, %s })
          return model(ms.ones { 8 }):sum():item()
        end)
        io.write(("rank %%d: %%s %%s\n"):format(ms.rank(), ok, message:gsub("\n", " ")))
      ]]):format(case[1]))
      local code, out, err = command.run(folder, ("run '%s' -n 2"):format(file))
      assert.not_equal(0, code)
      for rank = 0, 1 do
        local told = out:match(("rank %d: false ([^\n]*)"):format(rank))
        for i = 2, #case do assert.truthy(told and told:find(case[i], 1, true), out) end
      end
      for i = 2, #case do assert.truthy(err:find(case[i], 1, true), err) end
      assert.equal(1, select(2, err:gsub("moonshard: ", "")), err)
    end)
  end
end)

describe("gather= of a training recipe", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)
  local recipe = ("run '%s/recipes/gpt_bytes.lua' -n 2 data='%s/README.md' steps=2 \z
    length=16 dtype=bf16 batch=2 model.layers=2 model.width=32 model.heads=2 every.sample=0 ")
    :format(command.source, command.source)

  it("takes a file, with options for the function that it returns", function()
    local out, err = command.succeed(folder, recipe .. ("shard=full_shard gather='%s'"):format(
      command.source .. "/recipes/gathers/fp8.lua"))
    assert.truthy((out .. err):find("step", 1, true))
    command.write(folder .. "/own.lua", [[
      return function(options)
        print("scale " .. options.scale)
        return { before_gather = function(shard) return shard:clone() end }
      end
    ]])
    out = command.succeed(folder, recipe .. "shard=full_shard gather=own.lua gather.scale=3")
    assert.truthy(out:find("scale 3", 1, true), out)
  end)

  it("may be left out for shard.dtype=fp8, which keeps the losses", function()
    local function losses(options)
      local out = command.succeed(folder, recipe:gsub("dtype=bf16", "dtype=fp8") .. options)
      local list = {}
      for loss in out:gmatch "loss ([%d.]+)" do list[#list + 1] = loss end
      assert.is_true(#list > 0, out)
      return list
    end
    assert.same(losses "shard=full_shard", losses "shard=full_shard shard.dtype=fp8")
    local code, _, err = command.run(folder, recipe .. "shard=full_shard shard.dtype=int4")
    assert.equal(2, code)
    assert.truthy(err:find("dtype = 'int4': it is 'fp8'", 1, true), err)
  end)

  it("refuses what it cannot use, with code 2", function()
    local function refused(options, text, ...)
      command.write(folder .. "/own.lua", text)
      local code, _, err = command.run(folder, recipe .. options)
      assert.equal(2, code, err)
      for _, part in ipairs { ... } do assert.truthy(err:find(part, 1, true), err) end
    end
    refused("gather=own.lua", "return {}", "only a sharded model gathers", "shard=")
    refused("shard=full_shard gather=own.lua", "return {}", "own.lua", "before_gather")
    refused("shard=full_shard gather=own.lua", "return { before = 1 }", "before = 1")
    refused("shard=full_shard gather=own.lua gather.a=1",
      "return { before_gather = function(s) return s end }", "takes no options")
    refused("shard=full_shard gather=owm.lua", "return {}", "did you mean 'own.lua'")
  end)
end)
