-- Recipes whose ranks have parts of one model: losses, norms and saved tensors of one rank that has
-- all of it; and what they go on from.
local command = require "command"
local guide = require "guide"
local ms = require "moonshard"
local trained = require "trained"
local some, falls, same = command.some, trained.falls, trained.same

local SMALL <const> = "data=text length=24 batch=8 lr=5e-4 warmup=1 model.width=48 model.heads=12 "
local OPTIONS <const> = {
  ["parallel/tensor"] = SMALL .. "dtype=f32 model.layers=2 every.eval=2 ",
  ["parallel/pipeline"] = SMALL .. "model.layers=5 every.eval=2 ",
  ["parallel/context"] = SMALL .. "dtype=f32 model.layers=2 every.eval=2 ",
  gpt_bytes = SMALL .. "dtype=f32 model.layers=2 every.eval=2 every.sample=0 ",
}
local runs, folder
setup(function()
  runs = trained.runs(OPTIONS)
  folder = runs.folder
  -- A tenth is for validation: 32 sequences, which all grids divide.
  command.write(folder .. "/text", command.read(command.source .. "/README.md"):sub(1, 7700))
end)
teardown(function() runs:remove() end)

local function train(...) return runs:train(...) end
local function resume(...) return runs:resume(...) end
local function equal_bits(...) return runs:equal_bits(...) end

-- The saved folder on one rank, as any model of nn.
local function opens(one, tied)
  local model = ms.nn.gpt2 {
    vocab = 256, context = 24, layers = tied and 2 or 5, width = 48, heads = 12, tie = tied,
  }
  assert(model:load(folder .. "/" .. one.run .. "/model"))
  for name, t in pairs(model:state()) do
    local saved = one.saved[name] or one.saved["transformer." .. name]
    assert.is_true(t:eq(saved):all():item(), name)
  end
  local out = command.succeed(folder, ("generate %s/model --prompt a --count 3 --seed 1"):format(
    one.run))
  assert.matches("^a", out)
end

describe("recipes/parallel/tensor.lua", function()
  local recipe <const> = "parallel/tensor"
  local whole
  setup(function() whole = train(recipe, "1", "tensor=1") end)

  it("trains the model of gpt_bytes", function()
    falls(whole)
    same(train("gpt_bytes", "1", ""), whole, "gpt_bytes")
  end)

  it("gives losses, norms and tensors of one rank on any grid", function()
    for _, how in ipairs(some(2, {
      { "4 --thread-ranks", "tensor=4 sequence=true recompute=true" },
      { "2 --thread-ranks", "tensor=2 sequence=true" },
      -- 256 rows on three ranks have padding.
      { "3 --thread-ranks", "tensor=3 sequence=true" }, { "3 --thread-ranks", "tensor=3" },
      { "2", "tensor=2" }, { "4 --thread-ranks", "tensor=2" },
    })) do
      local own = train(recipe, how[1], how[2])
      same(whole, own, how[2])
      opens(own, true)
    end
  end)

  it("drops alike what ranks hold alike, and runs in 16 bits", function()
    for _, how in ipairs(some(2, {
      "dropout=0.1 sequence=true recompute=true", "dropout=0.1", "dtype=bf16 sequence=true",
      "dtype=f16",
    })) do
      local own = train(recipe, "4 --thread-ranks", how)
      falls(own)
      assert.is_true(math.abs(own.lines[5][1] - whole.lines[5][1]) < 0.1, how)
      assert.not_equal(own.lines[5][1], whole.lines[5][1])
    end
  end)

  it("goes on from a checkpoint, bit for bit, or on other ranks", function()
    for _, how in ipairs(some(2, {
      "sequence=true dropout=0.1 every.save=3", "tensor=2 every.save=3",
    })) do
      local one = train(recipe, "4 --thread-ranks", how)
      equal_bits(one, resume(recipe, "4 --thread-ranks", how .. " resume=auto", one))
    end
    local one = train(recipe, "4 --thread-ranks", "every.save=3")
    same(one, resume(recipe, "3 --thread-ranks", "tensor=3 resume=auto batch=8 sequence=true", one),
      "on three ranks")
  end)

  it("needs no more memory than check says", function()
    local one = train(recipe, "2", "sequence=true")
    local told = runs:predicted(recipe, 2, "sequence=true", one.run)
    assert.equal(told[1], one.metrics[5].peak_bytes)
  end)

  it("refuses sizes that cannot be cut", function()
    for options, message in pairs {
      ["model.heads=6 model.width=48 tensor=4"] = "4 ranks do not divide 6 heads",
      ["tensor=4 length=18 sequence=true"] = "4 ranks do not divide a length of 18",
    } do
      runs:refuses(recipe, "4 --thread-ranks", OPTIONS[recipe]:gsub("length=24 ", "")
        :gsub("model.heads=12 ", "") .. options, message)
    end
  end)
end)

