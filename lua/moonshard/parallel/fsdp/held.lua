-- How many bytes of gathered units a plan for prefetches holds.
local held = {}

--- The bytes of each unit, of those that are held, while visits are gone through in order.
---@class ms.Holding
---@field bytes integer
---@field units table<integer, integer> index -> bytes

---@param now ms.Holding
---@param unit integer
---@param bytes integer
function held.add(now, unit, bytes)
  if now.units[unit] then return end
  now.units[unit], now.bytes = bytes, now.bytes + bytes
end

---@param now ms.Holding
---@param unit integer
function held.remove(now, unit)
  now.bytes, now.units[unit] = now.bytes - (now.units[unit] or 0), nil
end

--- For each visit the numbers of those that end when it is the last that has begun, in order.
---@param visits ms.Visit[]
---@return integer[][]
function held.endings(visits)
  local lists = {}
  for i in ipairs(visits) do lists[i] = {} end
  for i, visit in ipairs(visits) do table.insert(lists[visit.last], i) end
  for _, list in ipairs(lists) do
    table.sort(list, function(a, b) return visits[a].ended < visits[b].ended end)
  end
  return lists
end

--- The most bytes that are gathered at a time, and the visit at which that is. What a pass leaves
--- gathered is there when the next one begins.
---@param view ms.PrefetchView
---@param entries ms.PrefetchEntry[]
---@return integer, integer
function held.most(view, entries)
  local bytes_of, ends, now = {}, held.endings(view.visits), { bytes = 0, units = {} }
  local most, at = 0, 1
  for _, visit in ipairs(view.visits) do bytes_of[visit.unit] = visit.bytes end
  local function note(i) if now.bytes > most then most, at = now.bytes, i end end
  local function gather(i, units)
    for _, unit in ipairs(units or {}) do held.add(now, unit, bytes_of[unit] or 0) end
    note(i)
  end
  for _ = 1, 2 do
    for i, visit in ipairs(view.visits) do
      if visit.needs_values then held.add(now, visit.unit, visit.bytes) end
      gather(i, entries[i].gather)
      for _, ended in ipairs(ends[i]) do
        local keep, one = entries[ended].keep, view.visits[ended]
        if keep == nil then keep = one.stays end
        if not keep then held.remove(now, one.unit) end
        gather(i, entries[ended].after)
      end
    end
  end
  return most, at
end

return held
