-- What ddp and fsdp have in common for models that compute in another precision than their weights:
-- the option, casts of inputs and outputs, and buffers.
local core = require "moonshard.core"
local named = require "moonshard.base.named"
local check = require "moonshard.base.options".check

local precision = {}

local floats = { f32 = true, f16 = true, bf16 = true }

---@param value any
---@return boolean
function precision.is_float(value)
  return core.is_tensor(value) and floats[value:dtype()] == true
end

-------------------------------------------------------------------------------------------- options

local function check_types(o, where)
  for _, name in ipairs { "param", "reduce", "buffer", "output" } do
    if o[name] ~= nil and not floats[o[name]] then
      core.raise(("%s.%s must be f32, f16 or bf16, not %s"):format(where, name, tostring(o[name])))
    end
  end
  for _, name in ipairs { "cast_inputs", "cast_root_inputs" } do
    if o[name] ~= nil and type(o[name]) ~= "boolean" then
      core.raise(("%s.%s must be a boolean, not %s"):format(where, name, type(o[name])))
    end
    if o[name] and not o.param then
      core.raise(("%s.%s casts to precision.param, which is not given"):format(where, name))
    end
  end
end

--- Checks a user's table and returns a copy in which cast_inputs has its default; reduce has none.
---@param given any
---@param where string begins the message: the function, and which of its options this is
---@param more? string[] names of further options; those but cast_root_inputs the caller checks
---@param other? string what may be given instead of a table
---@return ms.Precision
function precision.check(given, where, more, other)
  local known = { "param", "reduce", "buffer", "output", "cast_inputs" }
  table.move(more or {}, 1, #(more or {}), #known + 1, known)
  if type(given) ~= "table" then
    core.raise(("%s is a table { %s = }%s, not a %s"):format(where, table.concat(known, " =, "),
      other and " or " .. other or "", type(given)))
  end
  local o, made = check(where, given, known), {}
  check_types(o, where)
  for _, name in ipairs(known) do made[name] = o[name] end
  if made.cast_inputs == nil then made.cast_inputs = o.param ~= nil end
  return made
end

---------------------------------------------------------------------------------------------- casts

-- A copy of value, which may be nested tables, with its float tensors cast to dtype.
local function cast(value, dtype)
  if precision.is_float(value) then return value:to(dtype) end
  if not named.is_plain(value) then return value end
  local made = {}
  for key, item in pairs(value) do made[key] = cast(item, dtype) end
  return made
end

--- The values, with the float tensors in them cast to dtype; nil: as they are.
---@param dtype? ms.DType
---@param ... any
---@return any ...
function precision.cast_all(dtype, ...)
  if not dtype then return ... end
  local values = table.pack(...)
  for i = 1, values.n do values[i] = cast(values[i], dtype) end
  return table.unpack(values, 1, values.n)
end

-------------------------------------------------------------------------------------------- buffers

--- Calls f(fields, key, value, module, name) for all fields that the modules own; name: that of the
--- module.
---@param model ms.Module
---@param f fun(fields: table, key: string, value: any, part: ms.Module, name: string)
function precision.each_field(model, f)
  for name, part in model:modules() do
    local state = getmetatable(part)
    for _, key in ipairs(state.order) do
      f(state.fields, key, state.fields[key], part, name)
    end
  end
end

--- The buffers that can be cast: float ones that are not skipped.
---@param model ms.Module
---@param skipped fun(name: string): boolean
---@return table<ms.Tensor, boolean>
function precision.float_buffers(model, skipped)
  local found = {}
  for name, buffer in pairs(model:buffers()) do
    if precision.is_float(buffer) and not skipped(name) then found[buffer] = true end
  end
  return found
end

--- Buffers of a model that have another dtype than they had.
---@class ms.CastBuffers
---@field list { fields: table, key: string, dtype: ms.DType, low?: ms.Tensor, full?: ms.Tensor }[]
---@field is_full boolean
local Buffers = {}
Buffers.__index = Buffers

--- Casts the buffers.
---@param model ms.Module
---@param dtype_of fun(part: ms.Module): ms.DType? of the buffers of a module; nil: they stay
---@param skipped fun(name: string): boolean
---@return ms.CastBuffers
function precision.cast_buffers(model, dtype_of, skipped)
  local self, cast_of = setmetatable({ list = {}, is_full = false }, Buffers), {}
  local wanted = precision.float_buffers(model, skipped)
  precision.each_field(model, function(fields, key, value, part)
    local dtype = wanted[value] and dtype_of(part)
    if not dtype or value:dtype() == dtype then return end
    self.list[#self.list + 1] = { fields = fields, key = key, dtype = value:dtype() }
    cast_of[value] = cast_of[value] or core.no_grad(function() return value:to(dtype):keep() end)
    fields[key] = cast_of[value]
  end)
  return self
end

-- Shared buffers stay shared.
local function raise_to_full(self)
  local made = {}
  for _, item in ipairs(self.list) do
    local low = item.fields[item.key]
    made[low] = made[low] or low:to(item.dtype):keep()
    item.low, item.full = low, made[low]
    item.fields[item.key] = item.full
  end
end

-- What was written in full precision is rounded. A module may have assigned another tensor.
local function lower(self)
  local done = {}
  for _, item in ipairs(self.list) do
    local full = item.fields[item.key]
    done[full] = done[full] or (full == item.full and item.low or full:to(item.low:dtype()):keep())
    if done[full] == item.low then item.low:copy_(full) end
    item.fields[item.key], item.low, item.full = done[full], nil, nil
  end
end

--- Whether the buffers have their former dtypes.
---@param full boolean
function Buffers:set_full(full)
  if self.is_full == full then return end
  core.no_grad(function() (full and raise_to_full or lower)(self) end)
  self.is_full = full
end

--- Calls f(...) while the buffers have their former dtypes.
---@param f function
---@param ... any
---@return any ...
function Buffers:in_full(f, ...)
  local before = self.is_full
  self:set_full(true)
  local leave <close> = setmetatable({}, { -- luacheck: ignore leave
    __close = function() self:set_full(before) end,
  })
  return f(...)
end

return precision
