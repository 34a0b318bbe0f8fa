-- Run by every rank of masters_spec.lua: an optimizer's f32 copy of a 16-bit parameter takes what
-- others write to the parameter, whoever writes, whenever, under every strategy; and keeps its low
-- bits where nothing was written.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local cfg = ms.config { folder = "", hooks = "" }
local rank, size, nn, optim = ms.rank(), ms.world_size(), ms.nn, ms.optim
local LR <const> = 0.5
local DTYPES <const> = { "bf16", "f16" }

-- A model whose gradients are 1 in every pass, on every rank.
local Sum = nn.class "Sum"
function Sum:init(dtype)
  self.a = nn.Parameter(ms.full(4, { 3, 2, dtype = dtype }))
  self.b = nn.Parameter(ms.full(4, { 5, dtype = dtype }))
end
function Sum:forward() return self.a:sum() + self.b:sum() end

local wraps = {
  plain = function(m) return m end,
  ddp = ms.ddp,
  fsdp = ms.fsdp,
  rows = function(m) return ms.fsdp(m, { layout = "rows" }) end,
  no_shard = function(m) return ms.fsdp(m, { strategy = "no_shard" }) end,
  in_backward = function(m) return ms.ddp(m) end,
  deferred = function(m) return ms.ddp(m) end,
  in_backward_fsdp = ms.fsdp,
}

local function make(name, dtype)
  local model = wraps[name](Sum(dtype))
  local optimizer = optim.sgd(model, { lr = LR })
  if name:find "in_backward" then optimizer:overlap(model, "in_backward") end
  if name == "deferred" then optimizer:overlap(model, "deferred") end
  local function step()
    model():backward()
    optimizer:step()
  end
  return model, optimizer, step
end

local function all_are(model, value, what)
  for name, t in pairs(expect.whole(model)) do
    local low, high = t:min():item(), t:max():item()
    assert(low == value and high == value,
      ("%s, rank %d: '%s' is %g to %g, not %g"):format(what, rank, name, low, high, value))
  end
end

local function other(dtype, value)
  local m = Sum(dtype)
  ms.no_grad(function() for _, p in ipairs(m:parameters()) do p:fill_(value) end end)
  return m
end

-- What writes 10 to all parameters; of sharded models each rank writes its part.
local writers = {
  fill = function(model)
    ms.no_grad(function() for _, p in ipairs(model:parameters()) do p:fill_(10) end end)
  end,
  copy = function(model, dtype)
    ms.no_grad(function()
      for _, p in ipairs(model:parameters()) do
        if p:numel() > 0 then p:copy_(ms.full(10, p:shape()):to(dtype)) end
      end
    end)
  end,
  scale = function(model)
    ms.no_grad(function()
      for _, p in ipairs(model:parameters()) do if p:numel() > 0 then p:mul_(0):add_(10) end end
    end)
  end,
  load_state = function(model, dtype)
    model:load_state(rank == 0 and other(dtype, 10):state()
      or getmetatable(model).fsdp and {} or other(dtype, 10):state())
  end,
  load = function(model, dtype)
    local path = ("%s/%s.safetensors"):format(cfg.folder, dtype)
    assert(other(dtype, 10):save(path))
    assert(model:load(path))
  end,
  checkpoint = function(model, dtype)
    local path = assert(ms.checkpoint.save(cfg.folder .. "/" .. dtype,
      { model = other(dtype, 10), step = 1 }))
    assert(ms.checkpoint.wait())
    assert(ms.checkpoint.load(path, { model = model }))
  end,
  summon = function(model)
    if not getmetatable(model).fsdp then
      return ms.no_grad(function() for _, p in ipairs(model:parameters()) do p:fill_(10) end end)
    end
    model:summon({}, function(list) for _, p in ipairs(list) do p:fill_(10) end end)
  end,
}

