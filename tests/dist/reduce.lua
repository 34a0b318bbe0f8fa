-- Run by every rank of reduce_spec.lua: reduce() of ddp and fsdp models after passes without
-- synchronization gives the bits of an accumulation whose last pass reduces.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local cfg = ms.config { wrap = "ddp", hook = "none", policy = "none" }
local nn, rank = ms.nn, ms.rank()

local hooks = {
  none = function() return nil end,
  fp16 = function() return ms.hooks.fp16_compress() end,
  powersgd = function()
    return ms.hooks.powersgd { rank = 1, start_step = 1, min_rate = 1 }
  end,
  top_k = function() return ms.hooks.top_k { fraction = 0.3 } end,
}

local function make(unused)
  ms.seed(6)
  local model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 6), nn.Linear(6, 3))
  local hook = hooks[cfg.hook]()
  if cfg.wrap == "ddp" then
    model = ms.ddp(model, { comm_hook = hook, bucket_bytes = 100, find_unused = unused })
  else
    model = ms.fsdp(model, {
      comm_hook = hook, wrap = { class = "Linear" }, find_unused = unused, accumulate = "local",
    })
  end
  local optimizer = ms.optim.sgd(model, { lr = 0.1, momentum = 0.9 })
  if cfg.policy ~= "none" then optimizer:overlap(model, cfg.policy) end
  return model, optimizer
end

local function pass(model, step, i)
  model(ms.randn { 2, 5, seed = 100 * step + 10 * i + rank }):square():sum():backward()
end

local function train(own)
  local model, optimizer = make()
  for step in ms.steps(5) do
    -- The first backward that reduces gives the buckets of ddp their order.
    if own and step > 0 then
      model:no_sync(function() for i = 1, 3 do pass(model, step, i) end end)
      model:reduce()
    else model:accumulate(3, function(i) pass(model, step, i) end) end
    optimizer:step()
  end
  local kind = cfg.wrap == "fsdp" and "sharded" or nil
  return model:state { kind = kind, live = true }, model, optimizer
end

local function plain(state)
  local found = {}
  for name, t in pairs(state) do found[name] = ms.no_grad(function()
    return (getmetatable(t).__name == "ms.Piece" and t.tensor or t):clone()
  end) end
  return found
end

local expected = plain((train(false)))
local state, model, optimizer = train(true)
expect.same(plain(state), expected, cfg.wrap)

-- The last microbatch outside of no_sync, whose forward comes before other backwards.
if cfg.policy == "none" then
  local a, b = make(), make()
  local function forward(m, i) return m(ms.randn { 2, 5, seed = 10 * i + rank }):square():sum() end
  for _ = 1, 2 do
    a:accumulate(3, function(i) forward(a, i):backward() end)
    local first, second
    b:no_sync(function() first, second = forward(b, 1), forward(b, 2) end)
    local last = forward(b, 3)
    b:no_sync(function() first:backward() end)
    second:backward()
    last:backward()
  end
  if cfg.wrap == "ddp" then
    local mine, other = {}, {}
    for i, p in ipairs(b:parameters()) do mine[i], other[i] = p:grad(), a:parameters()[i]:grad() end
    expect.same(mine, other, "in turn")
    local one = forward(b, 1)
    one:backward()
    b:no_sync(function() one = forward(b, 1) end)
    b:unwrap()
    one:backward()
  end
end

-- Calls in another order.
expect.fails(function() model:no_sync(function() model:reduce() end) end, "inside no_sync")
if ms.world_size() == 1 or cfg.hook == "none" and cfg.policy == "none" then
  pass(model, 9, 1)
  optimizer:step()
  model:no_sync(function() pass(model, 9, 2) end)
  model:no_sync(function() pass(model, 9, 3) end)
  model:reduce()
  model:no_sync(function() pass(model, 9, 2) end)            -- adds to what is reduced
  model:reduce()
  optimizer:step()
  -- A branch that no rank, or one alone, has used.
  local branches = make(true)
  local head = branches.module
  local function use(all)
    branches:no_sync(function()
      local x = branches(ms.ones { 1, 5 })
      if all then x:sum():backward() else (x * 0):sum():backward() end
    end)
  end
  use(rank == 0)
  branches:reduce()
  assert(head ~= nil)
end
expect.fails(function() model:reduce() end, "reduce: no backward inside of no_sync has left")
print(("rank %d is done"):format(rank))
