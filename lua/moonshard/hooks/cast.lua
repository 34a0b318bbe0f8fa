-- The native link cast, in Lua: the later links see the buffer in another dtype.
return function(options)
  return function(bucket, next)
    local full = bucket:buffer()
    bucket:set_buffer(full:to(options.dtype))
    return next(bucket):and_then(function(reduced)
      local own = reduced:numel() == full:numel() and full or bucket:shard(full)
      return own:copy_(reduced)
    end)
  end
end
