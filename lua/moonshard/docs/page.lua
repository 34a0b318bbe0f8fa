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
.answer { margin: 0 0 12px; padding: 8px 12px; border: 1px solid var(--line); border-radius: 4px }
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
<div id="answers">@answers@</div>
<section id="rules"><h2>Rules that hold everywhere</h2>@rules@</section>
@body@
<section id="glossary"><h2>Glossary</h2><dl>@glossary@</dl></section>
<p id="nothing" class="hidden">Nothing has these words.</p>
</main>
]==]

local SCRIPT = [==[
const box = byId("search");
const items = [...document.querySelectorAll(".item, dt")];
const answers = [...document.querySelectorAll(".answer")];
// A word without case, spaces and signs, as the table of synonyms is searched.
const squashed = text => text.toLowerCase().replace(/\(.*$/, "").replace(/[^a-z0-9]/g, "");
// What a word of other tools is called here. Returns how many answers there are.
function answer(text) {
  const word = squashed(text);
  let count = 0;
  for (const one of answers) {
    const here = word.length > 1 && one.dataset.words.split(" ").includes(word);
    one.classList.toggle("hidden", !here);
    if (here) count++;
  }
  return count;
}
// Shows what has all words of the search in its name, its text, or what other tools call it.
function search() {
  const words = box.value.toLowerCase().split(/\s+/).filter(w => w);
  let count = 0;
  for (const item of items) {
    const text = (item.dataset.name + " " + (item.dataset.also || "") + " " + item.textContent
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
  // As it is called, "net.state_dict()", a method has the name of a variable in front.
  const called = box.value.replace(/\(.*$/, "").split(/[.:]/).pop();
  count += answer(box.value) || answer(called);
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

-- What other tools call the entry of this name. `page` has classes and names of the reference, ids
-- that the page has so far, and the words of other tools by name.
local function also_of(name, page)
  local words = page.words[name]
  return words and (' data-also="%s"'):format(escaped(table.concat(words, ", "))) or ""
end

local function field_of(field, short, page)
  local name = read.full_name(field)
  local id = page.seen[name] and "" or (' id="%s"'):format(anchor(name))
  page.seen[name] = true
  local example = field.example
    and ('<pre class="example">%s</pre>'):format(escaped(field.example)) or ""
  return ('<div class="item%s" data-name="%s"%s%s><div class="signature">%s</div>%s</div>'):format(
    short and " field" or "", escaped(name), also_of(name, page), id,
    linked(read.signature(field, short), page.classes), paragraph("text", field.text) .. example)
end

local function block_of(block, page)
  local parts = {}
  if block.class:match "^ms%.%u" then
    local id = page.seen[block.class] and "" or (' id="%s"'):format(anchor(block.class))
    page.seen[block.class] = true
    parts[#parts + 1] = ('<div class="item" data-name="%s"%s%s><h3>%s%s</h3>%s</div>'):format(
      block.class, also_of(block.class, page), id, block.class,
      block.base and ": " .. linked(block.base, page.classes) or "", paragraph("text", block.text))
  elseif block.text ~= "" then parts[#parts + 1] = paragraph("text", block.text) end
  for _, field in ipairs(block.fields) do
    parts[#parts + 1] = field_of(field, not field.parameters or find.is_table(block), page)
  end
  parts[#parts + 1] = paragraph("notes", block.notes)
  return ('<div class="block">%s</div>'):format(table.concat(parts, "\n"))
end

local function alias_of(alias, page)
  return ('<div class="item" data-name="%s"%s id="%s"><div class="signature">%s = %s</div>%s</div>')
    :format(alias.name, also_of(alias.name, page), anchor(alias.name), alias.name,
      linked(alias.type, page.classes), paragraph("text", alias.text))
end

-- The rules as a list, of which the search finds each.
local function rules_of(rules, page)
  local list = {}
  for number, rule in ipairs(rules.list) do
    list[number] = ('<li class="item" data-name="rule %d"%s id="rule-%d">%s</li>'):format(number,
      also_of("rule:" .. number, page), number, marked(rule))
  end
  return ("<p>%s</p><ol>%s</ol><p>%s</p>"):format(marked(rules.before), table.concat(list, "\n"),
    marked(rules.after))
end

-- What the search shows above all for a word of other tools.
local function answer_of(row)
  local words, links = {}, {}
  for i, word in ipairs(row.words) do words[i] = word:lower():gsub("[^a-z0-9]", "") end
  for i, name in ipairs(row.names) do
    links[i] = ('<a href="#%s">%s</a>'):format(anchor(name), (name:gsub("^rule:", "rule ")))
  end
  return ('<div class="answer hidden" data-words="%s">%s: %s. %s</div>'):format(
    table.concat(words, " "), row.none and "There is nothing of this name here. The nearest"
      or "It is called here", table.concat(links, ", "), marked(row.text))
end

-- The words of other tools by the names of entries, and what the search says of them.
local function synonyms_of()
  local by_name, answers = {}, {}
  for i, row in ipairs(find.synonyms()) do
    answers[i] = answer_of(row)
    for _, name in ipairs(row.names) do
      by_name[name] = by_name[name] or {}
      table.move(row.words, 1, #row.words, #by_name[name] + 1, by_name[name])
    end
  end
  return by_name, table.concat(answers, "\n")
end

-- The parts of the reference, and links to them.
local function parts_of(all, page)
  local contents, body = {}, {}
  for _, part in ipairs(read.parts) do
    local file, title = part[1], part[2]
    local id = "part-" .. (file == "" and "module" or file)
    contents[#contents + 1] = ('<a href="#%s">%s</a>'):format(id, title)
    body[#body + 1] = ('<section id="%s"><h2>%s</h2>'):format(id, title)
    for _, alias in ipairs(all.aliases) do
      if alias.part == file then body[#body + 1] = alias_of(alias, page) end
    end
    for _, block in ipairs(all.blocks) do
      if block.part == file then
        if block.class:match "^ms%.%u" and not page.seen[block.class] and find.is_object(block) then
          contents[#contents + 1] = ('<a class="class" href="#%s">%s</a>'):format(
            anchor(block.class), block.class)
        end
        body[#body + 1] = block_of(block, page)
      end
    end
    body[#body + 1] = "</section>"
  end
  return table.concat(contents, "\n"), table.concat(body, "\n")
end

local function glossary_of()
  local words = {}
  for i, entry in ipairs(glossary) do
    words[i] = ('<dt data-name="%s">%s</dt><dd>%s</dd>'):format(escaped(entry[1]),
      escaped(entry[1]), marked(entry[2]))
  end
  return table.concat(words, "\n")
end

--- The page as text.
---@return string
return function()
  local all = read.all()
  local words, answers = synonyms_of()
  local page = { classes = {}, seen = {}, words = words }
  for _, block in ipairs(all.blocks) do page.classes[block.class] = true end
  for _, alias in ipairs(all.aliases) do page.classes[alias.name] = true end
  local contents, body = parts_of(all, page)
  local values = {
    version = core.version, body = body, glossary = glossary_of(), answers = answers,
    contents = ('<a href="#rules">Rules that hold everywhere</a>\n%s\n\z
      <a href="#glossary">Glossary</a>'):format(contents),
    rules = rules_of(all.rules, page),
  }
  return html.page {
    title = "Moonshard " .. core.version, style = STYLE, body = html.filled(BODY, values),
    script = SCRIPT,
  }
end
