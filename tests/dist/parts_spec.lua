-- Models of which ranks have parts: parts.lua holds what each rank expects.
local command = require "command"

describe("declared parts", function()
  local function job(what, ranks, options)
    command.on_ranks("parts", ranks, ("what=%s %s"):format(what, options or ""))
  end

  it("have the values of their places in the whole model", function()
    for _, tensor in ipairs { 1, 2, 4 } do
      job("values", tensor .. " --thread-ranks", "tensor=" .. tensor)
    end
    job("owned", "2", "tensor=1 stages=2")
    job("owned", "4 --thread-ranks", "tensor=2 stages=2")
  end)

  it("train as the whole model does, and stay equal where they are copies", function()
    job("steps", "2", "tensor=2")
    job("steps", "4 --thread-ranks", "tensor=2")
    job("steps", "4 --thread-ranks", "tensor=4")
  end)

  it("of which several ranks have copies sum their gradients once", function()
    job("shared", "1", "tensor=1")
    job("shared", "3 --thread-ranks", "tensor=3")
    job("beyond", "2", "tensor=1")
    job("beyond", "4 --thread-ranks", "tensor=2")
    job("summon", "2", "tensor=2")
    job("summon", "4 --thread-ranks", "tensor=2")
  end)

  it("skip a step together", function() job("scaler", "2", "tensor=2") end)

  it("are refused where they would be silently wrong", function()
    job("refused", "2", "tensor=2")
  end)
end)
