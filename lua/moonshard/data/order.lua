-- The order of records: a permutation without a table, so that any place can be computed alone. It
-- is the one of engine/io/loader.c, number for number.
local order = {}

local LOW <const> = 0xFFFFFFFF

-- The first of philox's four numbers (moonshard/base.h) for a key and a counter.
local function philox(key, high, low)
  local k0, k1 = key & LOW, key >> 32
  local c0, c1, c2, c3 = low & LOW, low >> 32, high & LOW, high >> 32
  for _ = 1, 10 do
    local p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
    c0, c2 = p1 >> 32 ~ c1 ~ k0, p0 >> 32 ~ c3 ~ k1
    c1, c3 = p1 & LOW, p0 & LOW
    k0, k1 = k0 + 0x9E3779B9 & LOW, k1 + 0xBB67AE85 & LOW
  end
  return c0
end

--- The image of an index under a permutation of 0 .. count - 1: a Feistel network of six rounds
--- over the next power of four. A result outside of the range goes through it again.
---@param seed integer
---@param epoch integer
---@param count integer
---@param index integer
---@return integer
function order.permute(seed, epoch, count, index)
  local half = 1
  while half < 32 and 1 << (2 * half) < count do half = half + 1 end
  local mask = (1 << half) - 1
  repeat
    local left, right = index >> half, index & mask
    for round = 1, 6 do
      left, right = right, (left ~ philox(seed, epoch, round << 32 | right)) & mask
    end
    index = left << half | right
  until index < count
  return index
end

return order
