-- A rank that is killed at any moment of a save loses no checkpoint that was committed.
local command = require "command"
local full = os.getenv "MOONSHARD_TEST_FULL" == "1"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

local function run(arguments)
  return command.run(folder, ("run '%s/tests/dist/fsdp_kill.lua' -n 2 folder='%s' %s"):format(
    command.source, folder, arguments))
end

-- Kills a rank of a job, then loads with as many ranks, or others. Returns the step that was loaded
-- and the last committed one.
local function kill(arguments, ranks)
  os.execute(("rm -rf '%s/run' '%s/committed'"):format(folder, folder))
  local code, out, err = run(arguments)
  assert.is_true(code ~= 0, arguments .. out)
  assert.matches("killed by SIGKILL", err)
  local committed = tonumber(command.read(folder .. "/committed") or "0")
  code, out, err = command.run(folder, ("run '%s/tests/dist/fsdp_kill.lua' -n %d folder='%s' \z
    do=load %s"):format(command.source, ranks, folder, arguments:match "width=%d+" or ""))
  assert.equal(0, code, arguments .. out .. err)
  local step = tonumber(out:match "has step (%d+)")
  assert.is_true(step == committed or step == committed + 1,
    ("%s: step %d was committed, and %d is loaded"):format(arguments, committed, step))
  return step, committed
end

describe("a kill in a save", function()
  it("before or after each call that writes, tells or commits loses nothing", function()
    for victim = 0, 1 do
      local code, out, err = run(("do=count victim=%d call=1000"):format(victim))
      assert.equal(0, code, out .. err)
      local calls = tonumber(out:match "a save has (%d+) calls")
      assert.is_true(calls >= 4, out)
      local before, after = 0, 0
      -- Without the long ranges, each second one.
      for call = full and 1 or 1 + victim, calls, full and 1 or 2 do
        for _, when in ipairs(full and { "false", "true" } or { "false" }) do
          local step, committed = kill(("victim=%d call=%d after=%s"):format(victim, call, when),
            call % 3 + 1)
          if step == 2 then before = before + 1 else after = after + 1 end
          assert.is_true(committed >= 2)
        end
      end
      -- Rank 0's last calls come after the rename.
      assert.is_true(before > 0 and (victim == 1 or after > 0 or not full))
    end
  end)

  it("at any time loses nothing", function()
    local seed = 1
    for _ = 1, full and 200 or 3 do
      seed = seed * 48271 % 0x7fffffff
      kill(("victim=%d save=%d delay_ms=%.2f width=20000"):format(seed % 2, 2 + seed // 2 % 3,
        1 + seed // 7 % 3000 / 100), seed % 3 + 1)
    end
  end)
end)
