-- The native link all_reduce, in Lua: divides first, then sums.

-- For 16-bit buffers after error_feedback: each rank adds up its part in f32, and takes into its
-- own error what rounding the result to 16 bits loses.
local function mean_by_parts(bucket, group, share)
  local buffer = bucket:buffer()
  local count, ranks = buffer:numel(), group:size()
  local part = (count + ranks - 1) // ranks
  local received = group:all_to_all(buffer:pad_to(ranks * part):view(ranks, part)):value()
  local sum = received:to("f32"):mul_(share):sum(1)
  local rounded, sent, first = sum:to(buffer:dtype()), buffer:to "f32", group:rank() * part
  local own = math.min(part, count - first)
  if own > 0 then
    local lost = sum:narrow(1, 1, own) - rounded:narrow(1, 1, own):to "f32"
    sent:narrow(1, first + 1, own):sub_(lost:div_(share))
  end
  bucket:set_sent(sent)
  return buffer:copy_(group:all_gather(rounded:view(1, -1)):value():view(-1):narrow(1, 1, count))
end

return function(options)
  local given = options and options.group
  return function(bucket)
    local group, buffer = given or bucket:group(), bucket:buffer()
    local share = 1 / (given and given:size() or bucket:divisor())
    if bucket:wants_sent() then
      local is_wide = buffer:dtype() == "f32" or buffer:numel() == 0
      if not is_wide then return mean_by_parts(bucket, group, share) end
      bucket:set_sent(buffer)
    end
    return group:all_reduce(buffer, { premul_sum = share })
  end
end
