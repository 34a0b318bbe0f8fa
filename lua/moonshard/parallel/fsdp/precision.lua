-- Option precision of ms.fsdp: what units compute in while shards keep their dtype. The core casts
-- shards and gradients; here are inputs, outputs and buffers.
local core = require "moonshard.core"
local listed = require "moonshard.nn.listed"
local names = require "moonshard.nn.names"
local shared = require "moonshard.parallel.precision"
local sorted_pairs = require "moonshard.base.sorted_pairs"

local precision = {}

--- Options of units, checked: of all of them, of those that a function gave it for, or of those
--- that a name or pattern of precision.units matches.
---@class ms.FSDPPrecisionRule: ms.UnitPrecision
---@field where string begins messages
---@field of_model boolean output is that of the model, not of each unit
---@field whose string of which parameters keep may name some
---@field matched table<string, boolean> patterns of keep that match a parameter
---@field names string[] of the parameters of its units

--- What the option precision of a model has become.
---@class ms.FSDPPrecision
---@field rules table<integer, ms.FSDPPrecisionRule> by unit; nil: its parameters' dtypes
---@field by_unit boolean units were given options of their own
---@field keeps table<string, boolean> names of parameters that keep their dtype
---@field full_eval boolean
---@field buffers? ms.CastBuffers once the model is sharded

local short = { f16 = true, bf16 = true }
local dtypes = { "param", "reduce", "buffer", "output" }
local fields = { "param", "reduce", "buffer", "output", "cast_inputs", "cast_root_inputs" }

local function title_of(unit) return unit.index == 0 and "root" or unit.name end

----------------------------------------------------------------------------------- options of units

-- The rule that a table of options gives. from: another rule that the same function gave.
local function rule_of(given, where, whose, from)
  local rule = shared.check(given, where, { "cast_root_inputs", "keep" })
  ---@cast rule ms.FSDPPrecisionRule
  listed.check("fsdp", where:gsub("^fsdp: ", "", 1) .. ".keep", rule.keep)
  rule.where, rule.whose = where, whose
  rule.matched, rule.names = from and from.matched or {}, from and from.names or {}
  return rule
end

-- Sets what the options leave open.
local function complete(rule)
  rule.reduce = rule.reduce or rule.param and "f32" or nil
  if rule.cast_root_inputs == nil then rule.cast_root_inputs = rule.cast_inputs end
end

-- Rules of a function(module, name).
local function ask(f, list)
  local rules, first = {}, nil
  for _, unit in ipairs(list) do
    local given = f(unit.modules[1], unit.name)
    if given then
      local where = ("fsdp: precision(unit \"%s\")"):format(title_of(unit))
      local rule = rule_of(given, where, "", first)
      first = first or rule
      rules[unit.index] = rule
    end
  end
  return rules
end

-- Raises for a key of precision.units that is no pattern, or that no unit is called by.
local function check_key(key, list)
  if type(key) ~= "string" then
    core.raise(("fsdp: precision.units: its keys are names of units or patterns, not %s (a %s)")
      :format(tostring(key), type(key)))
  end
  if not pcall(string.find, "", "^" .. key .. "$") then
    local exact = false
    for _, unit in ipairs(list) do exact = exact or unit.name == key end
    if not exact then listed.check("fsdp", "precision.units", { key }) end
  end
end

local function matches(key, name)
  return key == name or pcall(string.find, "", "^" .. key .. "$") and listed.has({ key }, name)
end

