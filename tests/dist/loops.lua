-- Run by every rank of loops_spec.lua: training loops drawn at random (graphs, buckets, links,
-- optimizers, other features of a loop). Each runs once with optimizers that step early, late or
-- sharded, and once plainly; the weights must be bitwise equal. folder: for checkpoints; force: Lua
-- code that changes the drawn loop `c`, to debug one.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local hooks, nn, optim = ms.hooks, ms.nn, ms.optim
local o = ms.config { first = 1, count = 10, folder = "", force = "" }
local rank, world = ms.rank(), ms.world()

local NAMES <const> = { "a", "b", "c", "d", "e", "f" }
local STATIC_ROOM <const> = 64

local Net = nn.class "Net"
function Net:init()
  ms.seed(1)
  for i, name in ipairs(NAMES) do self[name] = i % 3 == 0 and nn.LayerNorm(8) or nn.Linear(8, 8) end
end
-- mask: which layers are used; recomputed: which of these run again in backward.
function Net:forward(x, mask, recomputed)
  for i, name in ipairs(NAMES) do
    local function layer(input) return input + self[name](input):tanh() end
    if mask & recomputed >> (i - 1) & 1 == 1 then x = ms.recompute(layer, x)
    elseif mask >> (i - 1) & 1 == 1 then x = layer(x) end
  end
  return x
end

local makers = { adamw = optim.adamw, sgd = optim.sgd, rmsprop = optim.rmsprop }
makers.heavy = expect.models.heavy()

-------------------------------------------------------------------------------------------- drawing

