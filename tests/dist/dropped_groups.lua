-- Groups that are dropped without close(): several hundred of them, of changing members and of
-- groups of groups, whose collectors run at different times on each rank. Sums stay right, memory
-- and threads level, a group that one rank keeps goes on, and so do models and tensors whose groups
-- are dropped.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")

local cfg = ms.config { rounds = 150, limit = true, memory = true }
local world, rank, size = ms.world(), ms.rank(), ms.world_size()

local function equal(own, expected)
  if own ~= expected then error(("%s, not %s"):format(own, expected), 2) end
end

-- Some ranks of a group, in an order that changes with the number; the same on all ranks.
local function some_of(group_size, number)
  local all, part, seed = {}, {}, number
  local function below(n)
    seed = (seed * 1103515245 + 12345) % 2147483648
    return seed // 65536 % n
  end
  for r = 0, group_size - 1 do table.insert(all, below(#all + 1) + 1, r) end
  for i = 1, 1 + below(group_size) do part[i] = all[i] end
  return part
end

local function sum_over(group)
  local sum = 0
  for r = 0, group:size() - 1 do sum = sum + group:_world_rank(r) + 1 end
  return sum
end

-- The sum of the members' numbers over a group, on both channels, and as numbers of hosts.
local function check(group)
  if not group then return end
  local sum = sum_over(group)
  for channel = 1, 2 do
    local t = ms.full(rank + 1, { 3 })
    equal(group:channel(channel):all_reduce(t):value():sum():item(), 3.0 * sum)
  end
  equal(group:_share("sum", "i64", { rank + 1 }, "numbers")[1], sum)
end

local function split(group, number)
  return group and group:split { some_of(group:size(), number) }
end

-- The last rank keeps a group of which the others know nothing any more.
local everybody = {}
for r = 0, size - 1 do everybody[r + 1] = r end
local kept = world:split { everybody }
check(kept)
if rank ~= size - 1 then kept = nil end

-- Lua's own collector runs on rank 0 only, and the others collect in different rounds.
if rank > 0 then collectgarbage "stop" end
local first, threads
for round = 1, cfg.rounds do
  local outer = split(world, round)
  check(outer)
  local inner = split(outer, round + 1000)
  check(inner)
  check(split(inner, round + 2000))
  -- What is enqueued on a group that is dropped at once is done.
  do
    local t = ms.full(rank + 1, { 4 })
    local pending = world:split({ everybody }):all_reduce(t)
    equal(pending:value():sum():item(), 4.0 * size * (size + 1) / 2)
  end
  outer, inner = nil, nil -- luacheck: ignore
  if round % (rank + 2) == 0 then
    collectgarbage()
    collectgarbage()
  end
  if round == 50 then first, threads = expect.process() end
end
if cfg.memory and first then
  local last, threads_now = expect.process()
  -- Ranks that are threads share a process: others may still make their first groups.
  if last > first + 20000 * size then error(("memory: %d kB, then %d kB"):format(first, last)) end
  if threads_now > threads + 20 * size then error(("%d threads"):format(threads_now)) end
end

-- The kept group lives, on all its ranks: rank 0 to size - 2 have no name for it, and so they take
-- it from its list of groups.
if size > 1 then
  local core, found = require "moonshard.core", nil
  for _, group in ipairs(core.comm_groups()) do
    if group:name() == "world/0.0" or group:name() == "world/1.0" then found = found or group end
  end
  equal(found and found:size(), size)
  check(found)
  if kept then equal(found, kept) end
  found = nil -- luacheck: ignore
end

-- A rank that still holds groups meets no others of their numbers, and closing goes on working.
do
  local closed = {}
  for i = 1, 20 do
    closed[i] = world:split { everybody }
    check(closed[i])
  end
  for i = 1, 20 do closed[i]:close() end
  local again = world:split { everybody }
  check(again)
  again:close()
end

-- What is made with a group keeps it: a model, a hook's link, a tensor with a history.
do
  local function full() return world:split { everybody } end
  local model = ms.ddp(ms.nn.Linear(2, 2, { bias = false }), { group = full() })
  local sharded = ms.fsdp(ms.nn.Linear(2, 2, { bias = false }), { group = full() })
  local linked = ms.ddp(ms.nn.Linear(2, 2, { bias = false }),
    { comm_hook = ms.hooks.all_reduce { group = full() } })
  local x = ms.full(1.0, { 2 }):requires_grad_()
  local y = full():all_reduce(x):value()
  for _ = 1, 3 * (rank + 1) do collectgarbage() end
  for i = 1, 30 do check(split(world, i)) end
  collectgarbage()
  for i = 1, 30 do check(split(world, i)) end
  for _, one in ipairs { model, sharded, linked } do
    one(ms.ones { 1, 2 }):sum():backward()
  end
  equal(model:parameters()[1]:grad():sum():item(), 4.0)
  equal(linked:parameters()[1]:grad():sum():item(), 4.0)
  y:sum():backward()
  equal(x:grad():sum():item(), 2.0 * size)
end

-- Where numbers would run out, all ranks collect first: no rank's collector has run so far.
if cfg.limit then
  collectgarbage "stop"
  for _ = 1, 600 do check(world:split { everybody }) end
  -- Groups that live count: 256 with the world.
  local alive = {}
  expect.fails(function()
    for i = 1, 300 do alive[i] = world:split { everybody } end
  end, "split: 1 more group", "may have 256 alive")
  if #alive < 200 then error(("only %d groups are alive"):format(#alive)) end
  check(alive[#alive])
  alive = nil -- luacheck: ignore
  check(world:split { everybody })
  collectgarbage "restart"
end
world:barrier()
print(("rank %d is done"):format(rank))
