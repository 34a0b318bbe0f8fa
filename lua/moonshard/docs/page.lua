-- The reference as a page, in one file without other resources.
local core = require "moonshard.core"
local find = require "moonshard.docs.find"
local glossary = require "moonshard.docs.glossary"
local html = require "moonshard.base.html"
local read = require "moonshard.docs.read"

local STYLE = [==[
body {
  font-size: 15px; line-height: 1.5; margin: 0;
  display: grid; grid-template-columns: 250px minmax(0, 1fr);
}
nav {
  position: sticky; top: 0; height: 100vh; overflow: auto; box-sizing: border-box; padding: 16px;
  border-right: 1px solid var(--line); font-size: 14px;
}
nav a { display: block; color: var(--ink); text-decoration: none; padding: 1px 0 }
nav a.class { padding-left: 12px; color: var(--faint) }
main { padding: 16px 24px 80px; max-width: 900px; box-sizing: border-box }
input {
  width: 100%; box-sizing: border-box; font: inherit; padding: 6px 8px; margin-bottom: 10px;
  color: inherit; background: var(--back); border: 1px solid var(--line); border-radius: 4px;
}
h2 { border-bottom: 1px solid var(--line); margin-top: 44px }
h3 { margin: 28px 0 4px }
code, .signature { background: var(--code) }
code { padding: 0 3px; border-radius: 3px }
.signature {
  font: 13px/1.5 ui-monospace, monospace; padding: 6px 10px; border-radius: 4px;
  margin: 18px 0 4px; overflow-wrap: anywhere; padding-left: 34px; text-indent: -24px;
}
.text { margin: 0 0 0 10px } .notes { margin: 10px 0 0 10px; color: var(--faint) }
.field .signature { background: none; margin: 6px 0 0; padding-top: 0; padding-bottom: 0 }
.field .text { margin-left: 34px; color: var(--faint) }
pre { white-space: pre-wrap }
dt { font-weight: 600; margin-top: 8px } dd { margin: 0 0 0 16px }
.example { margin: 4px 0 0 10px; padding: 6px 10px; border-left: 3px solid var(--line);
  overflow-x: auto }
.hidden { display: none }
@media (max-width: 760px) {
  body { display: block }
  nav { position: static; height: auto; border: 0; border-bottom: 1px solid var(--line) }
  nav .list { max-height: 180px; overflow: auto }
  main { padding: 12px }
}
]==]

local BODY = [==[
<nav><h1 style="font-size: 17px; margin: 0 0 8px">Moonshard @version@</h1>
<input id="search" type="search" placeholder="search" aria-label="search the reference">
<div class="list">@contents@</div></nav>
<main>
<section id="rules"><h2>Rules that hold everywhere</h2><pre>@rules@</pre></section>
@body@
<section id="glossary"><h2>Glossary</h2><dl>@glossary@</dl></section>
<p id="nothing" class="hidden">Nothing has these words.</p>
</main>
]==]

local SCRIPT = [==[
const box = byId("search");
const items = [...document.querySelectorAll(".item, dt")];
// Shows what has all words of the search: names first decide, then the text.
function search() {
  const words = box.value.toLowerCase().split(/\s+/).filter(w => w);
  let count = 0;
  for (const item of items) {
    const text = (item.dataset.name + " " + item.textContent
      + (item.tagName === "DT" ? item.nextElementSibling.textContent : "")).toLowerCase();
    const here = words.every(w => text.includes(w));
    item.classList.toggle("hidden", !here);
    if (item.tagName === "DT") item.nextElementSibling.classList.toggle("hidden", !here);
    if (here) count++;
  }
  for (const part of document.querySelectorAll(".block, section")) {
    const own = [...part.querySelectorAll(".item, dt")];
    const here = words.length === 0 || own.some(item => !item.classList.contains("hidden"));
    part.classList.toggle("hidden", !here);
  }
  byId("nothing").classList.toggle("hidden", count > 0);
  return count;
}
box.addEventListener("input", search);
document.addEventListener("keydown", e => {
  if (e.key === "/" && document.activeElement !== box) { e.preventDefault(); box.focus(); }
});
const asked = new URLSearchParams(location.search).get("q");
if (asked) { box.value = asked; search(); }
]==]

local escaped = html.escaped

