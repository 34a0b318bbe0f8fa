-- moonshard repl: an interactive session, with `ms` at hand.
local launch = require "moonshard.base.launch"
local switches = require "moonshard.cli.switches"

local repl = {}

-- Values are shown as print would; tensors with their elements.
local function show(...)
  local core = require "moonshard.core"
  for i = 1, select("#", ...) do
    local value = select(i, ...)
    print(core.is_tensor(value) and value:show() or tostring(value))
  end
end

-- The file that keeps the lines of former sessions.
local function history_path()
  local core = require "moonshard.core"
  local base = os.getenv "XDG_CACHE_HOME"
  if not base or base == "" then base = (os.getenv "HOME" or "/tmp") .. "/.cache" end
  -- Without the folder there is no history.
  core.make_directory(base .. "/moonshard")
  return base .. "/moonshard/repl_history"
end

-- Reads a line: its text; nil at the end of the input; nil, true if Ctrl-C has ended the line,
-- which only `process` can tell.
local function read_plain(process, prompt)
  io.write(prompt)
  io.flush()
  if not process then return io.read() end
  process.interrupts "line"
  local text = io.read()
  if not process.interrupts "end" or text then return text end
  print()
  return nil, true
end

-- How lines are read: with libedit where it can be, else plainly. keep(text) puts a line into the
-- history.
local function reader()
  local process, can_edit, is_typed = launch.process, false, false
  if process then can_edit, is_typed = process.line_editor(history_path()) end
  if not can_edit then
    -- Ctrl-C ends a session whose input is a file or a pipe.
    local typed = is_typed and process or nil
    return function(prompt) return read_plain(typed, prompt) end, function() end
  end
  local words = require "moonshard.cli.complete".words
  return function(prompt)
    local text, is_interrupted = process.read_line(prompt, words)
    if is_interrupted then print "^C" end
    return text, is_interrupted
  end, process.keep_line
end

-- Reads lines until they are a chunk. Returns the chunk; or false and what is wrong with it, nil if
-- Ctrl-C has ended it; nothing at the end of the input.
local function read_chunk(read, keep)
  local text, is_interrupted = read "> "
  while text do
    if text:find "%S" then keep(text:match "[^\n]*$") end
    local chunk = load("return " .. text, "=stdin", "t") or nil
    if chunk then return chunk end
    local message
    chunk, message = load(text, "=stdin", "t")
    if chunk then return chunk end
    if not message:match "<eof>$" then return false, message end
    local more
    more, is_interrupted = read ">> "
    if not more and not is_interrupted then return false, message end
    text = more and text .. "\n" .. more
  end
  if is_interrupted then return false end
  return nil
end

-- Runs a chunk and shows its results. Ctrl-C ends it by an error.
local function run(chunk)
  local handler = require "moonshard.cli.failure".handler
  local process = launch.process
  local function guarded(f, ...)
    if process then process.interrupts "run" end
    local results = table.pack(xpcall(f, handler, ...))
    if process then process.interrupts "end" end
    if results[1] then return results end
    -- os.exit of a recipe, and mistakes on a command line, end by such a value.
    if launch.is_exit(results[2]) then error(results[2], 0) end
    print(results[2])
    return nil
  end
  local results = guarded(chunk)
  if results then guarded(show, table.unpack(results, 2, results.n)) end
end

--- The parser of its command line.
---@return table
function repl.parser()
  return switches.parser("repl", "An interactive session; `ms` is the library. On a terminal, \z
    where the machine has libedit, Tab completes names, and the arrow keys bring back lines of \z
    this session and of former ones. Ctrl-C ends the line, and Ctrl-D the session.")
end

function repl.main(arguments)
  switches.apply(switches.parse(repl.parser(), arguments))
  local ms = require "moonshard"
  _G.ms = ms
  print(("Moonshard %s, %s. `ms` is the library; help \"NAME\" explains; end with Control-D.")
    :format(ms.version, ms.info().lua))
  function _G.help(name)
    local text, message = require "moonshard.cli.help".text(tostring(name or "ms"), 80)
    print(text or message)
  end
  local read, keep = reader()
  while true do
    local chunk, message = read_chunk(read, keep)
    if chunk then run(chunk)
    elseif message then print(message)
    elseif chunk == nil then
      print()
      return 0
    end
  end
end

return repl
