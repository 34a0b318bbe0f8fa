-- recipes/parallel/gpt2_3d.lua: losses, norms and saved tensors of recipes/gpt2.lua, which has the
-- whole model on one rank; given weights; and what runs go on from.
local command = require "command"
local ms = require "moonshard"
local trained = require "trained"
local some, falls, same = command.some, trained.falls, trained.same

local recipe <const>, plain <const> = "parallel/gpt2_3d", "gpt2"
local SMALL <const> = "data=text bytes=true length=24 batch=8 lr=5e-4 warmup=1 model.width=48 \z
  model.heads=12 model.layers=4 dtype=f32 "
local OPTIONS <const> = {
  [recipe] = SMALL .. "microbatches=2 every.eval=5 ",
  [plain] = SMALL .. "accumulate=1 every.eval=5 every.sample=0 every.save=0 ",
}
local runs, folder, whole
local function train(...) return runs:train(...) end

-- By gpt2.lua.
local function train_plain(options) return train(plain, "1", options) end

setup(function()
  runs = trained.runs(OPTIONS)
  folder = runs.folder
  -- A twentieth is for validation: 16 sequences, which all grids divide.
  command.write(folder .. "/text", command.read(command.source .. "/README.md"):sub(1, 7700))
  whole = train_plain ""
end)
teardown(function() runs:remove() end)

