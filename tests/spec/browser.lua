-- Pages of ours in a real browser: a script runs in the page, and what it says comes back.
local command = require "command"

local browser = {}

local CHROMIUM = io.popen "command -v chromium chromium-browser google-chrome 2>/dev/null":read "l"

--- busted's `it` for tests that are pending where there is no browser.
---@param it function
---@param pending function
---@return fun(name: string, f: function)
function browser.tests(it, pending)
  return function(name, f)
    it(name, function()
      if not CHROMIUM then
        return pending "no chromium here: the page was not opened in a browser"
      end
      f()
    end)
  end
end

--- Opens a page. js: statements that call say(...); key(element, name) presses a key. address:
--- text that is appended to the page's address. size: of the window. Returns what was said, with
--- "|" between calls, and the document as the browser sees it at the end.
---@param folder string where the copy with the script is written
---@param page string text of the page
---@param js string
---@param address? string
---@param size? string
---@return string said, string document
function browser.open(folder, page, js, address, size)
  local probe = ([[<script>
    const said = [];
    window.onerror = message => said.push("error: " + message);
    const say = (...values) => said.push(values.join(" "));
    const key = (element, name) =>
      element.dispatchEvent(new KeyboardEvent("keydown", { key: name, cancelable: true }));
    const pointer = (element, type, id, x, y) => element.dispatchEvent(Object.defineProperties(
      new PointerEvent(type, { pointerId: id, pointerType: "touch" }),
      { offsetX: { value: x }, offsetY: { value: y } }));
    try { %s } catch (e) { said.push("error: " + e.message); }
    document.title = "[" + said.join("|") + "]";
    </script></body>]]):format(js:gsub("%%", "%%%%"))
  command.write(folder .. "/probe.html", (page:gsub("</body>", function() return probe end)))
  local out = io.popen(("cd '%s' && HOME='%s' timeout 1800 '%s' --headless --no-sandbox \z
    --disable-gpu --disable-dev-shm-usage --window-size=%s --dump-dom "
    .. "'file://%s/probe.html%s' 2>browser.log")
    :format(folder, folder, CHROMIUM, size or "1000,700", folder, address or "")):read "a"
  return out:match "<title>%[(.-)%]</title>"
    or error("the browser gave no page: " .. command.read(folder .. "/browser.log"):sub(1, 2000)),
    out
end

return browser
