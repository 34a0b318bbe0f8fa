-- What a script drops is freed, though Lua's collector does not see what it holds: loops over data
-- sets, loaders, tokenizers, states and models, large and small, take no more than twice the memory
-- of their first round, and no more threads. close() frees at once, and a use after it is an error.
local command = require "command"
local ms = require "moonshard"

local SANITIZED = (os.getenv "MOONSHARD_SANITIZE" or "") ~= ""

local folder, text
setup(function()
  folder = command.folder()
  text = command.write(folder .. "/text", ("0123456789"):rep(1000))
  command.write(folder .. "/large", ("0123456789abcdef"):rep(1250000))
  command.write(folder .. "/loop.lua", [[
local ms = require "moonshard"
local cfg = ms.config { what = "data", rounds = 200, tokenizer = "", width = 512 }
-- Resident memory in kB, and threads.
local function status()
  ms.synchronize()
  local file <close> = io.open "/proc/self/status"
  local text = file:read "a"
  return tonumber(text:match "VmRSS:%s*(%d+)"), tonumber(text:match "Threads:%s*(%d+)")
end
local function open() return assert(ms.data.bytes "large") end
local LOADER = { batch = 4, length = 64 }
local SIZES = { vocab = 4 * cfg.width, context = 64, layers = 2, width = cfg.width, heads = 4 }
local model = ms.nn.gpt2(SIZES)
local round = {
  data = function() open():size() end,
  parts = function()
    local first, rest = open():split(0.9)
    return first:size() + rest:size()
  end,
  loader = function() open():loader(LOADER):next() end,
  closed = function()
    local data <close> = open()
    local loader <close> = data:loader(LOADER)
    loader:next()
  end,
  tokenizer = function()
    local tokenizer = assert(ms.tokenizer.load(cfg.tokenizer))
    tokenizer:encode "some text"
    tokenizer:decoder():add(1)
  end,
  state = function() model:state() end,
  checkpoint = function()
    local path = assert(ms.checkpoint.save("kept", { model = model, step = 1 }))
    assert(ms.checkpoint.wait())
    assert(ms.checkpoint.load(path, { model = model }))
  end,
  pretrained = function() assert(ms.nn.pretrained "saved") end,
  model = function() ms.nn.gpt2(SIZES) end,
}
if cfg.what == "pretrained" then assert(model:save "saved") end
round[cfg.what]()
local memory, threads = status()
local most, most_threads = 0, 0
for _ = 2, cfg.rounds do
  round[cfg.what]()
  local now, running = status()
  most, most_threads = math.max(most, now), math.max(most_threads, running)
end
print(memory, most, threads, most_threads)
]])
end)
teardown(function() command.remove(folder) end)

-- Memory in kB and threads: after the first round, and the most of all rounds. width: of the model.
local function loop(what, rounds, width)
  local out = command.succeed(folder, ("run loop.lua --threads 1 what=%s rounds=%d width=%d \z
    tokenizer='%s/tests/golden/tokenizers/gpt2'")
    :format(what, rounds, width or 512, command.source))
  local numbers = {}
  for number in out:gmatch "%d+" do numbers[#numbers + 1] = tonumber(number) end
  assert.equal(4, #numbers, out)
  return table.unpack(numbers)
end

-- Sanitizers keep freed memory for a while.
if not SANITIZED then
  describe("a loop over dropped", function()
    -- The collector is asked when what it does not see has grown by half, or by some MB: see
    -- ms_engine_relieved and bindings/outside.c.
    local function levels(what, rounds, width)
      it(("%s levels%s"):format(what, width and ", width " .. width or ""), function()
        local first, most, threads, most_threads = loop(what, rounds, width)
        assert.is_true(most <= 2 * first, ("%d kB, then %d kB"):format(first, most))
        assert.is_true(most_threads <= threads + 6, ("%d threads, then %d")
          :format(threads, most_threads))
      end)
    end
    for _, what in ipairs { "data", "parts", "loader", "tokenizer" } do
      levels(what, command.full and 200 or 100)
    end
    for _, width in ipairs { 64, 512 } do
      for what, rounds in pairs { state = 300, model = 300, checkpoint = 40, pretrained = 60 } do
        local cut = (width == 64 and 1 or 2) * (command.full and 1 or 2)
        levels(what, rounds // cut, width)
      end
    end

    it("data sets and loaders that are closed stays where it is", function()
      local first, most, threads, most_threads = loop("closed", 200)
      -- The first round was measured after its end: one data set may be there.
      assert.is_true(most <= first + 45000, ("%d kB, then %d kB"):format(first, most))
      -- The system may count a thread that has been joined for a moment.
      assert.is_true(most_threads <= threads + 1, ("%d threads, then %d")
        :format(threads, most_threads))
    end)
  end)
end

describe("close", function()
  local function fails(f, ...)
    local ok, message = pcall(f, ...)
    assert.is_false(ok)
    assert.matches("^[^\n]*dropped_spec.lua:%d+: this ms%.%a+ was closed", message)
  end

  it("of a data set leaves its parts and loaders, and a use after it is an error", function()
    local data = assert(ms.data.bytes(text))
    local first, rest = data:split(0.5)
    local loader = data:loader { batch = 1, length = 4 }
    data:close()
    data:close()
    fails(function() return data:size() end)
    fails(function() return data:split(0.5) end)
    fails(function() return data:loader { batch = 1, length = 4 } end)
    fails(function() return data:tokenizer() end)
    assert.equal("0123", ms.data.to_text(loader:next()[1]))
    first:close()
    assert.equal(5000, rest:size())
    assert.equal("0123", ms.data.to_text(rest:loader({ batch = 1, length = 4 }):next()[1]))
  end)

  it("of a loader ends its thread, in the middle of a pass too", function()
    local loader = assert(ms.data.bytes(text)):loader { batch = 1, length = 4 }
    local x = loader:next()
    local next_batch = loader:batches()
    next_batch()
    local state = loader:state()
    loader:close()
    loader:close()
    fails(function() return loader:next() end)
    fails(function() return loader:batches() end)
    fails(function() return loader:state() end)
    fails(function() return loader:load_state(state) end)
    fails(function() return next_batch() end)
    assert.equal("0123", ms.data.to_text(x[1]))
  end)

  it("of a tokenizer leaves its decoders", function()
    local tokenizer = assert(ms.tokenizer.load(command.source .. "/tests/golden/tokenizers/gpt2"))
    local decoder = tokenizer:decoder()
    local told = tokenizer:decode { 1, 2 }
    tokenizer:close()
    tokenizer:close()
    for _, name in ipairs { "vocab_size", "bos", "eos", "decoder" } do
      fails(function() return tokenizer[name](tokenizer) end)
    end
    fails(function() return tokenizer:encode "a" end)
    fails(function() return tokenizer:decode { 1 } end)
    assert.equal(told, decoder:add { 1, 2 } .. decoder:finish())
    decoder:close()
    decoder:close()
    fails(function() return decoder:add(1) end)
    fails(function() return decoder:finish() end)
  end)

  it("happens at the end of a block", function()
    local kept, loader
    do
      local data <close> = assert(ms.data.bytes(text))
      local made <close> = data:loader { batch = 1, length = 4 }
      kept, loader = data, made
    end
    fails(function() return kept:size() end)
    fails(function() return loader:next() end)
  end)
end)
