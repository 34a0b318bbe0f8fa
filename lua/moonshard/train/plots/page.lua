-- The page of moonshard plot --html: charts of one run or several, in one file without other
-- resources.
local core = require "moonshard.core"
local html = require "moonshard.base.html"
local read = require "moonshard.train.plots.read"

local STYLE = [==[
h1 { font-size: 18px } h2 { font-size: 15px; margin: 0 0 4px }
#tools, #key { display: flex; flex-wrap: wrap; gap: 6px 18px; align-items: center; margin: 8px 0 }
#key i { display: inline-block; width: 14px; height: 4px; margin: 0 5px 3px 2px }
#charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(430px, 100%), 1fr));
  gap: 18px }
.chart { position: relative; min-width: 0 }
canvas { height: 240px; touch-action: pan-y }
.tip { font-size: 12px; min-height: 1.4em; color: var(--faint); white-space: pre-wrap }
.table { overflow-x: auto; margin-top: 20px }
table { border-collapse: collapse; font-size: 13px }
th, td { text-align: left; padding: 3px 12px 3px 0; border-bottom: 1px solid var(--line) }
tr.differs td, tr.differs th { background: var(--mark) }
p { color: var(--faint) }
]==]

local BODY = [==[
<h1>@title@</h1>
<div id="tools">
<label>smoothing <input id="smooth" type="range" min="0" max="0.99" step="0.01">
<output id="smoothed"></output></label>
<label><input id="log" type="checkbox"> logarithmic</label>
<label><input id="same" type="checkbox"> only settings that differ</label>
</div>
<div id="key"></div>
<div id="charts"></div>
<p>Drag over a chart: zoom all to these steps. Double click: all steps.@thinned@</p>
<div class="table"><table id="settings"></table></div>
]==]

