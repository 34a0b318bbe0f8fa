-- The native link all_reduce, in Lua: divides first, then sums. Every rank gets all numbers.
local hooks = require "moonshard.hooks"
local reduce = require "moonshard.hooks.reduce"

return function(options)
  return hooks._limit(reduce(options), { "all_reduce", "between" },
    "it leaves every rank all numbers; reduce ends a chain for every kind")
end
