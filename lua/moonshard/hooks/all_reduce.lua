-- The native link all_reduce, in Lua: divides first, then sums.
return function(options)
  local group = options and options.group
  return function(bucket)
    local ranks = group and group:size() or bucket:divisor()
    return (group or bucket:group()):all_reduce(bucket:buffer(), { premul_sum = 1 / ranks })
  end
end
