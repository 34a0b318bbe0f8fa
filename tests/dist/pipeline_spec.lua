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

  it("refuses tables that cannot run, before the first step", function()
    job("2", "what=refused")
  end)
end)
