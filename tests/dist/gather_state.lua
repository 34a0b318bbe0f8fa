-- Run by every rank of gather_state_spec.lua: part.state and part.fresh of before_gather and
-- after_gather. what=save trains, saves in the middle and keeps the end; what=resume must come to
-- the same end; what=other loads on another number of ranks, and compares the numbers.
local ms = require "moonshard"
local region = require "moonshard.parallel.region"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local cfg = ms.config { folder = "", what = "save", layout = "flat", replicas = 1, tensor = 1 }
local nn, rank = ms.nn, ms.rank()
local STEPS <const>, MIDDLE <const> = 6, 3

-- Sends numbers rounded to bf16, and what was left out with the next ones. calls: of each part.
local function make()
  ms.seed(8)
  local calls, fresh = 0, 0
  local function before_gather(shard, _, part)
    local left, sent = part.state:flat "left", part.state:flat "sent"
    calls = calls + 1
    if part.fresh then
      fresh = fresh + 1
      left:add_(shard)
      sent:copy_(left:to "bf16")
      left:sub_(sent)
    end
    return sent:to "bf16"
  end
  local tensor, data = ms.world():levels(cfg.tensor)
  local shards, replicas = data:levels(data:size() // cfg.replicas)
  local is_hybrid = cfg.replicas > 1
  local inner = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))
  if cfg.tensor > 1 then
    nn.split(inner[3].weight, tensor, { dim = 1, whole = true, pad = -3 % cfg.tensor })
    nn.split(inner[3].bias, tensor, { whole = true, pad = -3 % cfg.tensor })
  end
  local model = ms.fsdp(inner, {
    group = data,
    before_gather = before_gather, layout = cfg.layout, wrap = { class = "Linear" },
    strategy = is_hybrid and "hybrid_shard" or nil,
    shard_group = is_hybrid and shards or nil, replica_group = is_hybrid and replicas or nil,
  })
  return { model = model, optimizer = ms.optim.adamw(model, { lr = 0.01 }) },
    function() return calls, fresh end
end

local function train(things, from, to)
  for step in ms.steps(to, from) do
    things.model(ms.randn { 4, 5, seed = step }):square():mean():backward()
    things.optimizer:step()
  end
end

-- What all ranks have, put together: for the compared file.
local function whole_of(things)
  local found = {}
  for name, one in ms.sorted_pairs(things.model:state { kind = "sharded" }) do
    if type(one) == "table" then
      local count = 1
      for _, size in ipairs(one.shape) do count = count * size end
      local t = ms.zeros { count }
      if one.saves and one.region then
        region.put(t, one.region, one.first, one.count, one.tensor)
      elseif one.saves and one.count > 0 then
        t:narrow(1, one.first + 1, one.count):copy_(one.tensor)
      end
      found[name] = ms.world():all_reduce(t):value():clone()
    end
  end
  return found
end

local function keep(things, file)
  local whole = whole_of(things)
  assert(whole["#gather/left/0.weight"] and whole["#gather/sent/2.bias"])
  if rank == 0 then assert(ms.safetensors.save(cfg.folder .. "/" .. file, whole)) end
end
local function compare(things, file)
  local whole, saved = whole_of(things), assert(ms.safetensors.load(cfg.folder .. "/" .. file))
  expect.same(whole, saved, file)
  expect.same(saved, whole, file)
end

local what = {}
function what.save()
  local things, counts = make()
  train(things, 0, MIDDLE)
  local calls, fresh = counts()
  -- Of each unit forward's gather is the first of its shard, backward's is not.
  if ms.world_size() > 1 then assert(fresh == 2 * MIDDLE and calls == 2 * fresh, calls .. fresh) end
  assert(ms.checkpoint.save(cfg.folder .. "/kept", { model = things.model,
    optimizer = things.optimizer, step = MIDDLE }))
  keep(things, "middle")
  train(things, MIDDLE, STEPS)
  keep(things, "end")
end
local function load(things)
  assert(ms.checkpoint.load(cfg.folder .. "/kept/step-00000003", things))
end
function what.resume()
  local things = make()
  load(things)
  compare(things, "middle")
  train(things, MIDDLE, STEPS)
  compare(things, "end")
end
function what.other()
  local things = make()
  load(things)
  compare(things, "middle")
  -- A state of rank 0 alone has the parameters only.
  local state = things.model:state()
  for name in pairs(state) do assert(not name:find "#gather", name) end
end
what[cfg.what]()
print(("rank %d is done"):format(rank))
