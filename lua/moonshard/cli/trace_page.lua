-- The page of moonshard trace --html: a trace as a timeline, in one file without other resources.
local core = require "moonshard.core"
local html = require "moonshard.base.html"

local STYLE = [==[
#key { margin-bottom: 6px }
#key span { display: inline-block; margin-right: 14px }
#key i { display: inline-block; width: 10px; height: 10px; margin-right: 4px }
#box { position: relative }
pre { overflow-x: auto }
canvas { border: 1px solid var(--line); touch-action: none }
canvas:focus { outline: 2px solid #4c78a8 }
dl { display: grid; grid-template-columns: max-content auto; gap: 2px 12px }
dt { color: var(--faint) } dd { margin: 0 }
#tip {
  position: absolute; display: none; pointer-events: none; z-index: 1; white-space: pre;
  color: var(--back); background: var(--ink); padding: 4px 7px; border-radius: 3px; font-size: 12px
}
]==]

local BODY = [==[
<h2>@title@</h2>
<dl>@about@</dl>
<div id="key"></div>
<div id="box">
<canvas id="picture" tabindex="0" role="img" aria-label="timeline of all ranks and streams">
</canvas>
<div id="tip"></div>
</div>
<p>Wheel, two fingers, + and -: zoom. Drag, left and right: move. n and p: the next step, the one
before. Double click, 0: everything.</p>
<pre>@table@</pre>
]==]