-- one_of(list), the same on all ranks.
local function chooser(seed)
  local x = seed
  local function draw(n)
    x = (x * 6364136223846793005 + 1442695040888963407)
    return (x >> 33) % n + 1
  end
  for _ = 1, 4 do draw(2) end
  return function(list) return list[draw(#list)] end, function(n) return draw(n) == 1 end, draw
end

local function draw(seed)
  local one_of, once_in, number = chooser(seed)
  local c = {
    seed = seed, kinds = {}, modes = {}, sharded = {}, part_of = {}, masks = {}, events = {},
  }
  c.graph = one_of { "whole", "whole", "find_unused", "static_graph" }
  c.frozen = once_in(4) and number(#NAMES) or 0
  c.bucket_bytes, c.planned = one_of { 64, 256, 512, 100000 }, once_in(5)
  c.delayed = once_in(6) and one_of(NAMES) or nil
  c.dtype, c.master = once_in(5) and "bf16" or "f32", one_of { "f32", "none" }
  c.precision = c.dtype == "f32" and once_in(6)
  -- Links that look at whole buckets depend on how these are cut, and plans on times.
  c.link = one_of(c.planned and { "mean", "bf16_compress", "halved" } or {
    "mean", "mean", "bf16_compress", "halved", "lagged", "global", "nan_check", "feedback",
    "powersgd", "adasum",
  })
  for i = 1, number(3) do
    c.kinds[i] = one_of { "adamw", "sgd", "rmsprop", "heavy" }
    c.modes[i] = one_of {
      "classic", "in_backward", "deferred", "early_where_hidden", "mixed", "mixed", "linked",
      "linked for some", "own",
    }
    c.sharded[i] = once_in(2) and c.modes[i] ~= "own"
  end
  for i = 1, #NAMES do c.part_of[i] = number(#c.kinds) end
  for i = 1, STATIC_ROOM do c.masks[i] = number(63) end
  c.passes, c.clips, c.scales = number(3), once_in(5), once_in(5)
  for step = 1, 5 + number(4) do
    c.events[step] = one_of {
      "", "", "", "rebuild", "wrap anew", "save", "two forwards", "evaluate", "local pass",
      "zero_grad",
    }
  end
  c.recomputed = once_in(4) and number(63) or 0
  c.joins, c.divisor = once_in(2), one_of { "all", "live" }
  -- Links see gradients that are still multiplied by the loss scale: clipping these is an error.
  if c.link == "lagged" or c.link == "global" then c.scales = false end
  if o.force ~= "" then assert(load("local c = ... " .. o.force))(c) end
  return c
end

-- The layers that this rank uses in a pass.
local function mask_of(c, step, i)
  if c.graph == "whole" then return 63 end
  if c.graph == "static_graph" then return c.masks[rank + 1] | (c.frozen == 1 and 2 or 1) end
  return c.masks[(step * 7 + i * 3 + rank) % STATIC_ROOM + 1]
end

------------------------------------------------------------------------------------------- training

local function mixed(c)
  return ms.overlap { name = "mixed", every = 1 + c.seed % 3, plan = function(view)
    local plan, moments = {}, { "on_reduced", "before_next_use", "after_backward" }
    for i, b in ipairs(view.buckets) do
      local moment = moments[(b.index + view.step + c.seed) % 3 + 1]
      plan[i] = {
        bucket = b.index,
        step = moment == "on_reduced" and view.needs_global_norm and "after_backward" or moment,
      }
    end
    return plan
  end }
end

local function changing(c)
  local plan = expect.models.changing_plan
  return ms.buckets { name = "changing", every = 1 + c.seed % 2, plan = plan }
end

local function link_of(c)
  if c.link == "halved" then
    return {
      function(bucket, next) return next(bucket):and_then(function(mean) return mean * 0.5 end) end,
    }
  end
  if c.link == "lagged" or c.link == "global" then
    return { hooks.clip { max_norm = 0.05, scope = c.link } }
  end
  if c.link == "feedback" then return { hooks.error_feedback(), hooks.int8() } end
  if c.link == "powersgd" then
    return { hooks.powersgd { start_step = 2, rank = 2, min_rate = 1 } }
  end
  return c.link ~= "mean" and { c.link } or {}
end

-- The objects of a training: model, net, optimizers, and the mode of each optimizer.
local function make(c, early)
  local t = { model = Net(), modes = {}, lists = {}, optimizers = {} }
  if c.dtype ~= "f32" then t.model:to(c.dtype) end
  if c.frozen > 0 then
    for _, p in ipairs(t.model[NAMES[c.frozen]]:parameters()) do p:requires_grad_(false) end
  end
  for n = 1, #c.kinds do t.lists[n] = {} end
  for i, name in ipairs(NAMES) do
    for _, p in ipairs(t.model[name]:parameters()) do table.insert(t.lists[c.part_of[i]], p) end
  end
  local needs_all = c.clips or c.scales or c.link == "nan_check" or c.link == "global"
  local late = { deferred = true, mixed = true, early_where_hidden = true }
  for n, list in ipairs(t.lists) do
    local trained = {}
    for _, p in ipairs(list) do if p:requires_grad() then trained[#trained + 1] = p end end
    t.modes[n] = early and #trained > 0 and (late[c.modes[n]] or not needs_all) and c.modes[n]
      or "classic"
    if t.modes[n] == "own" then
      optim.in_backward(makers[c.kinds[n]], trained, { lr = 0.02 * n, master = c.master })
    end
  end
  return t
end

local function make_optimizers(c, t, early)
  t.optimizers, t.links = {}, {}
  for n, list in ipairs(t.lists) do
    if #list > 0 and t.modes[n] ~= "own" then
      local optimizer = makers[c.kinds[n]](list,
        { lr = 0.02 * n, master = c.master, shard = early and c.sharded[n] and world or nil })
      t.optimizers[n] = optimizer
      if t.modes[n]:match "^linked" then
        table.insert(t.links, hooks.then_optimizer {
          optimizer = optimizer,
          params = t.modes[n] == "linked for some" and { list[1], list[#list] } or nil,
        })
      end
    end
  end
end

local function wrap(c, t)
  local chain = { table.unpack(t.links) }
  for _, link in ipairs(link_of(c)) do chain[#chain + 1] = link end
  t.net = ms.ddp(t.model, {
    find_unused = c.graph == "find_unused",
    static_graph = c.graph == "static_graph",
    comm_hook = #chain > 0 and hooks.chain(chain) or nil,
    delayed = c.delayed and c.delayed ~= NAMES[c.frozen] and { c.delayed .. "%..*" } or nil,
    buckets = c.planned and changing(c) or nil,
    bucket_bytes = not c.planned and c.bucket_bytes or nil,
    precision = c.precision and { param = "bf16", reduce = "f32", output = "f32" } or nil,
  })
  for n, optimizer in pairs(t.optimizers) do
    local mode = t.modes[n]
    if mode ~= "classic" and not mode:match "^linked" then
      optimizer:overlap(t.net, mode == "mixed" and mixed(c) or mode)
    end
  end
end

-- Saves everything in a checkpoint, and loads it into new optimizers and a new ddp model.
local function save_and_load(c, t, early)
  -- Optimizers of in_backward are not saved here: there is one for each parameter.
  for _, mode in ipairs(c.modes) do if mode == "own" then return end end
  local function things()
    local list = { model = t.model }
    for n, optimizer in pairs(t.optimizers) do list["optimizer " .. n] = optimizer end
    return list
  end
  local folder = ("%s/%d %s"):format(o.folder, c.seed, early)
  assert(ms.checkpoint.save(folder, things()))
  assert(ms.checkpoint.wait())
  world:barrier()
  t.net:unwrap()
  t.net, t.optimizers, t.links = nil, nil, nil
  for _, p in ipairs(t.model:parameters()) do ms.no_grad(function() p:fill_(0) end) end
  make_optimizers(c, t, early)
  wrap(c, t)
  assert(ms.checkpoint.load(ms.checkpoint.latest(folder), things()))
end

local function loss_of(c, t, step, i, mask)
  local x = ms.randn({ 4, 8, seed = 100000 * rank + 100 * step + i }):to(c.dtype)
  local loss = t.net(x, mask or mask_of(c, step, i), c.recomputed):square():mean()
  if (c.scales or c.link == "nan_check") and step % 4 == 0 and i == 1 and rank == 0 then
    loss = loss * 3e38 * 1e20
  end
  return loss
end

local function pass(c, t, step, i)
  local loss = loss_of(c, t, step, i)
  if not loss:requires_grad() then loss = loss + nn.Parameter(ms.ones({ 1 }):to(c.dtype)):sum() end
  if t.scaler then loss = t.scaler:scale(loss) end
  loss:backward()
end

local function take_step(c, t)
  local function has_gradients(n)
    for _, p in ipairs(t.lists[n]) do if p:grad() then return true end end
    return false
  end
  for n = 1, #c.kinds do
    if c.clips and t.scaler and t.optimizers[n] and has_gradients(n) then
      t.scaler:unscale(t.optimizers[n])
    end
  end
  if c.clips then t.net:clip_grad_norm(0.1) end
  for n = 1, #c.kinds do
    local optimizer, any = t.optimizers[n], has_gradients(n)
    if optimizer and not t.scaler then
      optimizer:step()
    elseif optimizer and any then
      t.scaler:step(optimizer)
    end
  end
end

local function train_one(c, t, step, event, early)
  if event == "rebuild" then t.net:rebuild_buckets()
  elseif event == "wrap anew" then
    t.net = t.net:unwrap()
    wrap(c, t)
  elseif event == "evaluate" then ms.no_grad(function() loss_of(c, t, step, 9, 63) end)
  elseif event == "local pass" then t.net:no_sync(function() pass(c, t, step, 8) end) end
  if event == "two forwards" and c.graph ~= "static_graph" and not t.scaler then
    local first, second = loss_of(c, t, step, 1, mask_of(c, step, 1) | 3), loss_of(c, t, step, 2)
    local sum = first + second
    sum:backward()
  else t.net:accumulate(c.passes, function(i) pass(c, t, step, i) end) end
  take_step(c, t)
  if event == "zero_grad" then
    for _, optimizer in pairs(t.optimizers) do optimizer:zero_grad() end
  end
  if event == "save" then save_and_load(c, t, early) end
end

local function train(c, early)
  local t = make(c, early)
  make_optimizers(c, t, early)
  wrap(c, t)
  t.scaler = c.scales and optim.scaler { init_scale = 8, growth_interval = 2 } or nil
  for step in ms.steps(#c.events) do train_one(c, t, step + 1, c.events[step + 1], early) end
  -- Ranks without inputs left do not take the steps of optimizers that are not sharded, so this
  -- comes last.
  if c.joins then
    t.net:join({ divisor = c.divisor }, function()
      for step in ms.steps((rank * 2 + c.seed) % 4) do
        train_one(c, t, 100 + step, step == 1 and "rebuild" or "", early)
      end
    end)
  end
  local bits = expect.bits(t.model:parameters())
  t.net:unwrap()
  return bits
end

-- Loaded states that wait for models and links that are made later.
local function forget()
  collectgarbage()
  require("moonshard.parallel.ddp.layouts").load(nil)
  require("moonshard.parallel.link_state").load({})
end

for seed = o.first, o.first + o.count - 1 do
  local c, bits = draw(seed), {}
  for _, early in ipairs { false, true } do
    local ok, result = pcall(train, c, early)
    if not ok then
      error(("seed %d%s: %s"):format(seed, early and "" or ", plainly", tostring(result)), 0)
    end
    bits[early] = result
    forget()
  end
  if bits[true] ~= bits[false] then
    error(("seed %d (%s): other weights than the plain loop's")
      :format(seed, table.concat(c.modes, ", ")), 0)
  end
end
print(("rank %d is done"):format(rank))
