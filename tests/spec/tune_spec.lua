-- Choices among the algorithms of a product on a GPU (lua/moonshard/train/tune.lua), over
-- stand-ins for NVIDIA's driver and cuBLASLt. There all candidates of a product but one are slow,
-- and the bits of its result depend on the candidate.
local command = require "command"
local core = require "moonshard.core"

local DRIVER = ("MOONSHARD_CUDA_DRIVER='%s'"):format(os.getenv "MOONSHARD_STAND_IN")

describe("choices of products", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  -- Candidate `fast` is the fast one; what is called is noted in the file `log`.
  local function on_gpu(fast, more)
    return ("%s %s MOONSHARD_STAND_IN_WATCH=stop MOONSHARD_STAND_IN_CUBLASLT_FAST=%d \z
      MOONSHARD_STAND_IN_CUBLASLT_LOG=log %s"):format(DRIVER, command.own_cache(folder), fast,
      more or "")
  end
  local RECIPE = ("'%s/recipes/gpt_bytes.lua' 'data=%s/README.md' length=16 batch=2 \z
    model.layers=1 model.width=32 model.heads=2 dtype=bf16 every.eval=0 every.sample=0 \z
    --device cuda")
    :format(command.source, command.source)
  -- Trains; returns stdout, stderr, and the candidates that products used and how often the library
  -- was asked for several: { [process] = { uses = { [candidate] = times }, asks = count } }.
  local function train(options, settings)
    os.remove(folder .. "/log")
    local out, err = command.succeed(folder, ("run %s %s"):format(RECIPE, options), settings)
    local found = {}
    for id, word, number in command.read(folder .. "/log"):gmatch "(%d+) (%a+) (%d+)\n" do
      local one = found[id] or { uses = {}, asks = 0, last = nil }
      found[id], number = one, tonumber(number)
      if word == "uses" then
        one.uses[number], one.last = (one.uses[number] or 0) + 1, number
      elseif number > 1 then one.asks = one.asks + 1 end
    end
    return out, err, found
  end
  local function only(found)
    local id, one = next(found)
    assert.is_nil(next(found, id))
    return one
  end
  local function uses_only(number, one)
    assert.equal(0, one.asks)
    for candidate in pairs(one.uses) do assert.equal(number, candidate) end
    assert.is_true(one.uses[number] > 20)
  end
  -- What a run has saved of its model.
  local function model(run)
    local text = {}
    for _, name in ipairs(core.list(folder .. "/" .. run .. "/model")) do
      text[#text + 1] = command.read(("%s/%s/model/%s"):format(folder, run, name))
    end
    assert.is_true(#table.concat(text) > 1000)
    return table.concat(text)
  end
  local FILE = "cache/moonshard/products.json"
  local function choices()
    return core.json_decode(assert(command.read(folder .. "/" .. FILE))).places
  end

  it("are none, and the library's first candidates are used", function()
    local _, err, found = train("run=a steps=4", on_gpu(2))
    assert.equal("", err)
    uses_only(0, only(found))
    assert.is_nil(command.read(folder .. "/" .. FILE))
  end)

  it("are made once, kept, and used by later runs", function()
    local out, err, found = train("run=a steps=6 --tune", on_gpu(2))
    assert.equal("", err)
    local count = assert(out:match "%-%-tune: (%d+) kinds of products timed in [%d.]+ s: one of \z
      each takes %d+ us, with the library's first candidates %d+ us; kept in ")
    assert.is_true(tonumber(count) > 5)
    local one = only(found)
    assert.equal(tonumber(count), one.asks)
    assert.equal(2, one.last)
    local place, list = next(choices())
    assert.equal("stand-in 0, 2 multiprocessors, cuBLASLt 130101", place)
    local kept = 0
    for _ in pairs(list) do kept = kept + 1 end
    assert.equal(tonumber(count), kept)

    out, err, found = train("run=b steps=3", on_gpu(0))
    assert.equal("", err)
    assert.is_nil(out:find "tune")
    uses_only(2, only(found))
    -- Nothing is left to be timed, and nothing is chosen again.
    out, err, found = train("run=c steps=4 --tune", on_gpu(0))
    assert.equal("", err)
    assert.truthy(out:find("--tune: 0 kinds of products timed", 1, true), out)
    uses_only(2, only(found))
    found = select(3, train("run=d steps=3 --no-tune", on_gpu(0)))
    uses_only(0, only(found))
    out = command.succeed(folder, "info", DRIVER .. " " .. command.own_cache(folder))
    assert.truthy(out:find(("gpu 0 choices    %s in %s/cache/moonshard/products.json")
      :format(count, folder), 1, true), out)
    out = command.succeed(folder, "info", DRIVER .. " XDG_CACHE_HOME=/nowhere")
    assert.truthy(out:find("gpu 0 choices    none (moonshard run --tune makes them)", 1, true), out)
  end)

  it("of another GPU or library are not used, and stay in the file", function()
    train("run=a steps=4 --tune", on_gpu(2))
    local settings = on_gpu(1, "MOONSHARD_STAND_IN_CUBLASLT_VERSION=130200")
    local _, err, found = train("run=b steps=3", settings)
    assert.equal("", err)
    uses_only(0, only(found))
    train("run=c steps=4 --tune", settings)
    local places = choices()
    assert.is_table(places["stand-in 0, 2 multiprocessors, cuBLASLt 130101"])
    assert.is_table(places["stand-in 0, 2 multiprocessors, cuBLASLt 130200"])
    found = select(3, train("run=d steps=3", settings))
    uses_only(1, only(found))
  end)

  it("are in a file that the environment may name", function()
    local named = "MOONSHARD_TUNED=here/mine.json"
    local _, err = train("run=a steps=4 --tune", on_gpu(2, named))
    assert.equal("", err, "the file is about to be made")
    assert.is_nil(command.read(folder .. "/" .. FILE))
    local found
    _, err, found = train("run=b steps=3", on_gpu(0, named))
    assert.equal("", err)
    uses_only(2, only(found))
    _, err, found = train("run=c steps=3", on_gpu(0, "MOONSHARD_TUNED=nowhere.json"))
    assert.equal("moonshard: rank 0: MOONSHARD_TUNED: there is no file 'nowhere.json' (moonshard \z
      run --tune makes it)\n", err)
    uses_only(0, only(found))
  end)

  it("of a damaged file are not used, which is told once", function()
    train("run=a steps=4 --tune", on_gpu(2))
    local path = folder .. "/" .. FILE
    local text = command.read(path)
    local key, algorithm = next((select(2, next(choices()))))
    local hurt = algorithm:gsub("^.", { ["0"] = "1" })
    if hurt == algorithm then hurt = "0" .. algorithm:sub(2) end
    for damage, why in pairs {
      [text:sub(1, -20)] = "not JSON",
      [text:gsub(algorithm, hurt, 1)] = "its content does not match its hash",
      [text:gsub(algorithm, "12", 1)] = "a choice in it is none",
      ["[]"] = "it has no choices",
      [text:gsub('"version":1', '"version":2', 1)] = "its version is 2, and 1 is known",
    } do
      command.write(path, damage)
      local _, err, found = train("run=b steps=2", on_gpu(0))
      assert.equal(1, select(2, err:gsub("\n", "")), err)
      assert.truthy(err:find("products.json' is damaged: " .. why, 1, true), err)
      uses_only(0, only(found))
    end
    assert.is_string(key)
    -- Timing writes it again.
    train("run=c steps=4 --tune", on_gpu(1))
    local _, err, found = train("run=d steps=2", on_gpu(0))
    assert.equal("", err)
    uses_only(1, only(found))
  end)

  it("of a checkpoint are used by the run that is resumed, to the bit", function()
    train("run=a steps=10 every.save=5 --tune", on_gpu(2))
    -- The file has changed since.
    os.remove(folder .. "/" .. FILE)
    train("run=other steps=4 --tune", on_gpu(1))
    local _, err, found = train("run=b steps=10 every.save=5 resume=a/step-00000005", on_gpu(0))
    assert.equal("", err)
    uses_only(2, only(found))
    assert.is_true(model "a" == model "b", "the resumed run gave another model")
    local out
    out, _, found = train("run=c steps=10 resume=a/step-00000005 --tune", on_gpu(0))
    assert.truthy(out:find("--tune: nothing is timed: the checkpoint has the choices", 1, true),
      out)
    uses_only(2, only(found))
    -- A run without choices goes on without.
    train("run=d steps=6 every.save=3 --no-tune", on_gpu(0))
    _, _, found = train("run=e steps=6 resume=d/step-00000003", on_gpu(0))
    uses_only(0, only(found))
    assert.is_true(model "d" == model "e", "the resumed run gave another model")
  end)

  it("hold for graphs of what each step repeats, too", function()
    train("run=a steps=12 every.save=8 --tune graph=true", on_gpu(2))
    local _, _, found = train("run=b steps=12 resume=a/step-00000008", on_gpu(0))
    uses_only(2, only(found))
    assert.is_true(model "a" == model "b", "the run with graphs gave another model")
  end)

  it("of a checkpoint for another library are not used, which is told", function()
    train("run=a steps=6 every.save=5 --tune", on_gpu(2))
    local _, err, found = train("run=b steps=7 resume=a/step-00000005",
      on_gpu(0, "MOONSHARD_STAND_IN_CUBLASLT_VERSION=130200"))
    assert.equal("moonshard: rank 0: the checkpoint's choices of products are for stand-in 0, \z
      2 multiprocessors, cuBLASLt 130101; here they are not used\n", err)
    uses_only(0, only(found))
  end)

  it("that the library refuses give way to its first candidate, which is told once", function()
    train("run=a steps=4 --tune", on_gpu(2))
    local _, err, found = train("run=b steps=3",
      on_gpu(0, "MOONSHARD_STAND_IN_CUBLASLT_REFUSES=2"))
    assert.equal(1, select(2, err:gsub("\n", "")), err)
    assert.matches("cuBLASLt refuses what was chosen for the product %d+x%d+x%d+ .*: its first \z
      candidate is used\n", err)
    uses_only(0, only(found))
  end)

  it("are rank 0's on all ranks", function()
    local two = " MOONSHARD_STAND_IN_GPUS=2 MOONSHARD_STAND_IN_GPU_NAME=H"
    local _, err, found = train("run=a steps=5 every.save=4 --tune -n 2", on_gpu(2, two))
    assert.equal("", err)
    local ranks, timed = 0, 0
    for _, one in pairs(found) do
      ranks = ranks + 1
      timed = timed + (one.asks > 0 and 1 or 0)
      assert.equal(2, one.last)
    end
    assert.equal(2, ranks)
    assert.equal(1, timed)
    for _, options in ipairs { "run=b steps=3", "run=c steps=6 resume=a/step-00000004" } do
      _, err, found = train(options .. " -n 2", on_gpu(0, two))
      assert.equal("", err)
      for _, one in pairs(found) do uses_only(2, one) end
    end
    -- Another kind of GPU than rank 0's.
    _, err = train("run=d steps=4 --tune -n 2", on_gpu(2, " MOONSHARD_STAND_IN_GPUS=2"))
    assert.equal("moonshard: rank 1: choices of products are for stand-in 0, 2 multiprocessors, \z
      cuBLASLt 130101, and this rank has stand-in 1, 2 multiprocessors, cuBLASLt 130101: products \z
      use the library's first candidates\n", err)
  end)

  it("cannot be made on a CPU, nor without steps", function()
    local recipe = RECIPE:gsub(" %-%-device cuda", "")
    local code, _, err = command.run(folder, ("run %s run=a steps=4 --tune"):format(recipe))
    assert.equal(2, code)
    assert.truthy(err:find("--tune: products are timed on a GPU, and this run computes on device \z
      cpu: add --device cuda", 1, true), err)
    assert.equal(1, select(2, err:gsub("\n", "")), err)
    code, _, err = command.run(folder, ("run %s --device sim --tune"):format(recipe))
    assert.equal(2, code)
    assert.truthy(err:find("not on device sim: give --device cuda", 1, true), err)
    code, _, err = command.run(folder, ("run %s --no-tune --tune"):format(RECIPE), DRIVER)
    assert.equal(2, code, err)
    _, err = train("run=b steps=2 --tune", on_gpu(2))
    assert.equal("moonshard: rank 0: --tune: nothing was timed: products are timed at the end of \z
      the third step of ms.steps\n", err)
    command.write(folder .. "/products.json", "")
    _, err = train("run=c steps=4 --tune", on_gpu(2, "MOONSHARD_TUNED=products.json/x"))
    assert.truthy(err:find("--tune: the choices of products were not kept: ", 1, true), err)
  end)
end)
