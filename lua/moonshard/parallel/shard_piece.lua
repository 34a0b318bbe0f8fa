-- Parts of tensors in states: what a rank has of a parameter that is sharded, or of an optimizer's
-- state of it. And what states may hold in place of a whole tensor when they are loaded.
local core = require "moonshard.core"

local piece = {}

local Piece = {}
Piece.__index = Piece
Piece.__name = "ms.Piece"
function Piece:__tostring()
  return ("a piece of [%s]: %d elements from %d on"):format(table.concat(self.shape, ", "),
    self.count, self.first)
end

--- tensor: the elements first .. first + count - 1 (counted from 0) of a tensor of that shape, in
--- row-major order, as 1-D. saves: of the ranks that have the same ones, one saves them.
---@param tensor ms.Tensor
---@param shape integer[]
---@param first integer
---@param saves boolean
---@return ms.Piece
function piece.new(tensor, shape, first, saves)
  return setmetatable({
    tensor = tensor, shape = shape, first = first, count = tensor:numel(), saves = saves,
  }, Piece)
end

---@param value any
---@return boolean
function piece.is(value) return getmetatable(value) == Piece end

--- The number of elements of a shape.
---@param shape integer[]
---@return integer
function piece.elements(shape)
  local count = 1
  for _, size in ipairs(shape) do count = count * size end
  return count
end

---@param a integer[]
---@param b integer[]
---@return boolean
function piece.same_shape(a, b)
  if #a ~= #b then return false end
  for i, size in ipairs(a) do if size ~= b[i] then return false end end
  return true
end

-------------------------------------------------------------------------------------- in files

--- A tensor in files, of which parts are read: what `load_state` of sharded things gets from a
--- checkpoint.
---@class ms.Source
local Source = {}
Source.__index = Source
Source.__name = "ms.Source"
piece.methods = Source

--- parts: { file, path, name, first, count, hashes? }, which cover the tensor, in order.
---@param dtype string
---@param shape integer[]
---@param parts table[]
---@return ms.Source
function piece.source(dtype, shape, parts)
  return setmetatable({ of_dtype = dtype, of_shape = shape, parts = parts }, Source)
end

---@param value any
---@return boolean
function piece.is_source(value)
  local meta = type(value) == "table" and getmetatable(value)
  return type(meta) == "table" and meta.__name == Source.__name
end

function Source:dtype() return self.of_dtype end
function Source:shape() return { table.unpack(self.of_shape) } end
function Source:__tostring()
  return ("%s [%s]"):format(self.of_dtype, table.concat(self.of_shape, ", "))
end

-- f(part, from, count, at) for each part that has some of these elements: `count` of them from
-- `from` on in the part, which are at `at` of those that were asked for. Stops at nil.
local function each_part(self, first, count, f)
  for _, part in ipairs(self.parts) do
    local from = math.max(first, part.first)
    local to = math.min(first + count, part.first + part.count)
    if from < to then
      local ok, message, code = f(part, from - part.first, to - from, from - first)
      if not ok then
        local named = message:find(part.path, 1, true)
        return nil, named and message or ("'%s': %s"):format(part.path, message), code
      end
    end
  end
  return true
end

--- Elements first .. first + count - 1 as a new 1-D tensor, or into one of the source's dtype; or
--- nil, message, code.
---@param first integer
---@param count integer
---@param into? ms.Tensor
---@return ms.Tensor?
---@return string? message
---@return string? code
function Source:read(first, count, into)
  return core.no_grad(function()
    local made = into or core.empty { count, dtype = self.of_dtype }
    local ok, message, code = each_part(self, first, count, function(part, from, number, at)
      return part.file:part(part.name, from, number, part.hashes, made:narrow(1, at + 1, number))
    end)
    if not ok then return nil, message, code end
    return made
  end)
end

--- Compares these elements with their hashes, without keeping them: true; or nil, message, code.
---@param first integer
---@param count integer
---@return true?
---@return string? message
---@return string? code
function Source:check(first, count)
  return each_part(self, first, count, function(part, from, number)
    return part.file:part(part.name, from, number, part.hashes)
  end)
end

--- The whole tensor in its shape; or nil, message, code.
---@return ms.Tensor?
---@return string? message
---@return string? code
function Source:whole()
  local t, message, code = self:read(0, piece.elements(self.of_shape))
  if not t then return nil, message, code end
  return core.no_grad(function() return t:view(table.unpack(self.of_shape)) end)
end

--------------------------------------------------------------------------------------- loading

--- Elements first .. first + count - 1 of what a state gives for a tensor: a whole tensor, a piece
--- with these elements, or a source. Raises where a source cannot be read.
---@param value ms.Tensor|ms.Piece|ms.Source
---@param first integer
---@param count integer
---@return ms.Tensor 1-D
function piece.cut(value, first, count)
  if piece.is(value) then return value.tensor end
  if piece.is_source(value) then
    local t, message = value:read(first, count)
    return t or core.raise(message)
  end
  return value:detach():contiguous():view(-1):narrow(1, first + 1, count)
end

-- Temporary memory that `put` has used since it last asked for a collection.
local used, LIMIT <const> = 0, 8 << 20

--- Copies elements first .. first + count - 1 of such a value to a 1-D tensor. Dropped handles keep
--- their memory until a collection, so there is one for each 8 MiB.
---@param there ms.Tensor
---@param value ms.Tensor|ms.Piece|ms.Source
---@param first integer
---@param count integer
function piece.put(there, value, first, count)
  if count == 0 then return end
  core.no_grad(function()
    if not piece.is_source(value) or value:dtype() ~= there:dtype() then
      there:copy_(piece.cut(value, first, count))
      used = used + 8 * count
      if used > LIMIT then
        used = 0
        core.collect()
      end
    else
      local ok, message = value:read(first, count, there)
      if not ok then core.raise(message) end
    end
  end)
end

--- Whether a value represents a tensor in a state that is loaded.
---@param value any
---@return boolean
function piece.is_tensor(value)
  return core.is_tensor(value) or piece.is(value) or piece.is_source(value)
end

--- The shape of the whole tensor for which a value is.
---@param value ms.Tensor|ms.Piece|ms.Source
---@return integer[]
function piece.shape_of(value)
  if piece.is(value) then return value.shape end
  return value:shape()
end

return piece
