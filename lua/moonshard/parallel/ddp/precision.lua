-- Models that compute in another precision than their weights. During forward, a recorded cast
-- takes each parameter's place in its module, so the gradients have the weights' dtype.
local core = require "moonshard.core"
local names = require "moonshard.nn.names"
local shared = require "moonshard.parallel.precision"
local cast_all, each_field, is_float = shared.cast_all, shared.each_field, shared.is_float

local precision = { cast_buffers = shared.cast_buffers }

local current                                  -- the scope that forward runs in, or nil

--- Checks a user's table and returns a copy with the defaults filled in.
---@param given any
---@return ms.Precision
function precision.check(given)
  local o = shared.check(given, "ddp: precision")
  o.reduce = o.reduce or o.param
  return o
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
for _, name in ipairs { "recompute", "recompute_rest" } do
  local recompute = core[name]
  core[name] = function(f, ...)
    local scope = current
    if not scope or type(f) ~= "function" and type(f) ~= "table" then return recompute(f, ...) end
    return recompute(function(...) return inside(scope, f, ...) end, ...)
  end
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

return precision
