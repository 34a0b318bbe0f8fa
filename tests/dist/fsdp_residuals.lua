-- Run by every rank of fsdp_checkpoint_spec.lua: what lossy links keep on each rank, in checkpoints
-- of sharded models. As many ranks continue with the same bits; others get the mean over the ranks,
-- so that the mean of the gradients loses nothing; or parts of the sum, where gradients are added
-- up.
local ms = require "moonshard"
local link_state = require "moonshard.parallel.link_state"
local core = require "moonshard.core"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local job = ms.config { folder = "", cases = "" }
local rank, size, world = ms.rank(), ms.world_size(), ms.world()
local usual = size % 2 == 0 and "rows" or "flat"

-- A case of the job, and what holds in all of it. run: the name of the run; saved: by how many
-- ranks it was saved, 0: save it; in_lua: the link's version in Lua; within: ranks that share one
-- copy, where links run between two reductions, 0: they do not.
local cfg, adds_up, feedback, shards, replicas
local function begin(text)
  cfg = {
    run = "", saved = 0, op = "avg", divide = 0, in_lua = false, ddp = false, within = 0,
    layout = usual,
  }
  for key, value in text:gmatch "(%S+)=(%S+)" do
    assert(cfg[key] ~= nil, key)
    cfg[key] = value == "true" or tonumber(value) or value
  end
  -- Whether the result does not become smaller with more ranks. Links between see what was divided.
  adds_up = cfg.op == "sum" or cfg.divide > 0 and cfg.within == 0
  feedback = cfg.in_lua and require "moonshard.hooks.error_feedback" { name = "error_feedback" }
    or ms.hooks.error_feedback()
  shards, replicas = nil, nil
  if cfg.within > 0 then shards, replicas = world:levels(cfg.within) end
end

local function make(seed)
  ms.seed(seed)
  local net = ms.nn.Sequential(ms.nn.Linear(6, 7), ms.nn.Linear(7, 5))
  local hook = ms.hooks.chain {
    feedback, ms.hooks.cast { dtype = "bf16" }, ms.hooks.reduce { op = cfg.op },
  }
  if cfg.within > 0 then hook = ms.hooks.reduce { op = cfg.op, between = hook } end
  local model = cfg.ddp and ms.ddp(net, { comm_hook = hook }) or ms.fsdp(net, {
    layout = cfg.layout, wrap = { class = "Linear" },
    strategy = cfg.within > 0 and "hybrid_shard" or nil, shard_group = shards,
    replica_group = replicas, comm_hook = hook,
    divide_factor = cfg.divide > 0 and cfg.divide or nil,
  })
  return model, ms.optim.sgd(model, { lr = 0.1, momentum = 0.9 })
end

local function step(model, optimizer, number)
  model(expect.models.input(4, 6, number * 10 + rank)):square():mean():backward()
  optimizer:step()
end

-- Of links between reductions: what is kept for each element of each parameter, as the mean over
-- the ranks that have it, or as their sum.
local function residuals_between(model)
  local found, own = {}, {}
  for _, one in ipairs(link_state.core(assert(link_state.find "error_feedback")):pieces()) do
    local name, parameter, t = table.unpack(one)
    assert(name == "error")
    own[parameter] = t
  end
  for _, one in ipairs(model:pieces()) do
    local whole = ms.zeros { one.shape[1] * (one.shape[2] or 1) }
    if one.count > 0 and own[one.name] then
      whole:narrow(1, one.first + 1, one.count):copy_(own[one.name]:narrow(1, 1, one.count))
    end
    found["error " .. one.name] = world:all_reduce(whole):value()
      / (adds_up and 1 or replicas:size())
  end
  return found
end

-- The mean over all ranks of what the link keeps for each parameter, or the sum.
local function residuals(model)
  if cfg.within > 0 then return residuals_between(model) end
  local found = {}
  for _, one in ipairs(link_state.core(assert(link_state.find "error_feedback")):pieces()) do
    local name, parameter, t = table.unpack(one)
    local op = adds_up and "sum" or "avg"
    found[name .. " " .. parameter] = world:all_reduce(t:clone(), op):value()
  end
  return found
end

local function take(text)
  begin(text)
  local path = ("%s/%s"):format(job.folder, cfg.run)
  local model, optimizer = make(cfg.saved == 0 and 1 or 2)
  local things = { model = model, optimizer = optimizer, step = 2 }
  if cfg.saved == 0 then
    for number = 1, 2 do step(model, optimizer, number) end
    assert(ms.checkpoint.save(path, things))
    local kept = residuals(model)
    if rank == 0 then assert(ms.safetensors.save(path .. "/kept.safetensors", kept)) end
    step(model, optimizer, 3)
    assert(model:save(path .. "/final.safetensors"))
    return
  end
  assert(ms.checkpoint.load(ms.checkpoint.latest(path), things))
  local expected, count = assert(ms.safetensors.load(path .. "/kept.safetensors")), 0
  local own = residuals(model)
  for name, t in pairs(expected) do
    local most = t:abs():max():item()
    assert(most > 0, "nothing was kept: " .. name)
    -- Sums over ranks are added in another order.
    assert((own[name]:view(-1) - t:view(-1)):abs():max():item() <= 1e-6 * most, name)
    count = count + 1
  end
  assert(count == 4)
  step(model, optimizer, 3)
  local state = model:state()
  if rank == 0 and cfg.saved == size and cfg.layout == usual then
    local final = assert(ms.safetensors.load(path .. "/final.safetensors"))
    expect.same(state, final, text)
  end
end

for text in job.cases:gmatch "[^;]+" do
  take(text)
  -- States have names, and the next case's link has the same: this one's must be gone.
  feedback = nil
  core.collect()
  print(("rank %d has taken %s"):format(rank, text))
end
print(("rank %d is done"):format(rank))
