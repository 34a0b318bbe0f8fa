-- Groups that are dropped: dropped_groups.lua holds what each rank expects.
local command = require "command"

-- Sanitizers keep freed memory for a while, and take longer.
local SANITIZED = (os.getenv "MOONSHARD_SANITIZE" or "") ~= ""
local OPTIONS = SANITIZED and "memory=false rounds=" .. (command.short and 15 or 30)
  or command.full and "" or "rounds=70"

describe("dropped groups are freed", function()
  for _, ranks in ipairs(command.some(2, { "2", "1", "4 --thread-ranks", "3" })) do
    it("on ranks: " .. ranks, function()
      local limit = command.short and ranks ~= "2" and " limit=false" or ""
      command.on_ranks("dropped_groups", ranks, OPTIONS .. limit)
    end)
  end

  -- The communicators of NCCL close, too.
  for _, ranks in ipairs { "2", "3 --thread-ranks" } do
    it("over NCCL, on ranks: " .. ranks, function()
      local rounds = command.short and 10 or command.full and 40 or 20
      command.on_ranks("dropped_groups", ranks,
        ("rounds=%d limit=false memory=false"):format(rounds), "MOONSHARD_TRANSPORT=nccl")
    end)
  end

  it("in a world without the others, with the numbers of their parts", function()
    local folder = command.folder()
    command.write(folder .. "/s.lua", [[
      local ms = require "moonshard"
      for _ = 1, 300 do ms.world():levels(2) end
      print "many levels"]])
    local code, out, err = command.run(folder, "check s.lua -n 8")
    command.remove(folder)
    assert.equal(0, code, err)
    assert.matches("many levels", out .. err)
  end)
end)
