-- Pages in one file without other resources: what the pages of the reference, of curves and of
-- traces have in common.
local core = require "moonshard.core"

local html = {}

-- The reader's system chooses between light and dark. A page's own style comes last.
local PAGE = [==[
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>@title@</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {
  --ink: #222; --faint: #666; --line: #ddd; --back: #fff; --code: #f5f5f2; --mark: #fff4cc;
  --link: #2a5db0;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #ddd; --faint: #999; --line: #444; --back: #161616; --code: #222; --mark: #4a3f14;
    --link: #8ab4f8;
  }
}
body { font: 14px system-ui, sans-serif; margin: 16px; color: var(--ink); background: var(--back) }
pre, code { font: 13px/1.5 ui-monospace, monospace }
a { color: var(--link) }
canvas { width: 100%; display: block; cursor: crosshair }
@style@</style></head><body>
@body@
<script>
"use strict";
const byId = name => document.getElementById(name);
@script@</script></body></html>
]==]

-- Before the script of a page that draws. What is drawn takes its colors from the style.
local PICTURES = [==[
const data = @data@;
const hues = {
  blue: "#4c78a8", orange: "#f58518", green: "#54a24b", red: "#e45756", teal: "#72b7b2",
  purple: "#b279a2", brown: "#9d755d", yellow: "#eeca3b",
};
const look = getComputedStyle(document.documentElement);
const tone = name => look.getPropertyValue("--" + name);
// Empties a canvas and makes it as fine as the screen.
function clear(canvas, pen, wide, tall) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = wide * scale;
  canvas.height = tall * scale;
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, wide, tall);
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
}
]==]

local ENTITIES <const> = { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;", ['"'] = "&quot;" }

--- For text between tags and in attributes.
---@param text string
---@return string
function html.escaped(text)
  return (text:gsub('[&<>"]', ENTITIES))
end

--- Puts values, which are HTML, in place of their names: @name@.
---@param text string
---@param values table<string, string>
---@return string
function html.filled(text, values)
  return (text:gsub("@(%l+)@", values))
end

--- The page as text. data: what the script draws.
---@param page { title: string, style: string, body: string, script: string, data?: table }
---@return string
function html.page(page)
  local script = page.script
  if page.data then
    -- In a script element only the text of its end tag is read as markup.
    local data = core.json_encode(page.data):gsub("<", "\\u003c")
    script = html.filled(PICTURES, { data = data }) .. script
  end
  return html.filled(PAGE, {
    title = html.escaped(page.title), style = page.style, body = page.body, script = script,
  })
end

return html
