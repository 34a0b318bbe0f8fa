-- The keys and values of the positions that a model has seen of a text, so that the next position
-- costs one position.
local core = require "moonshard.core"

--- What a block has of the positions before those of the running forward. It shows no tensors,
--- because what wraps a module casts and watches the tensors among the module's inputs.
---@class ms.Past
---@field first fun(): integer the number of these positions
--- Appends keys and values [batch, heads, time, width]; returns those of all positions.
---@field extend fun(keys: ms.Tensor, values: ms.Tensor): ms.Tensor, ms.Tensor

---@class ms.KeyCache
---@field length integer the positions of the forwards that have ended
---@field used boolean a block has appended to it
---@field capacity integer
---@field blocks ms.Past[]
local KeyCache = {}
KeyCache.__index = KeyCache

-- Memory comes with the first keys, which decide its dtype and shape.
local function past_of(cache)
  local keys, values
  local function put(whole, part)
    local shape = part:shape()
    whole = whole
      or core.zeros { shape[1], shape[2], cache.capacity, shape[4], dtype = part:dtype() }
    whole:narrow(3, cache.length + 1, shape[3]):copy_(part)
    return whole, whole:narrow(3, 1, cache.length + shape[3])
  end
  return {
    first = function() return cache.length end,
    extend = function(k, v)
      local all_keys, all_values
      keys, all_keys = put(keys, k)
      values, all_values = put(values, v)
      cache.used = true
      return all_keys, all_values
    end,
  }
end

--- What block `index` has.
---@param index integer from 1
---@return ms.Past
function KeyCache:block(index)
  self.blocks[index] = self.blocks[index] or past_of(self)
  return self.blocks[index]
end

--- After a forward of so many positions.
---@param count integer
function KeyCache:advance(count) self.length = self.length + count end

---@param capacity integer positions that it has room for
---@return ms.KeyCache
return function(capacity)
  return setmetatable({ length = 0, used = false, capacity = capacity, blocks = {} }, KeyCache)
end
