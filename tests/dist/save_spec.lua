-- Saving from several ranks: save.lua holds what each rank expects; and what a call by one rank
-- alone ends with.
local command = require "command"

describe("save and save_adapters", function()
  for _, ranks in ipairs { "1", "2", "3 --thread-ranks" } do
    it("are done when they return, on " .. ranks, function()
      local folder = command.folder()
      command.on_ranks("save", ranks, ("folder='%s'"):format(folder))
      command.remove(folder)
    end)
  end

  -- The other ranks go on to another call, or leave.
  it("are called by all ranks", function()
    local folder = command.folder()
    for rest, line in pairs { ["model(ms.ones { 1, 4 }):sum():backward()"] = true, [""] = false } do
      command.write(folder .. "/r.lua", ([[
        local ms = require "moonshard"
        local model = ms.ddp(ms.nn.Linear(4, 4))
        if ms.rank() == 0 then
          model:save "m.safetensors"
        end
        %s]]):format(rest))
      for _, how in ipairs { "", " --thread-ranks" } do
        local code, _, err = command.run(folder, "run r.lua -n 2" .. how)
        assert.equal(5, code, err)
        assert.truthy(err:find("all ranks call save", 1, true), err)
        assert.truthy(err:find("at r.lua:4", 1, true), err)
        assert.truthy(not line or err:find("at r.lua:6", 1, true), err)
        assert.falsy(err:find("[/%w]+/lua/moonshard"), err)
      end
    end
    command.remove(folder)
  end)
end)
