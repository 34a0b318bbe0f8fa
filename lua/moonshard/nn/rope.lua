-- Rotary positions: scaling beyond the trained context, and its description in config.json. The
-- formulas are at ms_rotary_scaling in engine/include/moonshard/tensor.h.
local core = require "moonshard.core"
local check_options = require "moonshard.base.options".check

local rope = {}

-- The fields that each kind of scaling needs.
local numbers = {
  default = {},
  linear = { "factor" },
  llama3 = { "factor", "low_freq_factor", "high_freq_factor", "original_context" },
}
local fields = { "type", "factor", "low_freq_factor", "high_freq_factor", "original_context" }

local function is_finite(value) return type(value) == "number" and value - value == 0 end

-- What is wrong with a scaling of a known type, or nil.
local function fault_of(scaling)
  for _, name in ipairs(numbers[scaling.type]) do
    local value = scaling[name]
    local low_enough = name == "low_freq_factor" and 0 or nil
    if not is_finite(value) or value < 0 or value == 0 and not low_enough then
      return ("%s must be a finite number %s, not %s")
        :format(name, low_enough and "of 0 or more" or "above 0", tostring(value))
    end
  end
  if scaling.type == "llama3" and scaling.low_freq_factor >= scaling.high_freq_factor then
    return ("low_freq_factor %g must be below high_freq_factor %g")
      :format(scaling.low_freq_factor, scaling.high_freq_factor)
  end
end

--- Raises unless scaling is nil or describes a scaling that is built.
---@param what string begins the message
---@param scaling? ms.RotaryScaling
function rope.check(what, scaling)
  if scaling == nil then return end
  what = what .. ": rotary_scaling"
  check_options(what, scaling, fields)
  if not numbers[scaling.type] then
    core.raise(("%s: type is %s; default, linear and llama3 are built")
      :format(what, tostring(scaling.type)))
  end
  local fault = fault_of(scaling)
  if fault then core.raise(("%s: %s"):format(what, fault)) end
end

-- Reads one description of rotary positions: rope_parameters, rope_scaling, or an empty table.
-- Returns base and scaling; or nil, message, code.
local function read_one(key, given, config, default)
  if type(given) ~= "table" then
    return nil, ("%s is %s; a table is expected"):format(key, tostring(given)), "corrupt"
  end
  for name, value in pairs(given) do
    -- transformers 5 writes such tables if kinds of layers have different rotary parameters.
    if type(value) == "table" then
      return nil,
        ("%s.%s is a table: positions by kind of layer are not supported"):format(key, name),
        "unsupported"
    end
  end
  local kind = given.rope_type or given.type or given.factor == nil and "default" or nil
  if not numbers[kind] then
    return nil, ("the rope_type in %s is %s; default, linear and llama3 are supported")
      :format(key, tostring(kind)), "unsupported"
  end
  local part = given.partial_rotary_factor or config.partial_rotary_factor or 1
  if part ~= 1 then
    return nil, ("partial_rotary_factor is %s; heads here turn as a whole"):format(tostring(part)),
      "unsupported"
  end
  local base = given.rope_theta or config.rope_theta or default or 10000.0
  if not is_finite(base) or base <= 0 then
    return nil, ("rope_theta is %s; a number above 0 is expected"):format(tostring(base)), "corrupt"
  end
  if kind == "default" then return { base = base } end
  local scaling = { type = kind }
  for _, name in ipairs(numbers[kind]) do scaling[name] = given[name] end
  if kind == "llama3" then
    scaling.original_context = config.original_max_position_embeddings
      or given.original_max_position_embeddings or config.max_position_embeddings or 2048
  end
  local fault = fault_of(scaling)
  if fault then return nil, ("%s: %s"):format(key, fault), "corrupt" end
  return { base = base, scaling = scaling }
end

local function same(a, b)
  if a.base ~= b.base then return false end
  for _, name in ipairs(fields) do
    if (a.scaling or {})[name] ~= (b.scaling or {})[name] then return false end
  end
  return true
end

--- Reads the rotary positions of a config.json: rope_parameters (transformers 5), or rope_theta and
--- rope_scaling (up to transformers 4). The precedence is that of RotaryEmbeddingConfigMixin in
--- transformers' modeling_rope_utils.py. A file with both forms that differ is refused, because
--- releases of transformers read it differently.
---@param config table
---@param default? number            base of a config.json that has none; 10000 unless given
---@return { base: number, scaling: ms.RotaryScaling? }?
---@return string? message
---@return string? code
function rope.read(config, default)
  local found
  for _, key in ipairs { "rope_parameters", "rope_scaling" } do
    local given = config[key]
    if given ~= nil and not (type(given) == "table" and next(given) == nil) then
      local one, message, code = read_one(key, given, config, default)
      if not one then return nil, message, code end
      if found and not same(found, one) then
        return nil,
          "rope_parameters and rope_scaling describe different positions: remove one of them",
          "unsupported"
      end
      found = one
    end
  end
  if found then return found end
  return read_one("rope_theta", {}, config, default)
end

--- The entries for config.json, in the form that transformers 4 and 5 both read.
---@param base? number
---@param scaling? ms.RotaryScaling
---@return number rope_theta
---@return table? rope_scaling
function rope.write(base, scaling)
  base = (base or 10000) + 0.0
  if not scaling or scaling.type == "default" then return base, nil end
  local written = { rope_type = scaling.type }
  -- transformers expects floats for all fields but the context.
  for _, name in ipairs(numbers[scaling.type]) do
    if name == "original_context" then written.original_max_position_embeddings = scaling[name]
    else written[name] = scaling[name] + 0.0 end
  end
  return base, written
end

return rope
