-- moonshard plot and moonshard runs: what they say of runs, and the page in a real browser.
local browser = require "browser"
local command = require "command"
local core = require "moonshard.core"

-- A line goes down from 4 to 0 in 101 steps; "other" is constant, and not finite once.
local function write_run(folder, name, about, count)
  assert(core.make_directory(folder .. "/" .. name))
  local lines = {}
  for step = 0, (count or 101) - 1 do
    lines[#lines + 1] = core.json_encode {
      step = step, loss = 4 - step / 25, other = step == 50 and 0 / 0 or 7,
      val_loss = step % 20 == 0 and math.abs(step - 40) / 10 + 1 or nil, links = { 1 },
    }
  end
  lines[#lines + 1] = '{"step": 101, "lo' -- of a process that was killed
  command.write(folder .. "/" .. name .. "/metrics.jsonl", table.concat(lines, "\n"))
  if about then
    command.write(folder .. "/" .. name .. "/run.json", core.json_encode(about))
  end
end

-- A run of 8 steps. In step 4 it runs a command.
local RECIPE = [[
local ms = require "moonshard"
local cfg = ms.config { run = "out", fail = -1, shell = "", rate = 0.1 }
local model = ms.nn.Linear(2, 2)
local x, y = ms.ones { 4, 2 }, ms.zeros { 4, 2 }
local function batch() return x, y end
local net = ms.world_size() > 1 and ms.ddp(model) or model
ms.train {
  model = net, optimizer = ms.optim.sgd(net, { lr = cfg.rate }), data = batch, steps = 8,
  run = cfg.run, loss = function(m, a, b) return m(a):mse_loss(b) end,
  save = { every = 100 },
  before_step = function(step)
    if step == cfg.fail then error "it fails" end
    if step == 4 and cfg.shell ~= "" then os.execute(cfg.shell) end
  end,
}
]]

describe("moonshard plot", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  local function plot(arguments, environment)
    local code, out, err = command.run(folder, "plot " .. arguments,
      environment or "LC_ALL=C.UTF-8")
    assert.equal(0, code, err)
    local lines = {}
    for line in (out .. "\n"):gmatch "(.-)\n" do lines[#lines + 1] = line end
    return lines, out
  end

  local function fails(arguments, code, text)
    local given, _, err = command.run(folder, "plot " .. arguments)
    assert.equal(code, given, err)
    assert.truthy(err:find(text, 1, true), err)
  end

  it("draws a line in letters where the terminal lacks Unicode", function()
    write_run(folder, "a")
    local lines = plot("a --key loss --height 5 --width 31", "LC_ALL=C")
    assert.same({
      "          loss",
      "        4|***",
      "         |  ******",
      "        2|       *****",
      "         |           ******",
      "        0|                ****",
      "          0                100",
    }, table.move(lines, 1, 7, 1, {}))
    assert.equal("          last 0 at step 100, least 0 at step 100", lines[8])
  end)

  it("draws dots that fit the width, and says what is not finite", function()
    write_run(folder, "a")
    local lines = plot "a --key other,loss --width 40"
    assert.equal("          last 7 at step 100, least 7 at step 0; 1 not finite", lines[17])
    assert.truthy(table.concat(lines, "\n", 2, 15):find "\u{2502}\xe2[\xa0-\xa3]")
    for i = 2, 15 do assert.is_true(utf8.len(lines[i]) <= 40, lines[i]) end
    -- A falling line: each row begins to the right of the one above.
    local before = 0
    for i = 20, 33 do
      local blank = utf8.len(lines[i]:match "\u{2502}( *)")
      assert.is_true(blank > before or i == 20, lines[i])
      before = blank
    end
  end)

  it("shows losses of several runs unless told otherwise, each in its letter", function()
    write_run(folder, "a")
    write_run(folder, "b", nil, 51)
    local _, out = plot "a b/"
    assert.truthy(out:find("* a: last 0 at step 100, least 0 at step 100", 1, true))
    assert.truthy(out:find("+ b: last 2 at step 50, least 2 at step 50", 1, true))
    assert.truthy(out:find("val_loss", 1, true))
    assert.is_nil(out:find("other", 1, true))
  end)

  it("smooths as Adam corrects its means, and draws logarithms", function()
    write_run(folder, "a", nil, 3)
    -- 4, 3.96, 3.92 with weight 0.5: (0.25 * 4 + 0.5 * 3.96 ...) / 0.875
    local mean = (0.125 * 4 + 0.25 * 3.96 + 0.5 * 3.92) / 0.875
    local _, out = plot "a --key loss --smooth 0.5 --log"
    assert.truthy(out:find(("last %.4g at step 2"):format(mean), 1, true), out)
    assert.truthy(out:find("loss, smoothed by 0.5 (logarithmic)", 1, true), out)
  end)

  it("says what is missing or wrong", function()
    write_run(folder, "a")
    assert(core.make_directory(folder .. "/empty"))
    assert(core.make_directory(folder .. "/begun"))
    command.write(folder .. "/begun/metrics.jsonl", "")
    command.write(folder .. "/page.html", "mine")
    fails("", 2, "which runs?")
    fails("none", 3, "there is no folder 'none'")
    fails("page.html", 3, "'page.html' is a file")
    fails("empty", 3, "'empty' is not the folder of a run: it has no metrics.jsonl")
    fails("begun", 3, "there are no metrics in 'begun' yet")
    fails("a --key los", 2, "--key los: no run has it: did you mean loss?")
    fails("a --key zzzzzz", 2, "there are loss, other, val_loss")
    fails("a --smooth 1", 2, "from 0 to below 1")
    fails("a --follow", 2, "--follow needs a terminal, or --html PAGE")
    fails("a --html page.html", 2, "'page.html' exists: name another page, or --force")
    assert.equal("mine", command.read(folder .. "/page.html"))
    plot "a --html page.html --force"
    assert.truthy(command.read(folder .. "/page.html"):find("<!DOCTYPE html>", 1, true))
  end)

  it("keeps the peaks of a long run on its page", function()
    assert(core.make_directory(folder .. "/long"))
    local lines = {}
    for step = 0, 19999 do
      local loss = step == 12345 and 99 or 1 + step % 2
      lines[#lines + 1] = ('{"loss":%g,"step":%d}'):format(loss, step)
    end
    command.write(folder .. "/long/metrics.jsonl", table.concat(lines, "\n"))
    plot "long --html page.html"
    local page = command.read(folder .. "/page.html")
    assert.truthy(page:find("the greatest value of each part", 1, true))
    local data = core.json_decode((page:match "const data = (.-);\n"))
    local steps, values = table.unpack(data.runs[1].series.loss)
    assert.is_true(#steps <= 4000)
    local found
    for i, value in ipairs(values) do if value == 99 then found = steps[i] end end
    assert.equal(12345, found)
  end)

  -- The run starts the command that follows it, and goes on once there is a page.
  it("follows a run until it ends", function()
    local follow = ("'%s' plot out --html page.html --follow >told 2>&1 & \z
      until grep -qs 'follow.:true' page.html; do :; done"):format(command.program)
    command.write(folder .. "/r.lua", RECIPE)
    command.succeed(folder, ("run r.lua shell=%q"):format(follow))
    assert(os.execute(("cd '%s' && until [ -s told ]; do :; done"):format(folder)))
    assert.equal("page.html shows 1 run\n", command.read(folder .. "/told"))
    local page = command.read(folder .. "/page.html")
    assert.truthy(page:find('"follow":false', 1, true))
    local data = core.json_decode((page:match "const data = (.-);\n"))
    assert.equal("done", data.runs[1].state)
    assert.equal(8, #data.runs[1].series.loss[1])
  end)
end)

describe("moonshard runs", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  it("tells states, results, and what was set", function()
    command.write(folder .. "/r.lua", RECIPE)
    local function run(name, options)
      return (command.run(folder, ("run r.lua run=runs/%s %s"):format(name, options)))
    end
    assert.equal(0, run("done", ""))
    assert.equal(1, run("failed", "fail=3 rate=0.5"))
    assert.equal(1, run("two", "-n 2 fail=3"))
    assert.equal(75, run("stopped", "shell='kill -TERM $PPID'"))
    assert.equal(137, run("killed", "shell='kill -KILL $PPID'"))
    assert.equal(0, run("running", ("shell=%q"):format(
      ("'%s' runs --json >seen"):format(command.program))))
    local seen = {}
    for line in command.read(folder .. "/seen"):gmatch "[^\n]+" do
      local one = core.json_decode(line)
      seen[one.run] = one
    end
    for name, state in pairs {
      done = "done", failed = "failed (1)", two = "failed (1)", stopped = "stopped (75)",
      killed = "killed", running = "running",
    } do
      assert.equal(state, seen["runs/" .. name].state, name)
    end
    assert.matches("it fails", seen["runs/failed"].message)
    assert.matches("it fails", seen["runs/two"].message)
    assert.equal(0.5, seen["runs/failed"].settings.rate)
    assert.equal(2, seen["runs/two"].ranks)
    assert.equal(7, seen["runs/done"].step)
    assert.is_nil(seen["runs/done"].settings.run)
    local lines = {}
    for line in (command.succeed(folder, "runs")):gmatch "[^\n]+" do lines[#lines + 1] = line end
    assert.matches("^run +state +steps +loss +best val_loss +started +settings$", lines[1])
    assert.matches("^runs/done +done +8/8 +[%d.]+ +%- +%d+%-%d+%-%d+ ..:..$", lines[2])
    assert.matches(" ..:..  fail=3 rate=0.5$", lines[3])
    assert.same({ fail = 3, rate = 0.5, run = "runs/failed" }, seen["runs/failed"].set)
    -- An older version did not note what was set.
    local about = core.json_decode(command.read(folder .. "/runs/failed/run.json"))
    about.set = nil
    command.write(folder .. "/runs/failed/run.json", core.json_encode(about))
    assert.matches("\nruns/failed [^\n]* ..:..  fail=3 rate=0.5 shell=\"\"\n",
      (command.succeed(folder, "runs")))
  end)

  it("cuts its lines at the edge of a terminal", function()
    command.write(folder .. "/r.lua", RECIPE)
    assert.equal(0, (command.run(folder, "run r.lua run=runs/one rate=0.25")))
    os.execute(command.terminal(command.line(folder, "runs"), folder .. "/typescript",
      { columns = 70 }) .. " </dev/null >/dev/null")
    local line = command.read(folder .. "/typescript"):match "\n(runs/one[^\r\n]*)"
    assert.equal(70, utf8.len(line), line)
    assert.matches("…$", line)
  end)

  it("lists runs without run.json, and says where there are none", function()
    local code, _, err = command.run(folder, "runs")
    assert.equal(3, code)
    assert.matches("there are no runs in %.:", err)
    write_run(folder, "a/old")
    assert.matches("a/old +unknown +101 +0.0000 +1.0000 at 40 +%-\n",
      (command.succeed(folder, "runs .")))
    code, _, err = command.run(folder, "runs none")
    assert.equal(3, code)
    assert.matches("none", err)
  end)

  -- All is of other programs here: each field of another type, numbers without measure, names that
  -- would change the terminal.
  it("tell of folders that others wrote, and show no control characters", function()
    assert(core.make_directory(folder .. "/runs"))
    write_run(folder, "runs/good", { code = 0, started = 1700000000 }, 3)
    local cases = {
      { code = { 1 } }, { code = "0" }, { code = 1e308 }, { started = {} }, { started = 1e308 },
      { started = 1 << 62 }, { settings = 0 }, { settings = { rate = { 1 } } }, { steps = { {} } },
      { ranks = "two" }, { recipe = 3 }, { message = { "no" }, code = 1 }, { ended = true },
      { settings = { ["\27[2J"] = "\27]0;title\7" }, recipe = "\27[31m" },
    }
    for i, about in ipairs(cases) do write_run(folder, "runs/case" .. i, about, 3) end
    write_run(folder, "runs/red\27[31m\xff", { code = 0 }, 3)
    command.write(folder .. "/runs/red\27[31m\xff/metrics.jsonl",
      '{"step":0,"loss":1e308,"\\u001b[2Jkey":1}\n{"step":1,"loss":-1e308}\n'
      .. '{"step":9223372036854775807,"loss":1}\n{"step":-1,"loss":1}\n'
      .. '{"step":9007199254740991,"loss":1.7976931348623157e308}\n')
    local out = command.succeed(folder, "runs")
    assert.is_nil(out:find "[\0-\9\11-\31\127\xff]")
    assert.matches("runs/good +done", out)
    assert.matches("runs/red\\x1b%[31m\\xff +done", out)
    for i = 1, #cases do assert.matches("runs/case" .. i .. " ", out) end
    local lines = 0
    for line in (command.succeed(folder, "runs --json")):gmatch "[^\n]+" do
      assert(core.json_decode(line))
      lines = lines + 1
    end
    assert.equal(#cases + 2, lines)
    for _, options in ipairs {
      "", "--log ", "--ascii ", "--smooth 0.9 ", "--html page.html --force ",
    } do
      local _, shown = command.run(folder, "plot " .. options .. "runs/*", "LC_ALL=C.UTF-8")
      assert.is_nil(shown:find "[\0-\9\11-\31\127\xff]")
      for name in pairs { good = 1, case1 = 1, case14 = 1 } do
        if not options:find "html" then assert.matches("runs/" .. name .. ":", shown) end
      end
    end
    assert.matches("\\x1b%[2Jkey", (command.succeed(folder,
      "plot --key '\27[2Jkey' runs/red*", "LC_ALL=C.UTF-8")))
  end)

  it("lists the runs beside one that cannot be read", function()
    write_run(folder, "runs/good", { code = 0 }, 3)
    write_run(folder, "runs/no", { code = 0 }, 3)
    os.remove(folder .. "/runs/no/metrics.jsonl")
    assert(core.make_directory(folder .. "/runs/no/metrics.jsonl"))
    local code, out, err = command.run(folder, "runs")
    assert.equal(3, code)
    assert.matches("runs/good +done", out)
    assert.matches("moonshard: .*runs/no/metrics.jsonl", err)
  end)

  it("are not written by two processes at once", function()
    command.write(folder .. "/loop.lua", [[
      local ms = require "moonshard"
      local cfg = ms.config { shell = "" }
      local report = ms.report { run = "out" }
      for step in ms.steps(2) do report:step { loss = 1 } end
      os.execute(cfg.shell)
    ]])
    command.succeed(folder, ("run loop.lua shell=%q"):format(
      ("'%s' run loop.lua 2>told; '%s' runs out >state"):format(command.program, command.program)))
    assert.matches("report: 'out/lock' is locked by process %d+", command.read(folder .. "/told"))
    assert.matches("out +running", command.read(folder .. "/state"))
    assert.matches("out +done", (command.succeed(folder, "runs out")))
  end)
end)

describe("the page of moonshard plot in a browser", function()
  local folder
  before_each(function()
    folder = command.folder()
    write_run(folder, "a<b", {
      started = 1795500000, code = 5, message = "rank 1 </script> left",
      settings = { lr = 1, x = 2 },
    })
    write_run(folder, "c", { started = 1795500000, code = 0, settings = { lr = 1, x = 3 } }, 51)
  end)
  after_each(function() command.remove(folder) end)

  local test = browser.tests(it, pending)

  local function open(js, address, size)
    command.succeed(folder, "plot 'a<b' c --html page.html --force")
    return browser.open(folder, command.read(folder .. "/page.html"), js, address, size)
  end

  test("draws each run in its color, and compares settings", function()
    local said, document = open [[
      say(charts.map(chart => chart.key).join(","));
      const ratio = window.devicePixelRatio || 1;
      const has = (chart, color) => {
        const [r, g, b] = color.match(/\w\w/g).map(x => parseInt(x, 16));
        const all = chart.pen.getImageData(0, 0, chart.canvas.width, chart.canvas.height).data;
        let found = 0;
        for (let i = 0; i < all.length; i += 4)
          if (Math.abs(all[i] - r) + Math.abs(all[i + 1] - g) + Math.abs(all[i + 2] - b) < 30)
            found++;
        return found > 100;
      };
      say(has(charts[0], colors[0]), has(charts[0], colors[1]), has(charts[0], colors[2]));
      document.querySelectorAll("#key input")[1].click();
      say(has(charts[0], colors[0]), has(charts[0], colors[1]));
      say(document.querySelectorAll("tr.differs").length);
      const rows = () => document.querySelectorAll("#settings tr").length;
      const before = rows(); byId("same").click(); say(before - rows());
    ]]
    assert.equal("loss,val_loss,other|true true false|true false|1|1", said)
    assert.truthy(document:find("<span>a&lt;b (failed (5))</span>", 1, true))
    assert.truthy(document:find("<td>failed (5): rank 1 &lt;/script&gt; left</td>", 1, true))
  end)

  test("marks one step in all charts, zooms them together, and keeps the view", function()
    local said = open [[
      const at = step => xOf(charts[0], step);
      const move = (type, x) => pointer(charts[0].canvas, type, 1, x, 50);
      move("pointermove", at(40));
      say(charts[0].tip.textContent.replace(/\n/g, ";"));
      say(charts[1].tip.textContent.replace(/\n/g, ";"));
      const [x, y] = [at(20), at(60)];
      move("pointerdown", x); move("pointermove", y); move("pointerup", y);
      say(window_().join(" ")); say(Math.round(stepOf(charts[1], xOf(charts[1], 30))));
      byId("smooth").value = 0.5; byId("smooth").dispatchEvent(new Event("input"));
      byId("log").click();
      say(decodeURIComponent(location.hash));
      charts[0].canvas.dispatchEvent(new MouseEvent("dblclick")); say(window_().join(" "));
    ]]
    assert.equal("a<b, step 40: 2.4;c, step 40: 2.4|a<b, step 40: 1;c, step 40: 1|20 60|30|"
      .. '#{"smooth":0.5,"log":true,"same":false,"off":[],"from":20,"to":60}|0 100',
      (said:gsub("&lt;", "<"):gsub("&gt;", ">")))
    said = open("say(window_().join(' '), state.log, byId('smooth').value)",
      "#%7B%22smooth%22%3A0.5%2C%22log%22%3Atrue%2C%22from%22%3A20%2C%22to%22%3A60%7D")
    assert.equal("20 60 true 0.5", said)
  end)

  test("fits a phone", function()
    local said = open("say(document.documentElement.scrollWidth <= innerWidth, \z
      charts[0].canvas.clientWidth > 200)", nil, "390,800")
    assert.equal("true true", said)
  end)
end)
