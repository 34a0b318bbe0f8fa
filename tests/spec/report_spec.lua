-- ms.report: the times and rates in metrics.jsonl, which lines are shown, and the contents of the
-- file for every end of a loop. The clock is the test's own, so that every number is known.
local ms = require "moonshard"
local core = require "moonshard.core"
local command = require "command"

describe("ms.report", function()
  local folder, now, said, stdout, clock_ms, synchronize
  before_each(function()
    folder, now, said, stdout = command.folder(), 0, {}, io.stdout
    clock_ms, synchronize = core.clock_ms, core.synchronize
    core.clock_ms = function() return now end
    io.stdout = { -- luacheck: ignore 122
      write = function(self, ...)
        for _, text in ipairs { ... } do said[#said + 1] = text end
        return self
      end,
      flush = function() end,
    }
  end)
  after_each(function()
    core.clock_ms, core.synchronize = clock_ms, synchronize
    io.stdout = stdout -- luacheck: ignore 122
    command.remove(folder)
  end)

  local function report(options)
    options.run = folder
    -- Measuring the peak takes real time.
    local peak = require "moonshard.train.peak_flops"
    local flops = peak.flops
    peak.flops = function() return 1e9, false end
    local made = ms.report(options)
    peak.flops = flops
    return made
  end
  local function metrics() return command.metrics(folder) end

  it("gives a step the time until its end, and what runs outside of steps to none", function()
    local r = report { tokens = 100 }
    -- Work that is still queued when validation begins takes 40 ms, which counts as the steps'
    -- time, not the validation's.
    core.synchronize = function()
      now = now + 40
      return synchronize()
    end
    for step in ms.steps(6) do
      now = now + 10
      r:step { loss = step }
      if step % 2 == 1 then
        assert.equal("result", r:outside(function()
          ms.ones { 64, 64 }:matmul(ms.ones { 64, 64 })
          now = now + 1000
          return "result"
        end))
      end
    end
    r:close()
    local list = metrics()
    assert.equal(6, #list)
    -- A step without validation after it ends when the next one has been enqueued, here 10 ms
    -- later; a step with validation ends after the wait.
    local expected = { 20, 40, 20, 40, 20, 40 }
    local sum = 0
    for i, entry in ipairs(list) do
      sum = sum + entry.ms_step
      assert.near(expected[i], entry.ms_step, 1e-9)
      assert.equal(0, entry.mfu)                               -- the products are the validation's
    end
    assert.near(6 * 10 + 3 * 40, sum, 1e-9)
    -- Rates are means over the steps after the first three.
    assert.near(100 / 0.040, list[4].tok_s, 1e-6)
    assert.near(100 / 0.030, list[5].tok_s, 1e-6)
    assert.near(100 / (0.100 / 3), list[6].tok_s, 1e-6)
  end)

  it("divides the FLOPs of a step by its time and the machine's peak", function()
    local r = report { tokens = 1 }
    local x = ms.ones { 100, 100 }:keep()
    for _ in ms.steps(3) do
      x:matmul(x)
      now = now + 4
      r:step { loss = 0 }
      r:outside(function() end)
    end
    r:close()
    -- 2 * 100^3 FLOPs in 4 ms, of 1e9 a second.
    for _, entry in ipairs(metrics()) do assert.near(0.5, entry.mfu, 1e-9) end
  end)

  ---------------------------------------------------------------------------- lines, off a terminal

  -- The steps whose lines were shown by a loop of so many steps of so many milliseconds each.
  local function shown(options, count, ms_step, first)
    said = {}
    local r = report(options)
    for step in ms.steps(count, first) do
      now = now + ms_step
      r:step { loss = step }
    end
    r:close()
    local list = {}
    for step in table.concat(said):gmatch "step +(%d+)" do
      list[#list + 1] = math.tointeger(step)
    end
    assert.equal(count - (first or 0), #metrics())             -- the file has every step
    command.remove(folder)
    return list
  end

  -- 0 to 9, and then from, from + every ... to, and the last one.
  local function lines(from, every, to, last)
    local list = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 }
    for step = from, to, every do list[#list + 1] = step end
    if list[#list] ~= last then list[#list + 1] = last end
    return list
  end

  it("shows the first 10 steps, then a line every 10 s or 1% of the steps, whichever is \z
    rarer", function()
    -- 2 steps are 1%, 10 steps are 10 s
    assert.same(lines(19, 10, 199, 199), shown({ total = 200 }, 200, 1000))
    -- 10 steps are 1%, 5 steps are 10 s
    assert.same(lines(19, 10, 999, 999), shown({ total = 1000 }, 1000, 2000))
    -- 100 steps are 10 s
    assert.same(lines(109, 100, 499, 499), shown({ total = 500 }, 500, 100))
    -- Without a known total number of steps.
    assert.same(lines(29, 20, 49, 59), shown({}, 60, 500))
    assert.same({ 0, 1, 2, 3, 4 }, shown({ total = 5 }, 5, 1))
    -- A resumed run shows its own first steps.
    assert.same({ 90, 91, 92, 93, 94, 95, 96, 97, 98, 99, 119 }, shown({ total = 120 }, 120, 1, 90))
  end)

  it("shows a line each so many steps where that was asked for, and the last one", function()
    assert.same({ 0, 7, 14, 19 }, shown({ total = 20, every = 7 }, 20, 1))
    assert.same({ 0, 7, 14, 19 }, shown({ every = 7 }, 20, 1))
    local launch = require "moonshard.base.launch"
    finally(function() launch.log_every = nil end)
    launch.log_every = 9                                       -- --log-every takes precedence
    assert.same({ 0, 9, 18, 19 }, shown({ total = 20, every = 7 }, 20, 1))
    for name, value in pairs { every = 0, total = 1.5, tokens = "many" } do
      assert.error_matches(function() report { [name] = value } end,
        ("report: %s must be an integer of 1 or more, not %s"):format(name, value))
    end
  end)

  ------------------------------------------------------------------------------------ metrics.jsonl

  local function file_steps()
    local list = {}
    for i, entry in ipairs(metrics()) do list[i] = entry.step end
    return list
  end

  it("has the last step however a loop is left, without close", function()
    local r = report {}
    for step in ms.steps(3) do r:step { loss = step } end
    assert.same({ 0, 1, 2 }, file_steps())
    for step in ms.steps(9, 3) do
      r:step { loss = step }
      if step == 4 then break end
    end
    assert.same({ 0, 1, 2, 3, 4 }, file_steps())
    local metric = ms.metric "of_step"
    assert.error_matches(function()
      for step in ms.steps(9, 5) do
        if step == 7 then error "broken" end
        metric:push(10 * step)
        r:step { loss = ms.full(step, {}) }
      end
    end, "broken")
    local list = metrics()
    assert.equal(7, #list)
    assert.same({ 6, 6, 60 }, { list[7].step, list[7].loss, list[7].of_step })
  end)

  it("has what was reported outside of loops of ms.steps when the program ends", function()
    io.stdout = stdout -- luacheck: ignore 122
    command.write(folder .. "/r.lua", [[
      local ms = require "moonshard"
      ms.report { run = "." }:step { loss = ms.full(7, {}) }]])
    command.succeed(folder, "run r.lua")
    assert.same({ 1, 0, 7 }, { #metrics(), metrics()[1].step, metrics()[1].loss })
  end)

  it("is cut at the step at which a loop goes on, and what was left of a line goes too", function()
    local r = report {}
    for step in ms.steps(6) do r:step { loss = step } end
    r:close()
    local text = command.read(folder .. "/metrics.jsonl")
    command.write(folder .. "/metrics.jsonl", text .. '{"step":6,"lo')
    r, said = report {}, {}
    for step in ms.steps(6, 4) do r:step { loss = 10 * step } end
    assert.same({ 0, 1, 2, 3, 4, 5 }, file_steps())
    assert.same({ 3, 40, 50 }, { metrics()[4].loss, metrics()[5].loss, metrics()[6].loss })
    assert.matches("3 lines of [^\n]*metrics.jsonl were removed: this run begins at step 4\n",
      table.concat(said))
    -- No line is removed before a new line is written.
    report {}
    for _ in ms.steps(2) do end
    assert.same({ 0, 1, 2, 3, 4, 5 }, file_steps())
    -- A loop that starts again in the same folder replaces the old lines.
    r = report {}
    for step in ms.steps(2) do r:step { loss = step } end
    assert.same({ 0, 1 }, file_steps())
  end)

  it("does not keep reports that have no reference any more", function()
    local seen, count = setmetatable({}, { __mode = "k" }), 0
    for round = 1, 3 do
      local r = report {}
      seen[r], count = round, count + 1
      for step in ms.steps(2) do r:step { loss = step } end
      if round == 2 then r:close() end
    end
    local train = require "moonshard.train.report".report
    local module = require "moonshard.train.report"
    module.report = function(...)
      local r = train(...)
      seen[r], count = "train", count + 1
      return r
    end
    finally(function() module.report = train end)
    local model = ms.nn.Linear(2, 2)
    for round = 1, 2 do
      ms.train {
        model = model,
        optimizer = ms.optim.sgd(model, { lr = 0.1 }),
        steps = 2,
        run = folder .. "/train" .. round,
        data = function() return ms.ones { 4, 2 }, ms.zeros { 4, 2 } end,
        loss = function(m, x, y) return m(x):mse_loss(y) end,
      }
    end
    assert.equal(5, count)
    collectgarbage()
    collectgarbage()
    assert.is_nil(next(seen))
  end)
end)
