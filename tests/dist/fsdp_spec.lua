-- Sharded models on several ranks, as processes and as threads: fsdp.lua, fsdp_programs.lua and
-- fsdp_golden.lua hold what each rank expects.
local command = require "command"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

local ways = { processes = "", threads = " --thread-ranks" }

local function on_ranks(file, ranks, arguments)
  return command.succeed(folder,
    ("run '%s/tests/dist/%s' -n %d %s"):format(command.source, file, ranks, arguments or ""))
end

describe("fsdp", function()
  for ranks = 1, command.full and 4 or 3 do
    it(("gives ddp's bits on %d ranks, whatever these are"):format(ranks), function()
      local hashes = {}
      -- Of two ranks, all runs as threads, and as processes what gives the hash.
      for _, way in pairs(ranks == 2 and ways or { ways.processes }) do
        local less = ranks == 2 and way == ways.processes and not command.full
        local options = less and " hash_only=true" or ""
        hashes[command.weights("fsdp", ranks .. way .. options)] = true
      end
      assert.is_nil(next(hashes, (next(hashes))))
    end)
  end

  -- One job for both.
  describe("in the log of two ranks", function()
    local trace, code, err
    lazy_setup(function()
      local at = command.folder()
      command.write(at .. "/run.lua", [[
        local ms = require "moonshard"
        local net = ms.nn.class "Net"
        function net:init()
          self.a = ms.nn.Linear(4, 4)
          self.b = ms.nn.Linear(4, 4)
        end
        function net:forward(x) return self.a(x) end
        local parts = ms.fsdp(net(), { wrap = { groups = { { "a", "b" } } } })
        for _ = 1, 3 do parts(ms.ones { 2, 4 }):sum():backward() end
        local model = ms.fsdp(ms.nn.Sequential(ms.nn.Linear(4, 4), ms.nn.Linear(4, 4)),
          { wrap = { class = "Linear" } })
        for _ = 1, 2 do model(ms.ones { 2, 4 }):sum():backward() end
      ]])
      local line = ("run '%s/run.lua' -n 2 --trace '%s/trace.json'"):format(at, at)
      local _
      code, _, err = command.run(at, line, "MOONSHARD_LOG=debug")
      trace = command.read(at .. "/trace.json")
      command.remove(at)
    end)

    it("warns once where modules of a unit do not run", function()
      assert.equal(0, code, err)
      local _, times = err:gsub('some modules of unit "a%+b" did not run', "")
      assert.equal(1, times, err)
    end)

    it("shows its edges in the trace and in the log", function()
      assert.equal(0, code, err)
      for _, edge in ipairs { "pre_forward", "post_forward", "unshard", "reshard", "rate_limit",
        "pre_backward", "pre_backward_prefetch", "post_backward", "reduce_grad" } do
        assert.truthy(trace:find(('"fsdp.%s 0"'):format(edge), 1, true), edge)
        local logged = err:find(("fsdp.%s 0"):format(edge), 1, true)
        assert.truthy(edge == "rate_limit" or logged, edge)
      end
      assert.truthy(trace:find('"fsdp.post_backward_final root"', 1, true))
      assert.truthy(err:find("fsdp.root_pre_forward root", 1, true))
    end)
  end)

  it("sends between replicas what it must, and gives ddp's sums", function()
    command.on_ranks("fsdp_hybrid", "4")
  end)

  for ranks = 2, 3 do
    it(("computes what one process computes on %d ranks"):format(ranks), function()
      local programs = command.full and 1000 or 12
      local out = on_ranks("fsdp_programs.lua", ranks,
        ("programs=%d seed=%d"):format(programs, ranks))
      for rank = 0, ranks - 1 do
        assert.truthy(out:find(("rank %d: %d programs"):format(rank, programs), 1, true), out)
      end
    end)
  end

  local cases = { 1, 24, 5, 19 }
  for ranks, count in ipairs(cases) do
    it(("agrees with PyTorch's fully_shard on %d ranks"):format(ranks), function()
      local strategies = "own shard_grad_op no_shard"
      local out = on_ranks("fsdp_golden.lua", ranks,
        ("folder='%s/tests/golden/data/fsdp' strategies='%s'"):format(command.source, strategies))
      local found, taken = 0, 0
      for number = 1, count do
        for way = 1, 3 do
          local is_taken = way == 1 or command.full or (number + way + ranks) % 8 == 0
          taken = taken + (is_taken and 1 or 0)
        end
      end
      for n in out:gmatch "(%d+) cases, 0 failures" do
        assert.equal(taken, tonumber(n))
        found = found + 1
      end
      assert.equal(ranks, found, out)
    end)
  end
end)
