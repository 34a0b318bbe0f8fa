-- The native link error_feedback, in Lua. The residual, that is, what later links lose of this
-- rank's numbers, is added to this rank's numbers in the next iteration. options.name: the name of
-- its state; a second state of the same name is an error.
local hooks = require "moonshard.hooks"

return function(options)
  local decay, state = options.decay or 1, hooks.state(options.name or "error_feedback in Lua")
  return function(bucket, next)
    if bucket:wants_sent() then
      error("error_feedback in Lua: another error_feedback stands before it: one is enough", 0)
    end
    local buffer, left = bucket:buffer(), state:flat(bucket, "error")
    if decay ~= 1 then left:mul_(decay) end
    left:add_(buffer:to "f32")
    buffer:copy_(left)
    bucket:ask_sent()
    return next(bucket):and_then(function(reduced)
      local sent = bucket:sent()
      if not sent then
        error("error_feedback in Lua: the link that reduced has not reported what this rank sent: "
          .. "it calls bucket:set_sent(t)", 0)
      end
      left:sub_(sent)
      left:masked_fill_(left:is_finite():eq(0), 0)  -- else inf or nan would stay in the residual
      return reduced
    end)
  end
end
