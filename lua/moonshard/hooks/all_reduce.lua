-- The native link all_reduce, in Lua: divides first, then sums.
return function(options)
  local group = options and options.group
  return function(bucket)
    local ranks = group and group:size() or bucket:divisor()
    if bucket:wants_sent() then bucket:set_sent(bucket:buffer()) end
    return (group or bucket:group()):all_reduce(bucket:buffer(), { premul_sum = 1 / ranks })
  end
end
