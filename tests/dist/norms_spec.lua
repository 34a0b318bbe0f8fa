-- BatchNorm over ranks: norms.lua holds what each rank expects.
local command = require "command"
local core = require "moonshard.core"

describe("BatchNorm over ranks", function()
  for _, ranks in ipairs(command.some(2, { "2", "1", "3 --thread-ranks" })) do
    it("is that of the whole batch, on " .. ranks, function() command.on_ranks("norms", ranks) end)
  end

  it("is that on a GPU, too, which the ranks share", function()
    command.on_ranks("norms", "2 --share-gpu --device cuda", nil,
      ("MOONSHARD_CUDA_DRIVER='%s' MOONSHARD_STAND_IN_WATCH=stop"):format(
        os.getenv "MOONSHARD_STAND_IN"))
  end)

  it("has the peak that check predicts", function()
    local folder = command.folder()
    command.write(folder .. "/peak.lua", [[
      local ms = require "moonshard"
      local model = ms.ddp(ms.nn.BatchNorm(64))
      local optimizer = ms.optim.sgd(model, { lr = 0.1 })
      for _ in ms.steps(3) do
        model(ms.ones { 32, 64, 8 }):sum():backward()
        optimizer:step()
      end
      print(("rank %d peak %d"):format(ms.rank(), ms.memory().peak))]])
    local real = command.succeed(folder, "run peak.lua -n 2")
    local predicted = core.json_decode((command.succeed(folder, "check peak.lua -n 2 --json")))
    for rank, peak in real:gmatch "rank (%d) peak (%d+)" do
      assert.equal(tonumber(peak), predicted.peak_bytes[tonumber(rank) + 1])
    end
    command.remove(folder)
  end)
end)
