-- What steps in a backward, bucket by bucket as it is reduced: parameters with optimizers of their
-- own, what a plan says, and at its end what could not be told before.
local core = require "moonshard.core"
local owners = require "moonshard.overlap.owners"
local unread = require "moonshard.overlap.unread"

local passes = {}

--- Steps the optimizers that a parameter has for itself; its gradient is gone then. What backward
--- still reads is stepped after that.
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

-- The optimizers that a parameter of the bucket has for itself.
local function step_owns(s, positions)
  for _, at in ipairs(positions) do
    local p = s.trained[at]
    local own = owners.own_of[p]
    local used = own and owners.is_used(s, at)
    if used and s.stepped[p] then
      core.raise(("in_backward: parameter '%s' got another gradient behind the forward whose step \z
        it has taken: the first iteration of a static graph cannot know how many backward \z
        passes follow; use optimizer:overlap(model, \"in_backward\") and step()"):format(p:name()))
    elseif used and p:grad() then
      passes.step_own(p, own)
      s.stepped[p] = true
    elseif own and used == nil and not s.stepped[p] then s.unstepped[#s.unstepped + 1] = at end
  end
end

local function on_reduced(s, index, positions)
  owners.stream():run(function()
    step_owns(s, positions)
    for _, entry in ipairs(s.overlaps) do
      -- What is not stepped here, step() does: what a sharded optimizer sends must not depend on
      -- what this rank has used, and inside join ranks without inputs left need other ranks'
      -- gradients for it.
      local shard = entry.optimizer.shard
      if entry.chosen[index] == "on_reduced" and not (shard and s.joining) then
        local stepped = {}
        for _, at in ipairs(positions) do
          local p = s.trained[at]
          local grad = entry.optimizer.slots[p] and owners.is_used(s, at, shard) and p:grad()
          if grad then
            entry.optimizer:_step_early(p, grad)
            stepped[#stepped + 1] = p
          end
        end
        entry.optimizer:_share(stepped)
      end
    end
  end)
end

--- Behind the last bucket, when it is known which parameters any rank has used: a gradient that
--- only others have brought is this rank's by now.
---@param s table the ddp model's state
function passes.finish(s)
  local owns, postponed = s.unstepped, s.postponed
  if #owns == 0 and #postponed == 0 then return end
  s.unstepped, s.postponed = {}, {}
  owners.stream():run(function()
    for _, at in ipairs(owns) do
      local p = s.trained[at]
      if s.reducer:is_used(at) and p:grad() then
        passes.step_own(p, owners.own_of[p])
        s.stepped[p] = true
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

--- Lets the reducer tell of each bucket; a model of which nothing steps early pays nothing for it.
---@param s table the ddp model's state
function passes.listen(s)
  if s.listens then return end
  s.listens = true
  -- The reducer must not hold the model that holds it: both would go in one collection, the reducer
  -- first.
  local held = setmetatable({ s }, { __mode = "v" })
  s.reducer:on_reduced(function(index, positions)
    if held[1] then on_reduced(held[1], index, positions) end
  end, function() if held[1] then passes.finish(held[1]) end end)
end

return passes
