-- moonshard trace: the times of a step, from spans with known sums; and the page.
local command = require "command"
local core = require "moonshard.core"

local function task(rank, stream, kind, step, from, to, more)
  local args = { kind = kind, step = step }
  for key, value in pairs(more or {}) do args[key] = value end
  return {
    ph = "X", pid = rank, tid = stream, name = kind .. "_task", ts = from, dur = to - from,
    args = args,
  }
end

-- Microseconds. Rank 0 communicates 0.7 ms of step 3, 0.2 of them exposed; the gap after its
-- optimizer is filled by step 4. Rank 1 only communicates.
local EVENTS = {
  { ph = "M", name = "process_name", pid = 0, args = { name = "rank 0" } },
  task(0, "compute", "compute", nil, -5000, -4000),
  task(0, "compute", "compute", 3, 0, 1000),
  task(0, "world", "comm", 3, 800, 1500,
    { bytes = 4096, label = "bucket 1, wte.weight", script = "a</script><b>.lua:7" }),
  task(0, "compute", "wait", 3, 1000, 1200, { of = "world" }),
  task(0, "compute", "compute", 3, 1200, 2000),
  task(0, "optimizer", "optimizer", 3, 2000, 2300),
  task(0, "compute", "copy", 3, 2400, 2500),
  task(0, "compute", "compute", 4, 2350, 3350),
  task(0, "steps", "step", 3, 0, 2500),
  task(1, "world", "comm", 3, 100, 900),
}

