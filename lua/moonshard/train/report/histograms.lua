-- How the elements of gradients are distributed: counts in equal buckets from the least to the
-- greatest.
local core = require "moonshard.core"
require "moonshard.parallel.group"                -- methods of the world
local module = require "moonshard.nn.module"

---@class ms.Histogram
---@field min number
---@field max number
---@field count integer
---@field sum number
---@field sum_squares number
---@field limits number[] upper ends of the buckets
---@field counts number[]

local BUCKETS <const> = 32

-- Adds to the sums of a tensor: of its elements, of their squares, and the counts of buckets.
local function count(flat, low, high, sums)
  sums[1] = sums[1] + flat:sum():item()
  sums[2] = sums[2] + (flat * flat):sum():item()
  -- Equal elements are in the first bucket.
  local counts = flat:histogram(BUCKETS, low, high > low and high or low + 1)
  for i, number in ipairs(counts:to_table()) do sums[i + 2] = sums[i + 2] + number end
end

-- The least and the greatest element of each gradient, over all ranks where ranks have pieces.
local function limits_of(flats, in_pieces)
  local lows, highs = {}, {}
  for i, flat in ipairs(flats) do
    local some = flat and flat:numel() > 0
    lows[i] = some and flat:min():item() or math.huge
    highs[i] = some and flat:max():item() or -math.huge
  end
  if not in_pieces then return lows, highs end
  local world = core.world()
  return world:all_reduce(core.tensor(lows), "min"):value():to_table(),
    world:all_reduce(core.tensor(highs), "max"):value():to_table()
end

--- The histograms of the gradients of these parameters by name, without those that have none and
--- those with elements that are not finite. All ranks call it; **blocks**.
---@param parameters ms.Parameter[]
---@return table<string, ms.Histogram>
return function(parameters)
  local in_pieces, flats = false, {}
  for i, p in ipairs(parameters) do
    in_pieces = in_pieces or module.is_cut(p)
    local grad = p:grad()
    flats[i] = grad and grad:detach():to "f32":reshape(-1) or false
  end
  -- Without pieces all ranks have the same gradients.
  if not in_pieces and core.rank() ~= 0 then return {} end
  return core.no_grad(function()
    local lows, highs = limits_of(flats, in_pieces)
    local sums, width = {}, BUCKETS + 2
    for i, flat in ipairs(flats) do
      local own = {}
      for k = 1, width do own[k] = 0.0 end
      local finite = lows[i] > -math.huge and highs[i] < math.huge
      if flat and flat:numel() > 0 and finite then count(flat, lows[i], highs[i], own) end
      table.move(own, 1, width, #sums + 1, sums)
    end
    if in_pieces then sums = core.world():_sum(sums, "histograms") end
    local result = {}
    for i, p in ipairs(parameters) do
      local own = table.move(sums, (i - 1) * width + 1, i * width, 1, {})
      local total, limits = 0, {}
      for k = 3, width do total = total + own[k] end
      for k = 1, BUCKETS do limits[k] = lows[i] + (highs[i] - lows[i]) * k / BUCKETS end
      if total > 0 then
        result[p:name()] = {
          min = lows[i], max = highs[i], count = total, sum = own[1], sum_squares = own[2],
          limits = limits, counts = table.move(own, 3, width, 1, {}),
        }
      end
    end
    return result
  end)
end
