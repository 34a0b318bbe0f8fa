-- For tests/hosts: levels of the ranks of several hosts, and models that are sharded over them.
local ms = require "moonshard"
local cfg = ms.config {
  hosts = { "", help = "the host of each rank, as aabb" },
  hybrid = { true, help = "each host has as many ranks" },
  message = { "", help = "what hybrid strategies say otherwise" },
}
local world = ms.world()

-- The members of a group, by their numbers in the world.
local function members(group)
  local mine = ms.tensor({ ms.rank() }, "i32")
  return group:all_gather(mine):value():to_table()
end

local own, positions = {}, {}
local here, seen = cfg.hosts:sub(ms.rank() + 1, ms.rank() + 1), {}
for rank = 0, ms.world_size() - 1 do
  local host = cfg.hosts:sub(rank + 1, rank + 1)
  seen[host] = (seen[host] or 0) + 1
  positions[rank] = seen[host]
  if host == here then own[#own + 1] = rank end
end
local mates = {}
for rank = 0, ms.world_size() - 1 do
  if positions[rank] == positions[ms.rank()] then mates[#mates + 1] = rank end
end

local function expect_same(a, b) assert(a == b, ("%s, not %s"):format(b, a)) end

local within, across = world:levels()
expect_same(table.concat(own, ","), table.concat(members(within), ","))
expect_same(table.concat(mates, ","), table.concat(members(across), ","))

-- Where the hosts have as many ranks each, they are what a hybrid strategy uses.
local function train(options)
  ms.seed(1)
  local model = ms.fsdp(ms.nn.Linear(8, 8), options)
  local optimizer = ms.optim.sgd(model, { lr = 0.1 })
  for step = 1, 3 do
    model((ms.ones { 2, 8 } * ((ms.rank() + step) / 8))):sum():backward()
    optimizer:step()
    optimizer:zero_grad()
  end
  local text
  model:summon({ writeback = false }, function(parameters)
    local parts = {}
    for i, p in ipairs(parameters) do
      parts[i] = table.concat(p:detach():view(-1):to_table(), " ")
    end
    text = table.concat(parts, " ")
  end)
  return text
end

if cfg.hybrid then
  expect_same(train { strategy = "hybrid_shard", shard_group = within, replica_group = across },
    train { strategy = "hybrid_shard" })
  expect_same(train { strategy = "hybrid_shard" }, train { strategy = "full_shard" })
else
  local ok, message = pcall(train, { strategy = "hybrid_shard" })
  assert(not ok and tostring(message):find(cfg.message, 1, true), message)
end
ms.log "levels are right"
