-- Option dtype of ms.fsdp: which weights travel as 8-bit floats in gathers. They are those whose
-- products are in 8 bits under ms.autocast "fp8": a product of what arrives has the same bits, as
-- the numbers of E4M3 codes are encoded again without a change (engine/ops/fp8.h).
local core = require "moonshard.core"
local coded = require "moonshard.nn.coded"
local names = require "moonshard.nn.names"
local precision = require "moonshard.parallel.fsdp.precision"

local fp8 = {}

local MULTIPLE <const> = 16

-- The weight of a module that is a linear layer and nothing else, or one with an adapter beside it.
-- A class made from a linear layer may compute something else.
local function weight_of(object)
  local meta = getmetatable(object)
  if rawget(meta.class, "lora_layout") == nil or coded.of(object) then return nil end
  local is_plain = object.forward == meta.class.forward or meta.lora ~= nil
  return is_plain and core.is_parameter(object.weight) and object.weight or nil
end

-- How many fields of modules each parameter is.
local function count_uses(model)
  local uses = {}
  for _, object in model:modules() do
    local state = getmetatable(object)
    for _, key in ipairs(state.order) do
      local value = state.fields[key]
      if core.is_parameter(value) then uses[value] = (uses[value] or 0) + 1 end
    end
  end
  return uses
end

-- In what a parameter of the unit is computed with.
local function computes_of(low, unit, name, p)
  if not low or low.keeps[name] then return p:dtype() end
  return precision.dtypes(low, unit) or p:dtype()
end

-- Why the weight does not travel in fp8; nil: it does.
local function refusal(layer, place, uses, low)
  local shape, p = layer.weight:shape(), layer.weight
  if layer.fp8 == false then return "its layer is kept out of fp8 (layer.fp8 = false)" end
  if uses[p] > 1 then return "another module has it, too" end
  if not place then return "it is among `ignored`" end
  for _, size in ipairs(shape) do
    if size % MULTIPLE ~= 0 then
      return ("its sizes %s are not multiples of %d"):format(table.concat(shape, " x "), MULTIPLE)
    end
  end
  local dtype = computes_of(low, place.unit, place.name, p)
  if dtype ~= "f32" and dtype ~= "bf16" then
    return ("it computes in %s, and fp8 takes f32 and bf16"):format(dtype)
  end
end

-- Raises, as no weight travels in fp8. reasons: of each linear layer's weight.
local function raise_none(reasons)
  if #reasons == 0 then
    core.raise "fsdp: dtype = 'fp8': the model has no linear layer (nn.Linear, or those of gpt2), \z
      and other parameters travel as they are: leave dtype out"
  end
  core.raise(("fsdp: dtype = 'fp8': no weight of the model can travel in fp8: '%s': %s%s: leave \z
    dtype out"):format(reasons[1].name, reasons[1].why,
    #reasons > 1 and (" (and %d more)"):format(#reasons - 1) or ""))
end

--- The names of parameters that travel in fp8; none without the option.
---@param o ms.FSDPOptions
---@param units table[]
---@param model ms.Module
---@param low? ms.FSDPPrecision
---@return table<string, boolean>
function fp8.of(o, units, model, low)
  local found, reasons, places = {}, {}, {}
  if not o.dtype then return found end
  for _, unit in ipairs(units) do
    for i, p in ipairs(unit.parameters) do places[p] = { unit = unit, name = unit.names[i] } end
  end
  local uses = count_uses(model)
  for name, object in model:modules() do
    local weight = weight_of(object)
    local why = weight and refusal(object, places[weight], uses, low)
    if why then reasons[#reasons + 1] = { name = names.join(name, "weight"), why = why }
    elseif weight then found[places[weight].name] = true end
  end
  if not next(found) then raise_none(reasons) end
  return found
end

return fp8
