-- The native link reduce, in Lua, for means: divides first, then sums, with the collectives that
-- each kind of bucket needs. Between the reductions of a hybrid bucket there are no links here,
-- only an all-reduce.

-- This rank's part of the mean of a 16-bit tensor over the group, in f32, without rounding; and the
-- position of the part.
local function exact_part(group, t, share)
  local ranks = group:size()
  local part = (t:numel() + ranks - 1) // ranks
  local received = group:all_to_all(t:pad_to(ranks * part):view(ranks, part)):value()
  return received:to("f32"):mul_(share):sum(1), group:rank() * part
end

-- Subtracts the rounding loss of the numbers from `first` on from `sent`, so that it goes into this
-- rank's residual.
local function report(sent, first, exact, rounded, share)
  local length = math.min(exact:numel(), sent:numel() - first)
  if length <= 0 then return end
  local lost = exact:narrow(1, 1, length) - rounded:narrow(1, 1, length):to "f32"
  sent:narrow(1, first + 1, length):sub_(lost:div_(share))
end

-- The mean of t over the group, in place; and this rank's numbers as the other ranks receive them.
local function mean_and_sent(group, t, share)
  local sent, count = t:to("f32"):clone(), t:numel()
  if t:dtype() == "f32" or count == 0 then
    return group:all_reduce(t, { premul_sum = share }):value(), sent
  end
  local exact, first = exact_part(group, t, share)
  local rounded = exact:to(t:dtype())
  report(sent, first, exact, rounded, share)
  local all = group:all_gather(rounded:view(1, -1)):value():view(-1)
  return t:copy_(all:narrow(1, 1, count)), sent
end

local function with_feedback(bucket, group, share)
  local buffer, kind = bucket:buffer(), bucket:kind()
  if kind == "all_reduce" then
    local mean, sent = mean_and_sent(group, buffer, share)
    bucket:set_sent(sent)
    return mean
  end
  local shards, replicas = bucket:group "shard", bucket:group "replicate"
  local sent = buffer:to("f32"):clone()
  local part, exact
  share = share * replicas:size()
  if buffer:dtype() == "f32" or buffer:numel() == 0 then
    part = shards:reduce_scatter(buffer, { premul_sum = share }):value()
    exact = part:clone()
  else
    exact = exact_part(shards, buffer, share)
    part = exact:to(buffer:dtype())
  end
  local received = part
  if kind == "hybrid" then part, received = mean_and_sent(replicas, part, 1 / replicas:size()) end
  report(sent, shards:rank() * exact:numel(), exact, received, share)
  bucket:set_sent(sent)
  return part
end

return function(options)
  local given = options and options.group
  return function(bucket)
    local group, buffer, kind = given or bucket:group(), bucket:buffer(), bucket:kind()
    local share = 1 / (given and given:size() or bucket:divisor())
    if bucket:wants_sent() then return with_feedback(bucket, group, share) end
    if kind == "all_reduce" then return group:all_reduce(buffer, { premul_sum = share }) end
    local shards, replicas = bucket:group "shard", bucket:group "replicate"
    local part = shards:reduce_scatter(buffer, { premul_sum = share * replicas:size() }):value()
    if kind == "reduce_scatter" then return part end
    return replicas:all_reduce(part, { premul_sum = 1 / replicas:size() })
  end
end
