-- A request to stop that a single rank never meets: the program ends by itself when --grace is
-- over.
local command = require "command"

-- What never comes to the end of a step after the request.
local BUSY = {
  loop = "stop() while true do end",
  library = "stop() local s = ('a'):rep(60) string.find(s, ('.-'):rep(40) .. 'b')",
  finalizer = [[stop()
    setmetatable({}, { __gc = function() while true do end end })
    collectgarbage()]],
  coroutine = "stop() coroutine.wrap(function() while true do end end)()",
  step = "for _ in ms.steps(2) do stop() while true do end end",
}

-- A timer's signal ends such a process. The thread sanitizer keeps a signal until the program calls
-- a function that it watches, and these call none.
local test = os.getenv "MOONSHARD_SANITIZE" == "thread" and pending or it

describe("one rank that does not stop", function()
  for name, body in pairs(BUSY) do
    test("is ended after --grace: " .. name, function()
      local folder = command.folder()
      command.write(folder .. "/r.lua", ([[
        local ms = require "moonshard"
        ms.world()
        local function stop()
          local pid = io.open "/proc/self/stat":read "a":match "^%%d+"
          io.popen("kill -%s " .. pid):close()
        end
        %s]]):format(name == "loop" and "INT" or "TERM", body))
      local code, _, err = command.run(folder, "run r.lua --grace 0.2")
      assert.equal(name == "loop" and 130 or 143, code, err)
      assert.equal("moonshard: the run did not stop within 0.2 s after a request to stop \z
        (--grace)\n", err)
      command.remove(folder)
    end)
  end

  it("has its time: a loop of steps stops by itself, and a script that ends does, too", function()
    local folder = command.folder()
    for body, expected in pairs {
      ["for step in ms.steps(3) do if step == 1 then stop() end end"] = 143,
      ["stop()"] = 0,
    } do
      command.write(folder .. "/r.lua", ([[
        local ms = require "moonshard"
        local function stop()
          local pid = io.open "/proc/self/stat":read "a":match "^%%d+"
          io.popen("kill -TERM " .. pid):close()
        end
        %s]]):format(body))
      local code, _, err = command.run(folder, "run r.lua --grace 1000")
      assert.equal(expected, code, err)
      assert.equal("", err)
    end
    command.remove(folder)
  end)
end)
