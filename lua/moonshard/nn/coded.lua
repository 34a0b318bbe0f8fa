-- Linear layers whose weight is kept as codes: 4 bits a number and a scale for each block of a row
-- (ms.codec). The product decodes them (engine/ops/linear.c), so nothing has the numbers for longer
-- than a call. Codes are not trained: nn.lora trains adapters beside them.
--
-- Such a layer keeps its class and its parameters' names. Its weight is a frozen parameter of u8
-- [rows, bytes], and `ownership.coded` knows what it was.
local core = require "moonshard.core"
local module = require "moonshard.nn.module"
local ownership = require "moonshard.base.ownership"
local piece = require "moonshard.parallel.shard_piece"

local coded = {}

local KIND <const>, BLOCK <const> = "int4", 64

---@class ms.CodedWeight
---@field codec ms.Codec
---@field shape integer[] of the numbers
---@field dtype ms.DType that the weight had
---@field trained boolean whether it was
---@field loaded? ms.DType of its file
---@field record? any how its values on "meta" are made, before they are encoded

--- What the weight of a layer was; nil: it has its numbers.
---@param layer ms.Module
---@return ms.CodedWeight?
function coded.of(layer) return ownership.coded[layer.weight] end

--- The shape of a layer's weight, of all of it where this rank has a piece, as numbers.
---@param layer ms.Module
---@return integer[]
function coded.shape_of(layer)
  local what = coded.of(layer)
  return what and what.shape or layer.weight:full_shape()
end

--- The layers of a model that are coded, in order.
---@param model ms.Module
---@return { name: string, layer: ms.Module }[]
function coded.layers(model)
  local list = {}
  for name, object in model:modules() do
    local layout = rawget(getmetatable(object).class, "lora_layout")
    if layout and coded.of(object) then list[#list + 1] = { name = name, layer = object } end
  end
  return list
end

--- The product of a layer, whose weight may be coded.
---@param layer ms.Module
---@param x ms.Tensor
---@param activation? string
---@return ms.Tensor
function coded.product(layer, x, activation)
  local class, what = getmetatable(layer).class, coded.of(layer)
  if not what then return class.forward(layer, x, activation) end
  if rawget(class, "lora_layout") == "columns" then
    return x:linear_t(layer.weight, layer.bias, activation, what.codec, what.shape[2])
  end
  return x:linear(layer.weight, layer.bias, activation, what.codec)
end
module.tidy(coded.product)

----------------------------------------------------------------------------------------- in files

-- Numbers in a file as codes. Rows are coded apart, so any bytes of the codes are made of the rows
-- that they are of: a rank that reads its shard has no more than these, one f32 weight at most.
local Encoded = setmetatable({}, { __index = piece.methods })
Encoded.__index, Encoded.__name = Encoded, "ms.Source"

local function encoded(source, what, bytes)
  return setmetatable({
    inner = source, codec = what.codec, of_dtype = "u8", of_shape = { what.shape[1], bytes },
    columns = what.shape[2], parts = source.parts,
  }, Encoded)
end

-- f(row, rows) for the rows that have the bytes first .. first + count - 1 of the codes, some of
-- them at a time. Stops at nil.
local function each_rows(self, first, count, f)
  local width, columns = self.of_shape[2], self.columns
  -- A part of 4 MiB of f32, so that reading takes little memory beside the codes.
  local most = math.max(1, (1 << 20) // columns)
  local row, last = first // width, (first + count - 1) // width
  while count > 0 and row <= last do
    local rows = math.min(most, last - row + 1)
    local ok, message, code = f(row, rows)
    if not ok then return nil, message, code end
    row = row + rows
  end
  return true
end

function Encoded:read(first, count, into)
  return core.no_grad(function()
    local width, made = self.of_shape[2], into or core.empty { count, dtype = "u8" }
    local ok, message, code = each_rows(self, first, count, function(row, rows)
      local numbers, why, kind = self.inner:read(row * self.columns, rows * self.columns)
      if not numbers then return nil, why, kind end
      local codes = self.codec:encode(numbers:view(rows, self.columns)):view(-1)
      local from = math.max(first, row * width)
      local to = math.min(first + count, (row + rows) * width)
      made:narrow(1, from - first + 1, to - from)
        :copy_(codes:narrow(1, from - row * width + 1, to - from))
      core.collect()
      return true
    end)
    if not ok then return nil, message, code end
    return made
  end)
end

function Encoded:check(first, count)
  return each_rows(self, first, count, function(row, rows)
    return self.inner:check(row * self.columns, rows * self.columns)
  end)
end

-------------------------------------------------------------------------------------------- layers

-- On "meta": where the numbers will come from. false and a reason: nowhere.
local function later(weight, what, new, bytes)
  local unread = module.unread[weight]
  if unread then
    if unread.version ~= core.tensor_version(weight) then
      return false, "it was written on \"meta\" after its file was opened"
    end
    module.unread[new] = {
      source = encoded(unread.source, what, bytes), version = core.tensor_version(new),
    }
    module.unread[weight] = nil
    return true
  end
  what.record = core.initializer(weight)
  if not what.record then return false, "its values on \"meta\" are computed by a reset()" end
  return true
end

--- Encodes the weight of a layer.
---@param what string who asks, for messages
---@param name string of the layer
---@param layer ms.Module
---@param trained boolean whether the weight is trained again when it has its numbers
function coded.encode(what, name, layer, trained)
  local weight, codec = layer.weight, core.codec(KIND, { block = BLOCK })
  local shape = weight:shape()
  local entry = {
    codec = codec, shape = shape, dtype = weight:dtype(), trained = trained,
    loaded = module.loaded_dtype[weight],
  }
  local bytes = codec:bytes(shape[2])
  local new
  if weight:device() == "meta" then
    new = core.empty { shape[1], bytes, dtype = "u8", device = "meta" }
    local found, why = later(weight, entry, new, bytes)
    if not found then
      core.raise(("%s: '%s.weight' cannot be encoded: %s"):format(what, name, why))
    end
  else
    new = core.no_grad(function() return codec:encode(weight:detach()):keep() end)
  end
  layer.weight = core.mark_parameter(new)
  ownership.coded[new] = entry
  if not getmetatable(layer).lora then layer.forward = coded.product end
end

--- Makes the codes of a tensor that was on "meta" and whose numbers are not in a file.
---@param t ms.Tensor of u8, which has memory
---@param entry ms.CodedWeight
function coded.initialize(t, entry)
  local numbers = core.empty { dtype = entry.dtype, table.unpack(entry.shape) }
  core.initialize(numbers, entry.record)
  t:detach():copy_(entry.codec:encode(numbers))
end

--- The numbers of a coded layer, as they are decoded, become its weight again.
---@param layer ms.Module
function coded.decode(layer)
  local entry, codes = coded.of(layer), layer.weight
  local numbers = core.no_grad(function()
    return entry.codec:decode(codes:detach(), entry.shape[2]):to(entry.dtype)
  end)
  local weight = module.Parameter(numbers)
  weight:requires_grad_(entry.trained)
  ownership.coded[codes] = nil
  module.loaded_dtype[weight] = entry.loaded
  layer.weight = weight
  if not getmetatable(layer).lora then layer.forward = nil end
end

return coded
