-- Helpers of several specs: values as flat lists, comparisons with a tolerance, errors with their
-- line.
local core = require "moonshard.core"

local support = {}

--- All values of a tensor, row-major.
function support.flat(t) return t:dim() == 0 and { t:item() } or t:reshape(-1):to_table() end

--- Numbers (or nested lists of them) are equal up to tolerance * max(1, |expected|); 1e-6 unless
--- given: some units in the last place of f32.
function support.near(expected, actual, tolerance, path)
  tolerance, path = tolerance or 1e-6, path or ""
  if core.is_tensor(expected) then expected = expected:to_table() end
  if core.is_tensor(actual) then
    actual = actual:dim() == 0 and actual:item() or actual:to_table()
  end
  if type(expected) ~= "table" then
    if type(expected) == "number" and type(actual) == "number" then
      local same = expected == actual
        or math.abs(expected - actual) <= tolerance * math.max(1, math.abs(expected))
      same = same or expected ~= expected and actual ~= actual
      if not same then
        error(("value%s: expected %.9g, got %.9g"):format(path, expected, actual), 2)
      end
    elseif expected ~= actual then
      error(("value%s: expected %s, got %s"):format(path, expected, actual), 2)
    end
    return
  end
  if type(actual) ~= "table" or #expected ~= #actual then
    error(("value%s: expected a list of %d, got %s"):format(path, #expected,
      type(actual) == "table" and "one of " .. #actual or tostring(actual)), 2)
  end
  for i = 1, #expected do
    support.near(expected[i], actual[i], tolerance, ("%s[%d]"):format(path, i))
  end
end

--- f raises a message that begins with a line of the calling file and holds all these texts;
--- returns it.
function support.fails(f, ...)
  local ok, message = pcall(f)
  if ok then error("no error was raised", 2) end
  if type(message) ~= "string" then error("the error is no string: " .. tostring(message), 2) end
  local own = debug.getinfo(2, "S").short_src
  if message:sub(1, #own + 1) ~= own .. ":" or not message:sub(#own + 2):match "^%d+: " then
    error("the message does not begin with a line of the caller: " .. message, 2)
  end
  -- One position, not that of a library's line before it.
  if message:sub(#own + 2):find("%.lua:%d+: .*%.lua:%d+: ") then
    error("the message has several positions: " .. message, 2)
  end
  for _, text in ipairs { ... } do
    if not message:find(text, 1, true) then
      error(("the message lacks '%s': %s"):format(text, message), 2)
    end
  end
  return message
end

--- Runs a shell command; returns its exit code and all output.
function support.shell(command)
  local pipe = io.popen("{ " .. command .. "; } 2>&1; code=$?; echo; echo rc=$code")
  local text = pipe:read "a"
  pipe:close()
  local output, code = text:match "^(.*)\nrc=(%d+)\n$"
  return tonumber(code), output
end

--- Runs a Lua file of this text with `moonshard run` and these arguments (a string); exit code and
--- output.
function support.recipe(text, arguments)
  local path = os.tmpname()
  local file = assert(io.open(path, "w"))
  file:write(text)
  file:close()
  local program = os.getenv "MOONSHARD_BIN" or "moonshard"
  local pipe = io.popen(("'%s' run '%s' %s 2>&1; echo rc=$?")
    :format(program, path, arguments or ""))
  local output = pipe:read "a"
  pipe:close()
  os.remove(path)
  local before, code = output:match "^(.*)rc=(%d+)\n$"
  return tonumber(code), (before:gsub(path:gsub("%p", "%%%0"), "RECIPE"))
end

--- Records of what f enqueues, without waits.
function support.recorded(f)
  core.trace_start()
  f()
  local list = {}
  for _, record in ipairs(core.trace_stop()) do
    if record.kind ~= "wait" then list[#list + 1] = record end
  end
  return list
end

--- For checks of parallel work by times, which other processes on the machine disturb. An engine
--- that waits, or runs streams one after another, can never show the expected times, so it is
--- enough to see them once. `seen` gets a factor by which the work may grow, because a busy machine
--- may delay the host for longer than a small task takes.
---@param seen fun(factor: integer): boolean?
function support.eventually(seen)
  for try = 1, 100 do
    if seen(try <= 15 and 1 or try <= 30 and 2 or try <= 50 and 4 or 8) then return end
  end
  error("not seen in 100 tries", 2)
end

return support
