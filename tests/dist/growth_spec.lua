-- A run that goes on takes no more memory: after half of its steps, small models keep the memory
-- that they have, in each configuration of growth.lua. In long ranges for 10,000 steps, where the
-- process does not grow either.
local command = require "command"

local few, all = { 4, 6, 8, 10, 15, 19 }, {}
for i = 1, 20 do all[i] = i end
-- What glibc's allocator may take beside: pieces of other sizes than those that were freed.
local RESIDENT <const> = 4 << 20
local SANITIZED = (os.getenv "MOONSHARD_SANITIZE" or "") ~= ""

describe("the memory of a run", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  it("stays what it is", function()
    local steps = command.full and 10000 or 400
    for _, config in ipairs(command.full and all or few) do
      local out = command.succeed(folder,
        ("run '%s/tests/dist/growth.lua' -n 2 --watch source='%s' config=%d steps=%d")
          :format(command.source, command.source, config, steps))
      local name, memory, resident = out:match "([^\n]+)\t(%-?%d+)\t(%-?%d+)\n"
      assert.equal("0", memory, name)
      if command.full and not SANITIZED then
        assert.is_true(tonumber(resident) <= RESIDENT, name .. ": " .. resident)
      end
    end
  end)
end)
