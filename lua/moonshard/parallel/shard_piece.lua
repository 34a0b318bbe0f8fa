-- Parts of tensors in states: what a rank has of a parameter that is sharded, or of an optimizer's
-- state of it. And what states may hold in place of a whole tensor when they are loaded.
local core = require "moonshard.core"
local region = require "moonshard.parallel.region"

local piece = {}

local Piece = {}
Piece.__index = Piece
Piece.__name = "ms.Piece"
function Piece:__tostring()
  if self.region then
    return ("a piece %s: %d elements from %d on"):format(self.region.text, self.count, self.first)
  end
  return ("a piece of [%s]: %d elements from %d on"):format(table.concat(self.shape, ", "),
    self.count, self.first)
end

--- tensor: the elements first .. first + count - 1 (counted from 0) of a tensor of that shape, in
--- row-major order, as 1-D. r: they are those of a part of it, counted in the part. saves: of the
--- ranks that have the same ones, one saves them.
---@param tensor ms.Tensor
---@param shape integer[] of the whole
---@param first integer
---@param saves boolean
---@param r? ms.Region
---@return ms.Piece
function piece.new(tensor, shape, first, saves, r)
  return setmetatable({
    tensor = tensor, shape = shape, first = first, count = tensor:numel(), saves = saves,
    region = r,
  }, Piece)
end

--- Whether a piece has just these elements.
---@param value ms.Piece
---@param first integer
---@param count integer
---@param r? ms.Region
---@return boolean
function piece.has(value, first, count, r)
  local own = value.region
  return value.first == first and value.count == count and (own and own.text) == (r and r.text)
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

-- Where elements of the whole are: of parts that are whole, by the indices of the dimension that is
-- cut, else by elements. Second: how many there are.
local function stretches_of(parts, shape)
  local dim = parts[1] and parts[1].region and parts[1].region.dim
  for _, part in ipairs(parts) do
    local r = part.region
    if not r or r.dim ~= dim or part.first ~= 0 or part.count ~= piece.elements(r.part) then
      dim = nil
      break
    end
  end
  local list = {}
  local function add(part, first, count)
    if count > 0 then list[#list + 1] = { first = first, count = count, file = part.file } end
  end
  for _, part in ipairs(parts) do
    local r = part.region
    if dim then for _, one in ipairs(r.stretches) do add(part, one.from, one.size) end
    elseif r then
      region.each_run(r, part.first, part.count, function(_, from, count)
        add(part, from, count)
      end)
    else add(part, part.first, part.count) end
  end
  return list, dim and shape[dim] or piece.elements(shape), dim
end

--- What covers a tensor twice, or not at all, as text; nil if its parts are exactly it.
---@param parts { file?: string, first: integer, count: integer, region?: ms.Region }[]
---@param shape integer[]
---@return string? problem
---@return string? file
function piece.gap(parts, shape)
  local list, total, dim = stretches_of(parts, shape)
  local of = dim and ("indices %%d to %%d of dimension %d are missing"):format(dim)
    or "elements %d to %d are missing"
  table.sort(list, function(a, b) return a.first < b.first end)
  local at, before = 0, nil
  for _, one in ipairs(list) do
    if one.first > at then return of:format(at, one.first - 1), one.file
    elseif one.first < at then
      return ("%s %d is in %s too"):format(dim and "index" or "element", one.first,
        before.file and "'" .. before.file .. "'" or "another part"), one.file
    end
    at, before = at + one.count, one
  end
  if at == total then return nil end
  return at < total and of:format(at, total - 1)
    or ("it has %d elements, and there are %d"):format(total, at), before and before.file
end

-------------------------------------------------------------------------------------- in files

--- A tensor in files, of which parts are read: what `load_state` of sharded things gets from a
--- checkpoint.
---@class ms.Source
local Source = {}
Source.__index = Source
Source.__name = "ms.Source"
piece.methods = Source

--- parts: { file, path, name, first, count, hashes?, region? }, which cover the tensor, in order;
--- those with a region have elements first .. first + count - 1 of that part.
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

-- Runs of a part with a region that are among these elements of the whole, as { from in the part's
-- file, at those that were asked for, count }; and the stretch of the file that has them.
local function runs_of(part, first, count)
  local runs, begin, finish = {}, math.maxinteger, 0
  region.each_run_of_whole(part.region, first, count, function(at, from, number)
    local low = math.max(at, part.first)
    local high = math.min(at + number, part.first + part.count)
    if low < high then
      runs[#runs + 1] = {
        from = low - part.first, at = from + low - at - first, count = high - low,
      }
      begin, finish = math.min(begin, low - part.first), math.max(finish, high - part.first)
    end
  end)
  return runs, begin, finish
end

-- f(part, from, count, at, runs) for each part that has some of these elements: `count` of them
-- from
-- `from` on in the part's file, which are at `at` of those that were asked for; or which have
-- `runs` of them. Stops at nil.
local function each_part(self, first, count, f)
  for _, part in ipairs(self.parts) do
    local from = math.max(first, part.first)
    local to = math.min(first + count, part.first + part.count)
    local begin, at, runs = from - part.first, from - first, nil
    if part.region then
      runs, from, to = runs_of(part, first, count)
      begin = from
    end
    if from < to then
      local ok, message, code = f(part, begin, to - from, at, runs)
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
    local ok, message, code = each_part(self, first, count, function(part, from, number, at, runs)
      if not runs then
        return part.file:part(part.name, from, number, part.hashes, made:narrow(1, at + 1, number))
      end
      local read = core.empty { number, dtype = self.of_dtype }
      local done, why, kind = part.file:part(part.name, from, number, part.hashes, read)
      for _, run in ipairs(done and runs or {}) do
        made:narrow(1, run.at + 1, run.count)
          :copy_(read:narrow(1, run.from - from + 1, run.count))
      end
      return done, why, kind
    end)
    if not ok then return nil, message, code end
    return made
  end)
