-- `pairs` over tables of named tensors has one order on all ranks: named.lua.
local command = require "command"

describe("pairs over named tensors", function()
  for _, ranks in ipairs { "3", "3 --thread-ranks" } do
    it("has the same order on " .. ranks .. " ranks", function()
      command.on_ranks("named", ranks)
    end)
  end

  it("prints the same in two processes", function()
    local folder = command.folder()
    command.write(folder .. "/t.lua", [[
      local ms = require "moonshard"
      local model = ms.nn.gpt2 { vocab = 16, context = 8, layers = 2, width = 16, heads = 2 }
      local file = assert(io.open("rank" .. ms.rank(), "w"))
      for name in pairs(model:state()) do file:write(name, "\n") end
      file:close()
      if ms.rank() == 0 then
        model:save "m.safetensors"
        ms.checkpoint.save("c", { model = model, x = { b = ms.ones { 2 }, a = ms.ones { 3 } } })
        ms.checkpoint.wait()
      end]])
    command.succeed(folder, "run t.lua -n 1")
    local first = command.read(folder .. "/rank0")
    command.write(folder .. "/u.lua", [[
      local ms = require "moonshard"
      local file = assert(io.open("loaded" .. ms.rank(), "w"))
      for name in pairs(assert(ms.safetensors.load "m.safetensors")) do file:write(name, "\n") end
      local order = {}
      local loaded = assert(ms.checkpoint.load(ms.checkpoint.latest "c", { x = true }))
      for name in pairs(loaded) do order[#order + 1] = name end
      for name in pairs(loaded.x) do order[#order + 1] = name end
      assert(table.concat(order, " ") == "x a b", table.concat(order, " "))
      file:close()]])
    command.succeed(folder, "run u.lua -n 2")
    for rank = 0, 1 do
      assert.equal(first, command.read(folder .. "/loaded" .. rank))
    end
    command.remove(folder)
  end)
end)