describe("recipes/parallel/context.lua", function()
  local recipe <const> = "parallel/context"
  local whole
  setup(function() whole = train(recipe, "1", "context=1") end)

  it("trains the model of gpt_bytes", function()
    falls(whole)
    same(train("gpt_bytes", "1", ""), whole, "gpt_bytes")
  end)

  it("gives losses, norms and tensors of one rank in every way", function()
    for _, how in ipairs(some(2, {
      { "4 --thread-ranks", "context=2 how=ulysses" }, { "2", "context=2" },
      { "3 --thread-ranks", "context=3 how=ring zigzag=true" },
      { "4 --thread-ranks", "context=2 how=ring" },
      { "4 --thread-ranks", "context=4 zigzag=true recompute=true" },
      { "3 --thread-ranks", "context=3 how=ulysses" },
      { "2", "context=2 how=ring" },
    })) do
      local own = train(recipe, how[1], how[2])
      same(whole, own, how[2])
      opens(own, true)
    end
  end)

  it("keeps to documents", function()
    local packed = train(recipe, "1", "context=1 packed=true")
    for _, how in ipairs(some(2, {
      { "4 --thread-ranks", "how=ring zigzag=true" }, { "2 --thread-ranks", "how=ring" },
      { "4 --thread-ranks", "how=ulysses" }, { "3 --thread-ranks", "zigzag=true" },
    })) do
      local own = train(recipe, how[1], "packed=true " .. how[2])
      same(packed, own, how[2])
      assert.is_true(math.abs(own.lines[1][1] - whole.lines[1][1]) > 1e-4, "nothing has changed")
    end
  end)

  it("runs in 16 bits and with dropout", function()
    for _, how in ipairs(some(2, {
      "how=ring dtype=bf16 dropout=0.1", "how=ulysses dtype=bf16 recompute=true",
      "zigzag=true dtype=f16",
    })) do
      falls(train(recipe, "2 --thread-ranks", how))
    end
  end)

  it("goes on bit for bit, and on other ranks", function()
    local one = train(recipe, "2 --thread-ranks", "how=ring every.save=3 resume=auto")
    local again = resume(recipe, "2 --thread-ranks", "how=ring every.save=3 resume=auto", one)
    equal_bits(one, again)
    same(whole, resume(recipe, "4 --thread-ranks", "zigzag=true every.save=3 resume=auto", one),
      "four ranks")
  end)

  it("refuses what cannot be cut", function()
    local function fails(options, text)
      local code, _, err = command.run(folder, ("run '%s/recipes/parallel/context.lua' -n 4 \z
        --thread-ranks steps=1 %s %s"):format(command.source, OPTIONS[recipe], options))
      assert.equal(1, code)
      assert.truthy(err:find(text, 1, true), err)
    end
    fails("length=30", "length=30 cannot be cut into 4 equal pieces")
    fails("length=28 zigzag=true", "into 8 equal pieces")
    fails("how=ulysses zigzag=true", "equal work already")
    fails("how=ulysses model.heads=6 model.width=48", "4 ranks do not divide 6 heads")
  end)
end)

describe("recipes/parallel/pipeline.lua", function()
  local recipe <const> = "parallel/pipeline"
  local whole
  setup(function() whole = train(recipe, "1", "stages=1") end)

  it("gives losses, norms and tensors of one rank by any schedule", function()
    falls(whole)
    -- As PyTorch writes tables: two chunks on each rank, in a V.
    command.write(folder .. "/v.csv", "0F0,0F1,,,3F0,3B0,3F1,3B1,0B0,0B1\n\z
      ,1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n")
    for _, how in ipairs(some(2, {
      { "4 --thread-ranks", "stages=2 microbatches=2" }, { "2", "stages=2" },
      { "4 --thread-ranks", "schedule=v.csv each=2 microbatches=2" },
      { "2 --thread-ranks", "schedule=gpipe microbatches=8" },
      { "4 --thread-ranks", "schedule=zb_h1" }, { "4 --thread-ranks", "stages=4" },
      { "4 --thread-ranks", "schedule=interleaved each=2" },
      { "1", "schedule=interleaved each=5" }, { "2", "schedule=zbv each=2" },
    })) do
      local own = train(recipe, how[1], how[2])
      same(whole, own, how[2])
      opens(own, false)
    end
  end)

  it("takes schedules in files, with their options", function()
    local function file(name)
      return ("schedule='%s/recipes/parallel/schedules/%s.lua' "):format(command.source, name)
    end
    for _, how in ipairs(some(2, {
      { "4 --thread-ranks", file "by_times" .. "schedule.every=1 schedule.spare=1" },
      { "2", file "limited" .. "schedule.most=1" },
      { "2 --thread-ranks", file "breadth_first" .. "each=2" },
      { "4 --thread-ranks", file "limited" .. "stages=4" },
    })) do
      local own = train(recipe, how[1], how[2])
      same(whole, own, how[2])
    end
    for options, text in pairs {
      [file "breadth_first" .. "schedule.most=2"] = "takes no options: it returns a plan",
      ["schedule=zb_h1 schedule.most=2"] = "'zb_h1' takes no options, only files in Lua do",
      ["schedule=1f2b"] = "there is no schedule '1f2b': did you mean '1f1b'?",
      ["schedule=none.csv"] = "there is no file 'none.csv'",
      [file "limited" .. "each=2"] = "placement leaves out chunk 2",
    } do
      local code, _, err = command.run(folder, ("run '%s/recipes/%s.lua' -n 2 --thread-ranks %s %s")
        :format(command.source, recipe, OPTIONS[recipe], options))
      assert.is_true(code == 1 or code == 2)
      assert.truthy(err:find(text, 1, true), err)
    end
  end)

  it("drops, and runs in 16 bits", function()
    local dropped = train(recipe, "4 --thread-ranks", "model.dropout=0.1")
    falls(dropped)
    assert.not_equal(whole.lines[5][1], dropped.lines[5][1])
    local low = train(recipe, "2 --thread-ranks", "dtype=bf16")
    falls(low)
    assert.is_true(math.abs(low.lines[5][1] - whole.lines[5][1]) < 0.02)
  end)

  it("goes on from a checkpoint, bit for bit, or on other ranks", function()
    local again <const> = "every.save=3 resume=auto "
    for _, how in ipairs(some(2, {
      again .. "schedule=interleaved each=2 model.dropout=0.1", again,
    })) do
      local one = train(recipe, "4 --thread-ranks", how)
      equal_bits(one, resume(recipe, "4 --thread-ranks", how, one))
    end
    local one = train(recipe, "4 --thread-ranks", again)
    same(one, resume(recipe, "4 --thread-ranks", again .. "stages=4", one), "in four stages")
  end)

  it("counts each token once, and refuses options that have no place", function()
    local out = train(recipe, "4 --thread-ranks", "stages=2").out
    local expected = train(recipe, "1", "stages=1").out
    assert.equal(expected:match "model +[^\n]*parameters", out:match "model +[^\n]*parameters")
    for options, text in pairs {
      ["accumulate = 2"] = "its microbatches are the passes of a step",
      ["loss = print"] = "the pipeline's own option loss gives it",
      ["dtype = 'f16'"] = "it does not scale its loss", ["graph = true"] = "ranks wait",
      ["sample = { every = 1 }"] = "no rank has the whole model",
      ["pipeline = 5"] = "option pipeline must be a pipeline",
    } do
      command.write(folder .. "/refused.lua", ([[
        local ms = require "moonshard"
        local net = ms.nn.Linear(4, 4)
        local pipe = ms.pipeline { chunks = net, microbatches = 1 }
        ms.train { model = net, optimizer = ms.optim.sgd(net), steps = 1, run = false,
          data = function() return ms.ones { 2, 4 }, ms.zeros { 2, dtype = "i64" } end,
          pipeline = pipe, %s }]]):format(options))
      local code, _, err = command.run(folder, "run refused.lua")
      assert.is_true(code == 1 and err:find(text, 1, true) ~= nil, options .. err)
    end
  end)

  it("ends with 75 and a checkpoint where it is stopped, and goes on", function()
    local options = ("'%s/recipes/%s.lua' -n 2 --log-every 1 run=stopped steps=100000 %s \z
      every.save=1000"):format(command.source, recipe, OPTIONS[recipe])
    local job = command.start(folder, options .. " 2>&1 & echo pid $!; wait $!")
    local pid
    for line in job.file:lines() do
      pid = pid or line:match "^pid (%d+)"
      if line:find "^step +3/" then break end
    end
    -- To the program alone: `timeout` sends a signal twice, and the second one ends a run at once.
    assert(os.execute("pkill -INT -x moonshard -P " .. pid))
    assert.equal(75, (job.finish()))
    local newest = ms.checkpoint.latest(folder .. "/stopped")
    assert.is_truthy(newest)
  end)

  it("refuses fewer blocks than chunks", function()
    runs:refuses(recipe, "2 --thread-ranks", OPTIONS[recipe] .. "each=3 schedule=interleaved",
      "6 chunks need as many blocks")
  end)
end)

describe("recipes/parallel/README.md", function()
  -- The file of a block.
  local function written(wanted)
    for _, block in ipairs(guide.blocks(command.read(command.source
      .. "/recipes/parallel/README.md"))) do
      if block.text:find("-- file: " .. wanted, 1, true) then
        return guide.write_file(folder, block.text)
      end
    end
    error("no block has the file " .. wanted)
  end

  it("has a schedule that runs, and names all others", function()
    local out = command.succeed(folder, ("check '%s/recipes/parallel/pipeline.lua' -n 2 steps=2 \z
      %s schedule=%s"):format(command.source, OPTIONS["parallel/pipeline"], written "in_turn.lua"))
    assert.truthy(out:find("at most 1, 1 microbatches held by the ranks\n\z
      rank 0   F0          B0    F1", 1, true), out)
    local text = command.read(command.source .. "/recipes/parallel/README.md")
    for name in io.popen(("ls '%s/recipes/parallel/schedules'"):format(command.source)):lines() do
      assert.truthy(text:find(("(schedules/%s)"):format(name), 1, true), name)
    end
  end)

  it("has an MLP over ranks, and says what only a comparison with one rank finds", function()
    local name = written "mlp.lua"
    local text = command.read(folder .. "/" .. name)
    local function losses(ranks)
      local out = command.succeed(folder, ("run %s -n %s"):format(name, ranks))
      assert.equal(4, select(2, out:gsub("loss", "")))
      return out
    end
    local whole = losses "1"
    assert.equal(whole, losses "2")
    assert.equal(whole, losses "4 --thread-ranks")
    -- Multiplied gradients.
    command.write(folder .. "/" .. name,
      (text:gsub("reduce_from(%b()) %+", "group:all_reduce%1:value() +")))
    assert.not_equal(whole, losses "2")
    command.write(folder .. "/" .. name, (text:gsub("copy_to%(x%)%)", "x)")))
    local code, _, err = command.run(folder, ("run %s -n 2"):format(name))
    assert.equal(5, code)
    assert.matches("save: '[%w.]+' of rank 1 differs from that of rank 0", err)
  end)

  it("has a script that combines all of them, and gives the losses of one rank", function()
    local name = written "all.lua"
    local function losses(ranks, options)
      local out = command.succeed(folder, ("run %s -n %s %s"):format(name, ranks, options))
      local list = {}
      for loss in out:gmatch "loss ([%d.]+)" do list[#list + 1] = tonumber(loss) end
      assert.equal(4, #list)
      return list
    end
    local whole = losses("1", "tensor=1 stages=1")
    for _, options in ipairs(some(2, { "", "tensor=4", "stages=4", "tensor=1" })) do
      for i, loss in ipairs(losses("8 --thread-ranks", options)) do
        assert.is_true(math.abs(loss - whole[i]) < 1.01e-4, options)
      end
    end
    -- Chunks of nn.cut know what would arrive.
    local drawn = command.succeed(folder, ("check %s -n 4 steps=2"):format(name))
    assert.truthy(drawn:find("\n1f1b: bubble 33.3%", 1, true), drawn)
  end)
end)