describe("recipes/parallel/gpt2_3d.lua", function()
  it("gives losses, norms and tensors of gpt2.lua on any grid", function()
    falls(whole)
    for _, how in ipairs(some(3, {
      { "4", "" }, { "1", "" }, { "2", "" },
      { "8 --thread-ranks", "stages=4 recompute=true" }, { "8 --thread-ranks", "" },
      { "8 --thread-ranks", "tensor=4" },
      -- 256 rows on three ranks have padding.
      { "3 --thread-ranks", "tensor=3" }, { "8 --thread-ranks", "tensor=1 stages=4" },
      { "2 --thread-ranks", "tensor=1 stages=2" },
      { "8 --thread-ranks", "sequence=true" }, { "2 --thread-ranks", "sequence=true stages=1" },
      { "8 --thread-ranks", "tensor=4 sequence=true recompute=true schedule=gpipe" },
      { "4 --thread-ranks", "sequence=true schedule=zb_h1" },
    })) do
      same(whole, train(recipe, how[1], how[2]), how[1] .. " " .. how[2])
    end
  end)

  it("has the table on two stages by any schedule that keeps these apart", function()
    command.write(folder .. "/own.csv", "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n")
    for _, schedule in ipairs(some(2, { "gpipe", "own.csv", "zb_h1", "interleaved each=2" }, 2)) do
      local own = train(recipe, "8 --thread-ranks", "schedule=" .. schedule)
      same(whole, own, schedule)
    end
    runs:refuses(recipe, "4 --thread-ranks", OPTIONS[recipe] .. "schedule=zbv each=2",
      "zbv has the first and the last chunk on one rank: it needs tie=false")
    local untied = train(recipe, "1", "tie=false")
    assert.is_truthy(untied.saved["lm_head.weight"])
    for _, how in ipairs(some(2, { "schedule=zbv each=2", "tensor=4" })) do
      same(untied, train(recipe, "8 --thread-ranks", how .. " tie=false"), how)
    end
  end)

  it("trains the weights of a folder, and saves them under their names", function()
    -- An odd number of rows; names with a prefix, as some tools write them; a file beside them.
    local made = ms.nn.gpt2 { vocab = 257, context = 32, layers = 2, width = 48, heads = 4 }
    local given = folder .. "/given"
    assert(made:save(given))
    local state, prefixed = made:state(), {}
    for name, t in pairs(state) do prefixed["transformer." .. name] = t end
    assert(ms.safetensors.save(given .. "/model.safetensors", prefixed, { format = "pt" }))
    command.write(given .. "/generation_config.json", '{"eos_token_id": 7}')
    local config = command.read(given .. "/config.json"):gsub("^{", '{"written_by": "a tool",')
    command.write(given .. "/config.json", config)
    local one = train_plain "weights=given"
    falls(one)
    for _, how in ipairs(some(3, {
      { "8 --thread-ranks", "tensor=4" }, { "4", "" }, { "8 --thread-ranks", "" },
    })) do
      local own = train(recipe, how[1], how[2] .. " weights=given")
      same(one, own, how[1] .. " from a folder")
      local saved = folder .. "/" .. own.run .. "/model"
      for name in pairs(prefixed) do assert.is_truthy(own.saved[name], name) end
      assert.equal(config, command.read(saved .. "/config.json"))
      assert.equal('{"eos_token_id": 7}', command.read(saved .. "/generation_config.json"))
      local again = assert(ms.nn.pretrained(saved))
      for name, t in pairs(again:state()) do
        assert.is_true(t:eq(own.saved["transformer." .. name]):all():item(), name)
      end
    end
    -- Nothing is trained: what was read is what is saved, to the bit.
    local kept = train(recipe, "4 --thread-ranks", "weights=given lr=0")
    for name, t in pairs(prefixed) do assert.is_true(t:eq(kept.saved[name]):all():item(), name) end
    runs:refuses(recipe, "2 --thread-ranks", "weights=given length=33",
      "length = 33: the weights have 32 positions")
  end)

  it("goes on from a checkpoint, bit for bit, or on other ranks", function()
    local again <const> = "every.save=3 resume=auto "
    for _, how in ipairs { again, again .. "schedule=interleaved each=2 dropout=0.1" } do
      local one = train(recipe, "8 --thread-ranks", how)
      runs:equal_bits(one, runs:resume(recipe, "8 --thread-ranks", how, one))
      if how == again then
        for _, other in ipairs(some(2, {
          { "6 --thread-ranks", "tensor=3 stages=2" }, { "1", "" },
        })) do
          same(one, runs:resume(recipe, other[1], again .. other[2], one), "on other ranks")
        end
      end
    end
  end)

  it("drops, and runs in 16 bits", function()
    for _, how in ipairs { "dropout=0.1", "dtype=bf16", "dropout=0.1 sequence=true" } do
      local own = train(recipe, "4 --thread-ranks", how)
      falls(own)
      assert.is_true(math.abs(own.lines[5][1] - whole.lines[5][1]) < 0.1, how)
      assert.not_equal(own.lines[5][1], whole.lines[5][1])
    end
  end)

  it("learns shards of tokens", function()
    local ids = {}
    for i = 1, 4000 do ids[i] = string.pack("<H", (i * i) % 300) end
    command.write(folder .. "/ids_00000.bin", table.concat(ids))
    local options = "data=ids_00000.bin bytes=false vocab=301"
    local one = train(recipe, "1", options)
    assert.same({ 301, 48 }, one.saved["wte.weight"]:shape())
    same(one, train(recipe, "4 --thread-ranks", options), "shards")
  end)

  it("needs less memory on each rank than one rank needs, and no more than check says", function()
    local one, own = train(recipe, "1", ""), train(recipe, "4", "")
    local peak = own.metrics[5].peak_bytes
    assert.is_true(peak < one.metrics[5].peak_bytes // 2)
    -- Validation and saving, which come after the last line, need more than a step.
    assert.is_true(peak <= runs:predicted(recipe, 4, "", own.run)[1])
  end)

  it("refuses sizes that cannot be cut", function()
    for options, message in pairs {
      ["tensor=3"] = "tensor = 3 times stages = 1 does not divide 4 ranks",
      ["tensor=4 length=18 sequence=true"] = "4 tensor ranks do not divide a length of 18",
      ["tensor=4 stages=2"] = "tensor = 4 times stages = 2 does not divide 4 ranks",
      ["model.heads=6 model.width=48 tensor=4"] = "4 tensor ranks do not divide 6 heads",
      ["stages=4 tensor=1 model.layers=3"] = "4 chunks need as many blocks, not 3",
    } do
      runs:refuses(recipe, "4 --thread-ranks", "run=no steps=1 " .. options, message)
    end
  end)
end)
