-- For specs: runs the program in a folder of its own and returns how it ended. No test waits for a
-- fixed time; `timeout` only ends a process that hangs.
local command = {
  program = os.getenv "MOONSHARD_BIN", source = os.getenv "MOONSHARD_SOURCE",
  full = os.getenv "MOONSHARD_TEST_FULL" == "1",
}
command.short = os.getenv "MOONSHARD_TEST_SHORT" == "1" and not command.full

-- Seconds until a command counts as hanging: long enough for sanitizers, long ranges and a busy
-- machine.
local DEADLINE <const> = 1800

--- Of cases that a test tries one after the other: each `every`-th one, from number `from` on
--- (default: 1); in long ranges all.
---@generic T
---@param every integer
---@param cases T[]
---@param from? integer
---@return T[]
function command.some(every, cases, from)
  if command.full then return cases end
  local list = {}
  for i = from or 1, #cases, every do list[#list + 1] = cases[i] end
  return list
end

--- A new empty folder; remove it with command.remove.
---@return string
function command.folder()
  local path = os.tmpname()
  os.remove(path)
  assert(os.execute(("mkdir -p '%s'"):format(path)))
  return path
end

function command.remove(folder) os.execute(("rm -rf '%s'"):format(folder)) end

---@return string? text nil if there is no such file
function command.read(path)
  local file = io.open(path, "rb")
  if not file then return nil end
  local text = file:read "a"
  file:close()
  return text
end

function command.write(path, text)
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
  return path
end

--- Writes 60 images of digits and their labels to a folder, for the recipe mnist.
---@param folder string
function command.write_digits(folder)
  local pixels = {}
  for i = 1, 60 * 28 * 28 do pixels[i] = string.char(i * 7 % 256) end
  command.write(folder .. "/images-idx3-ubyte",
    "\0\0\8\3" .. (">I4I4I4"):pack(60, 28, 28) .. table.concat(pixels))
  command.write(folder .. "/labels-idx1-ubyte",
    "\0\0\8\1" .. (">I4"):pack(60) .. ("\0\1\2"):rep(20))
end

-- Measuring the peak of products takes about a second, so all tests share one, in the build tree.
local CACHE <const> = (os.getenv "MOONSHARD_BUILD" or "") .. "/tests/cache"

--- Settings for command.line: what runs keep for later ones is in the folder, at first empty.
---@param folder string
---@return string
function command.own_cache(folder) return ("XDG_CACHE_HOME='%s/cache'"):format(folder) end

--- The line for a shell that runs `moonshard ARGUMENTS` in a folder; settings: NAME=value ... in
--- front.
function command.line(folder, arguments, settings)
  return ("cd '%s' && XDG_CACHE_HOME='%s' %s timeout -k 5 %d '%s' %s")
    :format(folder, CACHE, settings or "", DEADLINE, command.program, arguments)
end

--- The line for a shell that runs a line of command.line on a terminal, and writes what the
--- terminal shows to a file. `script` takes the user's shell, which may be any or none. `timeout`
--- would put the program into a group of its own, and a shell that forks does not make it the
--- terminal's: the first read stops such a program.
---@param line string
---@param screen string path of the file
---@param ends? { columns: integer?, code: boolean? } the terminal's width; "ended CODE" at the end
---@return string
function command.terminal(line, screen, ends)
  ends = ends or {}
  line = line:gsub(" timeout %-k 5 ", " timeout --foreground -k 5 ")
  if ends.code then line = ("{ %s; }; echo ended $?"):format(line) end
  if ends.columns then line = ("stty cols %d && { %s; }"):format(ends.columns, line) end
  return ("SHELL=/bin/sh script -q -f -e -c '%s' '%s'"):format(line:gsub("'", "'\\''"), screen)
end

-- The exit code of a command as a shell reports it: 128 + n for a signal.
local function code_of(_, how, number) return how == "signal" and 128 + number or number end

