-- Run by every rank of not_finite_spec.lua: one number of one gradient is nan, inf or -inf, on one
-- rank or on all. Norms, what clipping makes of all gradients, and metrics are those of plain
-- models.
local ms = require "moonshard"
local rank, size = ms.rank(), ms.world_size()
local INF <const>, NAN <const> = math.huge, 0 / 0
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")

local function same(a, b) return a == b or a ~= a and b ~= b end

local function make()
  ms.seed(3)
  return ms.nn.Sequential(ms.nn.Linear(3, 4), ms.nn.Linear(4, 5, { bias = false }),
    ms.nn.Linear(5, 1))
end

-- The gradients of a pass whose inputs have this number at this place. A rank's share is one row.
local function gradients(net, value, at, rows)
  local x = ms.ones { rows, 3 }
  if value then x:narrow(2, at, 1):fill_(value) end
  net(x):mean():backward()
end

-- Whole gradients by name; on a sharded model all ranks see them.
local function whole(net)
  local found = {}
  local function take()
    for _, item in ipairs(net:named_parameters()) do
      local grad = item.parameter:grad()
      found[item.name] = grad and grad:detach():clone():view(-1):to_table() or false
    end
  end
  if getmetatable(net).fsdp then net:summon({ grads = true }, take) else take() end
  return found
end

local wraps = {
  ddp = ms.ddp,
  full_shard = function(m) return ms.fsdp(m, { wrap = { class = "Linear" } }) end,
  root = function(m) return ms.fsdp(m) end,
  shard_grad_op = function(m)
    return ms.fsdp(m, { strategy = "shard_grad_op", wrap = { class = "Linear" } })
  end,
  no_shard = function(m) return ms.fsdp(m, { strategy = "no_shard" }) end,
  rows = function(m) return ms.fsdp(m, { layout = "rows", wrap = { class = "Linear" } }) end,
  ignored = function(m) return ms.fsdp(m, { ignored = { "2.weight" } }) end,
}
if size == 4 then
  local shards, replicas = ms.world():levels(2)
  wraps.hybrid = function(m)
    return ms.fsdp(m, {
      strategy = "hybrid_shard", shard_group = shards, replica_group = replicas,
    })
  end
end

local number = 0
for _, value in ipairs { NAN, INF, -INF, false } do
  for _, p in ipairs { 1, 2, 3, INF } do
    for _, max in ipairs { 0.5, INF } do
      number = number + 1
      if expect.takes(number, 3) then
        local plain = make()
        gradients(plain, value, 2, 1)
        local norm = plain:clip_grad_norm(max, p):item()
        local want = whole(plain)
        for name, wrap in ms.sorted_pairs(wraps) do
          local net = wrap(make())
          gradients(net, value, 2, 1)
          local what = ("%s, %s, clip_grad_norm(%s, %s)"):format(name, value, max, p)
          local got = net:clip_grad_norm(max, p):item()
          -- Sums over ranks round elsewhere.
          assert(same(got, norm) or math.abs(got - norm) <= 1e-5 * norm,
            ("%s: the norm is %s, not %s"):format(what, got, norm))
          for parameter, numbers in pairs(whole(net)) do
            for i, one in ipairs(numbers) do
              local other = want[parameter][i]
              assert(same(one, other) or math.abs(one - other) <= 1e-5 * math.abs(other),
                ("%s: gradient %d of %s is %s, not %s"):format(what, i, parameter, one, other))
            end
          end
        end
      end
    end
  end
end

-- Flags: the number is in one rank's loss. A scaler skips the step on all ranks and halves the
-- factor; hooks.nan_check skips it; the flag of a norm stops it. A step without such a number is
-- taken in each of these ways.
local flags = {
  scaler = function(net, optimizer, loss)
    local scaler = ms.optim.scaler { init_scale = 4 }
    scaler:scale(loss):backward()
    scaler:step(optimizer)
    return scaler:scale(ms.ones {}):item()
  end,
  unscaled = function(net, optimizer, loss)
    local scaler = ms.optim.scaler { init_scale = 4 }
    scaler:scale(loss):backward()
    local flag = scaler:unscale(optimizer)
    net:clip_grad_norm(1)
    scaler:step(optimizer)
    return flag:item() and 4 or 2
  end,
  norm = function(net, optimizer, loss)
    loss:backward()
    local finite = net:clip_grad_norm(INF):is_finite()
    optimizer:step { only_if = finite }
    return finite:item() and 4 or 2
  end,
  link = function(_, optimizer, loss)
    loss:backward()
    optimizer:step()
  end,
}

local function state_of(net)
  local copies = {}
  for name, t in pairs(expect.whole(net)) do copies[name] = t:detach():clone() end
  return copies
end

for name, wrap in ms.sorted_pairs(wraps) do
  for kind, f in ms.sorted_pairs(flags) do
    for _, value in ipairs { NAN, INF, -INF, false } do
      for from = 0, size - 1 do
        number = number + 1
        -- A chain is made with the model; the last layer's bias is the only gradient without x.
        local of_link = kind == "link"
        if expect.takes(number, 3) and not (of_link and name ~= "ddp" and name ~= "root") then
          local net
          if of_link then
            local options = { comm_hook = ms.hooks.nan_check() }
            net = name == "ddp" and ms.ddp(make(), options) or ms.fsdp(make(), options)
          else net = wrap(make()) end
          local optimizer, before = ms.optim.sgd(net, { lr = 0.5 }), state_of(net)
          local x = ms.ones { 1, 3 }
          if value and rank == from then x:narrow(2, 2, 1):fill_(value) end
          local factor = f(net, optimizer, net(x):mean())
          local after, what = state_of(net), ("%s, %s, %s from %d"):format(name, kind, value, from)
          local own_loss = name == "ignored" and value and rank ~= from
          for parameter, t in pairs(before) do
            local same_bits = t:eq(after[parameter]):all():item()
            -- What is ignored is each rank's own: only a flag of all ranks skips it.
            if value and not (own_loss and parameter == "2.weight") then
              assert(same_bits, ("%s: '%s' was stepped"):format(what, parameter))
            end
            if not value and parameter ~= "2.weight" then
              assert(not same_bits, ("%s: '%s' was not stepped"):format(what, parameter))
            end
          end
          if factor and not own_loss then
            assert(factor == (value and 2 or 4), ("%s: the factor is %g"):format(what, factor))
          end
        end
      end
    end
  end
end

-- One rank's number is the step's, whichever rank it is.
for from = 0, size - 1 do
  for _, value in ipairs { NAN, INF, -INF } do
    local names = {}
    for step in ms.steps(1) do
      for _, op in ipairs { "sum", "avg", "min", "max" } do
        names[op] = ("%s of %s from %d"):format(op, value, from)
        ms.metric(names[op], op):push(rank == from and value or rank + 1.)
      end
      assert(step == 0)
    end
    for op, name in pairs(names) do
      local got = require "moonshard.train.metric".values(0)[name]
      local lost = value == INF and op == "min" or value == -INF and op == "max"
      if size > 1 or not lost then
        assert(lost and got == got and math.abs(got) < INF or same(got, value),
          ("%s is %s"):format(name, got))
      end
    end
  end
end

print(("rank %d is done"):format(rank))