for _, dtype in ipairs(DTYPES) do
  for name in ms.sorted_pairs(wraps) do
    for how, write in ms.sorted_pairs(writers) do
      if expect.takes(#name + #how + #dtype, 2) then
        local what = ("%s, %s, %s"):format(dtype, name, how)
        local model, _, step = make(name, dtype)
        -- Before the first step, after it, between two others, and twice.
        write(model, dtype)
        step()
        all_are(model, 9.5, what)
        write(model, dtype)
        step()
        step()
        all_are(model, 9, what)
        model():backward()
        if not name:find "in_backward" then write(model, dtype) end
        select(2, make(name, dtype)):zero_grad()
      end
    end
  end
end

-- Between backward and step. (A step that is taken in backward is over by then.)
for _, name in ipairs { "plain", "ddp", "fsdp", "deferred" } do
  local model, optimizer, step = make(name, "bf16")
  step()
  model():backward()
  writers.fill(model)
  optimizer:step()
  all_are(model, 9.5, name .. ", after backward")
end

-- Steps of less than half a unit of the last place move the copy alone. A mask, a clamp, or a copy
-- of itself in each step leaves them where nothing is masked: the weights move as in f32.
for _, name in ipairs { "plain", "ddp", "fsdp" } do
  for what, touch in pairs {
    mask = function(p) p:mul_(ms.where(p:eq(0), 0, 1):to "bf16") end,
    clamp = function(p) p:clamp_(-100, 100) end,
    copy = function(p) p:copy_(p:clone()) end,
  } do
    local model = wraps[name](Sum "bf16")
    local optimizer = optim.sgd(model, { lr = 0.001 })
    for _ = 1, 40 do
      model():backward()
      optimizer:step()
      ms.no_grad(function()
        for _, p in ipairs(model:parameters()) do if p:numel() > 0 then touch(p) end end
      end)
    end
    -- 4 - 0.04, rounded to bf16; updates in bf16 would have left 4.
    all_are(model, 3.953125, ("%s, %s in each step"):format(name, what))
  end
end

-- Loading in any order keeps low bits: things load in the order of their names.
for _, order in ipairs { { "adam", "net" }, { "net", "opt" } } do
  local function things(model, optimizer)
    local list = {}
    for _, name in ipairs(order) do list[name] = name == "net" and model or optimizer end
    return list
  end
  for _, name in ipairs { "plain", "ddp", "fsdp" } do
    local function made()
      local model = wraps[name](Sum "bf16")
      return model, optim.adamw(model, { lr = 0.001 })
    end
    local model, optimizer = made()
    local function steps(m, o, count)
      for _ = 1, count do
        m():backward()
        o:step()
      end
    end
    steps(model, optimizer, 3)
    local kept = things(model, optimizer)
    kept.step = 3
    local path = assert(ms.checkpoint.save(cfg.folder .. "/" .. order[1] .. name, kept))
    assert(ms.checkpoint.wait())
    ms.world():barrier()
    steps(model, optimizer, 4)
    local again, with = made()
    steps(again, with, 1)
    assert(ms.checkpoint.load(path, things(again, with)))
    steps(again, with, 4)
    expect.same(expect.whole(again), expect.whole(model), name)
    for i, p in ipairs(again:parameters()) do
      local a = with.slots[p].state.master
      local b = optimizer.slots[model:parameters()[i]].state.master
      assert(a:eq(b):all():item(), name .. ": low bits are lost")
    end
  end
end

-- Wrapping after loading: rank 0's values go to all ranks.
do
  local module = Sum "bf16"
  local optimizer = optim.sgd(module, { lr = LR })
  module():backward()
  optimizer:step()
  ms.no_grad(function() module.a:fill_(10 + rank) module.b:fill_(10 + rank) end)
  local model = ms.ddp(module)
  model():backward()
  optimizer:step()
  all_are(model, 9.5, "wrapped after loading")
end

-- What averages over the ranks.
if size > 1 then
  local lr = LR * (rank + 1)
  local module = nn.alone(Sum "bf16", { merge = "mean" })
  local optimizer = optim.sgd(module, { lr = lr })
  local function step()
    module():backward()
    optimizer:step()
  end
  step()
  optim.averager { period = 2 }:step(module)
  step()
  all_are(module, 4 - (0.5 + 1) / 2 - lr, "averager")
  ms.no_grad(function()
    for _, p in ipairs(module:parameters()) do ms.world():broadcast(p, 0):value() end
  end)
  step()
  all_are(module, 4 - 0.75 - 0.5 - lr, "broadcast")
  for _, name in ipairs { "diloco", "slowmo" } do
    module = Sum "bf16"
    optimizer = optim.sgd(module, { lr = lr })
    local recipe = assert(loadfile(("%s/%s.lua"):format(cfg.hooks, name)))() {
      model = module, period = 1, lr = 1, momentum = name == "diloco" and 0 or 0.5,
    }
    for i = 0, 2 do
      step()
      recipe.after_step(i)
    end
    local t = module.a:view(-1):narrow(1, 1, 1):item()
    local all = ms.world():all_gather(ms.full(t, { 1 })):value()
    assert(all:eq(t):all():item(), name .. ": ranks go apart")
    local before = t
    step()
    all_are(module, before - lr, name)
  end
end
print(("rank %d is done"):format(rank))