--- Runs `moonshard ARGUMENTS` in the folder to its end.
---@return integer code
---@return string stdout
---@return string stderr
function command.run(folder, arguments, settings)
  local code = code_of(os.execute(("{ %s; } >'%s/.stdout' 2>'%s/.stderr'")
    :format(command.line(folder, arguments, settings), folder, folder)))
  return code, command.read(folder .. "/.stdout"), command.read(folder .. "/.stderr")
end

--- The same for a command that must succeed; shows its output if it fails.
---@return string stdout
function command.succeed(folder, arguments, settings)
  local code, out, err = command.run(folder, arguments, settings)
  if code ~= 0 then
    error(("moonshard %s ended with %d\n%s%s"):format(arguments, code, out, err), 2)
  end
  return out, err
end

--- Runs a script of tests/dist on so many ranks, each of which says at its end that it is done.
---@param name string of the script
---@param ranks string their number, and other switches: "4 --thread-ranks"
---@param options? string
---@param settings? string NAME=value ... in front
---@return string stdout
function command.on_ranks(name, ranks, options, settings)
  local folder = command.folder()
  local scope <close> = setmetatable({}, { __close = function() -- luacheck: ignore scope
    command.remove(folder)
  end })
  local out = command.succeed(folder, ("run '%s/tests/dist/%s.lua' -n %s %s"):format(
    command.source, name, ranks, options or ""), settings)
  for rank = 0, tonumber(ranks:match "%d+") - 1 do
    if not out:find(("rank %d is done"):format(rank), 1, true) then
      error(("%s, rank %d: it is not done:\n%s"):format(name, rank, out), 2)
    end
  end
  return out
end

--- The same for a script whose ranks also print a hash of their weights; returns that of all ranks.
---@param name string
---@param ranks string
---@param options? string
---@param settings? string
---@return string
function command.weights(name, ranks, options, settings)
  local out, hash, count = command.on_ranks(name, ranks, options, settings), nil, 0
  for one in out:gmatch "is done, weights (%x+)" do
    if hash and one ~= hash then error(("%s: ranks differ:\n%s"):format(name, out), 2) end
    hash, count = one, count + 1
  end
  if count ~= tonumber(ranks:match "%d+") then
    error(("%s: %d hashes:\n%s"):format(name, count, out), 2)
  end
  return hash
end

--- Losses and norms as the step lines of a training show them.
---@param out string
---@return string[]
function command.losses(out)
  local list = {}
  for loss, norm in out:gmatch "loss ([%d.]+)  [^\n]-norm ([%d.]+)" do
    list[#list + 1] = loss .. " " .. norm
  end
  if #list == 0 then error("there is no loss:\n" .. out, 2) end
  return list
end

--- Starts it and returns its output as a file; finish() waits for its end and returns the exit
--- code.
function command.start(folder, arguments, settings)
  local file = assert(io.popen(("{ %s; } 2>'%s/.stderr'")
    :format(command.line(folder, "run " .. arguments, settings), folder), "r"))
  local self = { file = file }
  function self.finish()
    local rest = file:read "a"
    local code = code_of(file:close())
    return code, rest, command.read(folder .. "/.stderr")
  end
  return self
end

--- Installs the program of this build into a folder, with libraries that say another version.
---@return string program
---@return string version
function command.other_version(folder)
  local build, version = os.getenv "MOONSHARD_BUILD", require "moonshard".version
  local other = version:sub(1, -2) .. (version:sub(-1) == "9" and "8" or "9")
  assert(os.execute(("cd '%s' && mkdir '%s/other' && cp -a bin lib share '%s/other'")
    :format(build, folder, folder)))
  local name = ("%s/other/lib/libmoonshard.so.%s"):format(folder, version)
  local library, count = command.read(name)
    :gsub(("\0%s\0"):format(version:gsub("%.", "%%.")), ("\0%s\0"):format(other))
  assert(count == 1, "the version is not in the library, or in several places")
  command.write(name, library)
  return folder .. "/other/bin/moonshard", other
end

--- metrics.jsonl as a list of objects.
function command.metrics(run)
  local core, list = require "moonshard.core", {}
  for line in assert(io.lines(run .. "/metrics.jsonl")) do
    list[#list + 1] = assert(core.json_decode(line))
  end
  return list
end

return command
