-- The native link powersgd, in Lua: each gradient matrix M is sent as two narrow matrices P and Q
-- with M approximately P Q' (Vogels et al. 2019). options.name: the name of its state; a second
-- state of the same name is an error.
local ms = require "moonshard"
local hooks = require "moonshard.hooks"
local mean = require "moonshard.hooks.reduce" ()

-- The matrices of a bucket: rows n, columns m, rank r, offset; small: whether it is compressed.
local function matrices(bucket, rank, min_rate)
  local list, offset = {}, 0
  for i, p in ipairs(bucket:gradients()) do
    local n = p:dim() > 0 and p:size(1) or 1
    local m = n > 0 and p:numel() // n or 0
    local r = math.min(n, m, rank)
    list[i] = { n = n, m = m, r = r, offset = offset, small = (n + m) * r * min_rate < n * m }
    offset = offset + n * m
  end
  return list
end

-- The whole bucket as one square matrix.
local function square(count, rank)
  local side = math.ceil(math.sqrt(count))
  return { { n = side, m = side, r = math.min(rank, side), offset = 0, small = true } }
end

local function part(t, offset, rows, columns)
  return t:narrow(1, offset + 1, rows * columns):view(rows, columns)
end

return function(options)
  options = options or {}
  local function option(key, default)
    if options[key] == nil then return default end
    return options[key]
  end
  local rank, start, min_rate = option("rank", 1), option("start_step", 1000), option("min_rate", 2)
  local feedback, warm, eps, seed, batched = option("error_feedback", true),
    option("warm_start", true), option("eps", 0), option("seed", 0), option("batched", false)
  local state = hooks.state(options.name or "powersgd in Lua")

  -- State `name` with count(matrix) numbers for each compressed matrix. For a square, each
  -- parameter has as many numbers as it has elements, and the last parameter also has the rest.
  local function kept(bucket, list, name, count)
    local lengths, parameters, total = {}, bucket:gradients(), 0
    if not batched then
      for i, x in ipairs(list) do lengths[i] = x.small and count(x) or 0 end
      return state:pieces(bucket, name, lengths)
    end
    for _, p in ipairs(parameters) do total = total + p:numel() end
    local left = count(list[1])
    local by_parameter = left >= total
    for i, p in ipairs(parameters) do
      lengths[i] = by_parameter and p:numel() or 0
      left = left - lengths[i]
    end
    local last = by_parameter and #parameters or 1
    lengths[last] = lengths[last] + left
    return state:pieces(bucket, name, lengths)
  end

  return function(bucket)
    local group, share, counts = bucket:group(), 1 / bucket:divisor(), state:of "counts"
    local buffer, iteration = bucket:buffer(), counts.iteration or 0
    if bucket:is_last() then counts.iteration = iteration + 1 end
    if iteration < start then return mean(bucket) end
    -- For error_feedback before this link: numbers in this link's own residual are not lost.
    local sent = bucket:wants_sent() and buffer:to("f32"):clone()

    local dtype = buffer:dtype()
    -- Sums t over ranks, in the buffer's dtype.
    local function add_up(t, factor)
      t:copy_(group:all_reduce(t:to(dtype):clone(), { premul_sum = factor }):value())
    end
    local total, list, wide = 0
    for _, p in ipairs(bucket:gradients()) do total = total + p:numel() end
    local own = buffer:narrow(1, 1, total)         -- without the padding of sharded kinds
    if batched then
      list = square(total, rank)
      wide = ms.zeros { list[1].n * list[1].m }
      wide:narrow(1, 1, total):copy_(own)
    else list, wide = matrices(bucket, rank, min_rate), buffer:to "f32" end
    local small, rest = {}, {}
    for i, x in ipairs(list) do
      if x.small then
        x.index, x.m_view = i - 1, part(wide, x.offset, x.n, x.m)
        small[#small + 1] = x
      else rest[#rest + 1] = wide:narrow(1, x.offset + 1, x.n * x.m) end
    end

    local error
    if feedback then
      local at = 0
      error = kept(bucket, list, "error", function(x) return x.n * x.m end)
      for _, x in ipairs(small) do
        x.error = part(error, at, x.n, x.m)
        x.error:add_(x.m_view)
        x.m_view:copy_(x.error)
        at = at + x.n * x.m
      end
    end
    if #rest > 0 then
      local flat, views = ms.pack(rest)
      add_up(flat, share)
      for i, t in ipairs(rest) do t:copy_(views[i]) end
    end
    if #small > 0 then
      local p_count, q_count = 0, 0
      for _, x in ipairs(small) do p_count, q_count = p_count + x.n * x.r, q_count + x.m * x.r end
      local all_p = ms.empty { p_count }
      local all_q, fresh
      if warm then
        all_q, fresh = kept(bucket, list, "q", function(x) return x.m * x.r end)
      else
        all_q = ms.empty { q_count }
      end
      p_count, q_count = 0, 0
      for _, x in ipairs(small) do
        x.q_at = q_count
        x.p, x.q = part(all_p, p_count, x.n, x.r), part(all_q, q_count, x.m, x.r)
        p_count, q_count = p_count + x.n * x.r, q_count + x.m * x.r
        if not fresh or fresh[x.index + 1] then
          x.q:copy_(ms.randn {
            x.m, x.r, seed = seed + (iteration << 32) + (bucket:index() << 16) + x.index,
          })
        end
        x.p:copy_(x.m_view:matmul(x.q:orthonormalize_(eps)))
      end
      local begun_with = warm and all_q:clone()
      add_up(all_p, dtype == "f32" and 1 or share)
      for _, x in ipairs(small) do x.q:copy_(x.m_view:t():matmul(x.p:orthonormalize_(eps))) end
      add_up(all_q, share)
      for _, x in ipairs(small) do
        x.m_view:copy_(x.p:matmul(x.q:t()):to(dtype))
        if error then
          x.error:sub_(x.m_view)
          x.error:masked_fill_(x.error:is_finite():eq(0), 0)
        end
        -- A column of Q that is zero or not finite would stay so in all later iterations. Such a
        -- column is set back to the value with which this iteration started.
        if begun_with then
          local norms, before = x.q:norm(2, 1, true), part(begun_with, x.q_at, x.m, x.r)
          x.q:copy_(ms.where(norms:is_finite(), ms.where(norms:eq(0), before, x.q), before))
        end
      end
    end
    if sent and not feedback then
      for _, x in ipairs(small) do
        local count = math.min(x.n * x.m, total - x.offset)
        sent:narrow(1, x.offset + 1, count):copy_(wide:narrow(1, x.offset + 1, count))
      end
    end
    if sent then bucket:set_sent(sent) end
    if wide ~= buffer then own:copy_(wide:narrow(1, 1, total)) end
    return bucket:shard(buffer)
  end
end
