-- Tokenizers of models and of shards: samples as text while a model trains, what is saved with it,
-- and what does not fit together.
local command = require "command"
local core = require "moonshard.core"
local ms = require "moonshard"
local support = require "support"
local fails = support.fails

local TOKENIZERS = command.source .. "/tests/golden/tokenizers/"

describe("a tokenizer", function()
  local folder
  before_each(function()
    folder = command.folder()
    command.write(folder .. "/text", ("A text of some words, 12 of them. "):rep(400))
  end)
  after_each(function() command.remove(folder) end)

  local function tokenize(name, tokenizer, more)
    command.succeed(folder, ("tokenize --tokenizer '%s' --out %s %s text"):format(tokenizer, name,
      more or ""))
  end

  local function copy(from, to)
    assert(os.execute(("cp -r '%s' '%s/%s'"):format(from, folder, to)))
  end

  local SMALL <const> = "length=32 batch=2 accumulate=1 steps=3 warmup=1 every.sample=2 \z
    every.eval=0 run=out "
  local TINY <const> = "model.layers=1 model.width=16 model.heads=2 "

  local function train(options, ranks)
    return command.run(folder, ("run '%s/recipes/%s %s%s"):format(command.source, options, SMALL,
      ranks or ""))
  end

  local function refused(options, ...)
    local code, out, err = train(options)
    assert.equal(3, code, out .. err)
    for _, text in ipairs { ... } do assert.truthy(err:find(text, 1, true), err) end
    assert.falsy(err:find("traceback", 1, true), err)
    assert.falsy(out:find("step", 1, true) and out:find("loss", 1, true), out)
  end

  it("of shards shows samples as text, and is saved with the model", function()
    tokenize("shards/train", TOKENIZERS .. "gpt2")
    local words = assert(ms.tokenizer.load(TOKENIZERS .. "gpt2"))
    for _, case in ipairs {
      "gpt2.lua' data=shards vocab=512 " .. TINY,
      "gpt2.lua' data=shards vocab=512 -n 2 shard=full_shard " .. TINY,
      "llama.lua' data=shards vocab=512 model.kv_heads=1 " .. TINY,
    } do
      local code, out, err = train(case)
      assert.equal(0, code, out .. err)
      assert.equal(2, select(2, out:gsub("%-%-%-%- sample", "")), out)
      for _, file in ipairs { "vocab.json", "merges.txt" } do
        assert.equal(command.read(TOKENIZERS .. "gpt2/" .. file),
          command.read(folder .. "/out/model/" .. file))
      end
      local model = assert(ms.nn.pretrained(folder .. "/out/model"))
      assert.equal(words:vocab_size(), model:tokenizer():vocab_size())
      local text = command.succeed(folder, "generate out --prompt 'A text' --count 8 --greedy")
      local ids = model:generate(words:encode "A text", { count = 8, temperature = 0, stop =
        words:id "<|endoftext|>" })
      assert.equal("A text" .. words:decode(ids) .. "\n", text)
      command.remove(folder .. "/out")
    end
  end)

  it("of ranks is saved with where it cuts text", function()
    tokenize("train", TOKENIZERS .. "ranks.tiktoken", "--pattern cl100k")
    local code, out, err = train("gpt2.lua' data='train_*.bin' vocab=100288 " .. TINY)
    assert.equal(0, code, out .. err)
    assert.equal(2, select(2, out:gsub("%-%-%-%- sample", "")), out)
    assert.equal(command.read(TOKENIZERS .. "ranks.tiktoken"),
      command.read(folder .. "/out/model/tokenizer.model"))
    local again = assert(ms.nn.pretrained(folder .. "/out/model")):tokenizer()
    local words = assert(ms.tokenizer.load(TOKENIZERS .. "ranks.tiktoken", { pattern = "cl100k" }))
    assert.same(words:encode "It's 12345 words":to_table(),
      again:encode "It's 12345 words":to_table())
    assert.matches("^A", (command.succeed(folder, "generate out --prompt A --count 5")))
  end)

  it("of the weights' folder shows samples, and must be that of the shards", function()
    ms.seed(1)
    local model = ms.nn.gpt2 { vocab = 600, context = 32, layers = 1, width = 16, heads = 2 }
    assert(model:save(folder .. "/weights"))
    assert(os.execute(("cp '%sgpt2/'* '%s/weights'"):format(TOKENIZERS, folder)))
    -- The same tokenizer, in another folder.
    copy(TOKENIZERS .. "gpt2", "same")
    tokenize("same_shards", folder .. "/same")
    local code, out, err = train "gpt2.lua' weights=weights data='same_shards_*.bin' "
    assert.equal(0, code, out .. err)
    assert.equal(2, select(2, out:gsub("%-%-%-%- sample", "")), out)
    assert.equal(command.read(TOKENIZERS .. "gpt2/merges.txt"),
      command.read(folder .. "/out/model/merges.txt"))
    -- Shards that name none, as other tools write them.
    assert(os.remove(folder .. "/same_shards.json"))
    code, out, err = train "gpt2.lua' weights=weights data='same_shards_*.bin' "
    assert.equal(0, code, out .. err)
    assert.equal(2, select(2, out:gsub("%-%-%-%- sample", "")), out)
    -- As many ids, and others: two tokens have changed places.
    copy(TOKENIZERS .. "gpt2", "other")
    local vocabulary = core.json_decode(command.read(folder .. "/other/vocab.json"))
    local a, b
    for text, id in pairs(vocabulary) do
      if id == 300 then a = text elseif id == 301 then b = text end
    end
    vocabulary[a], vocabulary[b] = 301, 300
    command.write(folder .. "/other/vocab.json", core.json_encode(vocabulary))
    tokenize("other_shards", folder .. "/other")
    refused("gpt2.lua' weights=weights data='other_shards_*.bin' ",
      "the model's tokenizer is 'weights'", "other_shards.json", folder .. "/other")
    -- Also where the shards' tokenizer is gone, if the number of ids shows it.
    tokenize("more_shards", TOKENIZERS .. "byte_level")
    local told = core.json_decode(command.read(folder .. "/more_shards.json"))
    told.vocab_size, told.tokenizer = 501, "gone"
    command.write(folder .. "/more_shards.json", core.json_encode(told))
    refused("gpt2.lua' weights=weights data='more_shards_*.bin' ",
      "the model's tokenizer is 'weights'", "more_shards.json", "'gone'")
  end)

  it("of one file of shards must be that of the others", function()
    copy(TOKENIZERS .. "gpt2", "same")
    tokenize("a", TOKENIZERS .. "gpt2")
    tokenize("b", folder .. "/same")
    tokenize("c", TOKENIZERS .. "byte_level")
    local code, out, err = train("gpt2.lua' data='a_*.bin' valid='b_*.bin' vocab=1024 " .. TINY)
    assert.equal(0, code, out .. err)
    refused("gpt2.lua' data='a_*.bin' valid='c_*.bin' vocab=1024 " .. TINY, "a.json",
      TOKENIZERS .. "gpt2", "c.json", TOKENIZERS .. "byte_level", "do not fit together")
  end)

  it("may not have more ids than the model has rows", function()
    tokenize("train", TOKENIZERS .. "gpt2")
    refused("gpt2.lua' data='train_*.bin' vocab=499 " .. TINY, "500 ids", "rows for 499",
      "give vocab=500")
    refused("gpt2.lua' data='train_*.bin' vocab=499 -n 2 " .. TINY, "500 ids", "rows for 499")
    assert.falsy((core.exists(folder .. "/out")))
  end)

  it("that has moved is told in one line, and training goes on", function()
    copy(TOKENIZERS .. "gpt2", "words")
    tokenize("shards/train", "words")
    assert.equal(2, select(2, (select(2,
      train("gpt2.lua' data=shards vocab=512 " .. TINY))):gsub("%-%-%-%- sample", "")))
    command.remove(folder .. "/out")
    -- Beside the shards it is found, too.
    assert(os.rename(folder .. "/words", folder .. "/shards/words"))
    local code, out, err = train("gpt2.lua' data=shards vocab=512 " .. TINY)
    assert.equal(0, code, out .. err)
    assert.equal(2, select(2, out:gsub("%-%-%-%- sample", "")))
    command.remove(folder .. "/out")
    assert(os.rename(folder .. "/shards/words", folder .. "/gone"))
    for _, ranks in ipairs { "", "-n 2 " } do
      code, out, err = train("gpt2.lua' data=shards vocab=512 " .. ranks .. TINY)
      assert.equal(0, code, out .. err)
      assert.equal("", err)
      local _, times = out:gsub("no samples are shown: 'shards/train.json' names the tokenizer \z
        'words', which is not there\n", "")
      assert.equal(1, times, out)
      assert.falsy(out:find("---- sample", 1, true), out)
      assert.truthy(core.exists(folder .. "/out/model/config.json"))
      command.remove(folder .. "/out")
    end
    -- Another one in its place.
    copy(TOKENIZERS .. "byte_level", "words")
    code, out = train("gpt2.lua' data=shards vocab=1024 " .. TINY)
    assert.equal(0, code, out)
    assert.matches("no samples are shown: 'shards/train.json' is of a tokenizer with 500 ids, and \z
      'words' has %d+ now\n", out)
  end)

  it("says how many tokens a model has, unless vocab= does", function()
    tokenize("shards/train", TOKENIZERS .. "gpt2")
    for recipe, rows in pairs { gpt2 = 512, llama = 500 } do
      for options, wanted in pairs {
        ["data=shards"] = rows, ["data=shards vocab=640"] = 640, ["data=text bytes=true"] = 256,
      } do
        local code, out, err = train(("%s.lua' %s %s"):format(recipe, options,
          TINY .. (recipe == "llama" and "model.kv_heads=1" or "")))
        assert.equal(0, code, out .. err)
        assert.matches(('"vocab_size": *%d[,\n}]'):format(wanted),
          command.read(folder .. "/out/model/config.json"))
        command.remove(folder .. "/out")
      end
    end
  end)

  it("is given to ms.train, with a prompt", function()
    tokenize("train", TOKENIZERS .. "gpt2")
    local set = assert(ms.data.tokens(folder .. "/train_*.bin"))
    local words = assert(set:tokenizer())
    assert.equal(500, words:vocab_size())
    local first, rest = set:split(0.9)
    assert.equal(500, first:tokenizer():vocab_size())
    assert.equal(500, rest:tokenizer():vocab_size())
    assert.is_nil(assert(ms.data.bytes(folder .. "/text")):tokenizer())
    local model = ms.nn.gpt2 { vocab = 512, context = 32, layers = 1, width = 16, heads = 2 }
    local lines, log = {}, require "moonshard.base.log"
    local write = log.log
    log.log = function(...) lines[#lines + 1] = string.format(...) end -- luacheck: ignore 122
    local function run(sample, net)
      sample.every = 1
      return pcall(ms.train, {
        model = net or model, optimizer = ms.optim.adamw(net or model), steps = 1,
        data = first:loader { batch = 2, length = 32 }, run = folder .. "/run", sample = sample,
      })
    end
    local ok, message = run { tokenizer = words, prompt = "A text", count = 5, temperature = 0 }
    log.log = write -- luacheck: ignore 122
    assert(ok, message)
    local text = words:decode(model:generate(words:encode "A text", { count = 5, temperature = 0 }))
    local shown = table.concat(lines, "\n")
    assert.truthy(shown:find("---- sample\nA text" .. text .. "\n----", 1, true), shown)
    ok, message = run { tokenizer = "gpt2" }
    assert.is_false(ok)
    assert.truthy(message:find("sample.tokenizer must be a tokenizer", 1, true), message)
    local small = ms.nn.gpt2 { vocab = 100, context = 32, layers = 1, width = 16, heads = 2 }
    ok, message = run({ tokenizer = words }, small)
    assert.is_false(ok)
    assert.truthy(message:find("500 ids, and the model's embedding has rows for 100", 1, true),
      message)
    fails(function() small:set_tokenizer(words) end, "set_tokenizer", "500 ids", "rows for 100")
    fails(function() model:set_tokenizer "words" end, "tokenizer must be a tokenizer")
  end)

  it("of a model is read when it is asked for, and replaced", function()
    local model = ms.nn.gpt2 { vocab = 1024, context = 32, layers = 1, width = 16, heads = 2 }
    assert.is_nil(model:tokenizer())
    local words = assert(ms.tokenizer.load(TOKENIZERS .. "gpt2"))
    assert(model:set_tokenizer(words))
    assert.equal(words, model:tokenizer())
    assert(model:save(folder .. "/one"))
    local config = core.json_decode(command.read(folder .. "/one/config.json"), true)
    assert.equal(words:id "<|endoftext|>", config.eos_token_id)
    assert.equal(words:bos() or core.json_null, config.bos_token_id)
    local read = assert(ms.nn.pretrained(folder .. "/one"))
    assert.equal(500, read:tokenizer():vocab_size())
    local other = assert(ms.tokenizer.load(TOKENIZERS .. "byte_level/tokenizer.json"))
    local wrapped = ms.ddp(read)
    assert(wrapped:set_tokenizer(other))
    assert.equal(other, wrapped:tokenizer())
    assert(wrapped:save(folder .. "/two"))
    local names = core.list(folder .. "/two")
    table.sort(names)
    assert.same({ "config.json", "model.safetensors", "tokenizer.json" }, names)
    -- A damaged one is not taken for none.
    command.write(folder .. "/two/tokenizer.json", "{")
    local none, message, code = assert(ms.nn.pretrained(folder .. "/two")):tokenizer()
    assert.same({ nil, "corrupt" }, { none, code })
    assert.truthy(message:find("tokenizer.json", 1, true))
    local piece = assert(ms.tokenizer.load(TOKENIZERS .. "sentencepiece/tokenizer.model"))
    assert(model:set_tokenizer(piece))
    assert(model:save(folder .. "/three"))
    assert.equal(piece:vocab_size(),
      assert(ms.nn.pretrained(folder .. "/three")):tokenizer():vocab_size())
  end)
end)
