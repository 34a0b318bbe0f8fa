-- Tokenizers: ids equal to those that the peers' libraries gave (golden/tokenizers), decoding,
-- streams, special tokens, files that are refused.
local ms = require "moonshard"
local core = require "moonshard.core"

local FOLDER = (os.getenv "MOONSHARD_SOURCE" or ".") .. "/tests/golden/tokenizers/"
local SPECIAL = { "<|endoftext|>", "<|turn|>" }

local files = {
  byte_level = { "byte_level" }, llama2 = { "llama2" }, gpt2 = { "gpt2" },
  ranks = { "ranks.tiktoken", { pattern = "cl100k", special = SPECIAL } },
  sentencepiece = { "sentencepiece" }, mapped = { "mapped.model" },
}

local function load(name)
  return assert(ms.tokenizer.load(FOLDER .. files[name][1], files[name][2]))
end

describe("a tokenizer", function()
  local golden = assert(core.json_decode(assert(core.file_read(FOLDER .. "golden.json"))))
  local folder
  before_each(function()
    folder = os.tmpname()
    os.remove(folder)
    assert(core.make_directory(folder))
  end)
  after_each(function() os.execute("rm -rf '" .. folder .. "'") end)

  local function put(name, text)
    assert(core.file_write(folder .. "/" .. name, text))
    return folder .. "/" .. name
  end

  -- A tokenizer.json of ours with one part replaced.
  local function changed(key, value)
    local content = assert(core.json_decode(assert(core.file_read(
      FOLDER .. "byte_level/tokenizer.json"))))
    content[key] = value
    return put("tokenizer.json", core.json_encode(content))
  end

  local function refused(path, options, pattern, code)
    local none, message, given = ms.tokenizer.load(path, options)
    assert.is_nil(none)
    assert.matches(pattern, message)
    assert.equal(code, given)
  end

  for name, kinds in ms.sorted_pairs(golden.ids) do
    it("of kind " .. name .. " gives the peer's ids", function()
      local tokenizer = load(name)
      for i, text in ipairs(golden.texts) do
        for _, special in ipairs { "text", "parse" } do
          local ids = tokenizer:encode(text, { special = special, bos = false, eos = false })
          if kinds[special] then assert.same(kinds[special][i], ids:to_table()) end
        end
        if kinds.ends then
          assert.same(kinds.ends[i], tokenizer:encode(text, { special = "parse" }):to_table())
        end
        if kinds.decoded then
          assert.equal(kinds.decoded[i], tokenizer:decode(kinds.text[i]))
        end
      end
    end)
  end

  it("gives the peer's ids with each kind of component", function()
    local components = assert(core.json_decode(assert(core.file_read(FOLDER .. "components.json"))))
    for number, file in ipairs(components.files) do
      local content = core.json_decode(core.file_read(FOLDER .. file.base .. "/tokenizer.json"))
      for key, value in pairs(file.parts) do
        if key == "model" then for k, v in pairs(value) do content.model[k] = v end
        else content[key] = value or nil end
      end
      local tokenizer = assert(ms.tokenizer.load(put("tokenizer.json", core.json_encode(content))))
      for i, text in ipairs(components.texts) do
        assert.same(file.ids[i], tokenizer:encode(text, { bos = false, eos = false }):to_table(),
          ("file %d of components.json, text %d"):format(number, i))
      end
    end
  end)

  -- Puts a folder of golden/tokenizers, with more files beside it: name -> content as a table.
  local function put_folder(base, more)
    for _, name in ipairs(core.list(folder)) do os.remove(folder .. "/" .. name) end
    for _, name in ipairs(core.list(FOLDER .. base)) do
      if name ~= "tokenizer_config.json" then
        put(name, assert(core.file_read(FOLDER .. base .. "/" .. name)))
      end
    end
    for name, content in pairs(more) do put(name, core.json_encode(content)) end
    return folder
  end

  -- The ids of a tokenizer's special tokens.
  local function specials(tokenizer)
    local list = {}
    for id = 0, tokenizer:vocab_size() - 1 do
      if select(2, tokenizer:token(id)) then list[#list + 1] = id end
    end
    return list
  end

  it("of a folder whose files add tokens gives transformers' ids", function()
    local peer = assert(core.json_decode(assert(core.file_read(FOLDER .. "folders.json"))))
    for number, case in ipairs(peer.folders) do
      local what = ("folder %d of folders.json"):format(number)
      local tokenizer = assert(ms.tokenizer.load(put_folder(case.base, case.files)))
      assert.equal(case.size, tokenizer:vocab_size(), what)
      if case.special then assert.same(case.special, specials(tokenizer), what) end
      if case.eos then assert.equal(case.eos, tokenizer:eos(), what) end
      for i, text in ipairs(peer.texts) do
        local ids = tokenizer:encode(text, { special = "parse", bos = false, eos = false })
        assert.same(case.ids[i], ids:to_table(), ("%s, text %d"):format(what, i))
        assert.equal(case.shown[i], tokenizer:decode(ids, { special = "text" }),
          ("%s, text %d"):format(what, i))
      end
    end
  end)

  describe("with added tokens in other files", function()
    local function decoder(tokens) return { added_tokens_decoder = tokens } end
    local function contradicts(base, more, file, pattern)
      refused(put_folder(base, more), nil, "/" .. file:gsub("%.", "%%.") .. "': " .. pattern,
        "corrupt")
    end

    it("refuses ids that do not fit, by file and token", function()
      for base, size in pairs { gpt2 = 500, byte_level = 602, llama2 = 600, sentencepiece = 700 } do
        local inner = assert(ms.tokenizer.load(put_folder(base, {}))):token(300)
        -- Another token's id.
        contradicts(base, { ["added_tokens.json"] = { ["<x>"] = 300 } }, "added_tokens.json",
          "the added token '<x>' has the id 300, which is another token's in the vocabulary")
        contradicts(base, { ["tokenizer_config.json"] = decoder { ["300"] = { content = "<x>" } } },
          "tokenizer_config.json", "the added token '<x>' has the id 300, which is another token's")
        -- Two tokens of one id.
        contradicts(base, { ["added_tokens.json"] = { ["<x>"] = size, ["<y>"] = size } },
          "added_tokens.json", ("the added token '<[xy]>' has the id %d, which is that of the \z
            token '<[xy]>'"):format(size))
        -- A gap, in which transformers puts the token.
        contradicts(base, { ["added_tokens.json"] = { ["<x>"] = size + 1 } }, "added_tokens.json",
          ("the added token '<x>' has the id %d, and no token has those from %d on"):format(
            size + 1, size))
        -- Another id than it has. The name of a token of bytes is in their alphabet.
        inner = inner:gsub(" ", "\u{120}")
        contradicts(base, { ["added_tokens.json"] = { [inner] = size } }, "added_tokens.json",
          ("the added token '.*' has the id %d, and the tokenizer has it as 300"):format(size))
      end
      contradicts("byte_level", { ["tokenizer_config.json"] =
        decoder { ["602"] = { content = "<|endoftext|>" } } }, "tokenizer_config.json",
        "the added token '<|endoftext|>' has the id 602, and the tokenizer has it as 0")
      contradicts("byte_level", { ["added_tokens.json"] = { ["<x>"] = 601 } },
        "added_tokens.json",
        "the added token '<x>' has the id 601, which is that of the token '<word>'")
    end)

    it("refuses damaged files by name", function()
      contradicts("gpt2", { ["added_tokens.json"] = { ["<x>"] = -1 } }, "added_tokens.json",
        "the added token '<x>' has no id from 0 to")
      contradicts("gpt2", { ["added_tokens.json"] = { ["<x>"] = "500" } }, "added_tokens.json",
        "the added token '<x>' has no id")
      contradicts("gpt2", { ["tokenizer_config.json"] = decoder { x5 = { content = "<x>" } } },
        "tokenizer_config.json", "the added token '<x>' has no id")
      contradicts("gpt2", { ["tokenizer_config.json"] = decoder { ["500"] = "<x>" } },
        "tokenizer_config.json",
        "the id '500' of its \"added_tokens_decoder\" has no \"content\"")
      contradicts("gpt2", { ["tokenizer_config.json"] = decoder "<x>" },
        "tokenizer_config.json", "its \"added_tokens_decoder\" is no object")
      for _, name in ipairs { "added_tokens.json", "special_tokens_map.json",
        "tokenizer_config.json" } do
        contradicts("gpt2", { [name] = core.json_list {} }, name, "it is no JSON object")
        put_folder("gpt2", {})
        put(name, "{")
        refused(folder, nil, name .. "': line 1 is no JSON", "corrupt")
      end
    end)

    it("takes a token of the vocabulary that no merge makes for one of them", function()
      local vocab = core.json_decode(core.file_read(FOLDER .. "gpt2/vocab.json"))
      vocab["end of turn"] = 500
      local more = { ["vocab.json"] = vocab }
      refused(put_folder("gpt2", more), nil, "none of its %d+ merges makes the token", "corrupt")
      more["added_tokens.json"] = { ["end of turn"] = 500 }
      local tokenizer = assert(ms.tokenizer.load(put_folder("gpt2", more)))
      assert.equal(501, tokenizer:vocab_size())
      local ids = tokenizer:encode "xend of turnx":to_table()
      assert.same({ 88, 500, 88 }, ids)
    end)

    it("passes over names that are no tokens, and keys that it does not know", function()
      local tokenizer = assert(ms.tokenizer.load(put_folder("gpt2", {
        ["tokenizer_config.json"] = { pad_token = "[PAD]", of_others = { 1 }, sep_token = "" },
      })))
      assert.equal(500, tokenizer:vocab_size())
      assert.is_nil(tokenizer:id "[PAD]")
    end)

    it("adds them to tiktoken's ranks, whose pattern another file names", function()
      put("tokenizer.model", core.file_read(FOLDER .. "ranks.tiktoken"))
      put("added_tokens.json", core.json_encode { ["<x>"] = 501 })
      local tokenizer = assert(ms.tokenizer.load(folder, { pattern = "gpt2", special = SPECIAL }))
      assert.same({ 501, 501 }, { tokenizer:id "<x>", tokenizer:vocab_size() - 1 })
    end)

    it("writes them with a model, from which the same tokenizer comes back", function()
      local more = {
        ["tokenizer_config.json"] = { eos_token = "<|end|>" },
        ["special_tokens_map.json"] = { bos_token = "<|begin|>" },
        ["added_tokens.json"] = { ["<|end|>"] = 500, ["<|begin|>"] = 501, ["<plain>"] = 502 },
      }
      local tokenizer = assert(ms.tokenizer.load(put_folder("gpt2", more)))
      local model = ms.nn.gpt2 { vocab = 512, context = 8, layers = 1, width = 8, heads = 1 }
      assert(model:set_tokenizer(tokenizer))
      assert(model:save(folder .. "/model"))
      local again = assert(ms.tokenizer.load(folder .. "/model"))
      assert.same({ 503, 500, 501 }, { again:vocab_size(), again:eos(), again:bos() })
      assert.same(specials(tokenizer), specials(again))
      local text = "a<|begin|>b<plain>c<|end|>"
      assert.same(tokenizer:encode(text, { special = "parse" }):to_table(),
        again:encode(text, { special = "parse" }):to_table())
      os.execute("rm -rf '" .. folder .. "/model'")
    end)
  end)

  it("that works by bytes applies the decoder's rules to the names of its tokens", function()
    local function replace(from, to)
      return { type = "Replace", pattern = { String = from }, content = to }
    end
    local bytes = { type = "ByteLevel" }
    local function shown(...)
      local tokenizer = assert(ms.tokenizer.load(changed("decoder",
        { type = "Sequence", decoders = { ... } })))
      return tokenizer:decode(tokenizer:encode("a the café x", { bos = false, eos = false }))
    end
    -- As tokenizers 0.23 decodes.
    assert.equal("a the café x", shown(bytes))
    assert.equal("a  the  café  x", shown(replace("Ġ", "ĠĠ"), bytes))
    assert.equal("a_the_café_x", shown(replace("Ġ", "_"), bytes))
    assert.equal("a the café x", shown(replace("é", "e"), bytes))
    assert.equal("a_the_cafÃ©_x", shown(replace("Ġ", "_")))
    assert.equal("a the cafÃ© x", shown(replace("Ġ", " "), { type = "Fuse" }))
    assert.equal("athecaféx", shown({ type = "Strip", content = "Ġ", start = 1, stop = 0 }, bytes))
    assert.equal(" the café x",
      shown(bytes, { type = "Strip", content = "a", start = 1, stop = 0 }))
    assert.equal("a the café x", shown(bytes, { type = "Fuse" }))
    -- A match may go over the ends of tokens.
    refused(changed("decoder", { type = "Sequence", decoders = { bytes, replace(" ", "_") } }), nil,
      'its decoder has "Replace" after "ByteLevel", which is not supported', "unsupported")
  end)

  it("gives any bytes back if it works by bytes", function()
    local state = 1
    local function draw(limit)
      state = (state * 6364136223846793005 + 1442695040888963407)
      return (state >> 33) % limit
    end
    for _, name in ipairs { "gpt2", "ranks", "llama2", "sentencepiece" } do
      local tokenizer = load(name)
      for _ = 1, 200 do
        local bytes = {}
        for i = 1, draw(60) do bytes[i] = string.char(draw(256)) end
        local text = table.concat(bytes)
        assert.equal(text, tokenizer:decode(tokenizer:encode(text)))
      end
      for _, text in ipairs { "\xff", "a\xffb \xc3", "\xe2\x96", ("\x80"):rep(99), "é\xf0" } do
        assert.equal(text, tokenizer:decode(tokenizer:encode(text)))
      end
    end
  end)

  it("decodes a stream without half characters", function()
    local text = "您好 🙂 café 👨‍👩‍👧 ok"
    for name in pairs(files) do
      local tokenizer = load(name)
      local ids = tokenizer:encode(text):to_table()
      local stream, parts = tokenizer:decoder(), {}
      for i, id in ipairs(ids) do
        parts[i] = stream:add(id)
        assert.truthy(utf8.len(parts[i]))
      end
      assert.equal("", stream:finish())
      assert.equal(tokenizer:decode(ids), table.concat(parts))
    end
    local tokenizer = load "gpt2"
    local stream = tokenizer:decoder()
    local half = tokenizer:encode "\xf0\x9f\x99"
    assert.equal("", stream:add(half))
    assert.equal("\xf0\x9f\x99", stream:finish())
    assert.equal("a", stream:add(tokenizer:id "a"))
    -- What cannot be the begin of a character does not wait.
    assert.equal("\xff\xc3a", stream:add(tokenizer:encode "\xff\xc3a"))
  end)

  it("knows its tokens", function()
    local tokenizer = load "byte_level"
    assert.equal(602, tokenizer:vocab_size())
    assert.equal(tokenizer:id "<|turn|>", tokenizer:bos())
    assert.equal(0, tokenizer:eos())
    assert.equal("<|endoftext|>", tokenizer:token(0))
    assert.is_true(select(2, tokenizer:token(0)))
    local id = tokenizer:id " the"
    assert.equal(" the", tokenizer:token(id))
    assert.is_false(select(2, tokenizer:token(id)))
    assert.is_nil(tokenizer:token(602))
    assert.is_nil(tokenizer:id "no such token")
    assert.equal(600, tokenizer:id "<mask>")
    assert.equal("\u{2581}the", (load "llama2":token(load "llama2":id "\u{2581}the")))
    assert.is_nil(load "ranks":bos())
    assert.equal(0, load "gpt2":bos())
    assert.equal(1, load "sentencepiece":bos())
  end)

  -- Of transformers, for each tokenizer without a longest text.
  it("refuses rules that make a text many times larger", function()
    local nested = {}
    for i = 1, 16 do
      nested[i] = { type = "Replace", pattern = { String = "e" }, content = "eeee" }
    end
    local told = "rules make more than 1048640 bytes of a text: 64 times its bytes and 1 MiB"
    local tokenizer = assert(ms.tokenizer.load(
      changed("normalizer", { type = "Sequence", normalizers = nested })))
    assert.error_matches(function() tokenizer:encode "e" end, told)
    assert.equal(1, tokenizer:encode("b", { bos = false, eos = false }):numel())
    -- 4^9 bytes are within it.
    nested = { table.unpack(nested, 1, 9) }
    tokenizer = assert(ms.tokenizer.load(
      changed("normalizer", { type = "Sequence", normalizers = nested })))
    assert.equal(("e"):rep(4 ^ 9), tokenizer:decode(
      tokenizer:encode("e", { bos = false, eos = false })))
    -- The texts of tokens are made when the file is read.
    for i = 10, 16 do nested[i] = nested[1] end
    local content = core.json_decode(core.file_read(FOLDER .. "llama2/tokenizer.json"))
    content.decoder = { type = "Sequence", decoders = nested }
    refused(put("tokenizer.json", core.json_encode(content)), nil,
      "tokenizer.json'.*rules make more than %d+ bytes of a text", "unsupported")
  end)

  it("reads integers that 64 bits cannot hold", function()
    local config = assert(core.file_read(FOLDER .. "byte_level/tokenizer_config.json"))
    local big = '"model_max_length": 1000000000000000019884624838656'
    local changed_config, count = config:gsub("^%s*{", "{ " .. big .. ",")
    assert.equal(1, count)
    put("tokenizer_config.json", (changed_config:gsub(',%s*"model_max_length":[^,}]*', "")))
    put("tokenizer.json", (assert(core.file_read(FOLDER .. "byte_level/tokenizer.json"))
      :gsub("^%s*{", '{ "of_others": -12345678901234567890,')))
    local tokenizer, plain = assert(ms.tokenizer.load(folder)), load "byte_level"
    assert.equal(plain:eos(), tokenizer:eos())
    assert.same(plain:encode "it's text\n":to_table(), tokenizer:encode "it's text\n":to_table())
  end)

  it("finds an added token whose name has characters of the byte alphabet", function()
    local content = core.json_decode(core.file_read(FOLDER .. "byte_level/tokenizer.json"))
    content.model.vocab["«x»"] = 602
    table.insert(content.added_tokens, { id = 602, content = "«x»", special = true })
    local tokenizer = assert(ms.tokenizer.load(put("tokenizer.json", core.json_encode(content))))
    local ids = tokenizer:encode("a«x»", { special = "parse", bos = false, eos = false })
    assert.same({ tokenizer:id "a", 602 }, ids:to_table())
    assert.equal("a«x»", tokenizer:decode(ids, { special = "text" }))
    content.added_tokens[#content.added_tokens].id = 601
    refused(put("tokenizer.json", core.json_encode(content)), nil,
      "'«x»' has the id 601, and it or its id is there already", "corrupt")
  end)

  it("puts ends around a text as it is told", function()
    local tokenizer = load "byte_level"
    local plain = tokenizer:encode("text", { bos = false, eos = false }):to_table()
    local function with(options) return tokenizer:encode("text", options):to_table() end
    assert.same({ 1, table.unpack(plain) }, with { eos = false })
    table.insert(plain, 0)
    assert.same({ 1, table.unpack(plain) }, with())
    assert.same(plain, with { bos = false })
    -- A file that says nothing of ends: none unless they are asked for.
    tokenizer = load "sentencepiece"
    assert.same({ 1, table.unpack(tokenizer:encode "x":to_table()) },
      tokenizer:encode("x", { bos = true }):to_table())
    assert.error_matches(function() load "ranks":encode("x", { bos = true }) end,
      "bos = true, but the tokenizer's files name no such token")
  end)

  it("sees names of special tokens as text, tokens or an error", function()
    local tokenizer = load "ranks"
    local text = "ab<|turn|>"
    local id = tokenizer:id "<|turn|>"
    assert.equal(id, tokenizer:encode(text, { special = "parse" }):to_table()[3])
    for _, one in ipairs(tokenizer:encode(text):to_table()) do assert.not_equal(id, one) end
    assert.error_matches(function() tokenizer:encode(text, { special = "error" }) end,
      "name of a special token at byte 2: '<|turn|>'")
    assert.equal(2, #tokenizer:encode("ab", { special = "error" }):to_table())
    assert.equal("ab", tokenizer:decode(tokenizer:encode(text, { special = "parse" })))
    assert.equal(text, tokenizer:decode(tokenizer:encode(text, { special = "parse" }),
      { special = "text" }))
  end)

  it("encodes a long text without a space in time that grows with it", function()
    local tokenizer = load "byte_level"
    local began = os.clock()
    assert.equal(200000, #tokenizer:decode(tokenizer:encode(("ab"):rep(100000))))
    assert.equal(200000, #tokenizer:decode(tokenizer:encode((" "):rep(200000))))
    assert.is_true(os.clock() - began < 20)
  end)

  it("takes a regular expression and its own special tokens for ranks", function()
    local ranks = FOLDER .. "ranks.tiktoken"
    local tokenizer = assert(ms.tokenizer.load(ranks,
      { pattern = [[\p{L}+|\p{N}|\s+|.]], special = { ["<a>"] = 700, ["<b>"] = 800 } }))
    assert.equal(801, tokenizer:vocab_size())
    assert.is_nil(tokenizer:token(750))
    assert.same({ 800, 700 }, tokenizer:encode("<b><a>", { special = "parse" }):to_table())
    assert.error_matches(function() tokenizer:decode { 750 } end, "750 is no token.*with gaps")
    assert.error_matches(function() tokenizer:decode { 801 } end, "ids from 0 to 800")
    assert.error_matches(function() ms.tokenizer.load(ranks) end, "give pattern = \"gpt2\"")
    assert.error_matches(function() ms.tokenizer.load(ranks, { pattern = "(" }) end,
      "expression '%(': missing closing parenthesis")
    assert.error_matches(function()
      ms.tokenizer.load(ranks, { pattern = "gpt2", special = { x = 5 } })
    end, "another token's")
    assert.error_matches(function()
      ms.tokenizer.load(ranks, { pattern = "gpt2", special = { x = "5" } })
    end, "integer")
    assert.error_matches(function() ms.tokenizer.load(ranks, { patern = "gpt2" }) end,
      "did you mean 'pattern'")
  end)

  it("that has parts which are not supported is refused by their names", function()
    for key, part in pairs {
      model = { type = "WordPiece" }, normalizer = { type = "BertNormalizer" },
      pre_tokenizer = { type = "UnicodeScripts" }, decoder = { type = "CTC" },
      post_processor = { type = "Other" },
    } do
      refused(changed(key, part), nil, part.type .. "\", which is not supported", "unsupported")
    end
    refused(changed("model", { type = "Unigram", vocab = {} }), nil,
      "tokenizer.json': its model is \"Unigram\"", "unsupported")
    refused(changed("pre_tokenizer", { type = "Split", pattern = { Regex = "[a&&b]" } }), nil,
      "intersection", "unsupported")
  end)

  it("that is damaged or truncated is refused", function()
    for name in pairs(files) do
      local path = FOLDER .. files[name][1]
      if core.exists(path) == "folder" then
        path = path .. (({ gpt2 = "/vocab.json", sentencepiece = "/tokenizer.model" })[name]
          or "/tokenizer.json")
      end
      local text = core.file_read(path)
      local half = put("half", text:sub(1, #text // 2))
      local none, message, code = ms.tokenizer.load(half, files[name][2])
      assert.is_nil(none)
      assert.matches(folder, message, 1, true)
      assert.truthy(code == "corrupt" or code == "unsupported")
    end
    local merges = core.file_read(FOLDER .. "gpt2/merges.txt")
    put("vocab.json", core.file_read(FOLDER .. "gpt2/vocab.json"))
    refused(folder, nil, "merges.txt", "not_found")
    put("merges.txt", merges:sub(1, #merges // 2 - #merges:sub(1, #merges // 2):match "[^\n]*$"))
    refused(folder, nil, "merges.txt': none of its %d+ merges makes the token", "corrupt")
    put("merges.txt", merges:gsub("\n$", " x\n"))
    refused(folder, nil, "merges.txt': merge %d+, of", "corrupt")
    put("merges.txt", merges .. "one\n")
    refused(folder, nil, "line %d+ is not two tokens", "corrupt")
    refused(put("x", "hello"), nil, "no tokenizer.json", "corrupt")
    refused(put("x", ""), nil, "no tokenizer.json", "corrupt")
    refused(put("x", "{}x"), nil, "line 1 is no JSON", "corrupt")
    refused(put("x", '{"a": "b"}'), nil, "'a' has no id", "corrupt")
    refused(folder .. "/none", nil, "No such file", "not_found")
    os.remove(folder .. "/vocab.json")
    refused(folder, nil, "has no tokenizer.json", "not_found")
  end)

  it("refuses arguments of other kinds", function()
    local tokenizer = load "gpt2"
    assert.error_matches(function() tokenizer:encode(1) end, "text must be a string")
    assert.error_matches(function() tokenizer:encode("x", { special = "no" }) end, "special")
    assert.error_matches(function() tokenizer:encode("x", { boss = true }) end, "bos")
    assert.error_matches(function() tokenizer:decode { "x" } end, "ids are integers")
    assert.error_matches(function() tokenizer:decode { -1 } end, "%-1 is no id")
    assert.error_matches(function() tokenizer:decode(ms.ones { 2 }) end, "ids are integers")
    assert.error_matches(function() tokenizer.encode("x") end, "with a colon")
    assert.equal("", tokenizer:decode {})
    assert.equal("", tokenizer:decode(tokenizer:encode ""))
  end)
end)
