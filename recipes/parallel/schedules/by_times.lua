-- zb_h1 that moves gradients of weights (W) to where ranks wait, by measured times: useful where
-- chunks take unequal times. It forecasts a pass with the W of a rank earlier or later, and keeps
-- what makes the pass shorter. Until times are known, all actions take equally long. A schedule;
-- options: spare (microbatches that a rank may hold beside as many as there are ranks; 0), every
-- (passes until it is asked again; 50).
local ms = require "moonshard"

local function text_of(r, kind, i) return ("%d%s%d"):format(r - 1, kind, i) end

-- The actions of rank r: while forwards are left, W come `lag` microbatches after I.
local function list_of(view, r, lag)
  local list, count, all = {}, { F = 0, I = 0, W = 0 }, view.microbatches
  local function add(kind)
    list[#list + 1] = { text = text_of(r, kind, count[kind]), kind = kind, micro = count[kind] }
    count[kind] = count[kind] + 1
  end
  for _ = 1, math.min(view.ranks - r, all) do add "F" end
  while count.I < all do
    if count.F < all then add "F" end
    add "I"
    if count.I - count.W > (count.F < all and lag or 0) then add "W" end
  end
  while count.W < all do add "W" end
  return list
end

-- When the last rank has ended.
local function forecast(view, lists)
  local ended, at, free, length, left = {}, {}, {}, 0, 3 * view.ranks * view.microbatches
  for r = 1, view.ranks do at[r], free[r] = 1, 0 end
  local function ready(r, action)
    local from = action.kind == "F" and r - 1 or action.kind == "I" and r + 1 or r
    if from < 1 or from > view.ranks or from == r then return free[r] end
    local when = ended[text_of(from, action.kind, action.micro)]
    return when and math.max(free[r], when)
  end
  while left > 0 do
    for r, list in ipairs(lists) do
      local action = list[at[r]]
      local begin = action and ready(r, action)
      while begin do
        free[r] = begin + (view.times and view.times[r - 1][action.kind] or 1)
        ended[action.text], at[r], left = free[r], at[r] + 1, left - 1
        action = list[at[r]]
        begin = action and ready(r, action)
      end
      length = math.max(length, free[r])
    end
  end
  return length
end

return function(options)
  return ms.schedule { name = "by_times", every = options.every or 50, plan = function(view)
    local placement, lists = {}, {}
    for r = 1, view.ranks do placement[r], lists[r] = { r - 1 }, list_of(view, r, r - 1) end
    local best, is_better = forecast(view, lists), true
    while is_better do
      is_better = false
      for r = 1, view.ranks do
        for lag = 0, r - 1 + (options.spare or 0) do
          local before = lists[r]
          lists[r] = list_of(view, r, lag)
          local length = forecast(view, lists)
          if length < best * (1 - 1e-9) then best, is_better = length, true
          else lists[r] = before end
        end
      end
    end
    local actions = {}
    for r, list in ipairs(lists) do
      actions[r] = {}
      for i, action in ipairs(list) do actions[r][i] = action.text end
    end
    return { placement = placement, actions = actions }
  end }
end
