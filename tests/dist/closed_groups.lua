-- Groups that are closed: the next split into the same parts gives them again, on all ranks, with
-- sums that are right, in no more memory, and more often than a job may have groups.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")

local SANITIZED = (os.getenv "MOONSHARD_SANITIZE" or "") ~= ""
local world, rank, size = ms.world(), ms.rank(), ms.world_size()

local function shown(value)
  return type(value) == "table" and table.concat(value, " ") or tostring(value)
end
local function equal(own, expected)
  if shown(own) ~= shown(expected) then
    error(("%s, not %s"):format(shown(own), shown(expected)), 2)
  end
end

local function parts_of(block)
  local parts = {}
  for first = 0, size - 1, block do
    local part = {}
    for r = first, math.min(first + block, size) - 1 do part[#part + 1] = r end
    parts[#parts + 1] = part
  end
  return parts
end
local function turned(parts)
  local list = {}
  for i, part in ipairs(parts) do
    list[i] = {}
    for at, r in ipairs(part) do list[i][#part + 1 - at] = r end
  end
  return list
end

-- The sum of the ranks' numbers over a group, on both channels.
local function check(group, parts)
  local sum
  for _, part in ipairs(parts) do
    local total, here = 0, false
    for _, r in ipairs(part) do
      total = total + r + 1
      here = here or r == rank
    end
    if here then sum = total end
  end
  for channel = 1, 2 do
    local t = ms.full(rank + 1, { 3 })
    equal(group:channel(channel):all_reduce(t):value():to_table(),
      { sum + 0.0, sum + 0.0, sum + 0.0 })
  end
end

local kinds = { parts_of(1), parts_of(2), parts_of(size), turned(parts_of(2)) }
local first, threads
for round = 1, 100 do
  for _, parts in ipairs(kinds) do
    local group = world:split(parts)
    check(group, parts)
    -- One of a group's own, and two of equal lists at a time.
    local other = world:split(parts)
    equal(group == other, false)
    equal(group:name() == other:name(), false)
    do
      local inner = {}
      for r = 0, group:size() - 1 do inner[r + 1] = { r } end
      local own <close> = group:split(inner)
      equal(own:size(), 1)
    end
    check(other, parts)
    other:close()
    group:close()
    group:close()
  end
  if round == 2 then first, threads = expect.process() end
end
local last, threads_now = expect.process()
-- Ranks that are threads share a process: others may still make their first groups. The memory of a
-- sanitizer grows.
equal(SANITIZED or last < first + 20000 * size, true)
equal(threads_now <= threads + 20 * size, true)

-- A handle of a group that was closed stays closed when the group is given again.
local group = world:split(parts_of(1))
local channel = group:channel(2)
group:close()
local again = world:split(parts_of(1))
equal(again == group, false)
for _, old in ipairs { group, channel } do
  for _, name in ipairs { "rank", "size", "name", "barrier" } do
    expect.fails(function() return old[name](old) end, "this group (world/", ") was closed")
  end
  expect.fails(function() old:all_reduce(ms.ones { 1 }) end, "was closed")
  expect.fails(function() old:split { { 0 } } end, "was closed")
end
equal(tostring(group):find("^group world/") ~= nil, true)
expect.fails(function() world:close() end, "close: group world was not made by a split")

-- A model that uses the group goes on.
local model = ms.ddp(ms.nn.Linear(2, 2), { group = again })
again:close()
model(ms.ones { 1, 2 }):sum():backward()
equal(model:parameters()[1]:grad():view(-1):to_table(), { 1.0, 1.0, 1.0, 1.0 })

-- Parts that lack a rank are made again, as the others could not know.
if size > 1 then
  local names = {}
  for i = 1, 2 do
    local some = world:split { { 0 } }
    names[i] = some and some:name()
    if some then some:close() end
  end
  equal(rank > 0 or names[1] ~= names[2], true)
end
world:barrier()
print(("rank %d is done"):format(rank))
