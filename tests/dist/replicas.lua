-- Run by every rank of replicas_spec.lua: what ranks must hold alike is compared. Each case changes
-- one thing on the last rank and names what the error must have; or changes what each rank may have
-- of its own, and there is no error.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local cfg = ms.config { folder = "" }
local rank, size, nn = ms.rank(), ms.world_size(), ms.nn
local last = size - 1
local folder = cfg.folder

local function linear() return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)) end

local function pass(model)
  model(ms.full(rank + 1, { 2, 4 })):sum():backward()
end

-- A model and its optimizer after two steps.
local function trained(wrap, make, module)
  local model = wrap((module or linear)())
  local optimizer = (make or ms.optim.adamw)(model)
  for _ = 1, 2 do
    pass(model)
    optimizer:step()
  end
  return model, optimizer
end

local count = 0
local function save(things)
  count = count + 1
  return ms.checkpoint.save(folder,
    { step = count, model = things.model, optimizer = things.optimizer })
end

-- The difference is found by both calls, on all ranks, and nothing is saved.
local function found(model, optimizer, ...)
  assert(ms.checkpoint.wait())
  ms.world():barrier()
  local before = #(require("moonshard.core").list(folder) or {})
  expect.fails(function() model:check_replicas(optimizer) end, "check_replicas", ...)
  expect.fails(function() save { model = model, optimizer = optimizer } end, "checkpoint.save", ...)
  assert(ms.checkpoint.wait())
  ms.world():barrier()                                   -- rank 0 removes what others have written
  assert(#(require("moonshard.core").list(folder) or {}) == before, "something was saved")
end

local function equal(model, optimizer)
  model:check_replicas(optimizer)
  assert(save { model = model, optimizer = optimizer })
end

local function on_last(f) if rank == last then ms.no_grad(f) end end

local function who()
  if size == 2 then return "rank 1 differs from that of rank 0" end
  return ("rank %d differs from that of ranks 0"):format(last)
end

-- Strategies of which several ranks hold copies.
local wraps = {
  ddp = ms.ddp,
  find_unused = function(m) return ms.ddp(m, { find_unused = true }) end,
  fp16 = function(m) return ms.ddp(m, { comm_hook = ms.hooks.fp16_compress() }) end,
  no_shard = function(m) return ms.fsdp(m, { strategy = "no_shard" }) end,
}
if size == 4 then
  wraps.hybrid = function(m)
    return expect.models.fsdp(m, { strategy = "hybrid_shard", wrap = { class = "Linear" } })
  end
end

-- What the last rank changes -> a text of the error.
local changes = {
  { "a weight", function(model) model:parameters()[3]:add_(1) end, "1.weight" },
  { "one bit", function(model)
    local p = model:parameters()[1]
    p:copy_(ms.where(p:eq(p:max()), p * (1 + 0x1p-22), p))
  end, "0.weight" },
  { "the sign of a zero", function(model)
    model:parameters()[2]:fill_(rank == last and -0.0 or 0)
  end, "0.bias", true },
  -- Not the bias of one element: the last rank of hybrid_shard has no element of it.
  { "a frozen weight", function(model)
    if rank == last then model:parameters()[3]:add_(1) end
  end, "1.weight", true, function(model) model:parameters()[3]:requires_grad_(false) end },
  { "a rate", function(_, optimizer) optimizer:groups()[1].lr = 0.5 end,
    "groups/1/lr' is 0.001 on rank", "0.5 on rank " .. last },
  { "a rate that is a tensor", function(_, optimizer)
    optimizer:groups()[1].lr = ms.full(rank == last and 0.5 or 0.25, {})
  end, "groups/1/lr", true },
  { "betas", function(_, optimizer) optimizer:groups()[1].betas[2] = 0.5 end, "groups/1/betas" },
  { "a moment", function(_, optimizer)
    for _, slot in pairs(optimizer.slots) do
      for _, t in pairs(slot.state) do if t:numel() > 4 then t:add_(1) end end
    end
  end, "exp_avg" },
  { "one step more", function(_, optimizer) optimizer:step() end, "steps' is 2 on rank" },
}

for name, wrap in ms.sorted_pairs(wraps) do
  for i, change in ipairs(changes) do
    local what, f, text, more, prepare = table.unpack(change)
    if expect.takes(i + #name, 3) then
      local model, optimizer = trained(function(m)
        if prepare then prepare(m) end
        return wrap(m)
      end)
      equal(model, optimizer)
      if more == true then ms.no_grad(function() f(model, optimizer) end)
      else on_last(function() f(model, optimizer) end) end
      print(("%s: %s"):format(name, what))
      found(model, optimizer, text, type(more) == "string" and more or "")
    end
  end
end

-- The ranks are named.
do
  local model, optimizer = trained(ms.ddp)
  on_last(function() model:parameters()[1]:add_(1) end)
  found(model, optimizer, "'", "0.weight' of " .. who(), "reduce gradients together")
  on_last(function() model:parameters()[2]:add_(1) end)
  expect.fails(function() model:check_replicas() end, "1 more names differ")
  expect.fails(function() model.module:check_replicas() end, "check_replicas")
end

-- What each rank may have of its own.
local own = {
  noop = function(m) return ms.ddp(m, { comm_hook = ms.hooks.noop() }) end,
  post_local_sgd = function(m)
    return ms.ddp(m, { comm_hook = ms.hooks.post_local_sgd { start_step = 0, subgroup =
      ms.world():split(size == 4 and { { 0, 1 }, { 2, 3 } } or { { 0 }, { 1 } }) } })
  end,
  link = function(m)
    local link = setmetatable({ is_local = true }, { __call = function(_, bucket)
      return bucket:buffer()
    end })
    return ms.ddp(m, { comm_hook = link })
  end,
  stage = function(m)
    return ms.ddp(m, { comm_hook = ms.hooks.chain { ms.hooks.stage {
      name = "own " .. count, is_local = true, decode = function(t) return t * (rank + 1) end } } })
  end,
  between = size == 4 and function(m)
    local hook = ms.hooks.reduce { between = ms.hooks.noop() }
    return expect.models.fsdp(m, { strategy = "hybrid_shard", comm_hook = hook })
  end or nil,
  full_shard = ms.fsdp,
}
for _, wrap in ms.sorted_pairs(own) do equal(trained(wrap)) end

-- A link in Lua that does not say so is found.
do
  local model, optimizer = trained(function(m)
    return ms.ddp(m, { comm_hook = function(bucket) return bucket:buffer() end })
  end)
  found(model, optimizer, "weight", "is_local = true")
end

-- Ignored parameters, of weights and of states.
do
  local model, optimizer = trained(function(m) return ms.ddp(m, { ignored = { "1.*" } }) end)
  equal(model, optimizer)
  on_last(function() model:parameters()[1]:add_(1) end)
  found(model, optimizer, "0.weight")
end

-- Buffers: what a forward writes is a rank's own, and what it only reads is not.
local Counting = nn.class "Counting"
function Counting:init()
  self.layer = nn.Linear(4, 1)
  self.table, self.seen = ms.ones { 3 }, ms.zeros { 1 }
end
function Counting:forward(x)
  ms.no_grad(function() self.seen:add_(x:max()) end)
  return self.layer(x) * self.table:sum()
end
do
  local function make() return Counting() end
  local model, optimizer = trained(ms.ddp, nil, make)
  equal(model, optimizer)
  on_last(function() model.table:add_(1) end)
  found(model, optimizer, "table")
  pass(model)                                            -- it copies rank 0's
  optimizer:zero_grad()
  equal(model, optimizer)
  on_last(function() model.table = ms.full(3, { 3 }) end)
  found(model, optimizer, "table")
  model, optimizer = trained(function(m) return ms.ddp(m, { broadcast_buffers = false }) end, nil,
    make)
  on_last(function() model.table:add_(1) end)
  equal(model, optimizer)
end

-- Optimizers whose states are shared out.
do
  local model, optimizer = trained(ms.ddp, function(m)
    return ms.optim.adamw(m, { shard = ms.world() })
  end)
  equal(model, optimizer)
  on_last(function() optimizer:groups()[1].weight_decay = 0.5 end)
  found(model, optimizer, "groups/1/weight_decay")
end

-- Groups of fewer ranks: the others learn of the difference, and save nothing either.
if size == 4 then
  local pairs_of = ms.world():split { { 0, 1 }, { 2, 3 } }
  local model = ms.ddp(linear(), { group = pairs_of })
  local optimizer = ms.optim.sgd(model, { lr = 0.1 })
  pass(model)
  optimizer:step()
  equal(model, optimizer)
  on_last(function() model:parameters()[1]:add_(1) end)
  expect.fails(function() save { model = model, optimizer = optimizer } end, "checkpoint.save",
    "0.weight' of rank 3 differs from that of rank 2")
  local ok = pcall(model.check_replicas, model)
  assert(ok == (rank < 2))
  -- Means over a group of the link's own.
  model = ms.ddp(linear(), { comm_hook = ms.hooks.all_reduce { group = pairs_of } })
  optimizer = ms.optim.sgd(model, { lr = 0.1 })
  pass(model)
  optimizer:step()
  equal(model, optimizer)
  on_last(function() model:parameters()[1]:add_(1) end)
  expect.fails(function() save { model = model, optimizer = optimizer } end,
    "0.weight' of rank 3 differs from that of rank 2")
end

-- A state that rank 0 alone has goes to all, bit for bit; so do counts and settings.
do
  local function step(model, optimizer)
    pass(model)
    optimizer:step()
  end
  for _, kind in ipairs { "adamw", "sgd" } do
    local function make(m)
      return ms.optim[kind](m, kind == "sgd" and { lr = 0.1, momentum = 0.9 } or nil)
    end
    local model, optimizer = trained(ms.ddp, make)
    optimizer:groups()[1].lr = 0.25
    local kept = {}
    for name, value in pairs(optimizer:state()) do kept[name] = value end
    kept.parameters = {}
    for name, state in pairs(optimizer:state().parameters) do
      kept.parameters[name] = {}
      for key, value in pairs(state) do
        kept.parameters[name][key] = type(value) == "userdata" and value:clone() or value
      end
    end
    local weights = {}
    for i, p in ipairs(model:parameters()) do weights[i] = p:detach():clone() end
    step(model, optimizer)
    local expected = {}
    for i, p in ipairs(model:parameters()) do expected[i] = p:detach():clone() end
    local second = make(model)
    step(model, second)
    second:load_state(rank == 0 and kept or {})
    assert(second:groups()[1].lr == 0.25)
    ms.no_grad(function()
      for i, p in ipairs(model:parameters()) do p:copy_(weights[i]) end
    end)
    step(model, second)
    expect.same(model:parameters(), expected, kind .. " went on otherwise")
    equal(model, second)
    expect.fails(function() second:load_state {} end, "load_state", "rank 0 gives an empty table")
    expect.fails(function() second:load_state(rank == last and { steps = 1 } or kept) end,
      "load_state")
    equal(model, second)
  end
end

-- After uneven inputs ranks hold the same again, moments and scales too.
for _, how in ipairs { "adamw", "sgd", "scaler" } do
  local model = ms.ddp(linear())
  local optimizer = ms.optim[how == "scaler" and "adamw" or how](model,
    how == "sgd" and { lr = 0.01, momentum = 0.9 } or nil)
  local scaler = how == "scaler"
    and ms.optim.scaler { init_scale = 64, growth_interval = 3 } or nil
  for _, batches in ipairs { rank == 0 and 2 or 5, 4, rank == last and 0 or 3 } do
    model:join({}, function()
      for i = 1, batches do
        optimizer:zero_grad()
        local loss = model(ms.full(rank + i, { 2, 4 })):sum()
        if scaler then
          scaler:scale(loss):backward()
          scaler:step(optimizer)
        else
          loss:backward()
          optimizer:step()
        end
        if rank == last and i == 5 then optimizer:groups()[1].lr = 0.02 end
      end
    end)
    equal(model, optimizer)
    if scaler then
      local all = ms.world():all_gather(scaler:state().factor:view(1)):value()
      assert(all:eq(all:narrow(1, 1, 1)):all():item(), "scales differ")
    end
  end
  assert(optimizer:groups()[1].lr == 0.02)
end

print(("rank %d is done"):format(rank))