describe("moonshard trace", function()
  local folder
  before_each(function()
    folder = command.folder()
    command.write(folder .. "/t.json", core.json_encode(EVENTS))
  end)
  after_each(function() command.remove(folder) end)

  local function near(expected, row)
    for key, value in pairs(expected) do
      assert.is_true(math.abs(row[key] - value) < 1e-9,
        ("%s is %s, not %s"):format(key, row[key], value))
    end
  end

  it("adds up each step's spans", function()
    local summary = core.json_decode((command.succeed(folder, "trace t.json --json")))
    assert.equal(2, summary.ranks)
    assert.equal(3, #summary.rows)
    local first = {
      rank = 0, step = 3, step_ms = 2.5, compute_ms = 1.9, comm_ms = 0.7, exposed_ms = 0.2,
      optimizer_ms = 0.3, idle_ms = 0.05, overlap_percent = 500 / 7,
    }
    near(first, summary.rows[1])
    near({
      rank = 0, step = 4, step_ms = 1, compute_ms = 1, comm_ms = 0, exposed_ms = 0,
      optimizer_ms = 0, idle_ms = 0,
    }, summary.rows[2])
    assert.is_nil(summary.rows[2].overlap_percent)
    near({
      rank = 1, step = 3, step_ms = 0.8, compute_ms = 0, comm_ms = 0.8, exposed_ms = 0.8,
      optimizer_ms = 0, idle_ms = 0, overlap_percent = 0,
    }, summary.rows[3])
    near({
      step = 3, step_ms = 1.65, compute_ms = 0.95, comm_ms = 0.75, exposed_ms = 0.5,
      optimizer_ms = 0.15, idle_ms = 0.025, overlap_percent = 100 / 3,
    }, summary.steps[1])
    near({ step_ms = 1.325, compute_ms = 0.975, comm_ms = 0.375, exposed_ms = 0.25 }, summary.mean)
  end)

  it("shows a table", function()
    local lines = {}
    for line in command.succeed(folder, "trace t.json"):gmatch "[^\n]+" do
      lines[#lines + 1] = line
    end
    assert.equal(11, #lines)
    assert.matches("^2 ranks", lines[1])
    assert.matches("^ +step +ms +compute +communication +exposed +optimizer +idle +overlap$",
      lines[2])
    assert.matches("^ +3 +1.65 +0.95 +0.75 +0.50 +0.15 +0.0[23] +33%%$", lines[3])
    assert.matches("^ +4 +1.00 +1.00 +0.00 +0.00 +0.00 +0.00 +%-$", lines[4])
    assert.matches("^ +mean ", lines[5])
    assert.equal("tasks of all steps, all ranks together; share: of the time of all tasks",
      lines[6])
    assert.matches("^operator +kind +calls +total ms +mean ms +share$", lines[7])
    assert.matches("^compute_task +compute +3 +2.80 +0.9333 +59.6%%$", lines[8])
    assert.matches("^comm_task +comm +2 +1.50 +0.7500 +31.9%%$", lines[9])
    assert.matches("^copy_task +copy +1 +0.10 +0.1000 +2.1%%$", lines[11])
  end)

  it("leaves the first two steps out of means where three others are left", function()
    local list = {}
    for step = 0, 4 do
      list[#list + 1] = task(0, "compute", "compute", step, step * 10000,
        step * 10000 + (step < 2 and 9000 or 1000))
    end
    command.write(folder .. "/t.json", core.json_encode(list))
    local summary = core.json_decode((command.succeed(folder, "trace t.json --json")))
    near({ step_ms = 1, from_step = 2 }, summary.mean)
    assert.equal(1, #summary.operators)
    near({ calls = 3, total_ms = 3, mean_ms = 1, share = 100 }, summary.operators[1])
    assert.matches("tasks of steps 2 to 4 %(as the mean%), all ranks",
      (command.succeed(folder, "trace t.json")))
  end)

  it("takes a run without steps as one", function()
    command.write(folder .. "/t.json", core.json_encode {
      task(0, "compute", "compute", nil, 0, 10), task(0, "compute", "compute", nil, 30, 40),
    })
    local summary = core.json_decode((command.succeed(folder, "trace t.json --json")))
    near({ step = -1, step_ms = 0.04, compute_ms = 0.02, idle_ms = 0.02 }, summary.rows[1])
    assert.matches("\n +all +0.04 +0.02 ", (command.succeed(folder, "trace t.json")))
  end)

  it("draws a page that needs nothing else", function()
    command.succeed(folder, "trace t.json --html page.html")
    local page = command.read(folder .. "/page.html")
    assert.matches("^<!DOCTYPE html>", page)
    assert.is_nil(page:match "https?://")
    assert.is_nil(page:match "@%l+@")
    -- Text of the trace must not end an element of the page.
    assert.equal(1, select(2, page:gsub("</script", "")))
    local data = core.json_decode(page:match "\nconst data = (%b{});\n")
    assert.same(
      { { 0, "steps" }, { 0, "compute" }, { 0, "world" }, { 0, "optimizer" }, { 1, "world" } },
      data.rows)
    assert.equal(#EVENTS - 1, #data.spans)
    -- Row, microseconds from the earliest, duration, name, kind, and the rest as text.
    local found
    for _, span in ipairs(data.spans) do
      if span[5] == "comm" and span[1] == 2 then found = span end
    end
    assert.same({
      2, 5800.0, 700.0, "comm_task", "comm",
      "bucket 1, wte.weight\n4096 bytes\nstep 3\na</script><b>.lua:7",
    }, found)
    assert.matches("<pre>2 ranks, milliseconds", page)
  end)

  it("tells the page which microbatch of a pipeline a task is of", function()
    command.write(folder .. "/t.json", core.json_encode {
      task(0, "compute", "compute", 0, 0, 10, { label = "2F1", action = "2F1", microbatch = 1 }),
    })
    command.succeed(folder, "trace t.json --html page.html")
    local data = core.json_decode(command.read(folder .. "/page.html"):match
      "\nconst data = (%b{});\n")
    assert.same({ 0, 0.0, 10.0, "compute_task", "compute", "2F1\nstep 0", "2F1", 1 },
      data.spans[1])
  end)

  it("says what is wrong with a file", function()
    local function refuses(text, expected)
      command.write(folder .. "/bad.json", text)
      local code, _, err = command.run(folder, "trace bad.json")
      assert.equal(3, code, err)
      assert.matches(expected, err)
    end
    refuses("no json", "bad.json is no trace: ")
    refuses("[]", "bad.json: it has no tasks")
    refuses('[{"ph":"X","name":"f"}]',
      "bad.json is no trace of Moonshard: event 1 lacks a time or a rank")
    assert.equal(3, (command.run(folder, "trace nowhere.json")))
    assert.equal(2, (command.run(folder, "trace")))
    local code, _, err = command.run(folder, "trace t.json --html nowhere/page.html")
    assert.equal(3, code)
    assert.matches("nowhere/page.html", err)
  end)
end)
