-- The native link cast, in Lua: what follows sees the buffer in another dtype.
return function(options)
  return function(bucket, next)
    local full = bucket:buffer()
    bucket:set_buffer(full:to(options.dtype))
    return next(bucket):and_then(function(reduced) return full:copy_(reduced) end)
  end
end
