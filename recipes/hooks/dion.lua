-- Dion: each rank keeps the momentum of its own gradients. Only the factors of its low-rank
-- approximation are averaged, and their orthonormal product is subtracted; what the approximation
-- leaves out stays in the momentum. Ahn, Xu, Abreu, Fan, Magakyan, Sharma, Zhan, Langford: "Dion:
-- Distributed Orthonormalized Updates", 2025. A link and its optimizer, for hook=dion; in your own
-- loop: local dion = dofile "recipes/hooks/dion.lua" { rank = 8 } local net = ms.ddp(model, {
-- comm_hook = dion.link }) local opt = dion.optimizer(net). Options: rank 8, lr 0.01, momentum
-- 0.95, others_lr, group. Embeddings, heads and vectors are averaged, and stepped by AdamW.
local ms = require "moonshard"

return function(options)
  options = options or {}
  local group, dion = options.group or ms.world(), {}
  local is_local = setmetatable({}, { __mode = "k" })           -- matrices
  local arrived = setmetatable({}, { __mode = "k" })            -- their gradients, until the step

  local kind = ms.optim.define {
    name = "dion", defaults = { lr = 0.01, momentum = 0.95, rank = 8 },
    whole = {
      before = function(p, gradient)
        local own = arrived[p]
        arrived[p] = nil
        return own or gradient
      end,
      update = function(gradient, own, now)
        local rows, columns = gradient:size(1), gradient:size(2)
        local rank = math.min(now.rank, rows, columns)
        own.momentum = own.momentum or gradient:zeros_like "f32"
        -- Equal on all ranks, as all later ones.
        own.q = own.q or ms.randn { columns, rank, seed = rows * 65537 + columns, per_rank = false }
          :orthonormalize_()
        own.momentum:add_(gradient)
        local p = group:all_reduce(own.momentum:matmul(own.q), "avg"):value()
        p:orthonormalize_():orthonormalize_()                  -- twice: the first rounds
        local r = group:all_reduce(own.momentum:t():matmul(p), "avg"):value()
        own.momentum:sub_(p:matmul(r:t()) * (1 - now.momentum))
        own.q:copy_(r / (r:norm(2, 1, true) + 1e-8))
        return p:matmul(own.q:t()) * (rows / columns) ^ 0.5
      end,
    },
  }

  -- Averages all but matrices. Their gradients are taken out of the bucket, so that the norm by
  -- which a loop clips is the same on all ranks. What is not finite stays so.
  function dion.link(bucket)
    local gradients, list = bucket:gradients(), {}
    for i, p in ipairs(bucket:parameters()) do
      if is_local[p] then
        arrived[p] = gradients[i]:clone():keep()
        gradients[i]:mul_(0)
      else list[#list + 1] = gradients[i] end
    end
    if #list == 0 then return bucket:buffer() end
    local packed, parts = ms.pack(list)
    return bucket:group():all_reduce(packed):and_then(function(sum)
      sum:div_(bucket:divisor())
      for i, t in ipairs(list) do t:copy_(parts[i]) end
      return bucket:buffer()
    end)
  end

  function dion.optimizer(model, recipe)
    local groups = ms.scripts.matrices({ model = model, recipe = recipe }, {
      lr = options.lr or 0.01, others_lr = options.others_lr,
    })
    for _, one in ipairs(groups) do
      for _, p in ipairs(one.whole ~= false and one.params or {}) do
        assert(p:dim() == 2, "dion: each rank has whole matrices: use ms.ddp, and not shard=")
        is_local[p] = true
      end
    end
    return kind(groups, { momentum = options.momentum or 0.95, rank = options.rank or 8 })
  end

  return dion
end
