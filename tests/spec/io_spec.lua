-- Files and JSON as the library uses them: its other parts write files through these functions.
local core = require "moonshard.core"

local function temporary()
  local path = os.tmpname()
  os.remove(path)
  assert(core.make_directory(path))
  return path
end

describe("files", function()
  local folder
  before_each(function() folder = temporary() end)
  after_each(function() os.execute("rm -rf '" .. folder .. "'") end)

  it("are written as a whole and read back, zero bytes and all", function()
    local text = "a\0b\n" .. ("x"):rep(100000)
    assert.is_true(core.file_write(folder .. "/f", text))
    assert.equal(text, core.file_read(folder .. "/f"))
    assert.is_true(core.file_write(folder .. "/f", ""))
    assert.equal("", core.file_read(folder .. "/f"))
    assert.same({ "f" }, core.list(folder))
  end)

  it("are appended to, by several handles in turn", function()
    local a, b = assert(core.file_append(folder .. "/log")),
      assert(core.file_append(folder .. "/log"))
    a:write("one\n"):write("two\n")
    b:write("three\n")
    a:close()
    a:close()
    assert.equal("one\ntwo\nthree\n", core.file_read(folder .. "/log"))
    assert.has_error(function() a:write "four" end)
  end)

  it("that the environment refuses give nil, message, code", function()
    local value, message, code = core.file_read(folder .. "/none")
    assert.is_nil(value)
    assert.matches("none': No such file", message)
    assert.equal("not_found", code)
    assert.equal("not_found", select(3, core.file_write(folder .. "/none/f", "x")))
    assert.equal("not_found", select(3, core.list(folder .. "/none")))
    assert.equal("io", select(3, core.file_read(folder)))
    core.file_write(folder .. "/f", "x")
    assert.is_nil((core.make_directory(folder .. "/f/g")))
  end)

  it("that are pipes with nobody at the other end hang no one", function()
    local pipe = os.tmpname()
    assert(os.execute(("rm '%s' && mkfifo '%s'"):format(pipe, pipe)))
    assert.equal("", core.file_read(pipe) or "")
    assert.is_nil((core.dataset_bytes { pipe }))
    assert.is_nil((core.dataset_tokens { pipe }))
    assert.is_nil((core.safetensors_open(pipe)))
    assert.is_nil((core.file_append(pipe)))
    os.remove(pipe)
  end)

  it("take no wrong arguments", function()
    assert.error_matches(function() core.file_read(7) end, "a path must be a string, not number")
    assert.error_matches(function() core.file_read "" end, "a path is empty")
    assert.error_matches(function() core.file_write("a\0b", "x") end, "zero byte")
    assert.has_error(function() core.file_write(folder .. "/f") end)
  end)

  it("and folders come, are told apart, and go", function()
    assert.is_true(core.make_directory(folder .. "/a/b"))
    assert.equal("folder", core.exists(folder .. "/a"))
    assert.is_false(core.exists(folder .. "/none"))
    core.file_write(folder .. "/a/b/f", "x")
    assert.equal("file", core.exists(folder .. "/a/b/f"))
    assert.is_true(core.remove(folder .. "/a/b"))
    assert.is_true(core.remove(folder .. "/a/b"))
    assert.same({}, core.list(folder .. "/a"))
  end)

  it("are locked against others for as long as the lock is open", function()
    local lock = assert(core.file_lock(folder .. "/lock"))
    local other, message, code = core.file_lock(folder .. "/lock")
    assert.is_nil(other)
    assert.matches("is locked by process %d+", message)
    assert.equal("denied", code)
    lock:close()
    assert(core.file_lock(folder .. "/lock")):close()
  end)
end)

describe("clocks", function()
  it("go forward, and know the year", function()
    local before = core.clock_ms()
    assert.is_true(core.clock_ms() >= before)
    -- A second of difference is more than two reads of the same clock can have.
    assert.is_true(math.abs(core.time() - os.time()) < 2)
  end)
end)

describe("json", function()
  it("keeps integers, floats, text, lists and tables apart", function()
    local value = {
      list = { 1, 2.0, "three", true, { nested = {} } },
      big = math.maxinteger,
      small = math.mininteger,
      tenth = 0.1,
      tiny = 5e-324, text = "é \0 \" \\ \n", no = false,
    }
    local text = core.json_encode(value)
    local back = core.json_decode((text:gsub("\\u0000", "0")))
    value.text = "é 0 \" \\ \n"
    assert.same(value, back)
    assert.equal("integer", math.type(back.list[1]))
    assert.equal("float", math.type(back.list[2]))
    assert.equal("integer", math.type(back.big))
  end)

  it("reads integers beyond 64 bits as reals, and changes nothing else", function()
    local text = '{"9223372036854775808":[9223372036854775807,9223372036854775808,'
      .. '-9223372036854775808,-9223372036854775809,1000000000000000019884624838656],'
      .. '"a\\\\":"\\"12345678901234567890,","b":[12345678901234567890.5,1e22,3]}'
    local read = assert(core.json_decode(text))
    assert.same({
      math.maxinteger, 2.0 ^ 63, math.mininteger, -2.0 ^ 63, 1000000000000000019884624838656.0,
    }, read["9223372036854775808"])
    local kinds = {}
    for i, n in ipairs(read["9223372036854775808"]) do kinds[i] = math.type(n) end
    assert.same({ "integer", "float", "integer", "float", "float" }, kinds)
    assert.equal('"12345678901234567890,', read["a\\"])
    assert.same({ 12345678901234567890.5, 1e22, 3 }, read.b)
    assert.equal("integer", math.type(read.b[3]))
    assert.equal(1e30, core.json_decode("1" .. ("0"):rep(30)))
  end)

  it("is the same text for the same value", function()
    local a, b = {}, {}
    for i = 1, 50 do a["k" .. i] = i end
    for i = 50, 1, -1 do b["k" .. i] = i end
    assert.equal(core.json_encode(a), core.json_encode(b))
    assert.equal('{"a":[1,2],"b":{}}', core.json_encode { b = {}, a = { 1, 2 } })
    assert.equal("[1.5,null,null]", core.json_encode { 1.5, 0 / 0, 1 / 0 })
  end)

  it("refuses what is no JSON, with the place", function()
    local value, message, code = core.json_decode '{"a": 1,\n "a": 2}'
    assert.is_nil(value)
    assert.matches("line 2", message)
    assert.equal("corrupt", code)
    for _, text in ipairs {
      "", "{", "[1,]", "{'a':1}", '{"a":1}x', "[1e999]", "[1" .. ("0"):rep(400) .. "]",
      "[01234567890123456789012]", '"\xff"',
    } do
      assert.equal("corrupt", select(3, core.json_decode(text)), text)
    end
    assert.equal("corrupt", select(3, core.json_decode(("["):rep(1000000))))
    assert.has_error(function() core.json_decode(("["):rep(1000) .. ("]"):rep(1000)) end)
  end)

  it("refuses to write what cannot be read again", function()
    local loop = {}
    loop.loop = loop
    local holes = { 1, nil, 3 }
    for _, value in ipairs {
      { [0] = 1 }, { 1, 2, x = 3 }, holes, { f = print }, { "\xff" }, { ["\xff"] = 1 },
      { [1.5] = 1 }, loop,
    } do
      assert.has_error(function() core.json_encode(value) end)
    end
  end)
end)
