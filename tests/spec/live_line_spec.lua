-- The live line of a run on a terminal, which `script` provides. The output is interpreted as a
-- terminal would show it.
local command = require "command"
local core = require "moonshard.core"

local RECIPE = [[
local ms = require "moonshard"
local cfg = ms.config {
  steps = 12, narrow = -1, columns = 30, say = false, fail = -1, lua_warns = -1, leave = -1,
  log_every = 0, hand = false,
}
local model = ms.nn.Linear(2, 2)
local function batch() return ms.ones { 4, 2 }, ms.zeros { 4, 2 } end
local function after_step(step)
  if step == cfg.narrow then assert(os.execute("stty -F /dev/tty cols " .. cfg.columns)) end
  if cfg.say and step % 5 == 1 then
    ms.log("logged at %d", step)
    ms.warn("warned at %d", step)
    print("printed", step)
  end
  if step == cfg.lua_warns then warn "a finalizer failed" end
  if step == cfg.fail then error "broken" end
  if step == cfg.leave then os.exit(9) end
end
if cfg.hand then
  local report = ms.report { run = "hand", total = 100 }
  for step in ms.steps(cfg.steps) do
    report:step { loss = step }
    after_step(step)
  end
else
  ms.train {
    by_hand = true,
    model = model,
    optimizer = ms.optim.adamw(model, { lr = 0.1 }),
    data = batch,
    steps = cfg.steps,
    run = "out",
    loss = function(m, x, y) return m(x):mse_loss(y) end,
    clip = 1.0,
    log_every = cfg.log_every > 0 and cfg.log_every or nil,
    after_step = after_step,
  }
  print "the recipe ends"
end
]]

