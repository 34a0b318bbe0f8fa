-- Models that compute in another precision than their weights. During forward, a recorded cast
-- takes each parameter's place in its module, so the gradients have the weights' dtype.
local core = require "moonshard.core"
local check = require "moonshard.options".check
local names = require "moonshard.nn.names"

local precision = {}

local floats = { f32 = true, f16 = true, bf16 = true }
local current                                  -- the scope that forward runs in, or nil

---@class ms.Precision
---@field param? ms.DType              in which forward and backward compute
---@field reduce? ms.DType             in which gradients are reduced; param unless given
---@field buffer? ms.DType             of buffers
---@field output? ms.DType             to which outputs of forward are cast
---@field cast_inputs? boolean         whether inputs are cast to param; true if param is given

--- Checks a user's table and returns a copy with the defaults filled in.
---@param given any
---@param what string begins the message
---@return ms.Precision
function precision.check(given, what)
  if type(given) ~= "table" then
    core.raise(("%s: precision is a table { param =, reduce =, buffer =, output =, cast_inputs = \z
      }, not a %s"):format(what, type(given)))
  end
  local o = check(what .. ": precision", given,
    { "param", "reduce", "buffer", "output", "cast_inputs" })
  for _, name in ipairs { "param", "reduce", "buffer", "output" } do
    if o[name] ~= nil and not floats[o[name]] then
      core.raise(("%s: precision.%s must be f32, f16 or bf16, not %s")
        :format(what, name, tostring(o[name])))
    end
  end
  if o.cast_inputs ~= nil and type(o.cast_inputs) ~= "boolean" then
    core.raise(("%s: precision.cast_inputs must be a boolean, not %s")
      :format(what, type(o.cast_inputs)))
  end
  local inputs = o.cast_inputs
  if inputs == nil then inputs = o.param ~= nil end
  if inputs and not o.param then
    core.raise(what .. ": precision.cast_inputs casts to precision.param, which is not given")
  end
  return {
    param = o.param, reduce = o.reduce or o.param, buffer = o.buffer, output = o.output,
    cast_inputs = inputs,
  }
end

local function is_float(value) return core.is_tensor(value) and floats[value:dtype()] == true end

-- A copy of value, which may be nested tables, with its float tensors cast to dtype.
local function cast(value, dtype)
  if is_float(value) then return value:to(dtype) end
  if type(value) ~= "table" or getmetatable(value) ~= nil then return value end
  local made = {}
  for key, item in pairs(value) do made[key] = cast(item, dtype) end
  return made
end

local function cast_all(dtype, ...)
  if not dtype then return ... end
  local values = table.pack(...)
  for i = 1, values.n do values[i] = cast(values[i], dtype) end
  return table.unpack(values, 1, values.n)
end

-- Calls f(fields, key, value) for all fields that the modules own.
local function each_field(model, f)
  for _, part in model:modules() do
    local state = getmetatable(part)
    for _, key in ipairs(state.order) do f(state.fields, key, state.fields[key]) end
  end
end

-- The casts for the parameters of a model: a list of { fields, key, parameter, cast }.
local function make_scope(model, dtype, skipped)
  local scope, casts = {}, {}
  each_field(model, function(fields, key, value)
    if not (core.is_parameter(value) and is_float(value)) or value:dtype() == dtype
        or skipped(value) then
      return
    end
    casts[value] = casts[value] or value:to(dtype)
    names.stand_in(casts[value], value)
    scope[#scope + 1] = { fields = fields, key = key, parameter = value, cast = casts[value] }
  end)
  return scope
end

local function put(scope, which)
  for _, item in ipairs(scope) do item.fields[item.key] = item[which] end
end

-- Calls f(...) while the casts have the parameters' places.
local function inside(scope, f, ...)
  if current == scope then return f(...) end
  local before = current
  if before then put(before, "parameter") end
  put(scope, "cast")
  current = scope
  local leave <close> = setmetatable({}, { __close = function() -- luacheck: ignore leave
    put(scope, "parameter")
    if before then put(before, "cast") end
    current = before
  end })
  return f(...)
end

-- A recomputed function must use the same casts when backward runs it again.
local recompute = core.recompute
function core.recompute(f, ...)
  local scope = current
  if not scope or type(f) ~= "function" and type(f) ~= "table" then return recompute(f, ...) end
  return recompute(function(...) return inside(scope, f, ...) end, ...)
end

--- Calls model(...) in this precision.
---@param model ms.Module
---@param p ms.Precision
---@param skipped fun(parameter: ms.Parameter): boolean whether a parameter keeps its dtype
---@return any ...
function precision.run(model, p, skipped, ...)
  local function forward(...)
    return cast_all(p.output, model(cast_all(p.cast_inputs and p.param or nil, ...)))
  end
  if not p.param then return forward(...) end
  return inside(make_scope(model, p.param, skipped), forward, ...)
end

--- Casts the buffers to dtype. Returns a function that restores their former dtypes.
---@param model ms.Module
---@param dtype ms.DType
---@param skipped fun(name: string): boolean
---@return fun()
function precision.cast_buffers(model, dtype, skipped)
  local before, cast_of = {}, {}
  local wanted = {}
  for name, buffer in pairs(model:buffers()) do
    if is_float(buffer) and not skipped(name) then wanted[buffer] = true end
  end
  each_field(model, function(fields, key, value)
    if not wanted[value] or value:dtype() == dtype then return end
    before[#before + 1] = { fields = fields, key = key, dtype = value:dtype() }
    cast_of[value] = cast_of[value] or core.no_grad(function() return value:to(dtype):keep() end)
    fields[key] = cast_of[value]
  end)
  return function()
    local back = {}                                          -- shared buffers stay shared
    for _, item in ipairs(before) do
      local now = item.fields[item.key]
      back[now] = back[now] or core.no_grad(function() return now:to(item.dtype):keep() end)
      item.fields[item.key] = back[now]
    end
  end
end

return precision