-- All charts show the same steps: the pointer marks one step in all of them, and a drag zooms all.
-- The part of the address after # keeps the view while a followed page loads itself again.
local SCRIPT = [==[
// data.runs: { name, state, about: [[name, value]], settings: {name: text}, series: {key: [steps,
// values]} }; a value that is not finite is null.
const colors = Object.values(hues);
const color = i => colors[i % colors.length];
const state = { smooth: data.smooth, log: data.log, same: false, off: [], from: null, to: null };
try { Object.assign(state, JSON.parse(decodeURIComponent(location.hash.slice(1)))); } catch (e) {}
function keep() {
  try {
    history.replaceState(null, "", "#" + encodeURIComponent(JSON.stringify(state)));
  } catch (e) {}
}
let whole = [Infinity, -Infinity];
for (const run of data.runs)
  for (const key of data.keys)
    if (run.series[key]) {
      const steps = run.series[key][0];
      whole = [Math.min(whole[0], steps[0]), Math.max(whole[1], steps[steps.length - 1])];
    }
const window_ = () => state.from === null ? whole : [state.from, state.to];

// The moving mean, corrected for its beginning; as moonshard plot --smooth.
function smooth(values, factor) {
  let mean = 0, weight = 0;
  return values.map(v => {
    if (v === null) return null;
    mean = factor * mean + (1 - factor) * v;
    weight = factor * weight + (1 - factor);
    return mean / weight;
  });
}
const text = v => v === null ? "not finite" : v === 0 || Math.abs(v) >= 1e-3 && Math.abs(v) < 1e6
  ? String(+v.toPrecision(5)) : v.toExponential(3);

const charts = data.keys.map(key => {
  const box = document.createElement("div");
  box.className = "chart";
  box.innerHTML = "<h2></h2><canvas role='img'></canvas><div class='tip'></div>";
  box.querySelector("h2").textContent = key;
  const canvas = box.querySelector("canvas");
  canvas.setAttribute("aria-label", key + " by step");
  byId("charts").append(box);
  return { key, canvas, pen: canvas.getContext("2d"), tip: box.querySelector(".tip") };
});
const left = 58, bottom = 20, top_ = 6;
const shown = i => !state.off.includes(data.runs[i].name);
const xOf = (chart, step) => {
  const [from, to] = window_();
  return left + (step - from) / Math.max(to - from, 1) * (chart.canvas.clientWidth - left - 8);
};
const stepOf = (chart, x) => {
  const [from, to] = window_();
  return from + (x - left) / (chart.canvas.clientWidth - left - 8) * Math.max(to - from, 1);
};

// Lines of a chart: of each run that is shown, its values and their moving mean.
function linesOf(chart) {
  return data.runs.flatMap((run, i) => {
    const series = run.series[chart.key];
    if (!series || !shown(i)) return [];
    return [{ i, run, steps: series[0], raw: series[1], values: smooth(series[1], state.smooth) }];
  });
}
function limits(chart) {
  const [from, to] = window_();
  let low = Infinity, high = -Infinity;
  for (const line of chart.lines)
    for (let n = 0; n < line.steps.length; n++)
      for (const v of [line.raw[n], line.values[n]])
        if (v !== null && line.steps[n] >= from && line.steps[n] <= to && (v > 0 || !state.log)) {
          low = Math.min(low, v);
          high = Math.max(high, v);
        }
  if (low > high) return null;
  if (state.log) [low, high] = [Math.log10(low), Math.log10(high)];
  // Equal, or apart by rounding only.
  if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high)))
    [low, high] = [low - 0.5, high + 0.5];
  return [low, high];
}
// Round numbers between two limits.
function ticks(low, high, count) {
  const raw = (high - low) / count, power = Math.pow(10, Math.floor(Math.log10(raw)));
  const unit = power * [1, 2, 5, 10].find(f => f * power >= raw);
  const list = [];
  for (let v = Math.ceil(low / unit) * unit; v <= high + unit / 1e6; v += unit) list.push(v);
  return list;
}
function draw(chart) {
  const { canvas, pen } = chart, wide = canvas.clientWidth, tall = canvas.clientHeight;
  clear(canvas, pen, wide, tall);
  chart.lines = linesOf(chart);
  const box = limits(chart);
  if (!box) return;
  const yOf = v => top_ + (box[1] - (state.log ? Math.log10(v) : v)) / (box[1] - box[0])
    * (tall - top_ - bottom);
  chart.yOf = yOf;
  const put = (t, x, y, align) => { pen.textAlign = align; pen.fillText(t, x, y); };
  for (const v of ticks(box[0], box[1], 5)) {
    const real = state.log ? Math.pow(10, v) : v, y = yOf(real);
    pen.fillStyle = tone("line");
    pen.fillRect(left, y, wide - left, 1);
    pen.fillStyle = tone("faint");
    put(text(real), left - 6, y, "right");
  }
  const [from, to] = window_();
  for (const step of ticks(from, Math.max(to, from + 1), 5)) {
    if (step === Math.round(step)) put(String(step), xOf(chart, step), tall - 8, "center");
  }
  pen.save();
  pen.beginPath();
  pen.rect(left, 0, wide - left, tall - bottom + 2);
  pen.clip();
  const stroke = (line, values, alpha, width) => {
    pen.beginPath();
    let on = false;
    for (let n = 0; n < values.length; n++) {
      const v = values[n];
      if (v === null || state.log && v <= 0) { on = false; continue; }
      const x = xOf(chart, line.steps[n]), y = yOf(v);
      if (on) pen.lineTo(x, y); else pen.moveTo(x, y);
      if (!on && (n + 1 === values.length || values[n + 1] === null)) pen.arc(x, y, 1.5, 0, 7);
      on = true;
    }
    pen.globalAlpha = alpha;
    pen.lineWidth = width;
    pen.strokeStyle = color(line.i);
    pen.stroke();
    pen.globalAlpha = 1;
  };
  for (const line of chart.lines) {
    if (state.smooth > 0) stroke(line, line.raw, 0.3, 1);
    stroke(line, line.values, 1, 1.6);
  }
  pen.restore();
}
// The place of the step that is nearest.
function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - steps[low - 1] <= steps[low] - step ? low - 1 : low;
}
// Marks a step in all charts and tells its values; null: no step.
function mark(step) {
  for (const chart of charts) {
    draw(chart);
    chart.tip.textContent = "";
    if (step === null || !chart.yOf) continue;
    const words = [];
    for (const line of chart.lines) {
      const n = nearest(line.steps, step), x = xOf(chart, line.steps[n]);
      chart.pen.fillStyle = tone("faint");
      chart.pen.fillRect(x, top_, 1, chart.canvas.clientHeight - bottom - top_);
      const v = line.values[n];
      if (v !== null && (v > 0 || !state.log)) {
        chart.pen.fillStyle = color(line.i);
        chart.pen.beginPath();
        chart.pen.arc(x, chart.yOf(v), 3.5, 0, 7);
        chart.pen.fill();
      }
      const means = state.smooth > 0 ? ", mean " + text(v) : "";
      words.push(`${line.run.name}, step ${line.steps[n]}: ${text(line.raw[n])}${means}`);
    }
    chart.tip.textContent = words.join("\n");
  }
}
const drawAll = () => mark(null);
for (const chart of charts) {
  let began = null;
  chart.canvas.addEventListener("pointerdown", e => { began = e.offsetX; });
  chart.canvas.addEventListener("pointermove", e => {
    mark(stepOf(chart, e.offsetX));
    if (began !== null) {
      chart.pen.fillStyle = "rgba(128, 128, 128, 0.25)";
      chart.pen.fillRect(Math.min(began, e.offsetX), top_, Math.abs(e.offsetX - began),
        chart.canvas.clientHeight - bottom - top_);
    }
  });
  chart.canvas.addEventListener("pointerup", e => {
    const from = stepOf(chart, Math.min(began ?? e.offsetX, e.offsetX));
    const to = stepOf(chart, Math.max(began ?? e.offsetX, e.offsetX));
    if (began !== null && Math.abs(e.offsetX - began) > 5) {
      state.from = Math.max(Math.floor(from), whole[0]);
      state.to = Math.min(Math.ceil(to), whole[1]);
      keep();
      drawAll();
    }
    began = null;
  });
  chart.canvas.addEventListener("pointerleave", () => { began = null; drawAll(); });
  chart.canvas.addEventListener("dblclick", () => {
    state.from = state.to = null;
    keep();
    drawAll();
  });
}
data.runs.forEach((run, i) => {
  const label = document.createElement("label");
  label.innerHTML = "<input type='checkbox'><i></i><span></span>";
  label.querySelector("i").style.background = color(i);
  label.querySelector("span").textContent = `${run.name} (${run.state})`;
  const input = label.querySelector("input");
  input.checked = shown(i);
  input.addEventListener("change", () => {
    state.off = state.off.filter(name => name !== run.name);
    if (!input.checked) state.off.push(run.name);
    keep();
    drawAll();
  });
  byId("key").append(label);
});
function table() {
  const names = [...new Set(data.runs.flatMap(run => Object.keys(run.settings)))].sort();
  const rows = [["", ...data.runs.map(run => run.name)]];
  for (const name of data.about) rows.push([name, ...data.runs.map(run => run.about[name] ?? "")]);
  const parts = rows.map(row => ({ row, differs: false }));
  for (const name of names) {
    const row = data.runs.map(run => run.settings[name] ?? "");
    const differs = row.some(v => v !== row[0]);
    if (differs || !state.same) parts.push({ row: [name, ...row], differs });
  }
  byId("settings").replaceChildren(...parts.map(({ row, differs }) => {
    const line = document.createElement("tr");
    if (differs) line.className = "differs";
    row.forEach((word, n) => {
      const cell = document.createElement(n === 0 ? "th" : "td");
      cell.textContent = word;
      line.append(cell);
    });
    return line;
  }));
}
byId("smooth").value = state.smooth;
byId("log").checked = state.log;
byId("same").checked = state.same;
byId("smoothed").textContent = state.smooth;
byId("smooth").addEventListener("input", e => {
  state.smooth = +e.target.value;
  byId("smoothed").textContent = state.smooth;
  keep();
  drawAll();
});
byId("log").addEventListener("change", e => { state.log = e.target.checked; keep(); drawAll(); });
byId("same").addEventListener("change", e => { state.same = e.target.checked; keep(); table(); });
window.addEventListener("resize", drawAll);
table();
drawAll();
if (data.follow) setTimeout(() => location.reload(), 3000);
]==]

