-- All-reduces of the engine, measured as figures.h says: sums of f32, in place, of tensors in the
-- group's memory. Rank 0 prints the figures.
--     mpirun -n 2 moonshard run moonshard.lua peer=NAME sizes="4096 65536x20"
local core = require "moonshard.core"
local ms = require "moonshard"

local SAMPLES <const> = 7
local cfg = ms.config { peer = "moonshard", sizes = "4096 65536 1048576 16777216 67108864" }
local world = ms.world()
local ranks = world:size()

-- Sums are right; those of zeros stay small, however many follow.
local function check(t, count)
  world:all_reduce(t, "sum")
  local values = t:to_table()
  for i = 1, count, math.max(1, count // 1000) do
    local sum = (i - 1) % 251 * ranks + ranks * (ranks - 1) // 2
    assert(values[i] == sum, "a sum is wrong")
  end
end

local function filled(count)
  local t = core.zeros { count, group = world }
  local values = {}
  for i = 1, math.min(count, 1 << 16) do values[i] = (i - 1) % 251 + ms.rank() + 0.0 end
  if count <= 1 << 16 then
    t:copy_(ms.tensor(values))
    check(t, count)
    t:zero_()
  end
  return t
end

local function measure(bytes, runs)
  local t, times = filled(bytes // 4), {}
  for sample = 0, SAMPLES do
    world:barrier()
    core.synchronize()
    local start = core.clock_ms()
    for _ = 1, runs do world:all_reduce(t, "sum") end
    core.synchronize()
    if sample > 0 then times[sample] = (core.clock_ms() - start) / runs * 1e3 end
  end
  table.sort(times)
  return times
end

for size in cfg.sizes:gmatch "%S+" do
  local bytes, runs = size:match "^(%d+)x?(%d*)$"
  bytes = math.tointeger(tonumber(bytes))
  runs = math.tointeger(tonumber(runs)) or math.max(3, math.min(500, (64 << 20) // (bytes // 4)))
  local times = measure(bytes, runs)
  if ms.rank() == 0 then
    io.stdout:write(core.json_encode {
      peer = cfg.peer, bytes = bytes, us_med = times[SAMPLES // 2 + 1], us_min = times[1],
      moved = bytes * runs * (SAMPLES + 1),
    }, "\n")
    io.stdout:flush()
  end
end