end

--- Compares these elements, of the whole or of a part, with their hashes, without keeping them:
--- true; or nil, message, code.
---@param first integer
---@param count integer
---@param r? ms.Region
---@return true?
---@return string? message
---@return string? code
function Source:check(first, count, r)
  local function check(from, number)
    return each_part(self, from, number, function(part, begin, some)
      return part.file:part(part.name, begin, some, part.hashes)
    end)
  end
  if not r then return check(first, count) end
  local ok, message, code = true, nil, nil
  region.each_span(r, first, count, function(from, number)
    if ok then ok, message, code = check(from, number) end
  end)
  return ok, message, code
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

-- These elements of a part, from a whole tensor or a source of one. Padding is 0.
local function cut_part(value, first, count, r)
  local made = core.zeros { count, dtype = value:dtype() }
  region.take(made, r, first, count, core.is_tensor(value) and value or function(from, number)
    local t, message = value:read(from, number)
    return t or core.raise(message)
  end)
  return made
end

--- Elements first .. first + count - 1 of what a state gives for a tensor: a whole tensor, a piece
--- with these elements, or a source; of the whole, or of the part of it that r describes. Raises
--- where a source cannot be read.
---@param value ms.Tensor|ms.Piece|ms.Source
---@param first integer
---@param count integer
---@param r? ms.Region
---@return ms.Tensor 1-D
function piece.cut(value, first, count, r)
  if piece.is(value) then return value.tensor end
  if r then return core.no_grad(function() return cut_part(value, first, count, r) end) end
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
---@param r? ms.Region
function piece.put(there, value, first, count, r)
  if count == 0 then return end
  core.no_grad(function()
    if r or not piece.is_source(value) or value:dtype() ~= there:dtype() then
      there:copy_(piece.cut(value, first, count, r))
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
