-- Option precision of ms.fsdp: what units compute in while shards keep their dtype. The core casts
-- shards and gradients; here are inputs, outputs and buffers.
local core = require "moonshard.core"
local listed = require "moonshard.nn.listed"
local shared = require "moonshard.precision"

local precision = {}

--- What a model's option precision has become.
---@class ms.FSDPPrecision: ms.ShardedPrecision
---@field keeps table<string, boolean> names of parameters that keep their dtype
---@field full_eval boolean
---@field buffers? ms.CastBuffers once the model is sharded

local short = { f16 = true, bf16 = true }

-- Names of the parameters that keep their dtype. A misspelled name would be cast.
local function find_kept(keep, list)
  local kept, matched, names = {}, {}, {}
  for _, unit in ipairs(list) do
    for _, name in ipairs(unit.names) do
      names[#names + 1] = name
      for i, pattern in ipairs(keep or {}) do
        if listed.has({ pattern }, name) then kept[name], matched[i] = true, true end
      end
    end
  end
  for i, pattern in ipairs(keep or {}) do
    if not matched[i] then
      local near = core.nearest(pattern, names)
      core.raise(("fsdp: precision.keep[%d]: no parameter is called '%s'%s"):format(i, pattern,
        near and (": did you mean '%s'?"):format(near) or ""))
    end
  end
  return kept
end

--- The options, checked; nil: no parameter, buffer, input or output is cast.
---@param o ms.FSDPOptions
---@param list table[] units
---@return ms.FSDPPrecision?
function precision.of(o, list)
  for _, name in ipairs { "keep_low_precision_grads", "full_precision_eval" } do
    if o[name] and not o.precision then
      core.raise(("fsdp: %s is about precision, which is not given"):format(name))
    end
  end
  if o.precision == nil then return nil end
  local p = shared.check(o.precision, "fsdp", { "keep" })
  ---@cast p ms.FSDPPrecision
  listed.check("fsdp", "precision.keep", p.keep)
  p.reduce = p.reduce or p.param and "f32" or nil
  p.keeps, p.full_eval = find_kept(p.keep, list), o.full_precision_eval == true
  return p
end

--- In which dtype gradients are added up and reduced; nil: the parameters' own. A chain that begins
--- with a cast to 16 bits rounds by itself, so gradients come to it, and leave it, without another
--- rounding.
---@param p ms.FSDPPrecision
---@param first? ms.Link of the chain
---@return ms.DType?
function precision.reduces(p, first)
  local casts = type(first) == "table" and first.facts and first.facts.casts
  if casts and short[first.dtype] and short[p.reduce] then return "f32" end
  return p.reduce
end

--- What ranks must give alike, as text.
---@param p? ms.FSDPPrecision
---@return string
function precision.describe(p)
  if not p then return "none" end
  local words, kept = {}, {}
  for _, name in ipairs { "param", "reduce", "buffer", "output", "cast_inputs", "full_eval" } do
    words[#words + 1] = ("%s %s"):format(name, tostring(p[name]))
  end
  for name in pairs(p.keeps) do kept[#kept + 1] = name end
  table.sort(kept)
  return table.concat(words, ", ") .. ", keep " .. table.concat(kept, " ")
end

--- Whether the inputs of a unit are cast: those of the model, and of units in precision.param.
---@param p ms.FSDPPrecision
---@param unit table
---@return boolean
function precision.is_cast(p, unit)
  local cast = unit.index == 0
  for _, name in ipairs(unit.names) do cast = cast or not p.keeps[name] end
  return p.param ~= nil and cast
end

--- Before a forward: whether it computes in the shards' dtype.
---@param s ms.FSDPState
function precision.begin(s)
  local p = s.precision
  if not p.full_eval then return end
  local full = not s.wrapped:is_training()
  s.sharded:full(full)
  if p.buffers then p.buffers:set_full(full) end
end

--- run(object, ...) of a unit's module, its inputs and outputs cast.
---@param p ms.FSDPPrecision
---@param unit table
---@param full boolean the unit computes in the shards' dtype
---@return any ...
function precision.run(p, unit, full, run, object, ...)
  local inputs = p.cast_inputs and unit.is_cast and not full and p.param or nil
  return shared.cast_all(unit.index == 0 and p.output or nil,
    run(object, shared.cast_all(inputs, ...)))
end

--- Casts the buffers, after all ranks have the same.
---@param s ms.FSDPState
function precision.cast_buffers(s)
  local p = s.precision
  if not (p and p.buffer) then return end
  p.buffers = shared.cast_buffers(s.wrapped, p.buffer, function(name)
    return listed.has(s.options.ignored, name)
  end)
end

--- f(s, ...) while buffers have the dtypes that they had before wrapping.
---@param s ms.FSDPState
---@param f function
---@param ... any
---@return any ...
function precision.with_buffers(s, f, ...)
  local buffers = s.precision and s.precision.buffers
  if not buffers then return f(s, ...) end
  return buffers:in_full(f, s, ...)
end

return precision
