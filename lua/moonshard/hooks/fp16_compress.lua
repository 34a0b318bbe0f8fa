-- The native link fp16_compress, in Lua: casts to f16, averages, casts back.
local hooks = require "moonshard.hooks"
local cast, all_reduce = require "moonshard.hooks.cast", require "moonshard.hooks.all_reduce"
local reduce = require "moonshard.hooks.reduce"

return function(options)
  local reduction = options and options.group and all_reduce(options) or reduce()
  return hooks.chain { cast { dtype = "f16" }, reduction }
end
