-- The steps in a backward, bucket by bucket as buckets are reduced: parameters with optimizers of
-- their own, then parameters that a plan steps; and at the end, parameters for which it was not
-- known before whether any rank uses them.
local core = require "moonshard.core"
local owners = require "moonshard.parallel.overlap.step_owners"
local source = require "moonshard.parallel.overlap.gradient_source"
local unread = require "moonshard.parallel.overlap.unread"

local passes = {}

--- Steps a parameter with its own optimizers, and frees its gradient. If backward still reads the
--- parameter's old values, the step waits for the last such read.
---@param p ms.Parameter
---@param own table
function passes.step_own(p, own)
  local grad = p:grad()
  if not grad then return end
  unread.call({ p }, function()
    for _, optimizer in ipairs(own.list) do optimizer:_step_alone(p, grad) end
    if not own.keep then core.consume_grad(p) end
  end)
end

-- Steps the bucket's parameters that have optimizers of their own, and returns whether it has any.
local function step_owns(s, positions)
  local state, any = s.overlap, false
  for _, at in ipairs(positions) do
    local p = s.trained[at]
    local own = owners.own_of[p]
    local used = own and source.is_used(s, at)
    if used and state.stepped[p] then
      core.raise(("in_backward: parameter '%s' got another gradient after the forward whose step \z
        it has taken: the first iteration of a static graph cannot know how many backward \z
        passes follow; use optimizer:overlap(model, \"in_backward\") and step()"):format(p:name()))
    elseif used and p:grad() then
      passes.step_own(p, own)
      state.stepped[p], any = true, true
    elseif own and used == nil and not state.stepped[p] then
      state.unstepped[#state.unstepped + 1] = at
    end
  end
  return any
end

-- Whether an entry steps the buckets of this index as soon as they are reduced.
local function steps_now(s, entry, index)
  -- These parameters are left to step(): the collectives of a sharded optimizer must not depend on
  -- which parameters this rank has used, and inside join, ranks without inputs left need the
  -- gradients of other ranks.
  if entry.optimizer.shard and s.joining then return false end
  if entry.link then return s.adds_up end
  return entry.chosen[index] == "on_reduced"
end

-- Whether an entry steps this parameter. A link may have chosen some.
local function has(entry, p)
  local chosen = entry.link and entry.link.chosen
  return entry.optimizer.slots[p] and (not chosen or chosen[p])
end

local function on_reduced(s, index, positions)
  if s.partial or s.adds_up and s.joining then return end
  owners.stream():run(function()
    local any = step_owns(s, positions)
    for _, entry in ipairs(s.overlap.entries) do
      if steps_now(s, entry, index) then
        local stepped, shard = {}, entry.optimizer.shard
        for _, at in ipairs(positions) do
          local p = s.trained[at]
          local grad = has(entry, p) and source.is_used(s, at, shard) and p:grad()
          if grad then
            entry.optimizer:_step_early(p, grad)
            stepped[#stepped + 1] = p
          end
        end
        entry.optimizer:_share(stepped)
        any = any or #stepped > 0
      end
    end
    -- What comes to these gradients later in this backward would be lost.
    if any and s.adds_up then s.reducer:note_step() end
  end)
end

-- Steps what has a gradient and was not stepped, unless step() does: buckets of units that this
-- pass did not use and earlier passes of the accumulation have, and of units of which it was not
-- known whether backward comes to them again.
local function step_left_out(s)
  for _, p in ipairs(s.trained) do
    local own = owners.own_of[p]
    if own and p:grad() and not s.overlap.stepped[p] then
      passes.step_own(p, own)
      s.overlap.stepped[p] = true
    end
  end
  for _, entry in ipairs(s.overlap.entries) do
    local stepped = {}
    for _, p in ipairs(entry.link and s.trained or {}) do
      if has(entry, p) and p:grad() and not entry.optimizer.slots[p].early then
        entry.optimizer:_step_early(p, p:grad())
        stepped[#stepped + 1] = p
      end
    end
    entry.optimizer:_share(stepped)
  end
end

--- Runs after the last bucket, when it is known which parameters any rank has used. A gradient that
--- only other ranks have computed has reached this rank by then.
---@param s ms.GradientSource
function passes.finish(s)
  local owns, postponed = s.overlap.unstepped, s.overlap.postponed
  if s.adds_up and not (s.partial or s.joining) then
    owners.stream():run(function() step_left_out(s) end)
  end
  if #owns == 0 and #postponed == 0 then return end
  s.overlap.unstepped, s.overlap.postponed = {}, {}
  owners.stream():run(function()
    for _, at in ipairs(owns) do
      local p = s.trained[at]
      if s.reducer:is_used(at) and p:grad() then
        passes.step_own(p, owners.own_of[p])
        s.overlap.stepped[p] = true
      end
    end
    for _, part in ipairs(postponed) do
      local stepped = {}
      for _, item in ipairs(part.items) do
        if s.reducer:is_used(item.at) and not part.optimizer.slots[item.p].early then
          part.optimizer:_step_early(item.p, item.grad)
          stepped[#stepped + 1] = item.p
        end
      end
      part.optimizer:_share(stepped)
    end
  end)
end

--- Makes the reducer call back for each bucket. Models without early steps do not have this cost.
---@param s ms.GradientSource
function passes.listen(s)
  if s.overlap.listens then return end
  s.overlap.listens = true
  -- The reducer must not keep its model alive: both would be collected together, the reducer first.
  local held = setmetatable({ s }, { __mode = "v" })
  s.reducer:on_reduced(function(index, positions)
    if held[1] then on_reduced(held[1], index, positions) end
  end, function() if held[1] then passes.finish(held[1]) end end)
end

return passes
