-- Safetensors files: round trips of every dtype, choices by name, and errors as values.
local ms = require "moonshard"
local core = require "moonshard.core"

describe("safetensors", function()
  local folder, path
  before_each(function()
    folder = os.tmpname()
    os.remove(folder)
    assert(core.make_directory(folder))
    path = folder .. "/t.safetensors"
  end)
  after_each(function() os.execute("rm -rf '" .. folder .. "'") end)

  it("keeps names, shapes, dtypes and values", function()
    local saved = {
      ["a.f32"] = ms.tensor { { 1.5, -2 }, { 0, 1 / 3 } },
      f16 = ms.tensor({ 1, 65504 }, "f16"), bf16 = ms.tensor({ 1, 3e38 }, "bf16"),
      i64 = ms.tensor { math.maxinteger, -1 }, i32 = ms.tensor({ -7 }, "i32"),
      u16 = ms.tensor({ 65535 }, "u16"),
      u8 = ms.tensor({ 255, 0, 1 }, "u8"),
      bool = ms.tensor { true, false, true }, scalar = ms.full(2.5, {}), empty = ms.zeros { 0, 3 },
    }
    assert.is_true(ms.safetensors.save(path, saved, { format = "pt", note = "ü" }))
    local loaded, metadata = ms.safetensors.load(path)
    assert.same({ format = "pt", note = "ü" }, metadata)
    for name, t in pairs(saved) do
      assert.same(t:shape(), loaded[name]:shape(), name)
      assert.equal(t:dtype(), loaded[name]:dtype(), name)
      assert.equal(t:show(), loaded[name]:show(), name)
      if t:dim() > 0 then assert.same(t:to_table(), loaded[name]:to_table(), name) end
      saved[name] = nil
      loaded[name] = nil
    end
    assert.same({}, loaded)
  end)

  it("saves views with the values that they show", function()
    local t = ms.tensor { { 1, 2, 3 }, { 4, 5, 6 } }
    assert(ms.safetensors.save(path, { turned = t:transpose(1, 2), row = t[2] }))
    local loaded = assert(ms.safetensors.load(path))
    assert.same({ { 1, 4 }, { 2, 5 }, { 3, 6 } }, loaded.turned:to_table())
    assert.same({ 4, 5, 6 }, loaded.row:to_table())
  end)

  it("gives the same bytes for the same tensors", function()
    local a, b = ms.ones { 3 }, ms.zeros { 2, 2 }
    assert(ms.safetensors.save(path, { x = a, y = b }))
    assert(ms.safetensors.save(folder .. "/again", { y = b, x = a }))
    assert.equal(core.file_read(path), core.file_read(folder .. "/again"))
  end)

  it("loads only what is asked for, and shows the header without loading", function()
    assert(ms.safetensors.save(path, { a = ms.ones { 2 }, b = ms.zeros { 3, 1 } }))
    local loaded = assert(ms.safetensors.load(path, { "b" }))
    assert.is_nil(loaded.a)
    assert.same({ 3, 1 }, loaded.b:shape())
    assert.same({ a = { dtype = "f32", shape = { 2 } }, b = { dtype = "f32", shape = { 3, 1 } } },
      (ms.safetensors.header(path)))
    local none, message, code = ms.safetensors.load(path, { "b", "c" })
    assert.is_nil(none)
    assert.matches("has no tensor 'c'", message)
    assert.equal("not_found", code)
  end)

  it("reads files that other code wrote", function()
    local golden = os.getenv "MOONSHARD_SOURCE" .. "/tests/golden/data/"
    local loaded = assert(ms.safetensors.load(golden .. "operators.safetensors"))
    assert.is_true(next(loaded) ~= nil)
  end)

  it("gives what the environment refuses as values", function()
    assert.equal("not_found", select(3, ms.safetensors.load(folder .. "/none")))
    assert.equal("not_found",
      select(3, ms.safetensors.save(folder .. "/none/t", { a = ms.ones { 1 } })))
    core.file_write(path, "no header here, and long enough")
    local value, message, code = ms.safetensors.load(path)
    assert.is_nil(value)
    assert.equal("corrupt", code)
    assert.truthy(message:find(path, 1, true))
    assert.equal("corrupt", select(3, ms.safetensors.header(path)))
  end)

  it("a shape that no tensor can have is corrupt, also where a size of 0 leaves no \z
    bytes", function()
    local header = '{"a":{"dtype":"F32","shape":[0,9223372036854775807,3],"data_offsets":[0,0]}}'
    core.file_write(path, ("<s8"):pack(header))
    for _, read in ipairs { ms.safetensors.load, ms.safetensors.header } do
      local value, message, code = read(path)
      assert.is_nil(value)
      assert.equal("corrupt", code)
      assert.truthy(message:find("tensor 'a' is larger than any file", 1, true), message)
    end
    core.file_write(path, ("<s8"):pack((header:gsub("9223372036854775807", "1"))))
    assert.same({ 0, 1, 3 }, assert(ms.safetensors.load(path)).a:shape())
  end)

  it("raises the programmer's mistakes", function()
    assert.error_matches(function() ms.safetensors.save(path, { ms.ones { 1 } }) end,
      "names are strings")
    assert.error_matches(function() ms.safetensors.save(path, { a = 1 }) end, "values are tensors")
    assert.error_matches(function() ms.safetensors.save(path, { a = ms.ones { 1 } }, { x = 1 }) end,
      "strings to strings")
    assert.error_matches(function() ms.safetensors.save(path, { ["a\1"] = ms.ones { 1 } }) end,
      "control characters")
    assert.is_false(core.exists(path))
  end)

  it("closes a file once, and says so afterwards", function()
    assert(ms.safetensors.save(path, { a = ms.ones { 1 } }))
    local file = assert(core.safetensors_open(path))
    file:close()
    file:close()
    assert.error_matches(function() file:entries() end, "was closed")
  end)
end)
