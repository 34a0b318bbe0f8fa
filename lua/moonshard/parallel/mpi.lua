-- ms.init { group = "mpi" }: a process that an MPI's launcher has started becomes a rank, in an
-- interpreter that is not the program `moonshard`.
local core = require "moonshard.core"

local mpi = {}

--- The content of a file as one number, so that hosts with different versions of it differ.
---@param path? string
---@return string
function mpi.content_of(path)
  local file = path and io.open(path, "rb")
  local text = file and file:read "a"
  if file then file:close() end
  return text and ("%s, %d bytes, hash %016x"):format(path:match "[^/]*$", #text, core.hash(text))
    or tostring(path)
end

-- The options of their own: what is expected, and the default.
local OWN = {
  sum_order = {
    "\"hosts\" or \"ranks\"", function(v) return v == "hosts" or v == "ranks" end, "hosts",
  },
  interface = { "a name", function(v) return type(v) == "string" end },
  port = {
    "a port from 1 to 65535",
    function(v) return math.type(v) == "integer" and v >= 1 and v <= 65535 end,
  },
}
local function is_time(v) return type(v) == "number" and v > 0 and v < 1e8 end
for name, default in pairs { init_timeout = 120, lost = 5, timeout = 300 } do
  OWN[name] = { "a number of seconds above 0", is_time, default }
end

OWN.stuck = { "a number of seconds above 0", is_time }

-- The options of the group, and those of the engine.
local function split(settings)
  local own, rest = {}, {}
  for name, value in pairs(settings) do
    if OWN[name] and not OWN[name][2](value) then
      core.raise(("init: %s: %s is expected, not %s"):format(name, OWN[name][1], tostring(value)))
    end
    if OWN[name] then own[name] = value elseif name ~= "group" then rest[name] = value end
  end
  for name, what in pairs(OWN) do
    if own[name] == nil then own[name] = what[3] end
  end
  return own, rest
end

-- What all ranks must have in common, as lines.
local function agreed(script, own)
  local lines = { "script=" .. mpi.content_of(script) }
  for _, name in ipairs { "sum_order", "timeout", "stuck", "lost", "init_timeout" } do
    lines[#lines + 1] = ("%s=%s"):format(name, tostring(own[name]))
  end
  return table.concat(lines, "\n")
end

-- The launcher that has started this process, and the program that watches the ranks of a host.
local function find()
  local found = core.hosts_launched()
  if package.loaded["moonshard.process"] then
    core.raise "init: group \"mpi\" is for other interpreters: `moonshard run` makes this process \z
      a rank by itself"
  elseif not found or not found.mpi then
    core.raise(("init: group \"mpi\": %s: start the script with mpirun, as mpirun -n 4 lua5.4 \z
      script.lua"):format(found and found.launcher .. " has no MPI"
      or "no launcher has started this process as one of several"))
  end
  local program, exists = core.hosts_program()
  if not exists then
    core.raise(("init: group \"mpi\" needs the program moonshard, which watches the ranks of a \z
      host: it is not at %s; MOONSHARD_PROGRAM=PATH says where it is"):format(program))
  end
  return program
end

local function report(message)
  io.stdout:flush()
  io.stderr:write("moonshard: ", message, "\n")
end

---@param settings ms.InitOptions
function mpi.init(settings)
  local own, rest = split(settings)
  core.configure(rest)
  local program = find()
  -- luacheck: push std lua54
  local script = arg and arg[0] or "a script"
  -- luacheck: pop
  local arguments = { "run", "--timeout", tostring(own.timeout), "--lost", tostring(own.lost) }
  if own.stuck then
    table.move({ "--stuck", tostring(own.stuck) }, 1, 2, #arguments + 1, arguments)
  end
  arguments[#arguments + 1] = script:gsub("^%-", "./-")
  local place, message, is_told = core.hosts_join {
    program = program, leaves = true, agree = agreed(script, own), arguments = arguments,
    interface = own.interface, port = own.port, init_ns = math.floor(own.init_timeout * 1e9),
    lost_ns = math.floor(own.lost * 1e9), timeout_ns = math.floor(own.timeout * 1e9),
    threads = rest.threads, memory_bytes = rest.memory_bytes,
    sum_by_ranks = own.sum_order == "ranks", report = report,
  }
  if place then return end
  if not is_told then report(message) end
  core.hosts_quit(2)
end

return mpi
