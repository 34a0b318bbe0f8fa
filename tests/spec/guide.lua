-- For specs: the blocks of a page of recipes/guides/, and a folder in which they run as
-- in the root of a clone.
--
-- A block ```lua that begins with "-- file: NAME" is written down. A block ```sh is run command by
-- command. What a command prints is after "#>", and what the message of its failure says after
-- "#!". A command with "# Ctrl-C" is stopped once its run has a few steps.
local command = require "command"

local guide = {}

function guide.read(name)
  return assert(command.read(("%s/recipes/guides/%s.md"):format(command.source, name)))
end

-- The words of a page beside its code.
function guide.words(text)
  local prose = text:gsub("\n```.-\n```", "\n"):gsub("`[^`\n]+`", "")
  return select(2, prose:gsub("[%w%p]*%w[%w%p]*", ""))
end

---@return { kind: string, text: string }[]
function guide.blocks(text)
  local list = {}
  for kind, body in text:gmatch "\n```(%l+)\n(.-)\n```%f[\n\0]" do
    list[#list + 1] = { kind = kind, text = body }
  end
  return list
end

-- The commands of a block: a line, or more where the line names the end of a text (<<'END').
---@return { line: string, shown: string?, fails: string?, stopped: boolean }[]
function guide.commands(block)
  local list, open, ending = {}, nil, nil
  for line in (block .. "\n"):gmatch "([^\n]*)\n" do
    if open then
      open.line = open.line .. "\n" .. line
      if line == ending then open = nil end
    elseif line:find "%S" then
      local bare = line:gsub("%s+#[>!].*$", ""):gsub("%s+# Ctrl%-C$", "")
      local one = {
        line = bare, shown = line:match "#> (.*)$", fails = line:match "#! (.*)$",
        stopped = line:find "# Ctrl%-C$" ~= nil,
      }
      list[#list + 1], ending = one, line:match "<<'(%u+)'$"
      open = ending and one
    end
  end
  return list
end

-- A new folder that has what the root of a clone has, and the program.
function guide.folder()
  local folder = command.folder()
  assert(os.execute(("cd '%s' && ln -s '%s' moonshard"):format(folder, command.program)))
  for name in ("CHANGELOG.md README.md engine lua recipes tests"):gmatch "%S+" do
    assert(os.execute(("ln -s '%s/%s' '%s'"):format(command.source, name, folder)))
  end
  return folder
end

function guide.write_file(folder, text)
  local name = text:match "^%-%- file: (%S+)\n"
  if name then command.write(folder .. "/" .. name, text .. "\n") end
  return name
end

-- Waits for the third step of the run, and asks it to stop. Over a slow network, which changes no
-- result, the run has far to go then.
local STOP <const> = [[
set -m # or the shell makes its background commands ignore SIGINT
%s --link 1Gbit,100ms >.stopped 2>&1 &
pid=$!
until [ "$(cat '%s/metrics.jsonl' 2>/dev/null | wc -l)" -ge 3 ] || ! kill -0 $pid 2>/dev/null; do
  sleep 0.05
done
kill -%s $pid
wait $pid
code=$?
cat .stopped
exit $code]]

-- Runs a line in the folder, as a shell does; returns the code and all output.
local function run(folder, line)
  local script = folder .. "/.command"
  command.write(script, line .. "\n")
  local _, how, code = os.execute(("cd '%s' && XDG_CACHE_HOME='%s/tests/cache' \z
    timeout -k 5 1800 bash .command >.output 2>&1"):format(folder, os.getenv "MOONSHARD_BUILD"))
  return how == "signal" and 128 + code or code, command.read(folder .. "/.output")
end

--- Runs a command of a page, and asserts that it does what the page says.
---@param small table<string, string> what a test writes in place of a page's sizes
---@param signal? string for a command with "# Ctrl-C"
---@return string output
function guide.try(folder, one, small, signal)
  local line = one.line
  for from, to in pairs(small) do
    local at, stop = line:find(from, 1, true)
    if at then line = line:sub(1, at - 1) .. to .. line:sub(stop + 1) end
  end
  if one.stopped then
    local code, out = run(folder, STOP:format(line, line:match "run=(%S+)", signal))
    assert(code == 75, ("%s ended with %d:\n%s"):format(line, code, out))
    return out
  end
  local code, out = run(folder, line)
  assert((code ~= 0) == (one.fails ~= nil), ("%s ended with %d:\n%s"):format(line, code, out))
  local expected = one.shown or one.fails
  if expected then
    local joined = out:gsub("%s+", " ")
    if not joined:find(expected, 1, true) then
      error(("%s does not print %q:\n%s"):format(line, expected, out))
    end
  end
  return out
end

return guide
