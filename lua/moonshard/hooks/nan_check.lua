-- The native link nan_check, in Lua: looks for infinities and NaN in each rank's numbers and in the
-- result. The second result is a function that gives the flag, for optimizer:step { only_if =
-- good() }, which the native link passes on by itself.
-- options.name: the name of its state; a second state of the same name is an error.
local ms = require "moonshard"
local hooks = require "moonshard.hooks"

return function(options)
  local state = hooks.state(options and options.name or "nan_check in Lua"):of "all"
  local function look(t) state.bad = ms.where(t:is_finite():all(), state.bad, 1.0) end
  local function link(bucket, next)
    if bucket:index() == 0 then state.bad = ms.zeros { 1 } end
    look(bucket:buffer())
    return next(bucket):and_then(function(reduced)
      look(reduced)
      if bucket:is_last() then
        state.bad = bucket:group():all_reduce(state.bad:clone(), "max"):value()
      end
      return reduced
    end)
  end
  return link, function() return state.bad:eq(0):any() end
end
