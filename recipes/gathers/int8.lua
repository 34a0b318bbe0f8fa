-- Gathers of 8 bits: a shard travels as 8-bit integers, of which 256 share a scale, so a quarter of
-- the bytes of f32. Units compute with the rounded values, in forward and in backward; optimizers
-- keep the exact ones. README.md has how to use it.
local ms = require "moonshard"
local codec = ms.codec "int8"

return {
  before_gather = function(shard) return codec:encode(shard) end,
  after_gather = function(gathered, _, part)
    return codec:decode(gathered:view(-1, codec:bytes(part.length)), part.length):flatten()
  end,
}