local function check_matched(units, used, list)
  local all, shown = {}, { "\"\" (the root)" }
  for i = 2, #list do
    all[#all + 1] = list[i].name
    shown[#shown + 1] = i < 12 and ("'%s'"):format(list[i].name) or nil
  end
  if #list > 11 then shown[#shown + 1] = ("%d more"):format(#list - 11) end
  for key in sorted_pairs(units) do
    local near = not used[key] and core.nearest(key, all)
    if not used[key] then
      core.raise(("fsdp: precision.units: no unit is called '%s'%s; the units are %s"):format(key,
        near and (": did you mean '%s'?"):format(near) or "", table.concat(shown, ", ")))
    end
  end
end

-- The key of precision.units that a unit has its options by: its name, else the pattern.
local function key_of(units, unit)
  if units[unit.name] ~= nil then return unit.name end
  local found
  for key in sorted_pairs(units) do
    if matches(key, unit.name) then
      if found then
        core.raise(("fsdp: precision.units: '%s' and '%s' match unit \"%s\": a unit has the \z
          options of its name, or of one pattern"):format(found, key, title_of(unit)))
      end
      found = key
    end
  end
  return found
end

-- Rules of a table, whose field units may have other ones by name.
local function look_up(given, list)
  local rest, units = {}, given.units or {}
  for name, value in pairs(given) do if name ~= "units" then rest[name] = value end end
  local default = rule_of(rest, "fsdp: precision", given.units
    and " of the units without options of their own" or "")
  default.of_model = true
  local rules, by_key, used = {}, {}, {}
  for key in pairs(units) do check_key(key, list) end
  for key, value in sorted_pairs(units) do
    if value then
      by_key[key] = rule_of(value, ("fsdp: precision.units['%s']"):format(key),
        " of the units that it matches")
    end
  end
  for _, unit in ipairs(list) do
    local key = key_of(units, unit)
    if key then
      used[key] = true
      rules[unit.index] = by_key[key]
    else rules[unit.index] = default end
  end
  check_matched(units, used, list)
  return rules, default
end

-------------------------------------------------------------------------------------------- choices

-- Names of the parameters that keep their dtype. A misspelled name would be cast.
local function find_kept(rules, default, list)
  local kept, all = {}, default and { default } or {}
  for _, unit in ipairs(list) do
    local rule = rules[unit.index]
    if rule and rule ~= default then all[#all + 1] = rule end
    for _, name in ipairs(rule and unit.names or {}) do
      table.insert(rule.names, name)
      for _, pattern in ipairs(rule.keep or {}) do
        if listed.has({ pattern }, name) then kept[name], rule.matched[pattern] = true, true end
      end
    end
  end
  for _, rule in ipairs(all) do
    for i, pattern in ipairs(rule.keep or {}) do
      if not rule.matched[pattern] then
        local near = core.nearest(pattern, rule.names)
        core.raise(("%s.keep[%d]: no parameter%s is called '%s'%s"):format(rule.where, i,
          rule.whose, pattern, near and (": did you mean '%s'?"):format(near) or ""))
      end
    end
  end
  return kept
end

-- The dtype of a module's buffers: that of the innermost unit that it is in.
local function buffers_of(p, unit_of)
  return function(part)
    local unit = unit_of[part]
    local rule = p.rules[unit and unit.index or 0]
    return rule and rule.buffer
  end
end

-- Raises for a buffer of two units that give it two dtypes.
local function check_buffers(p, o, model, unit_of)
  local dtype_of, first = buffers_of(p, unit_of), {}
  local wanted = shared.float_buffers(model, function(name) return listed.has(o.ignored, name) end)
  local function describe(place)
    return ("'%s' (%s)"):format(place.name, place.dtype or "as it is")
  end
  shared.each_field(model, function(_, key, value, part, prefix)
    if not wanted[value] then return end
    local place = { name = names.join(prefix, key), dtype = dtype_of(part) }
    local before = first[value]
    first[value] = before or place
    if before and before.dtype ~= place.dtype then
      core.raise(("fsdp: precision: %s and %s are one buffer: give their units the same \z
        precision.buffer"):format(describe(before), describe(place)))
    end
  end)
end

--- The options, checked; nil: no parameter, buffer, input or output is cast.
---@param o ms.FSDPOptions
---@param list table[] units
---@param model ms.Module
---@param unit_of table<ms.Module, table> the innermost unit of a module; nil: the root
---@return ms.FSDPPrecision?
function precision.of(o, list, model, unit_of)
  for _, name in ipairs { "keep_low_precision_grads", "full_precision_eval" } do
    if o[name] and not o.precision then
      core.raise(("fsdp: %s is about precision, which is not given"):format(name))
    end
  end
  local given, rules, default = o.precision
  if given == nil then return nil end
  if type(given) == "function" then rules = ask(given, list)
  else
    shared.check(given, "fsdp: precision", { "cast_root_inputs", "keep", "units" },
      "a function(module, name)")
    if given.units ~= nil and type(given.units) ~= "table" then
      core.raise(("fsdp: precision.units is a table { [name or pattern of units] = options or \z
        false }, not a %s"):format(type(given.units)))
    end
    rules, default = look_up(given, list)
  end
  for _, rule in pairs(rules) do complete(rule) end
  local p = {
    rules = rules, by_unit = default == nil or given.units ~= nil,
    keeps = find_kept(rules, default, list), full_eval = o.full_precision_eval == true,
  }
  check_buffers(p, o, model, unit_of)
  return p
end

--- In which dtype a unit computes, and in which its gradients are added up and reduced; nil: in
--- the parameters' own. A chain that begins with a cast to 16 bits rounds by itself, so gradients
--- come to it, and leave it, without another rounding.
---@param p ms.FSDPPrecision
---@param unit table
---@param first? ms.Link of the chain
---@return ms.DType? computes
---@return ms.DType? reduces
function precision.dtypes(p, unit, first)
  local rule = p.rules[unit.index]
  if not rule then return nil end
  local casts = type(first) == "table" and first.facts and first.facts.casts
  if casts and short[first.dtype] and short[rule.reduce] then return rule.param, "f32" end
  return rule.param, rule.reduce
end

------------------------------------------------------------------------------------------- describe

-- Names that are kept, of parameters that all ranks share.
local function kept_of(p, list, groups)
  local kept = {}
  for _, unit in ipairs(list) do
    for _, name in ipairs(unit.names) do
      if p.keeps[name] and not groups[name] then kept[#kept + 1] = name end
    end
  end
  table.sort(kept)
  return #kept > 0 and table.concat(kept, " ") or "nothing"
end

local function describe(rule)
  if not rule then return "none" end
  local words = {}
  for _, name in ipairs(fields) do
    words[#words + 1] = ("%s %s"):format(name, tostring(rule[name]))
  end
  return table.concat(words, ", ")
end

--- What ranks must give alike, as text: of all units, and of one where units have their own.
---@param p? ms.FSDPPrecision
---@param list table[] units
---@param groups table<string, ms.Group> of parameters that not all ranks share
---@return string
function precision.describe(p, list, groups)
  if not p then return "none" end
  local text = ("full_eval %s, keep %s"):format(p.full_eval, kept_of(p, list, groups))
  return (p.by_unit and "by unit" or describe(p.rules[0])) .. ", " .. text
end

---@param p ms.FSDPPrecision
---@param unit table
---@return string
function precision.describe_unit(p, unit) return describe(p.rules[unit.index]) end

--- The options in force, as stats shows them; of units with options of their own by name.
---@param o ms.FSDPOptions
---@param p? ms.FSDPPrecision
---@param list table[] units
---@return table?
function precision.in_force(o, p, list)
  if not (p and p.by_unit) then return o.precision end
  local units = {}
  for _, unit in ipairs(list) do
    local rule, shown = p.rules[unit.index], {}
    for _, name in ipairs(rule and dtypes or {}) do shown[name] = rule[name] end
    if rule then
      if rule.of_model and unit.index ~= 0 then shown.output = nil end
      shown.cast_inputs, shown.keep = precision.is_cast(p, unit), rule.keep
    end
    units[unit.name] = rule and shown or false
  end
  return { units = units }
end

-------------------------------------------------------------------------------------------- running

--- Whether the inputs of a unit are cast: with cast_root_inputs those of the model, with
--- cast_inputs those of other units in precision.param.
---@param p ms.FSDPPrecision
---@param unit table
---@return boolean
function precision.is_cast(p, unit)
  local rule = p.rules[unit.index]
  if not (rule and rule.param) then return false end
  if unit.index == 0 then return rule.cast_root_inputs end
  local low = false
  for _, name in ipairs(unit.names) do low = low or not p.keeps[name] end
  return rule.cast_inputs and low
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
  local rule = p.rules[unit.index]
  if not rule then return run(object, ...) end
  local output = rule.output
  if unit.index ~= 0 and (full or rule.of_model) then output = nil end
  return shared.cast_all(output,
    run(object, shared.cast_all(unit.is_cast and not full and rule.param or nil, ...)))
end

--- Casts the buffers, after all ranks have the same.
---@param s ms.FSDPState
function precision.cast_buffers(s)
  local p = s.precision
  if not p then return end
  p.buffers = shared.cast_buffers(s.wrapped, buffers_of(p, s.unit_of_module), function(name)
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
