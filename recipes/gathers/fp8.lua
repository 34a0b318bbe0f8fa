-- Gathers in 8-bit floats: as int8.lua, with 3 bits of mantissa for each number of a block of 256,
-- whatever its size. The codec's payload has a scale for each block.
local ms = require "moonshard"
local codec = ms.codec "fp8"

return {
  before_gather = function(shard) return codec:encode(shard) end,
  after_gather = function(gathered, _, part)
    return codec:decode(gathered:view(-1, codec:bytes(part.length)), part.length):flatten()
  end,
}
