-- The report on a job that failed because of the machine (out of memory).
local command = require "command"
local ranks = require "moonshard.cli.ranks"

describe("a rank that the system kills for want of memory", function()
  local root
  before_each(function() root = command.folder() end)
  after_each(function() command.remove(root) end)

  local function machine(files)
    for path, text in pairs(files) do
      assert(os.execute(("mkdir -p '%s%s'"):format(root, path:match "^(.*)/")))
      command.write(root .. path, text)
    end
  end

  it("is counted by its control group, of either version, wherever its files are", function()
    assert.equal(0, ranks.oom_kills(root))
    machine {
      ["/proc/self/cgroup"] = "0::/user/job\n",
      ["/sys/fs/cgroup/memory.events"] = "low 0\noom 9\noom_kill 2\noom_group_kill 0\n",
    }
    assert.equal(2, ranks.oom_kills(root))
    machine {
      ["/sys/fs/cgroup/user/job/memory.events"] = "low 0\nhigh 0\nmax 8\noom 4\noom_kill 3\n",
    }
    assert.equal(3, ranks.oom_kills(root))
    machine {
      ["/proc/self/cgroup"] = "4:memory:/job\n2:cpu,cpuacct:/\n0::/elsewhere\n",
      ["/sys/fs/cgroup/memory/job/memory.oom_control"] =
        "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
    }
    os.remove(root .. "/sys/fs/cgroup/memory.events")
    assert.equal(5, ranks.oom_kills(root))
    machine { ["/proc/self/cgroup"] = "0::/\n" }
    assert.equal(0, ranks.oom_kills(root))
  end)

  it("is reported with that, and only where a kill it was", function()
    local outcome = {
      cause = {
        reason = "died",
        rank = 1,
        message = "rank 1 (pid 12) killed by SIGKILL after all_reduce #3 of world",
      },
      folder = "",
      ranks = {
        { ended = true, ended_ns = 2e6, step = 3, code = 7, signal = 0 },
        { ended = true, ended_ns = 1e6, step = 3, code = 0, signal = 9 },
      },
    }
    local function no_flights() return {} end
    local text = ranks.report(outcome, { recipe = "r.lua", ranks = 2, options = {} }, no_flights, 1)
    assert.matches("^moonshard: rank 1 %(pid 12%) killed by SIGKILL", text)
    assert.matches("\n  rank 0 ended within 1.0 ms; rank 0 at step 3\n", text)
    assert.matches("\n  the system has killed a process for want of memory", text)
    assert.not_matches("want of memory",
      (ranks.report(outcome, { recipe = "r.lua", ranks = 2, options = {} }, no_flights, 0)))
    outcome.ranks[2].signal = 11
    assert.not_matches("want of memory",
      (ranks.report(outcome, { recipe = "r.lua", ranks = 2, options = {} }, no_flights, 1)))
  end)
end)
