-- Which elements of a whole tensor a rank's part has: of one dimension some stretches of indices,
-- and all of the other dimensions. A fused weight has a stretch of each of its blocks. What the
-- part has beyond its stretches is padding, which no whole tensor has.
--
-- Elements of a tensor are numbered in row-major order, from 0. A run is a number of elements that
-- follow each other both in the part and in the whole.
local core = require "moonshard.core"

local region = {}

---@class ms.Region
---@field shape integer[] of the whole
---@field part integer[] of the part
---@field dim integer counted from 1
--- at: the first index in the part, from: that in the whole, both counted from 0
---@field stretches { at: integer, from: integer, size: integer }[]
---@field text string equal for equal regions

local function product(shape, first, last)
  local count = 1
  for i = first, last do count = count * shape[i] end
  return count
end

---@param shape integer[]
---@param part integer[]
---@param dim integer
---@param stretches { at: integer, from: integer, size: integer }[]
---@return ms.Region
function region.new(shape, part, dim, stretches)
  local words = {}
  for i, one in ipairs(stretches) do words[i] = ("%d=%d+%d"):format(one.at, one.from, one.size) end
  return {
    shape = shape, part = part, dim = dim, stretches = stretches,
    text = ("[%s] of [%s] %d: %s"):format(table.concat(part, ","), table.concat(shape, ","), dim,
      table.concat(words, " ")),
  }
end

--- A region as files have it, beside the shape of the whole.
---@param r ms.Region
---@return table
function region.written(r)
  local list = core.json_list {}
  for i, one in ipairs(r.stretches) do
    list[i] = { at = one.at, from = one.from, size = one.size }
  end
  return { part = core.json_list { table.unpack(r.part) }, dim = r.dim, stretches = list }
end

--- The region that a file, or another rank, describes so; nil: there is none, or it is damaged.
---@param given any
---@param shape integer[] of the whole
---@return ms.Region?
function region.read(given, shape)
  local function are_sizes(list)
    if type(list) ~= "table" then return false end
    for _, size in ipairs(list) do
      if math.type(size) ~= "integer" or size < 0 then return false end
    end
    return true
  end
  if type(given) ~= "table" or not are_sizes(given.part) or #shape ~= #given.part
      or math.type(given.dim) ~= "integer" or given.dim < 1 or given.dim > #shape
      or type(given.stretches) ~= "table" then
    return nil
  end
  local whole, part = shape[given.dim], given.part[given.dim]
  for i, size in ipairs(shape) do
    if i ~= given.dim and size ~= given.part[i] then return nil end
  end
  for _, one in ipairs(given.stretches) do
    if type(one) ~= "table" or not are_sizes { one.at, one.from, one.size }
        or #{ one.at, one.from, one.size } ~= 3 or one.at + one.size > part
        or one.from + one.size > whole then
      return nil
    end
  end
  return region.new(shape, given.part, given.dim, given.stretches)
end

