-- Checkpoints: exact round trips, in-place loading, damage found, old ones kept when a save fails.
local ms = require "moonshard"
local core = require "moonshard.core"
local checkpoint = ms.checkpoint

-- An object with state, whatever it is.
local function thing(state)
  local object = { saved = state }
  function object.state() return object.saved end
  function object.load_state(_, t) object.saved = t end
  return object
end

local function shell(format, ...) return os.execute(format:format(...)) end

describe("checkpoint", function()
  local folder
  before_each(function()
    folder = os.tmpname()
    os.remove(folder)
  end)
  after_each(function()
    checkpoint.wait()
    shell("rm -rf '%s'", folder)
  end)

  it("there is none in a folder that does not exist", function()
    assert.is_nil(checkpoint.latest(folder))
  end)

  it("gives every kind of value back exactly", function()
    local value = {
      integer = math.mininteger, float = 0.1, one = 1.0, tiny = 5e-324, zero = -0.0,
      inf = math.huge, minus = -math.huge,
      text = "é \"\\\n", bytes = "\0\255", yes = true, no = false, empty = {},
      list = { 1, 2.5, { "x" } },
      ["$tensor"] = "not one", mixed = { 1, 2, x = 3, [10] = 4, [-1] = 5 },
      nested = { a = { b = { c = 1 } } },
    }
    local path = assert(checkpoint.save(folder,
      { step = 3, plain = value, object = thing(value), nan = 0 / 0 }))
    assert.equal(folder .. "/step-00000003", path)
    local object = thing()
    local loaded = assert(checkpoint.load(path, { object = object }))
    assert.same(value, loaded.plain)
    assert.same(value, object.saved)
    assert.equal(object, loaded.object)
    assert.equal(3, loaded.step)
    assert.is_true(loaded.nan ~= loaded.nan)
    assert.equal("float", math.type(loaded.plain.one))
    assert.equal("integer", math.type(loaded.plain.list[1]))
    assert.equal(-math.huge, 1 / loaded.plain.zero)
  end)

  it("gives tensors back bit for bit, wherever they stand", function()
    local state = {
      ["a/b"] = ms.randn { 3, 4 }, a = { b = ms.tensor { 1, 2 } }, [1] = ms.tensor({ 0.1 }, "bf16"),
      ["1"] = ms.tensor { true },
      ["%2f#"] = ms.full(7, {}), list = { ms.zeros { 0 }, { ms.tensor({ 9 }, "u8") } },
    }
    local object = thing()
    assert(checkpoint.load(
      assert(checkpoint.save(folder, { step = 0, object = thing(state), lone = ms.ones { 2 } })),
      { object = object }))
    local function same(a, b, name)
      if not core.is_tensor(a) then
        for key in pairs(a) do same(a[key], b[key], name .. "/" .. key) end
        for key in pairs(b) do assert.truthy(a[key] ~= nil, name) end
      else
        assert.equal(a:dtype(), b:dtype(), name)
        assert.same(a:shape(), b:shape(), name)
        assert.equal(a:show(), b:show(), name)
        if a:numel() > 1 then assert.same(a:to_table(), b:to_table(), name) end
      end
    end
    same(state, object.saved, "object")
  end)

  it("saves what was there when it was called, and sees through to the newest", function()
    local weight = ms.zeros { 1000 }
    local things = { object = thing { weight = weight } }
    for step = 1, 5 do
      things.step = step * 10
      assert(checkpoint.save(folder, things))
      weight:add_(1)                       -- while the files are written
    end
    local latest = checkpoint.latest(folder)
    assert.equal(folder .. "/step-00000050", latest)
    local object = thing()
    assert(checkpoint.load(latest, { object = object }))
    assert.equal(4000, object.saved.weight:sum():item())
  end)

  it("reads and checks parts of a large tensor by themselves", function()
    local store = require "moonshard.checkpoint.store"
    local t = ms.randn { 700000 }                            -- 2.8 MB: three blocks
    local path = assert(checkpoint.save(folder, { step = 1, object = thing { t = t } }))
    assert(checkpoint.wait())
    local file = path .. "/tensors.safetensors"
    local text = core.file_read(file)
    local function source()
      local manifest = assert(store.read_manifest(path))
      assert.equal(3, #manifest.tensors["object/t"].blocks)
      local files = assert(store.open_tensors(path, manifest))
      finally(function() store.close(files) end)
      return store.source(path, manifest, files, "object/t")
    end
    local whole = source()
    local ranges = { { 0, 1 }, { 262140, 9 }, { 262144, 262144 }, { 699999, 1 }, { 5, 0 } }
    for _, range in ipairs(ranges) do
      local part = assert(whole:read(table.unpack(range)))
      assert.equal(range[2], part:numel())
      assert.is_true(range[2] == 0
        or part:eq(t:narrow(1, range[1] + 1, range[2])):all():item())
    end
    assert.is_true(assert(whole:whole()):eq(t):all():item())
    assert(core.file_write(file, text:sub(1, -41) .. string.char(text:byte(-40) ~ 4)
      .. text:sub(-39)))
    local damaged = source()
    assert.is_true(damaged:check(0, 524288))
    assert(damaged:read(100, 300000))
    for _, range in ipairs { { 0, 524289 }, { 600000, 1 } } do
      local ok, message, code = damaged:check(table.unpack(range))
      assert.is_nil(ok)
      assert.equal("corrupt", code)
      assert.matches("tensors.safetensors': the bytes of tensor 'object/t' are not", message)
    end
    assert.is_nil(damaged:whole())
  end)

  it("continues random numbers where they were", function()
    ms.rand { 3 }
    local path = assert(checkpoint.save(folder, { step = 1 }))
    local expected = ms.rand { 4 }:to_table()
    ms.seed(999)
    assert(checkpoint.load(path, {}))
    assert.same(expected, ms.rand { 4 }:to_table())
  end)

  it("others may be removed while one is written", function()
    local weight = ms.zeros { 100000 }
    for step = 1, 20 do
      assert(checkpoint.save(folder, { step = step, object = thing { weight } }))
      if step > 2 then assert(core.checkpoint_remove(folder, ("step-%08d"):format(step - 2))) end
    end
    assert.is_true(checkpoint.wait())
    assert.same({ "lock", "step-00000019", "step-00000020" }, core.list(folder))
    assert.equal("not_found", select(3, core.checkpoint_remove(folder, "step-00000001")))
  end)

  it("one of the same step is replaced", function()
    assert(checkpoint.save(folder, { step = 1, x = "old" }))
    local path = assert(checkpoint.save(folder, { step = 1, x = "new" }))
    assert.equal("new", assert(checkpoint.load(path, {})).x)
    assert.same({ "lock", "step-00000001" }, core.list(folder))
  end)

  it("latest skips checkpoints that are not whole", function()
    assert(checkpoint.save(folder, { step = 1 }))
    assert(checkpoint.save(folder, { step = 2 }))
    checkpoint.wait()
    core.file_write(folder .. "/step-00000002/manifest.json", "{}")
    core.make_directory(folder .. "/step-00000003")
    core.make_directory(folder .. "/.tmp-step-00000004")
    assert.equal(folder .. "/step-00000001", checkpoint.latest(folder))
    -- A crash during a replacement leaves the old checkpoint under another name, until the next
    -- save restores it.
    shell("mv '%s/step-00000001' '%s/.old-step-00000001'", folder, folder)
    local aside = checkpoint.latest(folder)
    assert.equal(1, assert(checkpoint.load(aside, {})).step)
    assert(checkpoint.save(folder, { step = 5 }))
    checkpoint.wait()
    assert.same({ "lock", "step-00000001", "step-00000002", "step-00000003", "step-00000005" },
      core.list(folder))
  end)

  it("finds a flipped bit anywhere as corrupt, changes nothing then, and names the file", function()
    local path = assert(checkpoint.save(folder,
      { step = 1, object = thing { w = ms.randn { 40 }, lr = 0.1 }, note = "x" }))
    checkpoint.wait()
    local function write(file, text)
      local handle = assert(io.open(file, "wb"))
      handle:write(text)
      handle:close()
    end
    -- All of the tensors' header (a flipped dtype may be an unknown one), and places of all kinds
    -- elsewhere, in a short time.
    for name, stride in pairs { ["manifest.json"] = 7, ["tensors.safetensors"] = 61 } do
      local file = path .. "/" .. name
      local text = core.file_read(file)
      local header = name == "manifest.json" and 0 or 8 * (8 + ("<I8"):unpack(text))
      for bit = 0, #text * 8 - 1 do
        if bit < header or bit % stride == 0 then
          local at = bit // 8 + 1
          write(file,
            text:sub(1, at - 1) .. string.char(text:byte(at) ~ 1 << bit % 8) .. text:sub(at + 1))
          local object = thing "untouched"
          local value, message, code = checkpoint.load(path, { object = object })
          assert.is_nil(value, ("%s bit %d"):format(name, bit))
          assert.equal("corrupt", code, message)
          assert.truthy(message:find(name, 1, true), message)
          assert.equal("untouched", object.saved)
        end
      end
      write(file, text)
    end
    assert(checkpoint.load(path, { object = thing() }))
    os.remove(path .. "/tensors.safetensors")
    assert.equal("corrupt", select(3, checkpoint.load(path, {})))
  end)

  it("says what latest passes over, and whether nothing could be read or nothing is \z
    there", function()
    local log, said = require "moonshard.base.log", {}
    local warn = log.warn
    log.warn = function(...) said[#said + 1] = string.format(...) end
    finally(function() log.warn = warn end)
    for step = 1, 3 do
      assert(checkpoint.save(folder, { step = step, object = thing { ms.ones { 4 } } }))
    end
    checkpoint.wait()
    core.file_write(folder .. "/step-00000003/manifest.json", "{}")
    local tensors = folder .. "/step-00000002/tensors.safetensors"
    core.file_write(tensors, core.file_read(tensors):sub(1, -2))
    assert.equal(folder .. "/step-00000001", checkpoint.latest(folder))
    assert.equal(2, #said)
    assert.matches("step%-00000003/manifest.json' is damaged: .*; it is skipped", said[1])
    assert.matches("step%-00000002/tensors.safetensors'.*; it is skipped", said[2])
    os.remove(folder .. "/step-00000001/manifest.json")
    local path, message, code = checkpoint.latest(folder)
    assert.same({ nil, "corrupt" }, { path, code })
    assert.matches("none of the 3 checkpoints in .* can be read", message)
    shell("rm -r '%s'/step*", folder)
    assert.same({ n = 0 }, table.pack(checkpoint.latest(folder)))
  end)

  it("says what does not fit as mismatch", function()
    local path = assert(checkpoint.save(folder, { step = 1, model = thing { 1 } }))
    local value, message, code = checkpoint.load(path, { optimizer = thing() })
    assert.is_nil(value)
    assert.matches("holds no 'optimizer'; it holds model, step", message)
    assert.equal("mismatch", code)
    local picky = thing()
    function picky.load_state() error "wants [3], got [2]" end
    value, message, code = checkpoint.load(path, { model = picky })
    assert.is_nil(value)
    assert.matches("'model': .*wants %[3%]", message)
    assert.equal("mismatch", code)
    assert.equal("not_found", select(3, checkpoint.load(folder, {})))
  end)

  it("raises the programmer's mistakes, and leaves nothing then", function()
    local loop = {}
    loop.loop = loop
    for _, value in ipairs { print, { f = print }, loop, { [1.5] = 1 }, { [true] = 1 } } do
      assert.has_error(function() checkpoint.save(folder, { step = 1, x = value }) end)
    end
    assert.error_matches(
      function() checkpoint.save(folder, { x = { state = function() return {} end } }) end,
      "no load_state")
    assert.same({}, core.list(folder))
  end)

  it("a save that fails says so, at once or with the next", function()
    core.file_write(folder, "a file where the folder should be")
    assert.is_nil((checkpoint.save(folder, { step = 1 })))
    os.remove(folder)
    -- A file in place of the temporary folder: only the writing thread fails on it.
    core.make_directory(folder)
    core.file_write(folder .. "/.tmp-step-00000001", "in the way")
    assert.equal(folder .. "/step-00000001", checkpoint.save(folder, { step = 1 }))
    local path, message = checkpoint.save(folder, { step = 2 })
    assert.is_nil(path)
    assert.matches("the checkpoint before this one was not written: .*step%-00000001", message)
    assert.is_true(checkpoint.wait())
    assert.equal(folder .. "/step-00000002", checkpoint.latest(folder))
  end)

  it("of ddp models have the buckets that training goes on with, for models that are there or \z
    wrapped in the step that follows", function()
    local function train(net, first, last)
      for step = first, last do net(ms.randn { 2, 4, seed = step }):square():sum():backward() end
    end
    local function sizes(net)
      local list = {}
      for i, b in ipairs(net:stats().buckets) do list[i] = b.parameters end
      return table.concat(list, " ")
    end
    local function make()
      return ms.ddp(ms.nn.Sequential(ms.nn.Linear(4, 4), ms.nn.Linear(4, 4)), { bucket_bytes = 3 })
    end
    local net = make()
    train(net, 1, 1)
    assert.equal("4", sizes(net))
    local path = assert(checkpoint.save(folder, { step = 1 }))
    assert.is_true(checkpoint.wait())
    assert.equal("1 1 1 1", sizes(net))
    train(net, 2, 3)
    assert.equal("1 1 1 1", sizes(net))
    local other = make()
    assert(checkpoint.load(path, {}))
    local next_one
    for step in ms.steps(1) do
      next_one = make()
      train(next_one, step, step)
    end
    for _, one in ipairs { other, next_one } do assert.equal("1 1 1 1", sizes(one)) end
    assert.equal("4", sizes(make()))
  end)

  it("of a ddp model loads into one of other dtypes, whose buckets are its own", function()
    local function make(half)
      local model = ms.nn.Sequential(ms.nn.Linear(4, 4), ms.nn.Linear(4, 4))
      if half then model[1]:to "bf16" end
      return ms.ddp(model)
    end
    local model = make(false)
    for i = 1, 2 do model(ms.randn { 2, 4, seed = i }):sum():backward() end
    local path = assert(checkpoint.save(folder, { step = 1, model = model.module }))
    assert.is_true(checkpoint.wait())
    local half = make(true)
    assert(checkpoint.load(path, { model = half.module }))
    assert.equal("bf16", half.module[1].weight:dtype())
  end)

  it("of ddp models that have changed since says what does not fit, and changes nothing", function()
    local layouts = require "moonshard.parallel.ddp.layouts"
    local model = ms.ddp(ms.nn.Sequential(ms.nn.Linear(4, 4), ms.nn.Linear(4, 4)),
      { bucket_bytes = 3 })
    for i = 1, 2 do model(ms.randn { 2, 4, seed = i }):sum():backward() end
    local save = layouts.save
    local function refused(lists, meanwhile, ...)
      layouts.save = function()
        local saved = save()
        for key in pairs(saved) do saved[key] = lists or saved[key] end
        return saved
      end
      local path = assert(checkpoint.save(folder, { step = 1, object = thing { 1 } }))
      layouts.save = save
      meanwhile()
      local object = thing "untouched"
      local value, message, code = checkpoint.load(path, { object = object })
      assert.same({ nil, "mismatch", "untouched" }, { value, code, object.saved })
      for _, text in ipairs { "buckets", ... } do
        assert.truthy(message:find(text, 1, true), message)
      end
    end
    local function nothing() end
    refused({ { 1, 2, 3 } }, nothing, "'1.bias' is in no bucket",
      "wrapped as it was when it was saved")
    refused({ { 1, 2 }, { 3, 4, 5 } }, nothing, "have more")
    -- A backward that has not ended is not reported as damage, either.
    refused(nil, function()
      model(ms.ones { 4 })
      model[1](ms.ones { 4 }):sum():backward()
    end, "while a backward fills them")
  end)

  it("sweeps and prunes what it has made, and follows no link", function()
    local outside = folder .. "-precious"
    shell("mkdir -p '%s' '%s'", folder, outside)
    core.file_write(outside .. "/thesis.txt", "years")
    core.file_write(outside .. "/manifest.json", "{}")
    for _, name in ipairs { ".tmp-link", ".tmp-step-00000007", ".old-step-00000008",
      ".tmp-step-x", ".tmp-step-" } do
      shell("ln -s '%s' '%s/%s'", outside, folder, name)
    end
    shell("mkdir '%s/.tmp-mine' '%s/.tmp-step-00000009' '%s/.old-mine'", folder, folder, folder)
    core.file_write(folder .. "/.tmp-mine/notes", "mine")
    core.file_write(folder .. "/.old-mine/notes", "mine")
    core.file_write(folder .. "/.tmp-step-00000009/half", "ours")
    assert(checkpoint.save(folder, { step = 1, object = thing { ms.ones { 2 } } }))
    assert.is_true(checkpoint.wait())
    assert.is_true(core.checkpoint_sweep(folder))
    local left = {}
    for _, name in ipairs(core.list(folder)) do left[name] = true end
    for name, there in pairs { [".tmp-link"] = true, [".tmp-step-x"] = true, [".tmp-step-"] = true,
      [".tmp-mine"] = true, [".old-mine"] = true, ["step-00000001"] = true,
      [".tmp-step-00000007"] = false, [".tmp-step-00000009"] = false,
      [".old-step-00000008"] = false, ["step-00000008"] = false } do
      assert.equal(there, left[name] == true, name)
    end
    assert.equal("mine", core.file_read(folder .. "/.tmp-mine/notes"))
    -- A checkpoint that is a link to an archive: pruning takes the link away.
    shell("mv '%s/step-00000001' '%s/step-00000001'", folder, outside)
    shell("ln -s '%s/step-00000001' '%s/step-00000001'", outside, folder)
    assert.is_true(core.checkpoint_remove(folder, "step-00000001"))
    assert.is_false((core.exists(folder .. "/step-00000001")))
    assert.equal("file", core.exists(outside .. "/step-00000001/tensors.safetensors"))
    -- Saved again where the name is a link: the same.
    shell("ln -s '%s/step-00000001' '%s/step-00000001'", outside, folder)
    assert(checkpoint.save(folder, { step = 1, object = thing { ms.ones { 2 } } }))
    assert.is_true(checkpoint.wait())
    assert.equal("file", core.exists(outside .. "/step-00000001/tensors.safetensors"))
    assert.equal("years", core.file_read(outside .. "/thesis.txt"))
    shell("rm -r '%s'", outside)
  end)

  it("locks its folder until it is on disk", function()
    local function other(body)
      local file = os.tmpname()
      core.file_write(file, ([[
        local ms = require "moonshard"
        local core = require "moonshard.core"
        local path, message, code = ms.checkpoint.save(%q, { step = 5 })
        %s]]):format(folder, body))
      local interpreter = arg[-1] or "lua5.4"
      for i = -1, -10, -1 do interpreter = arg[i] or interpreter end
      local ok = shell("'%s' '%s'", interpreter, file)
      os.remove(file)
      return ok
    end
    assert(checkpoint.save(folder, { step = 1, object = thing { 1 } }))
    assert.is_true(other [[assert(path == nil and code == "denied" and message:find "locked by")]])
    assert.is_true(checkpoint.wait())
    assert.is_true(other [[assert(path, message)]])
    -- At the end of a step by which it is on disk, too.
    assert(checkpoint.save(folder, { step = 2, object = thing { 1 } }))
    for _ in ms.steps(1) do repeat until core.checkpoint_is_done() end
    assert.is_true(other [[assert(path, message)]])
    -- A run that has locked its folder saves there, however it spells it.
    local report = ms.report { run = folder }
    assert(checkpoint.save(folder .. "//", { step = 3, object = thing { 1 } }))
    assert.is_true(checkpoint.wait())
    assert.is_true(other [[assert(path == nil and code == "denied")]])
    report:close()
  end)

  it("the program ends only when the last one is written", function()
    local script = ([[
      local ms = require "moonshard"
      local state = ms.ones { 1000000 }
      assert(ms.checkpoint.save(%q,
        { step = 1, object = { state = function() return { state } end, load_state = print } }))
    ]]):format(folder)
    local file = os.tmpname()
    core.file_write(file, script)
    local interpreter = arg[-1] or "lua5.4"
    for i = -1, -10, -1 do interpreter = arg[i] or interpreter end
    assert.is_true(shell("'%s' '%s'", interpreter, file))
    os.remove(file)
    assert.equal(folder .. "/step-00000001", checkpoint.latest(folder))
  end)
end)
