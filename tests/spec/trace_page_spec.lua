-- The page of moonshard trace, opened in a real browser: its first view, and the effect of keys,
-- wheel and fingers. Needs chromium; without it the tests are reported as pending.
local browser = require "browser"
local command = require "command"
local core = require "moonshard.core"

-- Three steps of 1 ms, 1 ms apart, on two ranks: thread numbers as in every trace, with their
-- names.
local function events()
  local list = {}
  for rank = 0, 1 do
    for thread, name in ipairs { "steps", "compute", "comm1" } do
      list[#list + 1] = {
        ph = "M", name = "thread_name", pid = rank, tid = thread - 1, args = { name = name },
      }
    end
    list[#list + 1] = {
      ph = "M",
      name = "moonshard",
      pid = rank,
      args = {
        recipe = "a<b>.lua", command = "moonshard run a<b>.lua", date = "2026-11-22 10:00:00 UTC",
        machine = "an abacus",
      },
    }
    for step = 0, 2 do
      local begin = 1000 + step * 2000
      local function span(thread, name, kind, from, to)
        list[#list + 1] = {
          ph = "X", pid = rank, tid = thread, name = name, cat = kind, ts = from, dur = to - from,
          args = { kind = kind, step = step },
        }
      end
      span(0, "step " .. step, "step", begin, begin + 1000)
      span(1, "matmul", "compute", begin, begin + 600)
      span(2, "all_reduce", "comm", begin + 300, begin + 1000)
    end
  end
  return list
end

-- The output of a script in the opened page, and the document. js: statements that call say(...);
-- address: text that is appended to the page's address; list: other events.
local function open(folder, js, address, list)
  command.write(folder .. "/t.json", core.json_encode(list or events()))
  command.succeed(folder, "trace t.json --html page.html")
  local names = [[
    const press = name => key(canvas, name);
    const touch = (type, id, x) => pointer(canvas, type, id, x, 40);
    const view = () => say(from.toFixed(0), to.toFixed(0));
  ]]
  return browser.open(folder, command.read(folder .. "/page.html"), names .. js, address)
end

describe("the page of a trace in a browser", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  local test = browser.tests(it, pending)

  test("opens at the second step, has drawn it, and says what ran", function()
    local said, dom = open(folder, [[
      view();
      const ratio = window.devicePixelRatio || 1;
      const pixel = (x, row) =>
        [...pen.getImageData(x * ratio, (yOf(row) + 10) * ratio, 1, 1).data].slice(0, 3).join(",");
      say(data.rows.map(r => r.join(":")).join(" "));
      say(pixel(xOf(2100), 1));
      say(document.activeElement === canvas);
    ]])
    assert.equal("1970 3030|0:steps 0:compute 0:comm1 1:steps 1:compute 1:comm1|76,120,168|true",
      said)
    assert.truthy(dom:find("<dt>recipe</dt><dd>a&lt;b&gt;.lua</dd>", 1, true))
    for _, text in ipairs {
      "2026-11-22 10:00:00 UTC", "an abacus", "moonshard run a&lt;b&gt;.lua",
    } do
      assert.truthy(dom:find("<dd>" .. text, 1, true), text)
    end
  end)

  test("moves and zooms by keys", function()
    local said = open(folder, [[
      press("n"); view(); press("p"); view(); press("p"); view();
      press("0"); view(); press("+"); view(); press("-"); view();
      press("n"); press("ArrowRight"); press("ArrowLeft"); press("Home"); view();
      press("+"); press("ArrowRight"); view(); say(location.hash);
    ]])
    assert.equal(
      "3940 5000|1970 3030|0 1060|0 5000|1250 3750|0 5000|0 5000|1750 4250|#1750.000-4250.000",
      said)
  end)

  test("zooms by two fingers and by the wheel, and is dragged by one", function()
    local said = open(folder, [[
      press("0");
      const x = t => left + t / 5000 * width();
      touch("pointerdown", 1, x(2000)); touch("pointerdown", 2, x(3000));
      touch("pointermove", 2, x(4000)); view();
      touch("pointerup", 1, x(2000)); touch("pointerup", 2, x(4000));
      const before = from, length = to - from;
      touch("pointerdown", 3, 500); touch("pointermove", 3, 400); touch("pointerup", 3, 400);
      say(Math.abs(from - before - 100 / width() * length) < 1 ? "moved" : "not moved");
      touch("pointermove", 3, 200); say(to - from === length ? "let go" : "held");
      canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: -1000, cancelable: true }));
      say(to - from < length / 2 ? "nearer" : "as far");
    ]])
    assert.equal("1500 4000|moved|let go|nearer", said)
  end)

  test("has a color for each microbatch of a pipeline, and a shade for its backward", function()
    local list = events()
    for micro = 0, 1 do
      for i, kind in ipairs { "F", "B", "W" } do
        local from = 4000 + 300 * micro + 100 * i
        list[#list + 1] = {
          ph = "X", pid = 0, tid = 1, name = "mul", cat = "compute", ts = from, dur = 100,
          args = {
            kind = "compute", step = 1, action = ("3%s%d"):format(kind, micro), microbatch = micro,
          },
        }
      end
    end
    local said, dom = open(folder, [[
      const all = actions.map(colorOf);
      say(new Set(all).size);
      const hue = color => +color.match(/[(]([0-9.]+)/)[1];
      for (const i of [0, 3]) say(all.slice(i, i + 3).every(c => hue(c) === hue(all[i])));
      say(Math.abs(hue(all[0]) - hue(all[3])) > 60);
      say(data.spans.filter(s => !s[6]).every(s => colorOf(s) === colors[s.at(4)]));
      const ratio = window.devicePixelRatio || 1;
      const pixel = t => [...pen.getImageData(xOf(t) * ratio, (yOf(1) + 3) * ratio, 1, 1).data];
      const light = t => pixel(t).slice(0, 3).reduce((a, b) => a + b);
      say(light(3150) > light(3250) + 100, light(3450) > light(3550) + 100);
      say(byId("key").textContent);
    ]], "#3000-3700", list)
    assert.equal("6|true|true|true|true|true true|computecommoptimizercopywaitsteprange\z
      microbatch 0microbatch 1forwardbackwardgradients of weights", said)
    assert.truthy(dom:find("hsl(30, 75%, 68%)", 1, true))
  end)

  test("opens where its address says", function()
    assert.equal("100 200", (open(folder, "view();", "#100-200")))
  end)
end)
