-- moonshard tokenize: shards that loaders read, resuming, what does not fit together.
local ms = require "moonshard"
local core = require "moonshard.core"
local command = require "command"

local FOLDER = command.source .. "/tests/golden/tokenizers/"

describe("moonshard tokenize", function()
  local folder, tokenizer
  before_each(function()
    folder = command.folder()
    tokenizer = assert(ms.tokenizer.load(FOLDER .. "gpt2"))
  end)
  after_each(function() command.remove(folder) end)

  local function tokenize(rest)
    return command.succeed(folder,
      ("tokenize --tokenizer %sgpt2 --out shards/train %s"):format(FOLDER, rest))
  end

  local function fails(arguments, code, pattern)
    local given, _, err = command.run(folder, arguments)
    assert.equal(code, given)
    assert.matches(pattern, err)
  end

  local function description()
    return core.json_decode(command.read(folder .. "/shards/train.json"))
  end

  -- The tokens of all shards.
  local function tokens()
    local set = assert(ms.data.tokens(folder .. "/shards"))
    return set:loader { batch = 1, length = set:size() - 1 }:next(), set:size()
  end

  it("writes each file as a document, which loaders read", function()
    assert(core.make_directory(folder .. "/in/deep"))
    command.write(folder .. "/in/b", "one text")
    command.write(folder .. "/in/deep/a", "<|endoftext|> is text here \xff")
    command.write(folder .. "/in/.hidden", "no")
    command.write(folder .. "/first", "")
    local out = tokenize "first in"
    assert.matches("tokens of 3 files in 1 shard, 1 of them new", out)
    local ids, count = tokens()
    local text = tokenizer:decode(ids, { special = "text" })
    assert.equal("<|endoftext|>one text<|endoftext|><|endoftext|> is text here \xff", text)
    local told = description()
    assert.equal(count, told.tokens)
    assert.equal(500, told.vocab_size)
    assert.equal(0, told.end_of_text)
    assert.is_true(told.complete)
    assert.equal(FOLDER .. "gpt2", told.tokenizer)
    tokenize "--special parse --force first in"
    assert.equal("<|endoftext|>one text<|endoftext|><|endoftext|> is text here \xff",
      tokenizer:decode((tokens()), { special = "text" }))
    assert.equal(count - #tokenizer:encode "<|endoftext|>":to_table() + 1, description().tokens)
    tokenize "--end-of-text none --force first in"
    assert.equal(count - 3, description().tokens)
  end)

  it("goes on where it was stopped", function()
    for i = 1, 3 do command.write(folder .. "/" .. i, ("word %d\n"):format(i):rep(600000)) end
    assert.matches("3 shards, 3 of them new", (tokenize "1 2 3"))
    local whole = {}
    for i = 0, 2 do whole[i] = command.read(folder .. "/shards/train_0000" .. i .. ".bin") end
    assert.matches("3 shards, 0 of them new", (tokenize "1 2 3"))
    assert(core.remove(folder .. "/shards/train_00001.bin"))
    command.write(folder .. "/shards/train_00001.bin.tmp-1-2", "of a run that was killed")
    assert.matches("3 shards, 1 of them new", (tokenize "1 2 3"))
    assert.is_false((core.exists(folder .. "/shards/train_00001.bin.tmp-1-2")))
    -- Also on one thread, and from the start, the shards are the same.
    if not command.short then
      assert.matches("3 of them new", (tokenize "--force --threads 1 1 2 3"))
    end
    for i = 0, 2 do
      assert.equal(whole[i], command.read(folder .. "/shards/train_0000" .. i .. ".bin"))
    end
  end)

  it("refuses shards of another tokenizer or of other files", function()
    command.write(folder .. "/text", "text")
    command.write(folder .. "/other", "other")
    tokenize "text"
    fails(("tokenize --tokenizer %sbyte_level --out shards/train text")
      :format(FOLDER), 3, "is of the tokenizer '.*gpt2', not '.*byte_level'")
    local again = ("tokenize --tokenizer %sgpt2 --out shards/train "):format(FOLDER)
    fails(again .. "text other", 3, "is of other files or switches")
    fails(again .. "--end-of-text none text", 3, "is of other files or switches")
    tokenize "--force text other"
    assert.equal(2 + #tokenizer:encode "text":to_table() + #tokenizer:encode "other":to_table(),
      description().tokens)
    command.write(folder .. "/shards/train.json", "{}")
    fails(again .. "text", 3, "is not of `moonshard tokenize`")
  end)

  it("loses no shards that it has not made, and leaves none of another run", function()
    command.write(folder .. "/text", "text")
    assert(core.make_directory(folder .. "/shards"))
    command.write(folder .. "/shards/train_00003.bin", "mine")
    command.write(folder .. "/shards/train_3.bin", "another name")
    fails(("tokenize --tokenizer %sgpt2 --out shards/train text"):format(FOLDER), 3,
      "'shards/train_00003.bin' exists, but not 'shards/train.json'")
    assert.equal("mine", command.read(folder .. "/shards/train_00003.bin"))
    tokenize "--force text"
    assert.is_false((core.exists(folder .. "/shards/train_00003.bin")))
    assert.equal("another name", command.read(folder .. "/shards/train_3.bin"))
    assert(core.remove(folder .. "/shards/train_3.bin"))
    assert.equal(description().tokens, select(2, tokens()))
  end)

  it("says what is missing or wrong", function()
    command.write(folder .. "/text", "text")
    local start = ("tokenize --tokenizer %sgpt2 "):format(FOLDER)
    fails(start .. "--out x none", 3, "'none' does not exist")
    fails(start .. "--out x", 2, "files of text must be given")
    fails(start .. "text", 2, "%-%-out NAME must be given")
    fails(start .. "--out x --end-of-text no text", 2, "no such token")
    fails("tokenize --tokenizer none --out x text", 3, "none.*No such file")
    fails(start .. "--out text/x text", 3, "text")
    assert.is_false((core.exists(folder .. "/x.json")))
  end)

  it("writes four bytes a token where ids need them", function()
    command.write(folder .. "/text", "text")
    local big = assert(ms.tokenizer.load(FOLDER .. "ranks.tiktoken",
      { pattern = "gpt2", special = { ["<end>"] = 70000 } }))
    local jobs = { { out = folder .. "/x.bin", files = { folder .. "/text" } } }
    assert.error_matches(function() core.sharding(big, jobs, 2, nil, 1) end, "ids up to 70000")
    assert.is_true(assert(core.sharding(big, jobs, 4, 70000, 8)):finish())
    local set = assert(ms.data.tokens(folder .. "/x.bin"))
    local x, y = set:loader { batch = 1, length = set:size() - 1 }:next()
    assert.equal("text", big:decode(x))
    assert.equal(70000, y:to_table()[1][set:size() - 1])
    jobs[1].files[2] = folder .. "/none"
    local none, message, code = assert(core.sharding(big, jobs, 4, nil, 1)):finish()
    assert.is_nil(none)
    assert.matches("/none", message)
    assert.equal("not_found", code)
  end)

  describe("of lines of JSON", function()
    -- The documents of the shards, which end with <|endoftext|>.
    local function documents()
      local list = {}
      local set = assert(ms.data.tokens(folder .. "/shards"))
      local x, y = set:loader { batch = 1, length = set:size() - 1 }:next()
      local ids = x[1]:to_table()
      ids[#ids + 1] = y[1]:to_table()[#ids]
      local from = 1
      for i, id in ipairs(ids) do
        if id == 0 then
          list[#list + 1] = tokenizer:decode { table.unpack(ids, from, i - 1) }
          from = i + 1
        end
      end
      assert.equal(#ids + 1, from)
      return list
    end

    it("makes the member of each line a document", function()
      command.write(folder .. "/a.jsonl", table.concat({
        [[{"id": 1, "text": "one\nline, \u00e9 \ud83d\ude42 \"\/\\"}]], "", " \t\r",
        [[ {"text": "", "deep": {"text": "no"}, "big": 12345678901234567890123} ]] .. "\r",
        [[{"text": "<|endoftext|> is text", "body": "other"}]], [[{"text": "nul \u0000."}]],
        [[{"text": "the last line has no end"}]] }, "\n"))
      command.write(folder .. "/b.jsonl",
        "\xef\xbb\xbf" .. [[{"text": "of the second file"}]] .. "\n")
      assert.matches("tokens of 2 files in 1 shard, 1 of them new",
        (tokenize "--field text a.jsonl b.jsonl"))
      assert.same({ "one\nline, \u{e9} \u{1F642} \"/\\", "", "<|endoftext|> is text", "nul \0.",
        "the last line has no end", "of the second file" }, documents())
      assert.equal("text", description().field)
      assert.matches("0 of them new", (tokenize "--field text a.jsonl b.jsonl"))
      -- Another member is other work.
      local how = ("tokenize --tokenizer %sgpt2 --out shards/train "):format(FOLDER)
      fails(how .. "--field body a.jsonl b.jsonl", 3, "train.json' is of the field 'text', not \z
        the field 'body': choose another name, or %-%-force")
      command.write(folder .. "/text", "text")
      fails(how .. "text", 3, "train.json' is of the field 'text', not text")
      tokenize "text --force"
      fails(how .. "--field text a.jsonl", 3, "train.json' is of text, not the field 'text'")
      assert.is_nil(description().field)
    end)

    it("refuses what is none, by file and line", function()
      local how = ("tokenize --tokenizer %sgpt2 --out x --force "):format(FOLDER)
      local function wrong(line, pattern)
        command.write(folder .. "/a.jsonl", '{"text": "fine"}\n\n' .. line .. '\n{"text": "x"}\n')
        fails(how .. "--field text a.jsonl", 3, "'a.jsonl', line 3: " .. pattern)
        assert.is_false((core.exists(folder .. "/x_00000.bin")))
      end
      wrong('{"text": "cut', "it is no JSON: ")
      wrong('{"text": "a"} {"text": "b"}', "it is no JSON: end of file expected")
      wrong('{"text": "\\ud83d"}', "it is no JSON: ")
      wrong('{"text": "\xff"}', "it is no JSON: ")
      wrong('"text"', "it is no JSON: ")
      wrong('[1]', "it is an array, and no object")
      wrong('{"txt": "a", "id": 7}', "it has no member 'text', only 'txt', 'id'")
      wrong('{}', "it has no member 'text'\n$")
      wrong('{"text": null}', "its member 'text' is null, and no string")
      wrong('{"text": ["a"]}', "its member 'text' is an array, and no string")
      -- Without the switch, and where it does not belong.
      how = how:gsub("%-%-out x", "--out z")
      command.write(folder .. "/a.jsonl", '\n{"id": 1, "text": "a", "body": "b"}\n')
      command.write(folder .. "/text.txt", "text")
      fails(how .. "a.jsonl", 2, "'a.jsonl' is a file of JSON lines: %-%-field NAME says which \z
        member of each line is the text %(the first line has 'body', 'id', 'text'%)")
      fails(how .. "text.txt a.jsonl", 2, "'a.jsonl' is a file of JSON lines")
      fails(how .. "--field text text.txt", 2, "'text.txt' is not named %*.jsonl")
      fails(how .. "--field text a.jsonl text.txt", 2, "'text.txt' is not named %*.jsonl")
      command.write(folder .. "/a.jsonl", "no JSON")
      fails(how .. "a.jsonl", 2, "which member of each line is the text, or %-%-chat that each \z
        is a conversation\n")
      fails(how .. "--field text none.jsonl", 3, "'none.jsonl' does not exist")
      assert.is_false((core.exists(folder .. "/z.json")))
    end)

    -- core.sharding of parts of a file, which end at these bytes.
    local function shard(file, ...)
      local ends, files = { 0, ... }, {}
      for i = 2, #ends do files[i - 1] = { path = file, from = ends[i - 1], to = ends[i] } end
      local jobs = { { out = folder .. "/part.bin", files = files } }
      local job = assert(core.sharding(tokenizer, jobs, 2, 0, 1, false, "t"))
      local done, message = job:finish()
      return done and command.read(folder .. "/part.bin"), message
    end

    it("gives the same however a file is cut", function()
      local file, lines = folder .. "/a.jsonl", {}
      for i = 1, 9 do lines[i] = ('{"t": "%s %d"}'):format(("x"):rep(i % 4), i) end
      lines[4], lines[7] = "", "\r"
      local text = table.concat(lines, "\n")
      command.write(file, text)
      local whole = assert(shard(file, #text))
      for cut = 0, #text do
        assert.equal(whole, shard(file, cut, #text))
        assert.equal(whole, shard(file, cut // 2, cut, #text))
      end
      -- A line that is longer than what is read at once, and those around it.
      local long = ("word "):rep(command.short and 250000 or 700000)
      text = ('{"t": "before"}\n{"t": "%s"}\n{"t": "after"}\n{"t": 1}\n'):format(long)
      command.write(file, text)
      local _, message = shard(file, 1 << 20, 3 << 20, #text)
      assert.matches("a.jsonl', line 4: its member 't' is a number", message)
      text = text:sub(1, -10)
      command.write(file, text)
      whole = assert(shard(file, #text))
      local cuts = command.short and { 5, 1 << 20 }
        or { 5, 15, 16, 17, 1 << 20, 2 << 20, #text - 16, #text - 15 }
      for _, cut in ipairs(cuts) do assert.equal(whole, shard(file, cut, #text)) end
      local set = assert(ms.data.tokens(folder .. "/part.bin"))
      local ids = set:loader { batch = 1, length = set:size() - 1 }:next()
      local shown = tokenizer:decode(ids, { special = "text" })
      assert.is_true(shown == "before<|endoftext|>" .. long .. "<|endoftext|>after")
    end)

    it("cuts a large file into shards, of which each line is in one", function()
      local lines = {}
      for i = 1, 45000 do lines[i] = ('{"t": "%d %s"}\n'):format(i, ("y"):rep(i % 180)) end
      local text = table.concat(lines)
      command.write(folder .. "/a.jsonl", text)
      local out = tokenize "--field t --threads 2 a.jsonl"
      assert.matches("tokens of 1 file in 2 shards, 2 of them new", out)
      local second = command.read(folder .. "/shards/train_00001.bin")
      assert(core.remove(folder .. "/shards/train_00001.bin"))
      assert.matches("2 shards, 1 of them new", (tokenize "--field t --threads 1 a.jsonl"))
      assert.equal(second, command.read(folder .. "/shards/train_00001.bin"))
      -- The tokens follow the headers.
      local first = command.read(folder .. "/shards/train_00000.bin"):sub(1025)
      local whole = assert(shard(folder .. "/a.jsonl", #text)):sub(1025)
      assert.is_true(first .. second:sub(1025) == whole)
    end)
  end)

  it("says where documents are not separated, and takes a token that separates them", function()
    command.write(folder .. "/one", "a")
    command.write(folder .. "/two", "b")
    local start = ("tokenize --tokenizer %sranks.tiktoken --pattern \"%%s\" --out shards/train \z
      --force one two"):format(FOLDER)
    local told = "no end of text: documents are not separated; --end-of-text TOKEN\n"
    local out = command.succeed(folder, start:format("."))
    assert.truthy(out:find(told, 1, true))
    assert.is_nil(description().end_of_text)
    assert.equal(2, description().tokens)
    -- It is known, and asked for.
    assert.is_nil(command.succeed(folder, start:format(".") .. " --end-of-text none"):find(told, 1,
      true))
    out = command.succeed(folder, start:format(".") .. " --end-of-text in")
    assert.is_nil(out:find(told, 1, true))
    local ranks = assert(ms.tokenizer.load(FOLDER .. "ranks.tiktoken", { pattern = "." }))
    assert.equal(ranks:id "in", description().end_of_text)
    assert.equal(4, description().tokens)
    fails(("tokenize --tokenizer %sgpt2 --out y --end-of-text '<|endoftex|>' one"):format(FOLDER),
      2, "the tokenizer has no such token: did you mean '<|endoftext|>'%?")
  end)

  describe("by a tokenizer whose files change", function()
    local function train(change)
      local vocab = core.json_decode(command.read(FOLDER .. "gpt2/vocab.json"))
      if change then vocab.t, vocab.e = vocab.e, vocab.t end
      core.make_directory(folder .. "/tok")
      command.write(folder .. "/tok/vocab.json", core.json_encode(vocab))
      command.write(folder .. "/tok/merges.txt", command.read(FOLDER .. "gpt2/merges.txt"))
    end
    -- In a program of its own, in any folder: what the data set's tokenizer is.
    local function read_from(place)
      core.make_directory(folder .. "/" .. place)
      command.write(folder .. "/" .. place .. "/r.lua", ([[
        local ms = require "moonshard"
        local set = assert(ms.data.tokens "%s/shards")
        local tokenizer, message, code = set:tokenizer()
        print(tokenizer and "found " .. tokenizer:vocab_size() or code .. ": " .. message)]])
        :format(folder))
      local found = io.popen(("cd '%s/%s' && '%s' run r.lua 2>&1"):format(folder, place,
        command.program))
      local text = found:read "a"
      found:close()
      return text
    end

    it("does not take old shards for its own, and its ids meet no other tokenizer", function()
      train()
      command.write(folder .. "/text", "some text of some words")
      local how = "tokenize --tokenizer tok --out shards/train text"
      command.succeed(folder, how)
      local before = command.read(folder .. "/shards/train_00000.bin")
      assert.matches("0 of them new", (command.succeed(folder, how)))
      -- From any folder, also where another one has that name.
      core.make_directory(folder .. "/else/tok")
      command.write(folder .. "/else/tok/vocab.json", "{}")
      command.write(folder .. "/else/tok/merges.txt", "")
      for _, place in ipairs { ".", "deep/er", "else" } do
        assert.equal("found 500\n", read_from(place))
      end
      -- Of as many tokens, in the same folder.
      train(true)
      fails(how, 3, "is of the tokenizer 'tok' as it was: its files have changed since; choose")
      assert.matches("^mismatch: '.*train.json' is of another tokenizer than '.*tok' has now, \z
        with as many ids", read_from "deep/er")
      assert.equal(before, command.read(folder .. "/shards/train_00000.bin"))
      command.succeed(folder, how .. " --force")
      assert.not_equal(before, command.read(folder .. "/shards/train_00000.bin"))
      assert.equal("found 500\n", read_from "deep/er")
      -- What says how chats are written changes no id.
      command.write(folder .. "/tok/chat_template.jinja", "{{ messages }}")
      assert.matches("0 of them new", (command.succeed(folder, how)))
    end)

    it("keeps shards of older versions, and says what is not known", function()
      train()
      command.write(folder .. "/text", "some text of some words")
      local how = "tokenize --tokenizer tok --out shards/train text"
      command.succeed(folder, how)
      local told = description()
      told.tokenizer_hash, told.tokenizer_path = nil, nil
      -- As they made it: without the hash.
      local _, bytes, modified = core.exists(folder .. "/text")
      told.made_of = ("%016x"):format(core.hash(table.concat({ "tok", "", 500, "0", "text",
        ("text %d %d"):format(bytes, modified) }, "\n")))
      command.write(folder .. "/shards/train.json", core.json_encode(told))
      assert.matches("has no hash of its tokenizer: whether 'tok' is the one.*\nfound 500",
        read_from ".")
      local out = command.succeed(folder, how)
      assert.matches("train.json' has no hash of its tokenizer: the shards that are there are kept",
        out)
      assert.matches("0 of them new", out)
      assert.truthy(description().tokenizer_hash)
    end)
  end)
end)
