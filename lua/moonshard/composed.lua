-- Methods of tensors, and ms.einsum, that are made of operators of the engine. core.tidy releases
-- the tensors that are made on the way: their memory is free at once, unless a backward is to read
-- it.
--
-- Reading a method that tensors lack loads this file, and with it the methods of nn/module.lua.
local core = require "moonshard.core"
local options_of = require "moonshard.base.options"
require "moonshard.nn.module"
local argument = options_of.argument

---@class ms.Tensor
local Tensor = core.tensor_methods
local composed = {}

local floats = { f32 = true, f16 = true, bf16 = true }

-- A dimension of t, from 1.
local function dimension(what, t, dim)
  argument(what, "dim", dim, "integer")
  local dims = t:dim()
  if dim == 0 or dim > dims or dim < -dims then
    core.raise(("%s: dimension %d of %s: it has %d"):format(what, dim, tostring(t), dims))
  end
  return dim < 0 and dims + 1 + dim or dim
end

---@param dim? integer
---@param keep_dim? boolean
---@param correction? number
---@return ms.Tensor
function Tensor:var(dim, keep_dim, correction)
  argument("var", "keep_dim", keep_dim, "boolean?")
  argument("var", "correction", correction, "number?")
  if dim ~= nil then dim = dimension("var", self, dim) end
  if not floats[self:dtype()] then
    core.raise(("var: %s: it needs f32, f16 or bf16: cast first"):format(tostring(self)))
  end
  local count = dim and self:size(dim) or self:numel()
  return core.tidy(function()
    local x = self:to "f32"
    -- A gradient of the mean would be that of a sum of differences from it, which is 0.
    local squares = (x - x:detach():mean(dim, true)):square()
    local divisor = math.max(0, count - (correction or 1))
    return (squares:sum(dim, keep_dim) / divisor):to(self:dtype())
  end)
end

-- The product of n elements along dim, which keeps size 1. Each half is multiplied with the other,
-- so that each gradient is a product of other elements, also where some are 0.
local function product(x, dim, n)
  if n == 1 then return x:clone() end
  local half = n // 2
  local whole = product(x:narrow(dim, 1, half) * x:narrow(dim, half + 1, half), dim, half)
  return n % 2 == 0 and whole or whole * x:narrow(dim, n, 1)
end

---@param dim? integer
---@param keep_dim? boolean
---@return ms.Tensor
function Tensor:prod(dim, keep_dim)
  argument("prod", "keep_dim", keep_dim, "boolean?")
  if dim ~= nil then dim = dimension("prod", self, dim) end
  local is_float = floats[self:dtype()]
  return core.tidy(function()
    local x, shape = self:to(is_float and "f32" or "i64"), self:shape()
    local count = dim and self:size(dim) or self:numel()
    local whole
    if count == 0 then
      whole = x:sum(dim, keep_dim) + 1
    elseif dim then
      whole = product(x, dim, count)
      if not keep_dim then whole = whole:squeeze(dim) end
    else
      for i in ipairs(shape) do shape[i] = 1 end
      whole = product(x:reshape(-1), 1, count):view(keep_dim and shape or {})
    end
    return is_float and whole:to(self:dtype()) or whole
  end)
end