-- f(first, other, count) for each run among `count` elements from `first` on of the one shape: its
-- first element there, and in the other shape. own, theirs: the fields of stretches that say where
-- they are in each.
local function each(r, first, count, shape, own, other_shape, theirs, f)
  local inner = product(shape, r.dim + 1, #shape)
  local row_size, other_size = shape[r.dim] * inner, other_shape[r.dim] * inner
  if count == 0 or row_size == 0 then return end
  for row = first // row_size, (first + count - 1) // row_size do
    for _, one in ipairs(r.stretches) do
      local begin = row * row_size + one[own] * inner
      local from, to = math.max(first, begin), math.min(first + count, begin + one.size * inner)
      if from < to then
        f(from, row * other_size + one[theirs] * inner + from - begin, to - from)
      end
    end
  end
end

--- f(at, from, count) for each run among `count` elements of the part from element `first` on: its
--- first element in the part, and in the whole.
---@param r ms.Region
---@param first integer
---@param count integer
---@param f fun(at: integer, from: integer, count: integer)
function region.each_run(r, first, count, f)
  each(r, first, count, r.part, "at", r.shape, "from", f)
end

--- f(at, from, count) for each run that has some of `count` elements of the whole from element
--- `first` on.
---@param r ms.Region
---@param first integer
---@param count integer
---@param f fun(at: integer, from: integer, count: integer)
function region.each_run_of_whole(r, first, count, f)
  each(r, first, count, r.shape, "from", r.part, "at", function(from, at, number)
    f(at, from, number)
  end)
end

-- A contiguous tensor, or 1-D memory of one, as [rows, indices, elements of an index].
local function as_rows(flat, shape, dim)
  return flat:view(product(shape, 1, dim - 1), shape[dim], product(shape, dim + 1, #shape))
end

-- Whether elements first .. first + count - 1 of the part are all of it.
local function is_all(r, first, count)
  return first == 0 and count == product(r.part, 1, #r.part)
end

-- Elements of the whole that are read at once.
local AT_ONCE <const> = 1 << 21

--- f(from, count, runs) for stretches of the whole that have these elements of a part: its runs
--- that are near each other go together. runs: { at, from, count } each.
---@param r ms.Region
---@param first integer
---@param count integer
---@param f fun(from: integer, count: integer, runs: table[])
function region.each_span(r, first, count, f)
  local waiting, begin, finish = {}, 0, 0
  local function flush()
    if #waiting > 0 then f(begin, finish - begin, waiting) end
    waiting = {}
  end
  region.each_run(r, first, count, function(at, from, number)
    while number > 0 do
      local some = math.min(number, AT_ONCE)
      local lowest, highest = math.min(begin, from), math.max(finish, from + some)
      if #waiting > 0 and highest - lowest > AT_ONCE then flush() end
      if #waiting == 0 then lowest, highest = from, from + some end
      waiting[#waiting + 1] = { at = at, from = from, count = some }
      begin, finish, at, from, number = lowest, highest, at + some, from + some, number - some
    end
  end)
  flush()
end

-- Copies runs of the whole to `there`.
local function copy_runs(there, r, first, count, read)
  region.each_span(r, first, count, function(begin, number, runs)
    local values = read(begin, number)
    for _, one in ipairs(runs) do
      there:narrow(1, one.at - first + 1, one.count)
        :copy_(values:narrow(1, one.from - begin + 1, one.count))
    end
  end)
end

--- Copies to `there` (1-D) what a part has of a whole tensor: elements first .. first + count - 1
--- of the part. Padding stays as it is. whole: the tensor; or read(from, count), which gives
--- elements of the whole as 1-D.
---@param there ms.Tensor
---@param r ms.Region
---@param first integer
---@param count integer
---@param whole ms.Tensor|fun(from: integer, count: integer): ms.Tensor
function region.take(there, r, first, count, whole)
  if count == 0 then return end
  core.no_grad(function()
    if not core.is_tensor(whole) then return copy_runs(there, r, first, count, whole) end
    local flat = whole:detach():contiguous():view(-1)
    if not is_all(r, first, count) then
      return copy_runs(there, r, first, count, function(from, number)
        return flat:narrow(1, from + 1, number)
      end)
    end
    local own, from = as_rows(there, r.part, r.dim), as_rows(flat, r.shape, r.dim)
    for _, one in ipairs(r.stretches) do
      if one.size > 0 then
        own:narrow(2, one.at + 1, one.size):copy_(from:narrow(2, one.from + 1, one.size))
      end
    end
  end)
end

--- Copies elements first .. first + count - 1 of a part (1-D) to the place that they have in the
--- whole (1-D). Padding is left out.
---@param whole ms.Tensor
---@param r ms.Region
---@param first integer
---@param count integer
---@param own ms.Tensor
function region.put(whole, r, first, count, own)
  if count == 0 then return end
  core.no_grad(function()
    if not is_all(r, first, count) then
      return region.each_run(r, first, count, function(at, from, number)
        whole:narrow(1, from + 1, number):copy_(own:narrow(1, at - first + 1, number))
      end)
    end
    local from, to = as_rows(own, r.part, r.dim), as_rows(whole, r.shape, r.dim)
    for _, one in ipairs(r.stretches) do
      if one.size > 0 then
        to:narrow(2, one.from + 1, one.size):copy_(from:narrow(2, one.at + 1, one.size))
      end
    end
  end)
end

--- Elements of the whole that are among these of the part.
---@param r ms.Region
---@param first integer
---@param count integer
---@return integer
function region.count(r, first, count)
  local found = 0
  if not is_all(r, first, count) then
    region.each_run(r, first, count, function(_, _, number) found = found + number end)
    return found
  end
  for _, one in ipairs(r.stretches) do found = found + one.size end
  return found * product(r.part, 1, r.dim - 1) * product(r.part, r.dim + 1, #r.part)
end

return region