-- Rows are streams, grouped by rank. Pointers (mouse, pen, fingers) and keys move the shown window
-- [from, to). The address has the window, so that a view can be shared. The page opens at the
-- second step, because the first one allocates memory and makes plans.
local SCRIPT = [==[
// data.rows: [rank, stream]; data.spans: [row, microseconds from the beginning, duration, name,
// kind, more, action and microbatch of a pipeline or nothing]
const colors = {
  compute: hues.blue, comm: hues.red, optimizer: hues.green, copy: "#9ecae9", wait: "#d8d8d8",
  step: hues.yellow, range: hues.purple,
};
// Each microbatch has a hue: neighbours are far apart. Forwards are light, backwards dark; of a
// backward in two parts the one for inputs is dark, and the one for weights grey.
const kindOf = s => s[6].match(/[FBIW]/)[0];
const shades = { F: "75%, 68%", B: "65%, 40%", I: "65%, 40%", W: "25%, 52%" };
const ofMicrobatch = (number, kind) =>
  `hsl(${(number * 137.5 + 30) % 360}, ${shades[kind]})`;
const colorOf = s => s[6] ? ofMicrobatch(s[7], kindOf(s)) : colors[s[4]] || "#888";
const canvas = byId("picture"), tip = byId("tip");
const pen = canvas.getContext("2d");
const left = 150, top_ = 22, height = 20, gap = 3;
let whole = 1;
for (const s of data.spans) whole = Math.max(whole, s[1] + s[2]);
const steps = data.spans
  .filter(s => s[4] === "step" && s[0] === data.spans.find(o => o[4] === "step")[0])
  .sort((a, b) => a[1] - b[1]);
let from = 0, to = whole;
function explain(color, text) {
  const entry = `<span><i style="background:${color}"></i>${text}</span>`;
  byId("key").insertAdjacentHTML("beforeend", entry);
}
for (const kind of Object.keys(colors)) explain(colors[kind], kind);
const actions = data.spans.filter(s => s[6]);
const microbatches = [...new Set(actions.map(s => s[7]))].sort((a, b) => a - b);
const MOST_KEYS = 12;
for (const number of microbatches.slice(0, MOST_KEYS)) {
  explain(ofMicrobatch(number, "F"), `microbatch ${number}`);
}
if (microbatches.length > MOST_KEYS) explain("none", `... ${microbatches.at(-1)}`);
for (const [kind, text] of [["F", "forward"], ["B", "backward"], ["I", "gradients of inputs"],
  ["W", "gradients of weights"]]) {
  if (actions.some(s => kindOf(s) === kind)) explain(ofMicrobatch(microbatches[0], kind), text);
}
const yOf = row => top_ + row * (height + gap);
const width = () => canvas.clientWidth - left;
const xOf = t => left + (t - from) / (to - from) * width();
const tOf = x => from + (x - left) / width() * (to - from);
function draw() {
  const tall = yOf(data.rows.length) + 4;
  canvas.style.height = tall + "px";
  clear(canvas, pen, canvas.clientWidth, tall);
  const unit = Math.pow(10, Math.ceil(Math.log10((to - from) / 10)));
  for (let t = Math.ceil(from / unit) * unit; t <= to; t += unit) {
    pen.fillStyle = tone("line");
    pen.fillRect(xOf(t), top_ - 6, 1, tall);
    pen.fillStyle = tone("faint");
    pen.fillText(+(t / 1000).toFixed(3) + " ms", xOf(t) + 3, 9);
  }
  pen.save();
  pen.beginPath();
  pen.rect(left, 0, width(), tall);
  pen.clip();
  for (const span of data.spans) {
    const [row, begin, length, name, kind] = span;
    if (begin + length < from || begin > to) continue;
    const x = xOf(begin), w = Math.max(xOf(begin + length) - x, 0.6);
    pen.fillStyle = colorOf(span);
    pen.fillRect(x, yOf(row), w > 4 ? w - 1 : w, height);
    if (w > 40) {
      const isLight = span[6] ? kindOf(span) === "F" : ["wait", "copy", "step"].includes(kind);
      pen.fillStyle = isLight ? "#333" : "#fff";
      pen.fillText(name, Math.max(x, left) + 3, yOf(row) + height / 2, w - 6);
    }
  }
  pen.restore();
  data.rows.forEach(([rank, stream], row) => {
    if (row && data.rows[row - 1][0] !== rank) {
      pen.fillStyle = tone("faint");
      pen.fillRect(0, yOf(row) - 2, canvas.clientWidth, 1);
    }
    pen.fillStyle = tone("ink");
    pen.fillText(`rank ${rank}: ${stream}`, 4, yOf(row) + height / 2, left - 8);
  });
}
function limit(a, b) {
  const length = Math.min(b - a, whole);
  from = Math.max(0, Math.min(a, whole - length));
  to = from + length;
  history.replaceState(null, "", `#${from.toFixed(3)}-${to.toFixed(3)}`);
  draw();
}
// So that t stays where it is.
function zoom(t, factor) {
  const length = Math.max((to - from) * factor, 0.05);
  limit(t - (t - from) * length / (to - from), t + (to - t) * length / (to - from));
}
function show(step) {
  if (!step) return;
  const margin = step[2] * 0.03;
  limit(step[1] - margin, step[1] + step[2] + margin);
}
canvas.addEventListener("wheel", e => {
  e.preventDefault();
  zoom(tOf(e.offsetX), Math.exp(e.deltaY * 0.0015));
}, { passive: false });
// Where each pointer that is down was last: one moves, two zoom around their middle.
const down = new Map();
canvas.addEventListener("pointerdown", e => {
  try { canvas.setPointerCapture(e.pointerId); } catch { /* it is gone already */ }
  down.set(e.pointerId, e.offsetX);
  point(e);
});
for (const end of ["pointerup", "pointercancel"]) {
  canvas.addEventListener(end, e => down.delete(e.pointerId));
}
canvas.addEventListener("dblclick", () => limit(0, whole));
canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
canvas.addEventListener("pointermove", e => {
  const before = down.get(e.pointerId), other = [...down].find(([id]) => id !== e.pointerId);
  if (before !== undefined && other) {
    const [, x] = other;
    const wide = Math.max(Math.abs(before - x), 1), wider = Math.max(Math.abs(e.offsetX - x), 1);
    zoom(tOf((e.offsetX + x) / 2), wide / wider);
  } else if (before !== undefined) {
    const move = (before - e.offsetX) / width() * (to - from);
    limit(from + move, to + move);
  }
  if (before !== undefined) down.set(e.pointerId, e.offsetX);
  point(e);
});
canvas.addEventListener("keydown", e => {
  const length = to - from, middle = (from + to) / 2, slack = length * 0.05;
  const keys = {
    ArrowLeft: () => limit(from - length / 5, to - length / 5),
    ArrowRight: () => limit(from + length / 5, to + length / 5),
    "+": () => zoom(middle, 0.5), "=": () => zoom(middle, 0.5), ArrowUp: () => zoom(middle, 0.5),
    "-": () => zoom(middle, 2), ArrowDown: () => zoom(middle, 2),
    "0": () => limit(0, whole), Home: () => limit(0, whole),
    n: () => show(steps.find(s => s[1] > from + slack)),
    p: () => show(steps.findLast(s => s[1] < from - slack)),
  };
  if (!keys[e.key] || e.ctrlKey || e.metaKey || e.altKey) return;
  e.preventDefault();
  keys[e.key]();
});
function point(e) {
  const t = tOf(e.offsetX), slack = (to - from) / width();
  const row = Math.floor((e.offsetY - top_) / (height + gap));
  const hit = data.spans.findLast(
    s => s[0] === row && s[1] - slack <= t && t <= s[1] + s[2] + slack);
  tip.style.display = hit ? "block" : "none";
  if (!hit) return;
  const long = (hit[2] / 1000).toFixed(4), at = (hit[1] / 1000).toFixed(4);
  const more = hit[5] ? "\n" + hit[5] : "";
  tip.textContent = `${hit[3]} (${hit[4]})\n${long} ms, at ${at} ms${more}`;
  tip.style.left = Math.min(e.offsetX + 14, canvas.clientWidth - 260) + "px";
  tip.style.top = e.offsetY + 14 + "px";
}
window.addEventListener("resize", draw);
const asked = location.hash.match(/^#([\d.]+)-([\d.]+)$/);
if (asked) limit(+asked[1], +asked[2]);
else if (steps.length > 1) show(steps[1]);
else draw();
canvas.focus({ preventScroll: true });
]==]

-- The details that the pointer shows besides name, kind and time.
local function more_of(args)
  local parts = {}
  if args.label then parts[#parts + 1] = args.label end
  if args.of then parts[#parts + 1] = "for stream " .. args.of end
  if args.bytes and args.bytes > 0 then parts[#parts + 1] = ("%d bytes"):format(args.bytes) end
  if args.step and args.kind ~= "step" then parts[#parts + 1] = ("step %d"):format(args.step) end
  if args.script then parts[#parts + 1] = args.script end
  return table.concat(parts, "\n")
end

-- Steps and ranges are above the streams of their rank; streams are in the order of their first
-- tasks.
local FIRST = { steps = -2, ranges = -1 }

-- Names of threads by "pid/tid", and the first rank's description of the run.
local function metadata_of(events)
  local names, about = {}, nil
  for _, event in ipairs(events) do
    if event.ph == "M" and type(event.args) == "table" then
      if event.name == "thread_name" then
        names[event.pid .. "/" .. tostring(event.tid)] = event.args.name
      end
      if event.name == "moonshard" then about = about or event.args end
    end
  end
  return names, about or {}
end

local function about_of(args)
  local items = {}
  for _, key in ipairs { "recipe", "command", "date", "machine", "version" } do
    if args[key] then
      items[#items + 1] = ("<dt>%s</dt><dd>%s</dd>"):format(key, html.escaped(tostring(args[key])))
    end
  end
  return table.concat(items)
end

---@param title string
---@param events table[]
---@param text string what is below the picture
---@return string
return function(title, events, text)
  local rows, place, spans, begin = {}, {}, core.json_list {}, math.huge
  local names, about = metadata_of(events)
  for _, event in ipairs(events) do
    if event.ph == "X" then
      local key = event.pid .. "/" .. tostring(event.tid)
      local name = names[key] or tostring(event.tid)
      if not place[key] then
        rows[#rows + 1] = { rank = event.pid, name = name, order = FIRST[name] or #rows, key = key }
        place[key] = true
      end
      begin = math.min(begin, event.ts)
    end
  end
  table.sort(rows,
    function(a, b) if a.rank ~= b.rank then return a.rank < b.rank end return a.order < b.order end)
  local heads = core.json_list {}
  for i, row in ipairs(rows) do
    heads[i] = core.json_list { row.rank, row.name }
    place[row.key] = i - 1
  end
  for _, event in ipairs(events) do
    if event.ph == "X" then
      local args = type(event.args) == "table" and event.args or {}
      spans[#spans + 1] = core.json_list {
        place[event.pid .. "/" .. tostring(event.tid)], event.ts - begin, event.dur, event.name,
        args.kind or "", more_of(args), args.action, args.microbatch,
      }
    end
  end
  return html.page {
    title = title,
    style = STYLE,
    body = html.filled(BODY, {
      title = html.escaped(title), about = about_of(about), table = html.escaped(text),
    }),
    script = SCRIPT,
    data = { rows = heads, spans = spans },
  }
end
