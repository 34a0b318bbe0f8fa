-- PowerSGD: low-rank gradients with error feedback and warm start. Vogels, Karimireddy, Jaggi:
-- "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019. A link;
-- options: rank 1, start_step 10 (plain means before), min_rate 2 (a matrix is compressed if it
-- shrinks by at least this factor).
local ms, hooks = require "moonshard", require "moonshard.hooks"

return function(options)
  options = options or {}
  local rank, start, min_rate = options.rank or 1, options.start_step or 10, options.min_rate or 2
  local state = hooks.state "powersgd"

  local function worth_it(rows, columns, r)
    return (rows + columns) * r * min_rate < rows * columns
  end

  return function(bucket, next)
    if ms.step() < start then return next(bucket) end
    if bucket:wants_sent() then bucket:set_sent(bucket:buffer()) end  -- unsent numbers are kept
    local group, ranks = bucket:group(), bucket:divisor()
    local flat, residual = bucket:buffer():to "f32", state:flat(bucket, "residual")
    bucket:set_buffer(flat)  -- gradients() are views of it, also if gradients have 16 bits
    flat:add_(residual)
    residual:copy_(flat)

    local matrices, lefts, rest = {}, {}, {}
    for i, gradient in ipairs(bucket:gradients()) do
      local rows = gradient:dim() > 0 and gradient:size(1) or 1
      local columns = gradient:numel() // math.max(1, rows)
      local r = math.min(rows, columns, rank)
      if worth_it(rows, columns, r) then
        local own, m = state:of(bucket:parameters()[i]), gradient:view(rows, columns)
        own.q = own.q or ms.randn { columns, r, seed = i }  -- the same numbers on every rank
        matrices[#matrices + 1] = { m = m, own = own }
        lefts[#lefts + 1] = m:matmul(own.q:orthonormalize_())          -- P = M Q
      else
        rest[#rest + 1] = gradient
      end
    end

    local function reduce_rest()
      local packed, parts = ms.pack(rest)
      return group:all_reduce(packed):and_then(function()
        packed:div_(ranks)
        for i, part in ipairs(parts) do rest[i]:copy_(part) end
      end)
    end

    local function reduce_matrices()
      local left, p = ms.pack(lefts)
      local right, q
      -- The sum is enough: orthonormalizing removes the scale.
      return group:all_reduce(left):and_then(function()
        local rights = {}
        for i, one in ipairs(matrices) do rights[i] = one.m:t():matmul(p[i]:orthonormalize_()) end
        right, q = ms.pack(rights)                                     -- Q = M^T P
        return group:all_reduce(right)
      end):and_then(function()
        right:div_(ranks)
        for i, one in ipairs(matrices) do
          one.m:copy_(p[i]:matmul(q[i]:t()))                           -- M := P Q^T, in the bucket
          one.own.q:copy_(q[i])
        end
      end)
    end

    local waits = {}
    if #rest > 0 then waits[#waits + 1] = reduce_rest() end
    if #matrices > 0 then waits[#waits + 1] = reduce_matrices() end
    return ms.all(waits):and_then(function()
      residual:sub_(flat)
      return bucket:shard(flat):to(bucket:dtype())
    end)
  end
end