---@param classes integer
---@return ms.Tensor i64 [..., classes]
function Tensor:one_hot(classes)
  argument("one_hot", "classes", classes, "integer")
  if classes < 1 then
    core.raise(("one_hot: classes is %d: 1 or more is allowed"):format(classes))
  end
  local shape = self:shape()
  shape[#shape + 1] = classes
  shape.dtype = "i64"
  return core.tidy(function()
    local one = core.ones { 1, dtype = "i64" }
    return core.zeros(shape):scatter_(-1, self:unsqueeze(-1), one)
  end)
end

-- Zero where the column is beyond the row plus the diagonal: greater ("gt") or less ("lt").
local function triangle(what, t, diagonal, beyond)
  argument(what, "diagonal", diagonal, "integer?")
  if t:dim() < 2 then
    core.raise(("%s: %s: it needs two dimensions or more"):format(what, tostring(t)))
  end
  if t:numel() == 0 then return t:clone() end
  return core.tidy(function()
    local rows = core.arange(1, t:size(-2)):unsqueeze(2) + (diagonal or 0)
    local columns = core.arange(1, t:size(-1))
    return t:masked_fill(columns[beyond](columns, rows), 0)
  end)
end

---@param diagonal? integer
---@return ms.Tensor
function Tensor:tril(diagonal) return triangle("tril", self, diagonal, "gt") end

---@param diagonal? integer
---@return ms.Tensor
function Tensor:triu(diagonal) return triangle("triu", self, diagonal, "lt") end

--------------------------------------------------------------------------------------------- einsum

local function refuse(equation, format, ...)
  core.raise(("einsum '%s': "):format(equation) .. format:format(...))
end

-- The letters of one operand or of the result, as a list, each once.
local function letters_of(equation, text, what)
  local list, seen = {}, {}
  for letter in text:gmatch "." do
    if not letter:find "%a" then
      refuse(equation, letter == "." and "an ellipsis (...) is not supported: write a letter for \z
        each dimension" or "'%s' is not a letter", letter)
    end
    if seen[letter] then
      refuse(equation, "'%s' is twice in %s: diagonals are not supported", letter, what)
    end
    seen[letter], list[#list + 1] = true, letter
  end
  return list, seen
end

-- "ij,jk->ik" -> { { "i", "j" }, { "j", "k" } }, { "i", "k" }. Without -> the result has the
-- letters that are in one operand, in alphabetical order, capitals first.
local function parse(equation, count)
  local text = equation:gsub("%s", "")
  local left, right = text:match "^(.-)%->(.*)$"
  local operands, found, times = {}, {}, {}
  for part in ((left or text) .. ","):gmatch "([^,]*)," do
    local what = ("operand %d"):format(#operands + 1)
    operands[#operands + 1] = letters_of(equation, part, what)
    for _, letter in ipairs(operands[#operands]) do
      if not times[letter] then found[#found + 1] = letter end
      times[letter] = (times[letter] or 0) + 1
    end
  end
  if #operands ~= count then
    refuse(equation, "it has %d operands, and %d tensors are given", #operands, count)
  end
  if not right then
    table.sort(found)
    right = ""
    for _, letter in ipairs(found) do
      if times[letter] == 1 then right = right .. letter end
    end
  end
  local result = letters_of(equation, right, "the result")
  for _, letter in ipairs(result) do
    if not times[letter] then refuse(equation, "'%s' is in the result only", letter) end
  end
  return operands, result
end

-- Letter -> size.
local function sizes_of(equation, operands, tensors)
  local sizes = {}
  for i, letters in ipairs(operands) do
    local shape = tensors[i]:shape()
    if #shape ~= #letters then
      refuse(equation, "operand %d has %d letters, and the tensor %d dimensions", i, #letters,
        #shape)
    end
    for d, letter in ipairs(letters) do
      if sizes[letter] and sizes[letter] ~= shape[d] then
        refuse(equation, "'%s' has sizes %d and %d", letter, sizes[letter], shape[d])
      end
      sizes[letter] = shape[d]
    end
  end
  return sizes
end

local function set_of(list)
  local set = {}
  for _, item in ipairs(list) do set[item] = true end
  return set
end

-- Letters of the list for which f is true.
local function filter(list, f)
  local found = {}
  for _, letter in ipairs(list) do if f(letter) then found[#found + 1] = letter end end
  return found
end

-- t with its dimensions in the order of these groups of letters, each group as one dimension.
local function grouped(t, letters, sizes, groups)
  local place, order, shape = {}, {}, {}
  for d, letter in ipairs(letters) do place[letter] = d end
  for i, group in ipairs(groups) do
    shape[i] = 1
    for _, letter in ipairs(group) do
      order[#order + 1] = place[letter]
      shape[i] = shape[i] * sizes[letter]
    end
  end
  if #order == 0 then return t:view(shape) end
  return t:permute(table.unpack(order)):reshape(shape)
end

-- t as [batch, rows, columns] of these letters, the others summed.
local function matrices(t, letters, sizes, groups)
  local kept = {}
  for _, group in ipairs(groups) do for _, letter in ipairs(group) do kept[letter] = true end end
  local rest = filter(letters, function(letter) return not kept[letter] end)
  if #rest == 0 then return grouped(t, letters, sizes, groups) end
  return grouped(t, letters, sizes, { groups[1], groups[2], groups[3], rest }):sum(4)
end

-- A tensor of these letters in the order of the result.
local function ordered(t, letters, sizes, result)
  local shape, place, order = {}, {}, {}
  for d, letter in ipairs(letters) do shape[d], place[letter] = sizes[letter], d end
  if #letters == 0 then return t:view(shape) end
  for i, letter in ipairs(result) do order[i] = place[letter] end
  return t:view(shape):permute(table.unpack(order))
end

local function joined(...)
  local all = {}
  for _, list in ipairs { ... } do table.move(list, 1, #list, #all + 1, all) end
  return all
end

-- A sum over letters of one operand, and a turn. Without a sum its memory would be that of a.
local function of_one(a, letters, sizes, result)
  local whole = matrices(a, letters, sizes, { {}, {}, result })
  local turned = ordered(whole, result, sizes, result)
  return #result == #letters and turned:clone() or turned
end

local function of_two(a, b, operands, sizes, result)
  local in_a, in_b, in_result = set_of(operands[1]), set_of(operands[2]), set_of(result)
  local batch = filter(result, function(letter) return in_a[letter] and in_b[letter] end)
  local rows = filter(result, function(letter) return not in_b[letter] end)
  local columns = filter(result, function(letter) return not in_a[letter] end)
  local inner = filter(operands[1], function(letter)
    return in_b[letter] and not in_result[letter]
  end)
  local left = matrices(a, operands[1], sizes, { batch, rows, inner })
  local right = matrices(b, operands[2], sizes, { batch, inner, columns })
  return ordered(left:matmul(right), joined(batch, rows, columns), sizes, result)
end

---@param equation string
---@param a ms.Tensor
---@param b? ms.Tensor
---@return ms.Tensor
function composed.einsum(equation, a, b)
  argument("einsum", "equation", equation, "string")
  argument("einsum", "a", a, "tensor")
  argument("einsum", "b", b, "tensor?")
  local operands, result = parse(equation, b and 2 or 1)
  local sizes = sizes_of(equation, operands, { a, b })
  if b then return core.tidy(of_two, a, b, operands, sizes, result) end
  return core.tidy(of_one, a, operands[1], sizes, result)
end

options_of.methods(Tensor, "a tensor", core.is_tensor, { "var", "prod", "one_hot", "tril", "triu" })

return composed
