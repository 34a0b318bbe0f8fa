-- before_gather and after_gather of ms.fsdp: what travels in gathers in place of shards.
local extension = {}

-- As FSDP:units gives them.
local function units_of(s)
  local list = s.sharded:units()
  for i, unit in ipairs(list) do unit.parameters = s.units[i].parameters end
  return list
end

-- f(tensor, unit, part) with the tables that users see instead of numbers. They do not change, so
-- each is made once.
local function with_tables(s, f)
  local units, parts = nil, {}
  return f and function(tensor, index, number)
    units = units or units_of(s)
    parts[index] = parts[index] or {}
    local part = parts[index][number]
    if not part then
      part = { index = number }
      part.spans, part.length = s.sharded:spans(index, number)
      parts[index][number] = part
    end
    return f(tensor, units[index + 1], part)
  end
end

--- Installs the functions, before the first gather.
---@param s ms.FSDPState
function extension.install(s)
  local before, after = s.options.before_gather, s.options.after_gather
  if before or after then s.sharded:extend(with_tables(s, before), with_tables(s, after)) end
end

return extension