-- Words between backquotes are code, words between two stars are bold.
local function marked(text)
  return (escaped(text):gsub("`([^`]+)`", "<code>%1</code>"):gsub("%*%*(.-)%*%*", "<b>%1</b>"))
end

local function anchor(name) return (name:gsub("[:.]", "-")) end

-- A signature, with classes of the reference as links.
local function linked(text, classes)
  return (escaped(text):gsub("ms%.%u[%w_]*", function(class)
    return classes[class] and ('<a href="#%s">%s</a>'):format(anchor(class), class) or class
  end))
end

local function paragraph(kind, text)
  return text ~= "" and ('<div class="%s">%s</div>'):format(kind, marked(text)) or ""
end

local function field_of(field, short, classes, seen)
  local name = read.full_name(field)
  local id = seen[name] and "" or (' id="%s"'):format(anchor(name))
  seen[name] = true
  return ('<div class="item%s" data-name="%s"%s><div class="signature">%s</div>%s</div>'):format(
    short and " field" or "", escaped(name), id, linked(read.signature(field, short), classes),
    paragraph("text", field.text) .. (field.example
      and ('<pre class="example">%s</pre>'):format(escaped(field.example)) or ""))
end

local function block_of(block, classes, seen)
  local parts = {}
  if block.class:match "^ms%.%u" then
    local id = seen[block.class] and "" or (' id="%s"'):format(anchor(block.class))
    seen[block.class] = true
    parts[#parts + 1] = ('<div class="item" data-name="%s"%s><h3>%s%s</h3>%s</div>'):format(
      block.class, id, block.class,
      block.base and ": " .. linked(block.base, classes) or "", paragraph("text", block.text))
  elseif block.text ~= "" then parts[#parts + 1] = paragraph("text", block.text) end
  for _, field in ipairs(block.fields) do
    parts[#parts + 1] = field_of(field, not field.parameters or find.is_table(block), classes, seen)
  end
  parts[#parts + 1] = paragraph("notes", block.notes)
  return ('<div class="block">%s</div>'):format(table.concat(parts, "\n"))
end

local function alias_of(alias, classes)
  return ('<div class="item" data-name="%s" id="%s"><div class="signature">%s = %s</div>%s</div>')
    :format(alias.name, anchor(alias.name), alias.name, linked(alias.type, classes),
      paragraph("text", alias.text))
end

--- The page as text.
---@return string
return function()
  local all, classes, seen = read.all(), {}, {}
  for _, block in ipairs(all.blocks) do classes[block.class] = true end
  for _, alias in ipairs(all.aliases) do classes[alias.name] = true end
  local contents, body, words = { '<a href="#rules">Rules that hold everywhere</a>' }, {}, {}
  for _, part in ipairs(read.parts) do
    local file, title = part[1], part[2]
    local id = "part-" .. (file == "" and "module" or file)
    contents[#contents + 1] = ('<a href="#%s">%s</a>'):format(id, title)
    body[#body + 1] = ('<section id="%s"><h2>%s</h2>'):format(id, title)
    for _, alias in ipairs(all.aliases) do
      if alias.part == file then body[#body + 1] = alias_of(alias, classes) end
    end
    for _, block in ipairs(all.blocks) do
      if block.part == file then
        if block.class:match "^ms%.%u" and not seen[block.class] and find.is_object(block) then
          contents[#contents + 1] = ('<a class="class" href="#%s">%s</a>'):format(
            anchor(block.class), block.class)
        end
        body[#body + 1] = block_of(block, classes, seen)
      end
    end
    body[#body + 1] = "</section>"
  end
  contents[#contents + 1] = '<a href="#glossary">Glossary</a>'
  for _, entry in ipairs(glossary) do
    words[#words + 1] = ('<dt data-name="%s">%s</dt><dd>%s</dd>'):format(escaped(entry[1]),
      escaped(entry[1]), marked(entry[2]))
  end
  local values = {
    version = core.version, contents = table.concat(contents, "\n"), rules = escaped(all.rules),
    body = table.concat(body, "\n"), glossary = table.concat(words, "\n"),
  }
  return html.page {
    title = "Moonshard " .. core.version, style = STYLE, body = html.filled(BODY, values),
    script = SCRIPT,
  }
end
