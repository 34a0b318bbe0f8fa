-- Unused parameters, static graphs, uneven inputs and delayed parameters on several ranks:
-- ddp_graph.lua has the expectations of each rank. Here: the ways of running it, and the message of
-- a job in which a rank leaves early.
local command = require "command"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

local ways = { processes = "", threads = " --thread-ranks" }

-- Each number of ranks in one of the ways, or in long ranges all in both.
for _, ranks in ipairs(command.full and { 1, 2, 3, 4 } or { 1, 3, 4 }) do
  local chosen = ranks % 2 == 0 and "threads" or "processes"
  for name, way in pairs(command.full and ways or { [chosen] = ways[chosen] }) do
    it(("graphs that differ between ranks, and uneven inputs, give the bits of one process on %d \z
      ranks as %s"):format(ranks, name), function()
      command.on_ranks("ddp_graph", ranks .. way)
    end)
  end
end

-- Runs a script on 3 ranks; returns the exit code and all output.
local function run(text, way)
  local script = command.write(folder .. "/script.lua",
    'local ms = require "moonshard"\nlocal rank = ms.rank()\n' .. text)
  local code, out, err = command.run(folder, ("run '%s' -n 3%s"):format(script, way))
  return code, out .. err
end

for name, way in pairs(ways) do
  it("an error inside join ends the job for all, even where it is caught, as " .. name, function()
    local code, text = run([[
      local model = ms.ddp(ms.nn.Linear(4, 4))
      pcall(function()
        model:join({}, function()
          for step = 1, 3 do
            if rank == 1 and step == 2 then error "no more" end
            model(ms.ones { 2, 4 }):sum():backward()
          end
        end)
      end)
      ms.synchronize()
      model(ms.ones { 2, 4 }):sum():backward()
      ms.synchronize()
    ]], way)
    assert.not_equal(0, code)
    assert.truthy(text:find("no more", 1, true) and text:find("rank 1", 1, true), text)
  end)
end

it("ranks that join with different options are told so", function()
  local code, text = run([[
    local model = ms.ddp(ms.nn.Linear(4, 4))
    model:join({ divisor = rank == 1 and "live" or "all" }, function()
      model(ms.ones { 2, 4 }):sum():backward()
    end)
  ]], " --thread-ranks")
  assert.not_equal(0, code)
  assert.truthy(text:find("given different options", 1, true), text)
end)

it("a rank that has nothing to do for very long is remarked on once", function()
  local code, text = run([[
    local model = ms.ddp(ms.nn.Linear(1, 1, { bias = false }))
    model:join({}, function()
      for step = 1, rank == 2 and 1100 or 1 do
        model(ms.ones { 1, 1 }):sum():backward()
        model.weight:set_grad(nil)
      end
    end)
  ]], " --thread-ranks")
  assert.equal(0, code, text)
  for rank = 0, 2 do
    local _, count = text:gsub(("join: rank %d has had no inputs"):format(rank), "")
    assert.equal(rank < 2 and 1 or 0, count, text)
  end
end)

it("a graph without unused parameters is remarked on once", function()
  local code, text = run([[
    local model = ms.ddp(ms.nn.Linear(4, 4), { find_unused = true })
    for step = 1, 3 do model(ms.ones { 2, 4 }):sum():backward() end
  ]], "")
  assert.equal(0, code)
  local _, count = text:gsub("find_unused: the outputs", "")
  assert.equal(3, count, text)
end)

it("ranks that plan their buckets differently are told so", function()
  local code, text = run([[
    local plan = ms.buckets {
      name = "own",
      plan = function(view) return { caps_bytes = { rank == 2 and 1 or 1000 } } end,
    }
    local model = ms.ddp(ms.nn.Linear(4, 4), { buckets = plan })
    for step = 1, 3 do model(ms.ones { 2, 4 }):sum():backward() end
  ]], " --thread-ranks")
  assert.not_equal(0, code)
  for _, part in ipairs {
    "bucket plan own (", "script.lua:5", "planned differently", "on rank 2",
  } do
    assert.truthy(text:find(part, 1, true), text)
  end
end)

-- On the sim device all of this needs the same memory and sends the same bytes as with data.
it("check tells peak memory and bytes exactly, with all that may come together", function()
  local script = command.write(folder .. "/script.lua", [[
    local ms = require "moonshard"
    local plan =
      ms.buckets { name = "pairs", plan = function(view) return { caps_bytes = { 4000 } } end }
    local gpt = ms.nn.gpt2 { vocab = 64, context = 16, layers = 2, width = 32, heads = 4 }
    local model = ms.ddp(gpt, {
      buckets = plan, find_unused = true, delayed = { "wpe%..*" },
      precision = { param = "bf16", output = "f32" },
    })
    local optimizer = ms.optim.adamw(model)
    local x = ms.randint { 4, 16, low = 0, high = 64 }
    local function train(first, last)
      for _ in ms.steps(last, first) do
        model(x):cross_entropy(x):backward()
        optimizer:step()
      end
    end
    train(0, 3)
    model:join({ divisor = "live" }, function() train(3, 5) end)
    io.stdout:write(("%d %d\n"):format(ms.memory().peak, #model:stats().buckets))
  ]])
  local core = require "moonshard.core"
  local told = core.json_decode(command.succeed(folder, ("check '%s' -n 2 --json"):format(script))
    :match "({.*})")
  local out = command.succeed(folder, ("run '%s' -n 2"):format(script))
  local peak, buckets = out:match "(%d+) (%d+)"
  assert.equal(told.peak_bytes[1], tonumber(peak), out)
  assert.is_true(tonumber(buckets) > 3)
end)
