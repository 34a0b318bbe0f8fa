-- An optimizer as a link of a chain: it steps on what the later links returned.
local core = require "moonshard.core"
local owners = require "moonshard.parallel.overlap.step_owners"
local source = require "moonshard.parallel.overlap.gradient_source"
local options_of = require "moonshard.base.options"
local check = options_of.check

local chain = {}

local Then = { __name = "ms.Link" }
Then.__index = Then
Then.__tostring = function() return "then_optimizer" end

function Then.__call(self, bucket, next, _, is_first)
  local parameters, optimizer, s = bucket:parameters(), self.optimizer, self.held and self.held[1]
  if s and s.shadow and not optimizer.shard then return next(bucket) end
  return next(bucket):and_then(function(reduced)
    local at, total = 0, 0
    for _, p in ipairs(parameters) do total = total + p:numel() end
    if not core.is_tensor(reduced) or reduced:numel() ~= total then
      local got = core.is_tensor(reduced) and tostring(reduced) or "a " .. type(reduced)
      error(("then_optimizer: the later links gave %s; it needs all %d gradients of the bucket")
        :format(got, total), 0)
    end
    owners.stream():run(function()
      local stepped, later = {}, {}
      for _, p in ipairs(parameters) do
        local count = p:numel()
        if optimizer.slots[p] and (not self.chosen or self.chosen[p]) then
          local grad = reduced:narrow(1, at + 1, count):view(table.unpack(p:shape())):to(p:dtype())
          local used = not s or source.is_used(s, s.overlap.position_of[p], optimizer.shard)
          local again = used == nil and optimizer.slots[p].early
            and source.is_used(s, s.overlap.position_of[p])
          -- A delayed step needs a copy of the gradient, because the links before this one may
          -- write the buffer.
          if not is_first and (used == nil or core.is_awaited(p)) then grad = grad:clone() end
          if used or again then
            optimizer:_step_early(p, grad)
            stepped[#stepped + 1] = p
          elseif used == nil then
            later[#later + 1] = { p = p, at = s.overlap.position_of[p], grad = grad }
          end
        end
        at = at + count
      end
      optimizer:_share(stepped)
      if #later > 0 then
        s.overlap.postponed[#s.overlap.postponed + 1] = { optimizer = optimizer, items = later }
      end
    end)
  end)
end

---@param options { optimizer: ms.Optimizer, params?: ms.Parameter[] }
---@return ms.Link
function chain.then_optimizer(options)
  options = check("hooks.then_optimizer", options, { optimizer = "optimizer", params = "list" })
  local optimizer, chosen = options.optimizer, nil
  options_of.argument("hooks.then_optimizer", "optimizer", optimizer, "optimizer")
  if options.params then
    chosen = {}
    for i, p in ipairs(options.params) do
      if not optimizer.slots[p] then
        core.raise(("hooks.then_optimizer: params[%d] is in no group of this optimizer"):format(i))
      end
      chosen[p] = true
    end
  end
  return setmetatable({ optimizer = optimizer, chosen = chosen }, Then)
end

return chain