describe("the live line", function()
  local folder
  before_each(function()
    folder = command.folder()
    command.write(folder .. "/r.lua", RECIPE)
  end)
  after_each(function() command.remove(folder) end)

  -- Runs it on a terminal of so many columns. The rows that the terminal shows at the end, and each
  -- text that a row has had.
  local function run(columns, options)
    local file = folder .. "/typescript"
    os.execute(command.terminal(command.line(folder, "run r.lua " .. options), file,
      { columns = columns, code = true }) .. " </dev/null >/dev/null")
    local text = assert(command.read(file)):gsub("^Script started[^\n]*\n", "")
    local rows = {}
    for row in text:gmatch "([^\n]*)\n" do
      local states = { "" }
      for state in (row:gsub("\r$", "") .. "\r"):gmatch "([^\r]*)\r" do
        -- Each text in place begins at the left edge and clears the row first.
        local cleared = state:match "^\27%[K(.*)$"
        if cleared then states[#states + 1] = cleared
        elseif state ~= "" then states[#states] = states[#states] .. state end
      end
      rows[#rows + 1] = { states = states, text = states[#states] }
    end
    return rows, text
  end

  local function steps_of(rows)
    local list = {}
    for _, row in ipairs(rows) do
      for _, state in ipairs(row.states) do
        if state:match "^step " then
          list[#list + 1] = { step = math.tointeger(state:match "^step +(%d+)"), text = state }
        end
      end
    end
    return list
  end

  local function row_of(rows, text)
    for i, row in ipairs(rows) do if row.text == text then return i end end
    error(("no row is '%s'"):format(text), 2)
  end

  it("shows each step in one row, cut to the terminal at whole values", function()
    local wide = steps_of((run(200, "")))
    assert.equal(12, #wide)
    assert.matches("^step +11/12  loss %S+  eta 0:00  %S+ tok/s  %S+ ms  norm %S+  lr %S+  \z
      mfu %d+%%  mem %d+ MiB$", wide[12].text)
    local rows = run(40, "")
    local narrow = steps_of(rows)
    assert.equal(12, #narrow)
    for i, shown in ipairs(narrow) do
      assert.equal(i - 1, shown.step)
      assert.truthy(#shown.text < 40, shown.text)
      assert.matches(i <= 3 and "^step +%d+/12  loss %d+%.%d%d%d%d  norm %d+%.%d%d%d$"
        or "^step +%d+/12  loss %d+%.%d%d%d%d  eta %d+:%d%d$", shown.text)
    end
    -- One row has all lines of steps, and other text begins a new row.
    local last = row_of(rows, narrow[12].text)
    assert.equal(12, #rows[last].states - 1)
    assert.equal("the recipe ends", rows[last + 1].text)
    for _, shown in ipairs(steps_of((run(9, "")))) do assert.equal(8, #shown.text) end
  end)

  it("follows the terminal when its size changes", function()
    local list = steps_of((run(100, "narrow=4")))
    assert.equal(12, #list)
    for _, shown in ipairs(list) do
      -- A step is shown when the next one has been enqueued: from the change on it must fit.
      if shown.step < 4 then assert.truthy(#shown.text > 30 and #shown.text < 100, shown.text)
      else assert.truthy(#shown.text < 30, shown.text) end
    end
  end)

  it("gives what is logged, warned or printed a row of its own", function()
    local rows = run(100, "say=true")
    for _, step in ipairs { 1, 6, 11 } do
      local at = row_of(rows, ("logged at %d"):format(step))
      assert.matches(("^step +%d/12 "):format(step - 1), rows[at - 1].text)
      assert.equal(("moonshard: rank 0: warned at %d"):format(step), rows[at + 1].text)
      assert.matches(("^printed +%d$"):format(step), (rows[at + 2].text:gsub("\t", " ")))
    end
    -- Messages of Lua itself and of the engine's C code clear the row.
    rows = run(100, "lua_warns=6")
    local states = rows[row_of(rows, "moonshard: rank 0: a finalizer failed")].states
    assert.matches("^step +5/12 ", states[#states - 1])
    -- Another rank's warning clears the row, which may show the line of rank 0.
    rows = run(100, "-n 2 say=true")
    for rank = 0, 1 do
      local count = 0
      for _, row in ipairs(rows) do
        for _, state in ipairs(row.states) do
          if state == ("moonshard: rank %d: warned at 6"):format(rank) then count = count + 1 end
        end
      end
      assert.equal(1, count, tostring(rank))
    end
  end)

  it("is ended by an error, by os.exit and by the end of a loop by hand", function()
    local rows = run(100, "fail=5")
    local at = row_of(rows, "moonshard: r.lua:16: broken")
    assert.matches("^step +5/12 ", rows[at - 1].text)
    rows = run(100, "leave=5")
    at = row_of(rows, "ended 9")
    assert.matches("^step +5/12 ", rows[at - 1].text)
    assert.equal(6, #command.metrics(folder .. "/out-2"))
    rows = run(100, "hand=true steps=7")
    at = row_of(rows, "ended 0")
    assert.matches("^step +6/100 ", rows[at - 1].text)
    assert.equal(7, #command.metrics(folder .. "/hand"))
  end)

  it("is shown each so many steps where that was asked for", function()
    local function numbers(options)
      local list = {}
      for i, shown in ipairs(steps_of((run(100, options)))) do list[i] = shown.step end
      return list
    end
    assert.same({ 0, 4, 8, 11 }, numbers "log_every=4")
    assert.same({ 0, 5, 10, 11 }, numbers "--log-every 5 log_every=4")
  end)

  it("is none without a terminal: whole lines, and log_every and --log-every choose \z
    which", function()
    local function numbers(options)
      local out, list = command.succeed(folder, "run r.lua " .. options), {}
      assert.is_nil(out:find("\27", 1, true))
      for step in out:gmatch "%f[^\n]step +(%d+)/" do list[#list + 1] = math.tointeger(step) end
      return list
    end
    -- Steps that take far less than 10 s: the first ten, and the last.
    assert.same({ 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 29 }, numbers "steps=30")
    assert.same({ 0, 10, 20, 29 }, numbers "steps=30 log_every=10")
    assert.same({ 0, 15, 29 }, numbers "steps=30 --log-every 15 log_every=10")
    assert.equal(30, #command.metrics(folder .. "/out"))
    local code, _, err = command.run(folder, "run r.lua --log-every 0")
    assert.equal(2, code)
    assert.matches("1 or more is expected, not '0'", err)
    assert.truthy(core.exists(folder .. "/out-2"))
  end)
end)
