-- Run by every rank of changed_spec.lua: a model is changed after it was wrapped, or after its
-- optimizer was made, by any call, at any moment, under any strategy. Training then goes on as that
-- of a model on one rank, or an error says which parameter and what to do.
local ms = require "moonshard"
local cfg = ms.config { strategy = "ddp" }
local rank, size, nn, optim = ms.rank(), ms.world_size(), ms.nn, ms.optim

-- Numbers are such that all sums are exact in f32. The mean input over the ranks has the mean
-- gradient.
local function input(own) return ms.full(own or (size + 1) / 2, { 1, 2 }) end

local Net = nn.class "Net"
function Net:init()
  self.a, self.b = nn.Linear(2, 2, { bias = false }), nn.Linear(2, 2, { bias = false })
  self.frozen = nn.Linear(2, 2, { bias = false })
  ms.no_grad(function()
    for i, p in ipairs(self:parameters()) do p:fill_(i) end
  end)
  self.frozen.weight:requires_grad_(false)
end
function Net:forward(x)
  local y = self.a(x) + self.b(x) * 2 + self.frozen(x) * 4
  if self.head then y = y + self.head(x) * 8 end
  return y
end

local function ones(t) return ms.no_grad(function() return t:fill_(1) end) end

-- name -> f(net, model), and what an error may name
local changes = {
  nothing = { function() end },
  to = { function(_, model) model:to "f16" end, "to:" },
  inner_to = { function(net) net.a:to "bf16" end, "to:" },
  same_to = { function(_, model) model:to "f32" end },
  unfreeze = { function(net) net.frozen.weight:requires_grad_(true) end, "frozen.weight" },
  freeze = { function(net) net.a.weight:requires_grad_(false) end, "a.weight" },
  freeze_all = { function(net)
    for _, p in ipairs(net:parameters()) do p:requires_grad_(false) end
  end, "requires_grad_" },
  freeze_and_back = { function(net)
    net.a.weight:requires_grad_(false)
    net.a.weight:requires_grad_(true)
  end, "requires_grad_" },
  assign = { function(net) net.a.weight = nn.Parameter(ones(ms.empty { 2, 2 })) end, "a.weight" },
  module = { function(net)
    local layer = nn.Linear(2, 2, { bias = false })
    ones(layer.weight)
    net.b = layer
  end, "b.weight" },
  head = { function(net)
    local layer = nn.Linear(2, 2, { bias = false })
    ones(layer.weight)
    net.head = layer
  end, "head.weight" },
  frozen_head = { function(net)
    local layer = nn.Linear(2, 2, { bias = false })
    ones(layer.weight)
    layer.weight:requires_grad_(false)
    net.head = layer
  end, "head.weight" },
  take_out = { function(net) net.frozen = nn.Linear(2, 2, { bias = false }) ones(net.frozen.weight)
    net.frozen.weight:requires_grad_(false) end, "frozen.weight" },
  another_model = { function() nn.Linear(2, 2) end },
}

local function sgd(model, options)
  return optim.sgd(model, { lr = 0.25, momentum = 0.5, master = options })
end
local strategies = {
  ddp = function(net) return ms.ddp(net) end,
  find_unused = function(net) return ms.ddp(net, { find_unused = true }) end,
  static_graph = function(net) return ms.ddp(net, { static_graph = true }) end,
  small_buckets = function(net) return ms.ddp(net, { bucket_bytes = 4 }) end,
  clip = function(net)
    return ms.ddp(net, { comm_hook = ms.hooks.clip { scope = "global", max_norm = 1e9 } })
  end,
  error_feedback = function(net)
    return ms.ddp(net, { comm_hook = ms.hooks.chain {
      ms.hooks.error_feedback(), ms.hooks.cast { dtype = "f32" } } })
  end,
  in_backward = function(net)
    local model = ms.ddp(net)
    return model, function(o) o:overlap(model, "in_backward") end
  end,
  deferred = function(net)
    local model = ms.ddp(net)
    return model, function(o) o:overlap(model, "deferred") end
  end,
  fsdp = function(net) return ms.fsdp(net, { wrap = { class = "Linear" } }) end,
  no_shard = function(net) return ms.fsdp(net, { strategy = "no_shard" }) end,
}

local moments = { "wrapped", "optimizer", "stepped", "forward", "backward", "no_sync" }

-- Trains three steps; the change comes at its moment. Returns the net.
local function train(net, model, after, own, change, moment)
  local function change_at(now) if now == moment then change[1](net, model) end end
  change_at "wrapped"
  local optimizer = sgd(model)
  if after then after(optimizer) end
  change_at "optimizer"
  for step = 1, 3 do
    if step == 2 and moment == "no_sync" and model.no_sync then
      model:no_sync(function() model(input(own)):sum():backward() end)
      change_at "no_sync"
    elseif step == 2 and moment == "no_sync" then
      model(input(own)):sum():backward()
      change_at "no_sync"
    end
    local loss = model(input(own)):sum()
    if step == 2 then change_at "forward" end
    loss:backward()
    if step == 2 then change_at "backward" end
    optimizer:step()
    if step == 1 then change_at "stepped" end
    optimizer:zero_grad()
  end
  return optimizer
end

local function values_of(net, model)
  local found = {}
  local function read()
    for _, item in ipairs(net:named_parameters()) do
      found[item.name] = item.parameter:detach():to "f32":clone()
    end
  end
  if model and getmetatable(model).fsdp then model:summon({ writeback = false }, read)
  else read() end
  return found
end

local wrap = strategies[cfg.strategy]
local trained, refused = 0, 0
for name, change in ms.sorted_pairs(changes) do
  for _, moment in ipairs(moments) do
    -- A parameter that is frozen between a forward and its backward leaves its bucket waiting,
    -- which ends the job: unreduced_spec.lua.
    local skipped = (name == "freeze" or name == "freeze_all" or name == "freeze_and_back")
      and (moment == "forward" or cfg.strategy == "static_graph")
      or (name == "assign" or name == "module" or name == "head") and moment == "no_sync"
    if not skipped then
      local what = ("%s, %s, %s"):format(cfg.strategy, name, moment)
      local plain = Net()
      local fine, why = pcall(train, plain, plain, nil, nil, change, moment)
      local net = Net()
      local model, after = wrap(net)
      local ok, message = pcall(train, net, model, after, rank + 1, change, moment)
      if ok then
        trained = trained + 1
        assert(fine, ("%s: one rank refused: %s"):format(what, why))
        local expected = values_of(plain)
        for key, t in pairs(values_of(net, model)) do
          local one = assert(expected[key], key)
          assert(t:eq(one):all():item(), ("%s: '%s' is %s, on one rank %s"):format(what, key,
            tostring(t:view(-1):to_table()[1]), tostring(one:view(-1):to_table()[1])))
        end
      else
        refused = refused + 1
        assert(not fine or name ~= "nothing" and name ~= "another_model" and name ~= "same_to",
          what .. ": " .. tostring(message))
        assert(not fine or message:find(change[2], 1, true), ("%s: %s"):format(what, message))
        if getmetatable(model).fsdp then pcall(model.reset, model) end
      end
      -- All ranks do the same.
      local all = ms.world():_share("all_gather", "i64", { ok and 1 or 0 }, "test")
      for _, one in ipairs(all) do assert(one == all[1], what .. ": ranks differ") end
    end
  end
end
assert(trained >= 15 and refused >= 15, ("%d, %d"):format(trained, refused))
print(("%s: %d combinations train as on one rank, %d are refused"):format(cfg.strategy, trained,
  refused))
print(("rank %d is done"):format(rank))
