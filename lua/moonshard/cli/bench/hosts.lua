-- moonshard bench collectives --hosts 2: all-reduces between two hosts, ours beside others'. It
-- runs in a build tree, whose tests make hosts of this machine and have the programs of others.
local core = require "moonshard.core"
local launch = require "moonshard.base.launch"
local switches = require "moonshard.cli.switches"

local bench_hosts = {}

local SIZES <const> = "4096x200 65536x100 1048576x30 16777216x4 67108864x2"

-- The sources of the build tree: this file is reached by a link to them.
local function source_of(program)
  local build = program:match "^(.*)/bin/[^/]*$" or "."
  local source = (build .. "/share/lua/5.4/..")
  local probe = io.open(source .. "/tests/hosts/hosts.sh")
  if probe then probe:close() end
  local built = io.open(build .. "/tests/bench/exchange")
  if built then built:close() end
  if not probe or not built then
    launch.exit(2, "--hosts needs a build tree: its tests make hosts of this machine, and have \z
      the programs of other libraries. Between machines, `mpirun -n 2 -host HOST,HOST moonshard \z
      run tests/bench/peers/moonshard.lua` measures ours")
  end
  return source, build
end

local function quoted(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

-- All peers once: { [peer] = { us_med, us_min, crossed } }. What launchers say on stderr would get
-- into the lines of figures, so it goes to a file.
local function round_of(source, build, where, python, size)
  local path = os.tmpname()
  local pipe = assert(io.popen(("%s %s --where %s --python %s %s 2>%s"):format(
    quoted(source .. "/tests/bench/peers/peers.sh"), quoted(build), where, quoted(python), size,
    quoted(path))))
  local result, order, said = {}, {}, {}
  local function fail(what)
    local file = io.open(path)
    local errors = file and file:read "a" or ""
    if file then file:close() end
    os.remove(path)
    launch.exit(1, what .. table.concat(said, "\n") .. errors)
  end
  for line in pipe:lines() do
    local row = line:match "^{" and core.json_decode(line)
    if not row then said[#said + 1] = line
    elseif row.us_med then
      result[row.peer], order[#order + 1] = row, row.peer
    elseif not result[row.peer] then fail(row.peer .. " gave no figures: ")
    else result[row.peer].crossed = row.sent / result[row.peer].moved end
  end
  if not pipe:close() then fail "" end
  os.remove(path)
  return result, order
end

-- A sum of f32 between hosts takes each byte to the other host once at least.
local function check_crossing(peer, row)
  if row.crossed and row.crossed >= 1 then return end
  launch.exit(1, ("%s: only %.2f of the bytes have crossed the cable between the hosts")
    :format(peer, row.crossed or 0))
end

local function measure(parsed, source, build, layout, size, median)
  local all, order = {}, nil
  for _ = 1, parsed.rounds do
    local result
    result, order = round_of(source, build, layout.where, parsed.python, size)
    for peer, row in pairs(result) do
      check_crossing(peer, row)
      local seen = all[peer] or { us_med = {}, us_min = math.huge, crossed = row.crossed }
      table.insert(seen.us_med, row.us_med)
      seen.us_min = math.min(seen.us_min, row.us_min)
      all[peer] = seen
    end
  end
  local rows = {}
  for i, peer in ipairs(order) do
    rows[i] = {
      peer = peer, ranks = layout.ranks, bytes = math.tointeger(tonumber(size:match "%d+")),
      us_med = median(all[peer].us_med), us_min = all[peer].us_min, crossed = all[peer].crossed,
    }
  end
  return rows
end

-- A flat ring in the order of hosts sends 2 (n - 1) / n of the tensor over the cable each way.
local function show(rows, layout)
  local ring = 2 * (layout.ranks - 1) / layout.ranks
  for _, row in ipairs(rows) do
    local cable = ("hosta sent %.2f of the bytes, a flat ring %.2f: %.2f")
      :format(row.crossed, ring, row.crossed / ring)
    print(("%9d bytes  %-18s %10.1f us (%.1f)  %s")
      :format(row.bytes, row.peer, row.us_med, row.us_min, cable))
  end
end

local layouts = {
  { ranks = 2, where = "hosta:1,hostb:1" },
  { ranks = 4, where = "hosta:2,hostb:2" },
}

-- On the hosts.
local function run_inside(parsed, source, build, median)
  local all = {}
  for _, layout in ipairs(layouts) do
    if parsed.ranks == 1 or parsed.ranks == layout.ranks then
      if not parsed.json then
        print(("all_reduce of f32 in place, %d ranks on 2 hosts: microseconds a call, median \z
          (minimum) of %d rounds in turns"):format(layout.ranks, parsed.rounds))
      end
      for size in parsed.bytes:gmatch "%S+" do
        local rows = measure(parsed, source, build, layout, size, median)
        if not parsed.json then show(rows, layout) end
        table.move(rows, 1, #rows, #all + 1, all)
        io.stdout:flush()
      end
    end
  end
  if parsed.json then print(core.json_encode { hosts = 2, all_reduce = all }) end
  return 0
end

--- The switches of the measurement between hosts.
---@param parser table
function bench_hosts.add_switches(parser)
  parser:option("--hosts", "2: between two hosts that it makes of this machine, beside \z
    MPI_Allreduce, gloo and bare sockets, in a build tree (default: none)"):argname "H"
    :convert(switches.count)
  parser:option("--bytes", "with --hosts: sizes, each with a number of runs")
    :argname "LIST":default(SIZES)
  parser:option("--rounds", "with --hosts: how often each is measured, in turns")
    :convert(switches.count):default "3"
  parser:option("--python", "with --hosts: an interpreter that has PyTorch, for gloo")
    :argname "PYTHON":default "python3"
end

--- Runs the measurement; returns the exit code.
---@param parsed table
---@param median fun(list: number[]): number
---@param arguments string[] as given, after `bench`
---@return integer
function bench_hosts.run(parsed, median, arguments)
  if parsed.hosts ~= 2 then
    launch.exit(2, ("--hosts %d: there are two hosts in this measurement"):format(parsed.hosts))
  elseif parsed.ranks ~= 1 and parsed.ranks ~= 2 and parsed.ranks ~= 4 then
    launch.exit(2, ("-n %d beside --hosts: 2 or 4 ranks (default: both)"):format(parsed.ranks))
  end
  for size in parsed.bytes:gmatch "%S+" do
    local bytes = tonumber(size:match "^(%d+)x?%d*$")
    if not bytes or bytes == 0 or bytes % 4 > 0 then
      launch.exit(2, ("--bytes: '%s' is no size: multiples of 4 with a number of runs, as 65536x20")
        :format(size))
    end
  end
  local program = launch.process.program
  local source, build = source_of(program)
  if (os.getenv "MOONSHARD_HOSTS" or ""):match "hostb=" then
    return run_inside(parsed, source, build, median)
  end
  local parts = { quoted(source .. "/tests/hosts/hosts.sh"), "run 2", quoted(program), "bench" }
  for _, argument in ipairs(arguments) do parts[#parts + 1] = quoted(argument) end
  local _, how, code = os.execute(table.concat(parts, " "))
  return how == "signal" and 128 + code or code
end

return bench_hosts