local POINTS <const> = 4000 -- of a series: more would not be seen
local ABOUT <const> = { "state", "recipe", "command", "ranks", "steps", "started", "version" }

-- Steps and values as JSON lists. Of a long series the least and the greatest of equal parts stay,
-- so that no peak is lost. Returns whether anything was left out.
local function listed(series)
  local steps, values = core.json_list {}, core.json_list {}
  local count = #series.steps
  local function add(i)
    local value = series.values[i]
    steps[#steps + 1] = series.steps[i]
    values[#values + 1] = value == value and value or core.json_null
  end
  if count <= POINTS then
    for i = 1, count do add(i) end
    return core.json_list { steps, values }, false
  end
  local parts = POINTS // 2
  for part = 0, parts - 1 do
    local first, last = part * count // parts + 1, (part + 1) * count // parts
    local low, high = first, first
    for i = first, last do
      local value = series.values[i]
      -- A value that is not finite stays, so that the gap is seen.
      if value ~= value then low = i
      elseif series.values[low] == series.values[low] and value < series.values[low] then
        low = i
      end
      if not (value <= series.values[high]) then high = i end
    end
    add(math.min(low, high))
    if low ~= high then add(math.max(low, high)) end
  end
  return core.json_list { steps, values }, true
end

-- Keys in the order of their charts: what most look at first.
local FIRST <const> = { loss = 1, val_loss = 2, lr = 3, grad_norm = 4, tok_s = 5 }
local function keys_of(runs)
  local list = core.json_list((read.keys(runs)))
  table.sort(list, function(a, b)
    local x, y = FIRST[a] or 9, FIRST[b] or 9
    if x ~= y then return x < y end
    return a < b
  end)
  return list
end

local function about_of(run)
  local known, result = run.about, {}
  for _, name in ipairs(ABOUT) do
    local value = known[name]
    if name == "started" and value then value = os.date("%Y-%m-%d %H:%M:%S", value) end
    if value ~= nil then result[name] = tostring(value) end
  end
  result.state = run.state .. (known.message and ": " .. known.message or "")
  return result
end

--- The page as text.
---@param runs ms.RunRecord[]
---@param options { smooth: number, log?: boolean, keys?: string[], follow?: boolean }
---@return string
return function(runs, options)
  local list, names, thinned = core.json_list {}, {}, false
  local keys = options.keys and core.json_list(options.keys) or keys_of(runs)
  for i, run in ipairs(runs) do
    local settings, series = {}, {}
    for name, value in pairs(run.about.settings or {}) do settings[name] = tostring(value) end
    for _, key in ipairs(keys) do
      if run.series[key] then
        local less
        series[key], less = listed(run.series[key])
        thinned = thinned or less
      end
    end
    names[i] = read.printable(run.path)
    list[i] = {
      name = names[i], state = run.state, about = about_of(run), settings = settings,
      series = series,
    }
  end
  local title = table.concat(names, ", ")
  return html.page {
    title = title,
    style = STYLE,
    body = html.filled(BODY, {
      title = html.escaped(title),
      thinned = thinned
        and " Of long runs, the least and the greatest value of each part are shown." or "",
    }),
    script = SCRIPT,
    data = {
      runs = list, keys = keys, about = core.json_list(ABOUT), smooth = options.smooth,
      log = options.log == true, follow = options.follow == true,
    },
  }
end
