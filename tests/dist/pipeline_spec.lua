-- Pipelines: pipeline.lua holds what each rank expects. Tables of PyTorch are read, too.
local command = require "command"

describe("a pipeline", function()
  local function job(ranks, options) command.on_ranks("pipeline", ranks, options) end

  it("trains as the whole model does on one rank", function()
    for _, schedule in ipairs { "gpipe", "1f1b" } do
      job("2", "schedule=" .. schedule)
      job("4 --thread-ranks", "schedule=" .. schedule)
    end
    job("1", "microbatches=3")
    job("2 --thread-ranks", "schedule=interleaved each=2")
    for _, ranks in ipairs { 2, 4 } do
      job(ranks .. " --thread-ranks", "schedule=zb_h1")
      job(ranks .. " --thread-ranks", "schedule=zbv each=2")
    end
  end)

  it("has chunks that ddp and fsdp reduce over ranks with other data", function()
    for _, wrap in ipairs { "ddp", "fsdp" } do
      job("4 --thread-ranks", "stages=2 wrap=" .. wrap)
      job("4 --thread-ranks", "stages=2 each=2 schedule=interleaved wrap=" .. wrap)
      job("4 --thread-ranks", "stages=2 schedule=zb_h1 wrap=" .. wrap)
    end
  end)

  it("gives the same bits by any schedule", function()
    job("3 --thread-ranks", "what=same microbatches=5")
    for _, ranks in ipairs { 2, 3, 6 } do
      job(ranks .. " --thread-ranks", "what=random tables=" .. (command.full and 500 or 12))
    end
  end)

  it("holds no more microbatches than its schedule says", function()
    job("3 --thread-ranks", "what=memory microbatches=6")
  end)

  it("is shown by check, with the messages of each rank", function()
    local folder = command.folder()
    command.write(folder .. "/r.lua", [[
      local ms = require "moonshard"
      local pipe = ms.pipeline { chunks = ms.nn.Linear(8, ms.rank() == 0 and 8 or 4),
        microbatches = 4, passes = { { dtype = "f32", 2, 8 } } }
      for _ in ms.steps(2) do pipe:step(ms.ones { 8, 8 }, ms.zeros { 8, dtype = "i64" }) end]])
    local out = command.succeed(folder, "check r.lua -n 2")
    assert.truthy(out:find("\n1f1b: bubble 20.0%, at most 2, 1 microbatches held", 1, true), out)
    assert.truthy(out:find("\nrank 0   F0 F1       B0", 1, true), out)
    assert.truthy(out:find("send of world, f32 x 16, channel 1 \"0F3.0\"", 1, true), out)
    command.write(folder .. "/r.lua", command.read(folder .. "/r.lua"):gsub(", passes.-} }", ""))
    local code, _, err = command.run(folder, "check r.lua -n 2")
    assert.equal(1, code)
    assert.truthy(err:find("nothing tells the shapes that go into chunk 1: give passes", 1, true))
    command.remove(folder)
  end)

  it("refuses tables that cannot run, before the first step", function()
    job("2", "what=refused")
  end)
end)
