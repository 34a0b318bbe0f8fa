-- A run that goes on takes no more memory: small models in the configurations of growth.lua. In
-- long ranges each of them takes 2,000 steps.
local command = require "command"

local few, all = { 3, 4, 10 }, {}
for i = 1, 20 do all[i] = i end
local configurations = command.full and all or few
local from, steps = command.full and 500 or 250, command.full and 2000 or 500
-- What the process may take beside 2%: Lua's own heap, whose collector runs when it has grown.
local HEAP <const> = 2 << 20
local SANITIZED = (os.getenv "MOONSHARD_SANITIZE" or "") ~= ""

describe("the memory of a run", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  it("stays what it is", function()
    for _, config in ipairs(configurations) do
      local out = command.succeed(folder,
        ("run '%s/tests/dist/growth.lua' -n 2 --watch source='%s' config=%d from=%d steps=%d")
          :format(command.source, command.source, config, from, steps))
      local name, reserved, later, resident, at_last =
        out:match "([^\n]+)\t(%d+)\t(%d+)\t(%d+)\t(%d+)\n"
      assert.equal(reserved, later, name)
      -- Sanitizers keep freed memory for a while.
      assert.is_true(SANITIZED or tonumber(at_last) <= 1.02 * tonumber(resident) + HEAP,
        ("%s: %d bytes, then %d"):format(name, resident, at_last))
    end
  end)
end)
