-- Examples of the reference (a third of them, in long ranges all) on two ranks, each in a job of
-- its own: nothing is loaded but what `moonshard run` and the example itself load, so a method that
-- another module brings along is missing here as it is for a user. The ranks are threads: a job
-- then takes some 50 ms of one core. The examples tell the values of one rank. Ranks share batches,
-- reduce and number themselves, so that values are computed here, and not compared:
-- spec/examples_spec.lua compares them.
local command = require "command"
local examples = require "examples"

-- What a job runs in front of an example. Both ranks write the same files in one folder: rank 0
-- writes, and a close of the other waits for that file. It asks the file system, as the engine
-- must not be started before an example that has ms.init.
local HEAD <const> = [==[
local process = require "moonshard.base.launch".process
local open, opened = io.open, 0
local function write_once(path, mode)
  if not (mode or "r"):find "^w" then return open(path, mode) end
  opened = opened + 1
  local sign = (".written-%%d"):format(opened)
  local file = process.rank == 0 and open(path, mode) or nil
  local written = {}
  function written:write(...)
    if file then file:write(...) end
    return self
  end
  function written.close()
    if file then
      file:close()
      open(sign, "w"):close()
      return true
    end
    while not open(sign) do process.pause(1) end
    return true
  end
  return written
end
local own = setmetatable({ open = write_once }, { __index = io })
local function check() end
local environment = setmetatable({ check = check, io = own }, { __index = _G })
environment.ms = %s
assert(load(%q, "=example", "t", environment))()
]==]

local tried = command.some(3, examples.all())
local folder, jobs
setup(function()
  folder, jobs = command.folder(), {}
  local lines = {}
  for i, one in ipairs(tried) do
    local own = ("%s/%d"):format(folder, i)
    jobs[one.name] = own
    lines[#lines + 1] = own
    assert(os.execute("mkdir -p " .. own))
    command.write(own .. "/example.lua", HEAD:format(
      one.name == "ms.init" and "nil" or 'require "moonshard"', examples.checked(one.code)))
  end
  command.write(folder .. "/list", table.concat(lines, "\n") .. "\n")
  -- Some jobs wait for their turn while others wait for their threads.
  assert(os.execute(([[xargs -P $(($(nproc) + 1)) -I DIR sh -c 'cd DIR && timeout -k 5 1800 "%s" \
    run example.lua -n 2 --thread-ranks --threads 1 >output 2>&1; echo $? >code' <'%s/list']])
    :format(command.program, folder)))
end)
teardown(function() command.remove(folder) end)

describe("on two ranks, alone,", function()
  for _, one in ipairs(tried) do
    it("the example of " .. one.name .. " runs", function()
      local own = jobs[one.name]
      assert.equal("0\n", command.read(own .. "/code"), command.read(own .. "/output"))
    end)
  end
end)
