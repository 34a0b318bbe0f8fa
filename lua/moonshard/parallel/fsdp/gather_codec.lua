-- before_gather and after_gather of ms.fsdp: what travels in gathers in place of shards; and what
-- these functions keep from gather to gather.
--
-- What is kept is f32 numbers beside those of a shard. Checkpoints have them as pieces of tensors
-- that are laid out as the parameters: "#gather/NAME/PARAMETER" in the sharded state of the model.
-- So any other number of ranks has the numbers of the elements that it has.
local core = require "moonshard.core"
local piece = require "moonshard.parallel.shard_piece"
local sorted_pairs = require "moonshard.base.sorted_pairs"
local whole = require "moonshard.nn.whole"

local extension = {}

local PREFIX <const> = "#gather/"

-- As FSDP:units gives them.
local function units_of(s)
  local list = s.sharded:units()
  for i, unit in ipairs(list) do unit.parameters = s.units[i].parameters end
  return list
end

---@class ms.PartState
local PartState = {}
PartState.__index = PartState
PartState.__name = "ms.PartState"

-- part -> the numbers by name, and how many there are
local kept = setmetatable({}, { __mode = "k" })

local function numbers_of(part, name)
  local found = kept[part][name]
  if not found then
    found = core.no_grad(function() return core.zeros { part.length } end):keep()
    kept[part][name] = found
  end
  return found
end

---@param name string
---@return ms.Tensor
function PartState:flat(name)
  if type(name) ~= "string" or name == "" or name:find "/" then
    core.raise("part.state:flat: a name without a slash is expected, not " .. tostring(name))
  end
  return numbers_of(self.part, name)
end

-- The table of a part that users see; each is made once.
local function part_of(s, index, number)
  local parts = s.gather_parts or {}
  s.gather_parts = parts
  parts[index] = parts[index] or {}
  local part = parts[index][number]
  if not part then
    part = { index = number }
    part.spans, part.length = s.sharded:spans(index, number)
    part.state = setmetatable({ part = part }, PartState)
    kept[part] = {}
    parts[index][number] = part
  end
  return part
end

-- f(tensor, unit, part) with the tables that users see instead of numbers.
local function with_tables(s, f)
  local units
  return f and function(tensor, index, number)
    units = units or units_of(s)
    local part = part_of(s, index, number)
    part.fresh = s.sharded:is_fresh(index, number)
    return f(tensor, units[index + 1], part)
  end
end

--- Installs the functions, before the first gather.
---@param s ms.FSDPState
function extension.install(s)
  local before, after = s.options.before_gather, s.options.after_gather
  if before or after then s.sharded:extend(with_tables(s, before), with_tables(s, after)) end
end

---------------------------------------------------------------------------------------- in states

-- f(part, span, place) for each parameter in the parts of a model; place: this rank's piece of it,
-- with the region and the shape of the whole where the parameter is itself a part.
local function each_span(s, f)
  local places = {}
  for _, one in ipairs(s.sharded:pieces()) do places[one.name] = one end
  for _, item in ipairs(s.wrapped:named_parameters()) do
    local place, r = places[item.name], whole.region_of(item.parameter)
    if place and r then place.region, place.shape = r, r.shape end
  end
  for index = 0, #s.sharded:units() - 1 do
    for number = 0, math.maxinteger do
      local spans, length = s.sharded:spans(index, number)
      if length == 0 then break end
      local part = part_of(s, index, number)
      for _, span in ipairs(spans) do
        if places[span.name] then f(part, span, places[span.name]) end
      end
    end
  end
end

--- What is kept, for each parameter, in its memory.
---@param s ms.FSDPState
---@return ms.PartItem[]
function extension.items(s)
  local list = {}
  if not s.gather_parts then return list end
  each_span(s, function(part, span, place)
    for name, numbers in sorted_pairs(kept[part]) do
      list[#list + 1] = {
        name = PREFIX .. name .. "/" .. span.name, dtype = "f32", shape = place.shape,
        first = place.first, count = place.count, region = place.region,
        flat = core.no_grad(function() return numbers:narrow(1, span.at + 1, place.count) end),
      }
    end
  end)
  return list
end

--- Whether a name in a state is of what is kept.
---@param name any
---@return boolean
function extension.is_kept(name)
  return type(name) == "string" and name:sub(1, #PREFIX) == PREFIX
end

--- Takes what is kept out of a state that is loaded: this rank's numbers. Returns the rest.
---@param s ms.FSDPState
---@param given table<string, any>
---@return table<string, any>
function extension.take(s, given)
  local rest, names = {}, {}
  for name, value in pairs(given) do
    local key, parameter = tostring(name):match("^" .. PREFIX .. "([^/]*)/(.*)$")
    if key and piece.is_tensor(value) then
      names[parameter] = names[parameter] or {}
      names[parameter][key] = value
    else rest[name] = value end
  end
  if next(names) == nil then return given end
  each_span(s, function(part, span, place)
    for key, value in sorted_pairs(names[span.name] or {}) do
      local fits = piece.same_shape(piece.shape_of(value), place.shape)
        and (not piece.is(value) or piece.has(value, place.first, place.count, place.region))
      if not fits then
        core.raise(("load_state: '%s%s/%s' is %s, and here it is of [%s], %d elements from %d on")
          :format(PREFIX, key, span.name, tostring(value), table.concat(place.shape, ", "),
          place.count, place.first))
      end
      local there = core.no_grad(function()
        return numbers_of(part, key):narrow(1, span.at + 1, place.count)
      end)
      piece.put(there, value, place.first, place.count, place.region)
    end
  end)
  return rest
end

return extension
