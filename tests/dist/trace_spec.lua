-- Traces of jobs: one file of all ranks, for processes and threads, for every end.
local command = require "command"
local core = require "moonshard.core"

local RECIPE = [[
local ms = require "moonshard"
local cfg = ms.config { kill = false, own = "" }
local hooks = require "moonshard.hooks"
local model = ms.nn.Linear(32, 32)
local twice = hooks.stage {
  name = "twice",
  encode = function(buffer) return buffer * 2 end,
  decode = function(reduced) return reduced / 2 end,
}
local net = ms.ddp(model, { comm_hook = hooks.chain { twice, hooks.cast { dtype = "bf16" } } })
local opt = ms.optim.sgd(model, { lr = 0.1 })
if cfg.own ~= "" then assert(ms.trace.start(cfg.own)) end
for step in ms.steps(3) do
  net(ms.randn { 8, 32, seed = step }):square():mean():backward()
  opt:step()
  if cfg.kill and step == 1 and ms.rank() == 1 then os.execute "kill -KILL $PPID" end
end
if cfg.own ~= "" then assert(ms.trace.stop()) end
]]

describe("the trace of a job", function()
  local folder
  before_each(function()
    folder = command.folder()
    command.write(folder .. "/r.lua", RECIPE)
  end)
  after_each(function() command.remove(folder) end)

  local function events_of(path)
    -- No part is left.
    assert.equal("", io.popen(("ls -A '%s' | grep rank-"):format(folder)):read "a")
    return core.json_decode(command.read(folder .. "/" .. path))
  end

  -- The spans of a row of a rank, in order.
  local function row_of(events, rank, thread)
    local list = {}
    for _, event in ipairs(events) do
      if event.ph == "X" and event.pid == rank and event.tid == thread then
        list[#list + 1] = event
      end
    end
    table.sort(list, function(a, b) return a.ts < b.ts end)
    return list
  end

  -- Steps do not overlap, though tasks of two steps do. An arrow leads from inside of a task of
  -- another row to the beginning of each collective of a bucket.
  local function check_rows(events, rank, collectives)
    local begun, ended, steps = {}, {}, nil
    for _, event in ipairs(events) do
      if event.pid == rank and event.name == "thread_name" and event.args.name == "steps" then
        steps = row_of(events, rank, event.tid)
      elseif event.pid == rank and event.ph == "s" then begun[event.id] = event
      elseif event.pid == rank and event.ph == "f" then ended[event.ts] = event end
    end
    assert.equal(3, #steps)
    for i = 2, 3 do
      assert.equal(("step %d"):format(i - 1), steps[i].name)
      -- Times are written in microseconds with three digits.
      assert.is_true(steps[i].ts >= steps[i - 1].ts + steps[i - 1].dur - 0.01)
    end
    for _, collective in ipairs(collectives) do
      local arrow = assert(ended[collective.ts], "a collective has no arrow")
      local from = assert(begun[arrow.id])
      assert.equal(collective.tid, arrow.tid)
      assert.equal("e", arrow.bp)
      assert.not_equal(from.tid, arrow.tid)
      assert.is_true(from.ts <= arrow.ts)
      local inside = false
      for _, task in ipairs(row_of(events, rank, from.tid)) do
        inside = inside or task.ts <= from.ts and from.ts <= task.ts + task.dur
      end
      assert.is_true(inside)
    end
  end

  local function check(events, ranks)
    local names, seen, collectives, threads, about = {}, {}, {}, {}, {}
    for _, event in ipairs(events) do
      if event.name == "process_name" then names[event.pid] = event.args.name end
      if event.name == "thread_name" then
        threads[event.pid .. "/" .. event.tid] = event.args.name
      end
      if event.name == "moonshard" then about[event.pid] = event.args end
      if event.ph == "X" then
        local args = event.args
        assert.is_true(event.dur >= 0)
        -- Viewers need numbers and categories.
        assert.equal("integer", math.type(event.tid))
        assert.equal(args.kind, event.cat)
        seen[event.pid] = seen[event.pid] or {}
        if args.label then seen[event.pid][args.label .. "/" .. event.name] = args end
        if event.name == "all_reduce" and args.bucket == 0 then
          collectives[event.pid] = collectives[event.pid] or {}
          table.insert(collectives[event.pid], event)
        end
        if threads[event.pid .. "/" .. event.tid] == "steps" then
          seen[event.pid][event.name] = args
        end
      end
    end
    for rank = 0, ranks - 1 do
      assert.equal(("rank %d"):format(rank), names[rank])
      assert.equal("r.lua", about[rank].recipe)
      assert.matches("^moonshard run r.lua ", about[rank].command)
      assert.matches("^%d%d%d%d%-%d%d%-%d%d %d%d:%d%d:%d%d UTC$", about[rank].date)
      assert.matches("%d+ threads", about[rank].machine)
      local own = seen[rank]
      -- Stages and links by name, with bytes and the line from which they come.
      assert.matches("r.lua:%d+$", own["bucket 0: stage 'twice'/mul"].script)
      assert.truthy(own["bucket 0: cast bf16/cast"] or own["bucket 0: cast bf16/copy"]
        or own["bucket 0: cast bf16/contiguous"], "cast is not there")
      assert.equal(0, own["bucket 0: stage 'twice'/mul"].bucket)
      assert.truthy(own["step 2"])
      assert.equal(3, #collectives[rank])
      assert.equal("comm", collectives[rank][1].args.kind)
      assert.equal((32 * 32 + 32) * 2, collectives[rank][1].args.bytes)
      assert.equal(0, collectives[rank][1].args.step)
      check_rows(events, rank, collectives[rank])
    end
    -- All ranks have one clock: they are in a collective at the same time.
    for i = 1, 3 do
      local from, to = 0, math.huge
      for rank = 0, ranks - 1 do
        local event = collectives[rank][i]
        from, to = math.max(from, event.ts), math.min(to, event.ts + event.dur)
      end
      assert.is_true(from <= to, ("collective %d"):format(i))
    end
  end

  for _, kind in ipairs { "", "--thread-ranks" } do
    it("has all ranks in one file" .. kind, function()
      -- A part of an earlier run with more ranks.
      command.write(folder .. "/t.json.rank-1", "[]")
      command.succeed(folder, ("run r.lua -n 2 %s --trace t.json"):format(kind))
      check(events_of "t.json", 2)
      local summary = core.json_decode(
        (command.succeed(folder, "trace t.json --json --html page.html")))
      assert.equal(2, summary.ranks)
      assert.equal(3, #summary.steps)
      assert.equal(6, #summary.rows)
      for _, row in ipairs(summary.rows) do
        assert.is_true(row.comm_ms > 0 and row.compute_ms > 0 and row.exposed_ms <= row.comm_ms
          and row.idle_ms >= 0)
        assert.is_true(row.compute_ms <= row.step_ms
          and row.idle_ms + row.exposed_ms <= row.step_ms)
      end
      assert.matches("rank ${rank}", command.read(folder .. "/page.html"), 1, true)
    end)
  end

  it("may be a recipe's own", function()
    command.succeed(folder, "run r.lua -n 3 own=mine.json")
    check(events_of "mine.json", 3)
  end)

  -- The wait for the tasks raises the error of the one that failed.
  it("is written where a task has failed, and the error is raised after that", function()
    command.write(folder .. "/fails.lua", [[
local ms = require "moonshard"
assert(ms.trace.start "mine.json")
ms.ones { 4, 2 }:index_select(1, ms.tensor({ 9 }, "i64"))
print(pcall(ms.trace.stop))
]])
    local out = command.succeed(folder, "run fails.lua")
    assert.matches("^false\tfails.lua:4: index_select: index 9 outside 0..3", out)
    local names = {}
    for _, event in ipairs(events_of "mine.json") do names[event.name] = true end
    assert.truthy(names.gather)
  end)

  it("has what the others did when a rank was killed", function()
    local code = command.run(folder, "run r.lua -n 2 kill=true --trace t.json")
    assert.equal(7, code)
    local pids = {}
    for _, event in ipairs(events_of "t.json") do pids[event.pid] = true end
    assert.same({ [0] = true }, pids)
  end)

  it("names the actions of a pipeline, their microbatches and their messages", function()
    command.write(folder .. "/pipe.lua", [[
      local ms = require "moonshard"
      local pipe = ms.pipeline { chunks = ms.nn.Linear(8, 8), microbatches = 2, schedule = "zb_h1" }
      for step in ms.steps(2) do
        pipe:step(ms.rand { 4, 8, seed = step }, ms.zeros { 4, dtype = "i64" })
      end]])
    command.succeed(folder, "run pipe.lua -n 2 --trace t.json")
    local tasks, ranges, messages, spans = {}, {}, {}, {}
    for _, event in ipairs(events_of "t.json") do
      local args = event.args or {}
      if event.ph == "X" and args.action then
        assert.equal(args.action:match "%d+$", tostring(args.microbatch))
        if args.kind == "range" then
          ranges[args.action] = (ranges[args.action] or 0) + 1
          spans[event.pid] = spans[event.pid] or {}
          table.insert(spans[event.pid], event)
          assert.equal(args.action, event.name)
        elseif args.kind == "comm" then messages[event.pid .. event.name .. args.action] = true
        elseif args.kind ~= "wait" then
          tasks[args.action] = true
          assert.equal(args.action:match "^%d+", tostring(event.pid))
        end
      end
    end
    -- The first chunk has no gradients of inputs.
    for _, action in ipairs { "0F0", "0F1", "0W0", "0W1", "1F0", "1F1", "1I0", "1I1", "1W0", "1W1" }
    do
      assert.equal(2, ranges[action], action)
      assert.is_true(tasks[action], action)
    end
    for _, name in ipairs { "0send0F0", "1recv0F0", "1send1I1", "0recv1I1" } do
      assert.is_true(messages[name], name)
    end
    -- An action's range has no waiting in it: those of a rank follow each other.
    for _, list in pairs(spans) do
      table.sort(list, function(a, b) return a.ts < b.ts end)
      for i = 2, #list do
        assert.is_true(list[i].ts >= list[i - 1].ts + list[i - 1].dur - 0.01)
      end
    end
  end)
end)
