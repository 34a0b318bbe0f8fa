-- The strategy "by_budget". What comes next is gathered ahead, and units stay gathered, within
-- numbers of elements (view.budgets, as DeepSpeed's coordinator of ZeRO-3 has them) and within the
-- bytes of the budget.
--   prefetch_elements  gathered ahead of their use at a time
--   live_elements      gathered at a time
--   reuse_elements     a unit stays gathered after a use if fewer elements are used until its next
--   keep_elements      a unit of so few elements stays in any case until its next use
local held = require "moonshard.parallel.fsdp.held"

-- Number of the next visit of each visit's unit; nil: there is none in this pass.
local function next_visits(visits)
  local next_of, seen = {}, {}
  for i = #visits, 1, -1 do
    next_of[i], seen[visits[i].unit] = seen[visits[i].unit], i
  end
  return next_of
end

-- Sums of the elements used before each visit.
local function sums(visits)
  local before = { 0 }
  for i, visit in ipairs(visits) do before[i + 1] = before[i] + visit.elements end
  return before
end

-- What is gathered while visits are gone through.
local function new_state(view)
  return { view = view, elements = 0, bytes = 0, held = {}, ahead = {}, ahead_elements = 0,
    largest = 0 }
end

local function fits(state, visit)
  local view = state.view
  return state.elements + visit.elements <= view.budgets.live_elements
    and state.bytes + visit.bytes <= view.budget_bytes
end

local function hold(state, visit)
  if state.held[visit.unit] then return end
  state.held[visit.unit] = true
  state.elements, state.bytes = state.elements + visit.elements, state.bytes + visit.bytes
end

local function drop(state, visit)
  if not state.held[visit.unit] then return end
  state.held[visit.unit] = nil
  state.elements, state.bytes = state.elements - visit.elements, state.bytes - visit.bytes
end

-- Units of the visits after number i, as many as the budgets allow. Room for a unit that is needed
-- before them stays free.
local function ahead_of(state, i)
  local visits, budgets, list = state.view.visits, state.view.budgets, {}
  for k = i + 1, #visits do
    local visit = visits[k]
    if visit.needs_values and not state.held[visit.unit] then
      local more = state.ahead_elements + visit.elements
      if more > budgets.prefetch_elements or not fits(state, visit) then break end
      hold(state, visit)
      state.ahead[visit.unit], state.ahead_elements = visit.elements, more
      list[#list + 1] = visit.unit
    end
  end
  return list
end

local function is_kept(view, next_of, before, i)
  local visit, next_at = view.visits[i], next_of[i]
  if not next_at then return false end
  if visit.elements <= view.budgets.keep_elements then return true end
  return before[next_at] - before[i + 1] <= view.budgets.reuse_elements
end

local function end_visit(state, plan, ended, kept)
  -- What stays must leave room for the use of any unit.
  local view = state.view
  plan[ended].keep = kept and state.bytes + state.largest <= view.budget_bytes
    and state.elements <= view.budgets.live_elements
  if not plan[ended].keep then drop(state, view.visits[ended]) end
end

-- The plan, with or without units that stay and that are gathered ahead.
local function plan_of(view, keeps, ahead)
  local visits, state, plan = view.visits, new_state(view), {}
  local next_of, before, ends = next_visits(visits), sums(visits), held.endings(visits)
  for _, visit in ipairs(visits) do state.largest = math.max(state.largest, visit.bytes) end
  for i, visit in ipairs(visits) do
    state.ahead_elements = state.ahead_elements - (state.ahead[visit.unit] or 0)
    state.ahead[visit.unit] = nil
    if visit.needs_values then hold(state, visit) end
    plan[i] = { unit = visit.unit, gather = ahead and ahead_of(state, i) or nil }
    for _, ended in ipairs(ends[i]) do
      end_visit(state, plan, ended, keeps and is_kept(view, next_of, before, ended))
    end
  end
  return plan
end

--- Where units of different sizes do not fit, first none stays, then none is gathered ahead.
---@param view ms.PrefetchView
---@return ms.PrefetchEntry[]
return function(view)
  local plan
  for _, how in ipairs { { true, true }, { false, true }, { false, false } } do
    plan = plan_of(view, how[1], how[2])
    if held.most(view, plan) <= view.budget_bytes then break end
  end
  return plan
end
