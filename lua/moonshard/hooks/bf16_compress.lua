-- The native link bf16_compress, in Lua: casts to bf16, averages, casts back.
local hooks = require "moonshard.hooks"
local all_reduce, cast = require "moonshard.hooks.all_reduce", require "moonshard.hooks.cast"

return function(options) return hooks.chain { cast { dtype = "bf16" }, all_reduce(options) } end
