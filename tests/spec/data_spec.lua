-- Data sets and loaders: text to batches, shards by pattern, images, resuming.
local ms = require "moonshard"
local core = require "moonshard.core"
local command = require "command"
local data = ms.data

-- An idx file of bytes.
local function idx(sizes, bytes)
  local text = { "\0\0\8" .. string.char(#sizes) }
  for _, size in ipairs(sizes) do text[#text + 1] = (">I4"):pack(size) end
  return table.concat(text) .. bytes
end

describe("data", function()
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

  it("text becomes byte tokens and comes back", function()
    local t = data.to_tokens "Aé\0"
    assert.equal("i64", t:dtype())
    assert.same({ 65, 0xc3, 0xa9, 0 }, t:to_table())
    assert.equal("Aé\0", data.to_text(t))
    assert.equal("Aé\0", data.to_text(t:to "u8"))
    assert.equal("", data.to_text(data.to_tokens ""))
    assert.error_matches(function() data.to_text(ms.tensor { 65, 256 }) end,
      "token 256 is not a byte")
    assert.error_matches(function() data.to_text(ms.ones { 2 }) end, "tokens are integers")
  end)

  it("a pass with fewer samples than ranks is an error that names both", function()
    local set = assert(data.bytes(put("text", ("x"):rep(13))))          -- 3 windows of 4
    assert.equal("function",
      type(core.loader(set, { batch = 3, length = 4, rank = 2, ranks = 3 }):batches()))
    local four = core.loader(set, { batch = 4, length = 4, rank = 0, ranks = 4 })
    assert.error_matches(function() four:batches() end,
      "loader: 3 windows of 4 tokens for 4 ranks; each rank needs at least one")
    four:next()  -- training goes on into the next epoch
    put("t10k-images-idx3-ubyte", idx({ 2, 1, 1 }, "ab"))
    put("t10k-labels-idx1-ubyte", idx({ 2 }, "\1\2"))
    local images = core.loader(assert(data.mnist(folder)), { batch = 3, rank = 0, ranks = 3 })
    assert.error_matches(function() images:batches() end, "loader: 2 samples for 3 ranks")
  end)

  it("batches are windows of the text, y one byte later", function()
    local set = assert(data.bytes(put("text", "abcdefghijklm")))
    assert.equal(13, set:size())
    local loader = set:loader { batch = 2, length = 3 }
    local x, y = loader:next()
    assert.same({ 2, 3 }, x:shape())
    assert.equal("i64", x:dtype())
    assert.equal("abcdef", data.to_text(x:reshape(6)))
    assert.equal("bcdefg", data.to_text(y:reshape(6)))
    assert.equal("ghijkl", data.to_text(loader:next():reshape(6)))
    assert.equal("abcdef", data.to_text(loader:next():reshape(6)))
  end)

  it("several paths and folders make one set", function()
    assert(core.make_directory(folder .. "/sub/deep"))
    put("sub/b", "B")
    put("sub/deep/a", "D")
    put("sub/.git", "hidden")
    local set = assert(data.bytes { put("z", "Z"), folder .. "/sub" })
    assert.equal("ZB", data.to_text(set:loader { batch = 1, length = 2 }:next()[1]))
    local none, message, code = data.bytes(folder .. "/none")
    assert.is_nil(none)
    assert.matches("No such file", message)
    assert.equal("not_found", code)
  end)

  it("a split holds back the end", function()
    local train, valid = assert(data.bytes(put("text", ("x"):rep(90) .. ("y"):rep(10)))):split(0.9)
    assert.equal(90, train:size())
    assert.equal(10, valid:size())
    assert.equal(("y"):rep(9), data.to_text(valid:loader { batch = 1, length = 9 }:next()[1]))
    assert.error_matches(function() train:split(2) end, "fraction 2")
  end)

  it("a decimal fraction means what was written, and others are rounded down", function()
    local thousand = assert(data.bytes(put("thousand", ("x"):rep(1000))))
    for i = 0, 1000 do
      local first, rest = thousand:split(assert(tonumber(("%.3f"):format(i / 1000))))
      assert.same({ i, 1000 - i }, { first:size(), rest:size() })
      assert.equal(1000 - i, (thousand:split(1 - i / 1000)):size())
    end
    local hundred = thousand:split(0.1)
    assert.equal(29, (hundred:split(0.29)):size())
    assert.equal(28, (hundred:split(0.2899999)):size())
    assert.equal(33, (hundred:split(1 / 3)):size())
  end)

  it("shuffled epochs give each window once and follow the seed", function()
    local text = {}
    for i = 0, 255 do text[#text + 1] = string.char(i) end
    local set = assert(data.bytes(put("all", table.concat(text))))
    local function epoch(seed)
      local order, loader = {}, set:loader { batch = 5, length = 10, shuffle = true, seed = seed }
      for _ = 1, 4 do
        local x = loader:next()
        for row = 1, 5 do order[#order + 1] = x[row][1]:item() end
      end
      return order
    end
    local a, seen = epoch(1), {}
    assert.same(a, epoch(1))
    assert.are_not.same(a, epoch(2))
    for _, begin in ipairs(a) do
      assert.is_nil(seen[begin])
      assert.equal(a[1] % 10, begin % 10)
      seen[begin] = true
    end
  end)

  it("a loader resumes to the sample, through a checkpoint's plain numbers", function()
    local set = assert(data.bytes(put("text", ("The quick brown fox jumps. "):rep(40))))
    local options = { batch = 4, length = 16, shuffle = true, seed = 7 }
    local loader = set:loader(options)
    for _ = 1, 20 do loader:next() end
    local state = core.json_decode(core.json_encode(loader:state()))
    local expected = {}
    for i = 1, 30 do expected[i] = data.to_text(loader:next():reshape(64)) end
    local again = set:loader(options)
    again:load_state(state)
    for i = 1, 30 do assert.equal(expected[i], data.to_text(again:next():reshape(64))) end
    -- The loader that continued can also be set back.
    loader:load_state(state)
    assert.equal(expected[1], data.to_text(loader:next():reshape(64)))
    assert.error_matches(function() set:loader { batch = 4, length = 17 }:load_state(state) end,
      "must be the same")
  end)

  it("batches begin at the beginning, leave nothing out and do not move next", function()
    local set = assert(data.bytes(put("text", "abcdefghijk")))
    local loader = set:loader { batch = 4, length = 1 }
    loader:next()
    local function all(count)
      local text, rows = "", {}
      for x, y in loader:batches(count) do
        rows[#rows + 1] = #x
        assert.equal(#x, #y)
        text = text .. data.to_text(x:reshape(#x))
      end
      return text, rows
    end
    local text, rows = all()
    assert.equal("abcdefghij", text)
    assert.same({ 4, 4, 2 }, rows)
    assert.equal("abcdefgh", (all(2)))
    assert.equal("", (all(0)))
    assert.equal("efgh", data.to_text(loader:next():reshape(4)))
  end)

  -- tests/dist/meta_answers_spec.lua does it with groups of a job.
  it("gives each of several ranks its slice", function()
    local set = assert(data.bytes(put("text", "abcdefghijklm")))
    local parts = {}
    for rank = 0, 1 do
      local loader = core.loader(set, { batch = 4, length = 2, rank = rank, ranks = 2 })
      parts[rank + 1] = data.to_text(loader:next():reshape(4))
    end
    assert.same({ "abcd", "efgh" }, parts)
    assert.error_matches(function()
      core.loader(set, { batch = 3, length = 2, rank = 0, ranks = 2 })
    end, "a batch of 3 does not divide by 2 ranks")
    assert.error_matches(function() set:loader { batch = 4, length = 2, group = {} } end,
      "group must be a group of ranks")
  end)

  describe("packed documents:", function()
    local DOT <const> = ("."):byte()

    -- What positions must be, from the row's bytes.
    local function expected(x)
      local rows = {}
      for i = 1, #x do
        local at = 0
        rows[i] = {}
        for byte in data.to_text(x[i]):gmatch "." do
          rows[i][#rows[i] + 1] = at
          at = byte == "." and 0 or at + 1
        end
      end
      return rows
    end

    it("positions begin again in each row and after each end of text, which belongs to its \z
      document", function()
      local set = assert(data.bytes(put("text", "ab.c..def.ghijkl.")))
      local loader = set:loader { batch = 2, length = 8, packed = true, end_of_text = DOT }
      local x, y, positions = loader:next()
      assert.equal("i64", positions:dtype())
      assert.same({ { 0, 1, 2, 0, 1, 0, 0, 1 }, { 0, 1, 0, 1, 2, 3, 4, 5 } }, positions:to_table())
      -- Also the target of an end of text is kept.
      assert.same({ "ab.c..de", "f.ghijkl", "b.c..def", ".ghijkl." },
        { data.to_text(x[1]), data.to_text(x[2]), data.to_text(y[1]), data.to_text(y[2]) })
      local last = set:loader { batch = 1, length = 8 }
      assert.equal(2, select("#", last:next()))
      for a, b, c in last:batches() do assert.is_true(a ~= nil and b ~= nil and c == nil) end
    end)

    it("in shuffled epochs, in passes, on each rank and after a resume", function()
      local set = assert(data.bytes(put("text", ("The quick. Brown fox jumps. "):rep(40))))
      local options = {
        batch = 4, length = 16, shuffle = true, seed = 7, packed = true, end_of_text = DOT,
      }
      local loader = set:loader(options)
      for _ = 1, 25 do                                   -- more than an epoch
        local x, _, positions = loader:next()
        assert.same(expected(x), positions:to_table())
      end
      local state = core.json_decode(core.json_encode(loader:state()))
      local again = set:loader(options)
      again:load_state(state)
      for _ = 1, 5 do
        local x, _, positions = loader:next()
        local same_x, _, same = again:next()
        assert.same(x:to_table(), same_x:to_table())
        assert.same(positions:to_table(), same:to_table())
      end
      local batches, rows = 0, 0
      for x, _, positions in loader:batches() do
        batches, rows = batches + 1, rows + #positions
        assert.same(expected(x), positions:to_table())
      end
      assert.equal(math.ceil(rows / 4), batches)
      local parts, whole = {}, select(3, set:loader(options):next()):to_table()
      for rank = 0, 1 do
        local own = { rank = rank, ranks = 2 }
        for key, value in pairs(options) do own[key] = value end
        table.move(select(3, core.loader(set, own):next()):to_table(), 1, 2, 2 * rank + 1, parts)
      end
      assert.same(whole, parts)
    end)

    local function shards(name, told)
      put(name .. "_00000.bin", ("<" .. ("I2"):rep(9)):pack(5, 6, 9, 7, 9, 0, 5, 6, 7))
      if told then put(name .. ".json", told) end
    end

    it("the end of text is that of the shards, or an option", function()
      shards("told", [[{"tokenizer": "t", "vocab_size": 10, "end_of_text": 9}]])
      shards("none", [[{"tokenizer": "t", "vocab_size": 10}]])
      shards "bare"
      local function positions(name, given)
        local set = assert(data.tokens(folder .. "/" .. name))
        return select(3, set:loader {
          batch = 1, length = 8, packed = true, end_of_text = given,
        }:next())[1]:to_table()
      end
      local function refused(name, given, ...)
        local ok, message = pcall(positions, name, given)
        assert.is_false(ok)
        for _, part in ipairs { ... } do assert.truthy(message:find(part, 1, true), message) end
      end
      assert.same({ 0, 1, 2, 0, 1, 0, 1, 2 }, positions "told_*.bin")
      assert.same({ 0, 1, 2, 0, 1, 0, 1, 2 }, positions("told_*.bin", 9))
      assert.same({ 0, 1, 2, 3, 4, 5, 0, 1 }, positions("none_*.bin", 0))
      assert.same({ 0, 1, 2, 3, 4, 5, 0, 1 }, positions("bare_*.bin", 0))
      -- A part of the data has the end of text of the whole.
      local part = assert(data.tokens(folder .. "/told_*.bin")):split(0.5)
      assert.same({ { 0, 1, 2 } }, select(3, part:loader {
        batch = 1, length = 3, packed = true,
      }:next()):to_table())
      refused("told_*.bin", 0, "is the id 0 by the option end_of_text", "9 by", "told.json")
      refused("none_*.bin", nil, "none.json' names none", "give the option end_of_text")
      refused("bare_*.bin", nil, "nothing beside the data names it", "moonshard tokenize")
      refused("", nil, "none.json' names none")
      refused("bare_*.bin", 65536, "end_of_text is 65536", "0 .. 65535")
      core.remove(folder .. "/none.json")
      shards("other", [[{"tokenizer": "t", "vocab_size": 10, "end_of_text": 8}]])
      refused("", nil, "is the id 8 by", "other.json", "9 by", "told.json")
    end)

    it("wrong options are errors", function()
      local set = assert(data.bytes(put("text", "abcdef")))
      local function refused(options, message)
        options.batch = options.batch or 1
        assert.error_matches(function() set:loader(options) end, message, 1, true)
      end
      refused({ length = 2, packed = true }, "nothing beside the data names it")
      refused({ length = 2, end_of_text = 46 }, "end_of_text is for packed documents")
      refused({ length = 2, packed = 1 }, "packed must be a boolean")
      refused({ length = 2, packed = true, end_of_text = "." }, "end_of_text must be an integer")
      refused({ length = 2, packed = true, end_of_text = -1 }, "end_of_text is -1")
      refused({ length = 2, packed = true, end_of_text = 256 }, "the ids of this data are 0 .. 255")
      refused({ packed = true, end_of_text = 46 }, "give a length")
      put("t10k-images-idx3-ubyte", idx({ 2, 1, 1 }, "ab"))
      put("t10k-labels-idx1-ubyte", idx({ 2 }, "\1\2"))
      set = assert(data.mnist(folder))
      refused({ packed = true }, "images have no documents")
    end)
  end)

  it("wrong options are named", function()
    local set = assert(data.bytes(put("text", "abc")))
    assert.error_matches(function() set:loader { batch = 1, lenght = 2 } end,
      "did you mean 'length'")
    assert.error_matches(function() set:loader { length = 2 } end, "give a batch")
    assert.error_matches(function() set:loader { batch = 1, length = 3 } end,
      "a length of 3 needs 4 tokens")
  end)

  it("token shards are found by pattern, in order", function()
    local header = ("<" .. ("i4"):rep(3)):pack(20240520, 1, 2) .. ("\0"):rep(1012)
    put("train_1.bin", header .. ("<I2I2"):pack(50256, 11))
    put("train_2.bin", header .. ("<I2I2"):pack(12, 13))
    put("valid_1.bin", ("<I2I2I2"):pack(21, 22, 23))
    local function tokens(pattern)
      local set = assert(data.tokens(folder .. pattern))
      return set:loader { batch = 1, length = set:size() - 1 }:next()[1]:to_table()
    end
    assert.same({ 50256, 11, 12 }, tokens "/train_*.bin")
    assert.same({ 50256, 11, 12 }, tokens "/train_?.bin")
    assert.same({ 21, 22 }, tokens "/valid_1.bin")
    -- Of a folder, what is named val* is validation, unless there is nothing else.
    assert.same({ 50256, 11, 12 }, tokens "")
    assert.equal(4, assert(data.tokens(folder, "train")):size())
    assert.equal(3, assert(data.tokens(folder .. "/", "valid")):size())
    assert(core.make_directory(folder .. "/held"))
    local _, _, no_files = data.tokens(folder .. "/train_1.bin", "valid")
    assert.equal("not_found", no_files)
    put("held/val.bin", ("<I2I2I2"):pack(21, 22, 23))
    assert.equal(3, assert(data.tokens(folder .. "/held")):size())
    -- What a recipe trains and validates on.
    local function sizes(path, valid, bytes)
      local train, held = ms.scripts.texts { data = path, valid = valid or "", bytes = bytes }
      return { train:size(), held:size() }
    end
    assert.same({ 4, 3 }, sizes(folder))
    assert.same({ 4, 3 }, sizes(folder .. "/train_*.bin", folder .. "/valid_1.bin"))
    assert.same({ 95, 5 }, sizes(put("hundred", ("x"):rep(100)), nil, true))
    put("held/val.bin", ("<I2"):pack(7):rep(100))
    assert.same({ 95, 5 }, sizes(folder .. "/held"))
    put("val_2.bin", "odd")
    assert.error_matches(function() sizes(folder) end, "val_2.bin', byte 2")
    os.remove(folder .. "/val_2.bin")
    put("held/val.bin", ("<I2I2I2"):pack(21, 22, 23))
    assert.error_matches(function() data.tokens(folder, "test") end,
      'part must be "train" or "valid", not test')
    local none, message, code = data.tokens(folder .. "/test_*.bin")
    assert.is_nil(none)
    assert.matches("no file matches", message)
    assert.equal("not_found", code)
    -- A header tells what it is; without one the name does.
    put("shard", header .. ("<I2I2"):pack(12, 13))
    assert.equal(2, assert(data.tokens(folder .. "/shard")):size())
    for _, text in ipairs { "text", "an even number of letters.", "abc" } do
      none, message, code = data.tokens(put("book.txt", text))
      assert.is_nil(none)
      assert.equal("corrupt", code)
      assert.matches("book.txt' is no token shard: .*bytes = true.*moonshard tokenize", message)
    end
    assert.equal("not_found", select(3, data.tokens(folder .. "/none.txt")))
    put("cut.bin", header .. "\1")
    none, message, code = data.tokens(folder .. "/cut.bin")
    assert.is_nil(none)
    assert.matches("cut.bin', byte 8", message)
    assert.equal("corrupt", code)
  end)

  it("shards without a header are told, with their largest id", function()
    local header = ("<" .. ("i4"):rep(3)):pack(20240520, 1, 2) .. ("\0"):rep(1012)
    put("a_1.bin", ("<I2"):pack(7):rep(1230))
    put("a_2.bin", ("<I2I2I2I2"):pack(1, 50256, 300, 2))
    put("a_3.bin", header .. ("<I2I2"):pack(65000, 11))
    put("a_4.bin", "")
    put("large_1.bin", ("\xff\xff"))
    put("headers.bin", header .. ("<I2I2"):pack(65000, 11))
    local script = put("r.lua", [[
      local ms = require "moonshard"
      local folder = ...
      for _ = 1, 2 do assert(ms.data.tokens(folder .. "/a_*.bin")) end
      assert(ms.data.tokens(folder .. "/headers.bin"))
      assert(ms.data.tokens(folder .. "/large_*.bin"))
      assert(io.open(folder .. "/large_2.bin", "wb")):write("\0\1"):close()
      assert(ms.data.tokens(folder .. "/large_*.bin"))
      assert(ms.data.bytes(folder .. "/a_1.bin"))]])
    local job = io.popen(("'%s' '%s' '%s' 2>&1"):format(arg and arg[-1] or "lua5.4", script,
      folder))
    local out = job:read "a"
    job:close()
    assert.equal("data       2 files without a header are read as 16-bit tokens: 1,234 of them, \z
      largest id 50256\n\z
      data       1 file without a header is read as 16-bit tokens: 1 of them, largest id 65535\n\z
      data       2 files without a header are read as 16-bit tokens: 2 of them, largest id \z
      65535\n", out)
    -- Of several ranks rank 0 says it.
    put("ranks.lua", ([[assert(require "moonshard".data.tokens "%s/a_*.bin")]]):format(folder))
    out = command.succeed(folder, "run ranks.lua -n 2")
    assert.equal(1, select(2, out:gsub("data       2 files without a header", "")))
  end)

  it("images come as floats with their labels", function()
    put("train-images-idx3-ubyte", idx({ 2, 1, 2 }, "\0\255\51\102"))
    put("train-labels-idx1-ubyte", idx({ 2 }, "\7\3"))
    put("t10k-images-idx3-ubyte", idx({ 1, 1, 2 }, "\1\2"))
    local set = assert(data.mnist(folder))
    assert.equal(2, set:size())
    local x, y = set:loader { batch = 2 }:next()
    assert.same({ 2, 1, 2 }, x:shape())
    -- A pixel is a byte divided by 255, rounded to f32.
    for i, expected in ipairs { 0, 1, 51 / 255, 102 / 255 } do
      assert.near(expected, x:reshape(4)[i]:item(), 1e-7)
    end
    assert.same({ 7, 3 }, y:to_table())
    local none, message, code = data.mnist(folder,
      { images = "t10k-images-idx3-ubyte", labels = "train-labels-idx1-ubyte" })
    assert.is_nil(none)
    assert.matches("1 images", message)
    assert.equal("mismatch", code)
    os.remove(folder .. "/train-labels-idx1-ubyte")
    assert.equal("not_found", select(3, data.mnist(folder)))
  end)

  it("methods take their own kind of object only, and metatables are out of reach", function()
    local set = assert(data.bytes(put("text", "abcdefgh")))
    local loader = set:loader { batch = 1, length = 2 }
    for _, other in ipairs { set, io.stdout, ms.ones { 1 }, {}, 1, "x" } do
      assert.has_error(function() loader.next(other) end)
      assert.has_error(function() loader.batches(other) end)
      assert.has_error(function() loader.load_state(other, {}) end)
    end
    assert.has_error(function() set.size(loader) end)
    assert.has_error(function() set.split(loader, 0.5) end)
    assert.equal("locked", getmetatable(loader))
    assert.equal("locked", getmetatable(set))
    assert.has_error(function() setmetatable(loader, {}) end)
  end)

  it("loaders may be dropped at any moment", function()
    local set = assert(data.bytes(put("text", ("abcdefgh"):rep(1000))))
    for i = 1, 30 do
      local loader = set:loader { batch = 8, length = 64, shuffle = true }
      for _ = 1, i % 4 do loader:next() end
      loader = nil -- luacheck: ignore
      collectgarbage()
    end
  end)
end)
