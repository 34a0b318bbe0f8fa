-- Ready-made schedules of pipelines: functions from numbers to tables of actions (actions.lua).
local core = require "moonshard.core"

local schedules = {}

local function refuse(name, text, ...)
  core.raise(("pipeline: %s: %s"):format(name, text:format(...)))
end

-- Chunk r on rank r.
local function one_each(name, view)
  if view.chunks ~= view.ranks then
    refuse(name, "it has one chunk on each of the %d ranks, not %d chunks in all", view.ranks,
      view.chunks)
  end
  local placement = {}
  for r = 1, view.ranks do placement[r] = { r - 1 } end
  return placement
end

local function text_of(chunk, kind, micro) return ("%d%s%d"):format(chunk, kind, micro) end

--- All forwards, then all backwards (GPipe, Huang et al. 2019).
---@param view ms.PipelineView
function schedules.gpipe(view)
  local lists = {}
  for r = 1, view.ranks do
    lists[r] = {}
    for _, kind in ipairs { "F", "B" } do
      for i = 0, view.microbatches - 1 do table.insert(lists[r], text_of(r - 1, kind, i)) end
    end
  end
  return { placement = one_each("gpipe", view), actions = lists }
end

--- One forward and one backward in turn, after as many forwards as stages follow (PipeDream-Flush,
--- Narayanan et al. 2021): rank r holds at most ranks - r microbatches.
---@param view ms.PipelineView
schedules["1f1b"] = function(view)
  local lists, all = {}, view.microbatches
  for r = 1, view.ranks do
    local list, ahead = {}, math.min(view.ranks - r, all)
    for i = 0, ahead - 1 do list[#list + 1] = text_of(r - 1, "F", i) end
    for i = 0, all - 1 do
      if ahead + i < all then list[#list + 1] = text_of(r - 1, "F", ahead + i) end
      list[#list + 1] = text_of(r - 1, "B", i)
    end
    lists[r] = list
  end
  return { placement = one_each("1f1b", view), actions = lists }
end

--- 1F1B over several chunks for each rank, chunk c on rank c % ranks (Narayanan et al. 2021). The
--- microbatches go through a chunk in rounds of as many as there are ranks.
---@param view ms.PipelineView
function schedules.interleaved(view)
  local ranks, all = view.ranks, view.microbatches
  if view.chunks % ranks ~= 0 then
    refuse("interleaved", "%d ranks do not divide %d chunks", ranks, view.chunks)
  elseif all % ranks ~= 0 then
    refuse("interleaved", "%d ranks do not divide %d microbatches", ranks, all)
  end
  local each, placement, lists = view.chunks // ranks, {}, {}
  local total = each * all
  for r = 1, ranks do
    placement[r], lists[r] = {}, {}
    for v = 0, each - 1 do placement[r][v + 1] = v * ranks + r - 1 end
    -- Number k of the forwards, or of the backwards.
    local function add(kind, k)
      local v = k // ranks % each
      if kind == "B" then v = each - 1 - v end
      table.insert(lists[r],
        text_of(v * ranks + r - 1, kind, k // (ranks * each) * ranks + k % ranks))
    end
    local ahead = math.min((ranks - r) * 2 + (each - 1) * ranks, total)
    for k = 0, ahead - 1 do add("F", k) end
    for k = 0, total - 1 do
      if ahead + k < total then add("F", ahead + k) end
      add("B", k)
    end
  end
  return { placement = placement, actions = lists }
end

-- A table made by playing in steps of one action: each rank does the gradients of inputs first,
-- then the forward of its last chunk that can go and holds at most `most` microbatches, then
-- gradients of weights. A forward that is not the last of its rank leaves room for the ones after
-- it.
local function fill(view, placement, most)
  local lists, live, done, all, last = {}, {}, {}, view.microbatches, view.chunks - 1
  for r in ipairs(placement) do lists[r], live[r] = {}, 0 end
  -- How many of each kind and chunk are done; and the time when each was.
  local counts = {}
  for _, kind in ipairs { "F", "I", "W" } do
    counts[kind] = {}
    for chunk = 0, last do counts[kind][chunk] = 0 end
  end
  local left = 3 * all * view.chunks
  local function is_done(kind, chunk, i, time)
    local at = done[text_of(chunk, kind, i)]
    return at ~= nil and at <= time
  end
  local function can(kind, chunk, r, time)
    local i = counts[kind][chunk]
    if i >= all then return false end
    if kind == "W" then return is_done("I", chunk, i, time)
    elseif kind == "I" then
      return is_done("F", chunk, i, time) and (chunk == last or is_done("I", chunk + 1, i, time))
    end
    local after = 0
    for _, other in ipairs(placement[r]) do if other > chunk then after = after + 1 end end
    return live[r] + after < most and (chunk == 0 or is_done("F", chunk - 1, i, time))
  end
  local function best(r, time)
    for _, kind in ipairs { "I", "F", "W" } do
      local found
      for _, chunk in ipairs(placement[r]) do
        if can(kind, chunk, r, time) and (not found or chunk > found) then found = chunk end
      end
      if found then return kind, found end
    end
  end
  local time = 0
  while left > 0 do
    local chosen = {}
    for r = 1, view.ranks do
      local kind, chunk = best(r, time)
      if kind then chosen[#chosen + 1] = { r, kind, chunk } end
    end
    for _, one in ipairs(chosen) do
      local r, kind, chunk = table.unpack(one)
      local i = counts[kind][chunk]
      local text = text_of(chunk, kind, i)
      table.insert(lists[r], text)
      counts[kind][chunk], done[text], left = i + 1, time + 1, left - 1
      live[r] = live[r] + (kind == "F" and 1 or kind == "W" and -1 or 0)
    end
    time = time + 1
  end
  return { placement = placement, actions = lists }
end

--- 1F1B with the gradients of weights apart, which fill the bubble (ZB-H1, Qi et al. 2023): each
--- rank holds at most as many microbatches as there are ranks. While forwards are left, rank r
--- computes the gradients of weights r microbatches after those of inputs. Then each gradient of
--- inputs is followed by one of weights, and the other gradients of weights come at the end.
---@param view ms.PipelineView
function schedules.zb_h1(view)
  local lists, all = {}, view.microbatches
  for r = 0, view.ranks - 1 do
    local list, count = {}, { F = 0, I = 0, W = 0 }
    local function add(kind)
      list[#list + 1] = text_of(r, kind, count[kind])
      count[kind] = count[kind] + 1
    end
    for _ = 1, math.min(view.ranks - r - 1, all) do add "F" end
    while count.I < all do
      if count.F < all then add "F" end
      add "I"
      if count.I - count.W > (count.F < all and r or 0) then add "W" end
    end
    while count.W < all do add "W" end
    lists[r + 1] = list
  end
  return { placement = one_each("zb_h1", view), actions = lists }
end

--- Two chunks for each rank, in a V: of 2R chunks on R ranks, rank r has chunks r and 2R - 1 - r,
--- counted from 0. With gradients of weights apart (ZB-V, Qi et al. 2024): each rank holds at most
--- as much as rank 0 does in 1F1B, two microbatches of half a stage for each rank.
---@param view ms.PipelineView
function schedules.zbv(view)
  if view.chunks ~= 2 * view.ranks then
    refuse("zbv", "it has two chunks on each of the %d ranks, not %d chunks in all", view.ranks,
      view.chunks)
  end
  local placement = {}
  for r = 1, view.ranks do placement[r] = { r - 1, view.chunks - r } end
  return fill(view, placement, 2 * view.ranks)
end

-- What PyTorch's tables have besides: messages, and what fsdp does.
local OTHER <const> = {
  SEND_F = true, RECV_F = true, SEND_B = true, RECV_B = true, UNSHARD = true, RESHARD = true,
  REDUCE_GRAD = true,
}

--- A schedule of a table of PyTorch (torch.distributed.pipelining): text in CSV with a row for each
--- rank and actions as here. Cells may be empty; messages and other actions of PyTorch are left
--- out, since messages are made here.
---@param name string for messages
---@param text string
---@return fun(view: ms.PipelineView): table
function schedules.from_csv(name, text)
  local placement, lists, seen = {}, {}, {}
  for line in text:gmatch "[^\r\n]+" do
    local list, own = {}, {}
    for cell in line:gmatch "[^,]+" do
      cell = cell:match "^%s*\"?(.-)\"?%s*$"
      local chunk, kind = cell:match "^(%d+)([%u_]+)"
      if cell ~= "" and not OTHER[kind] then
        list[#list + 1] = cell
        chunk = math.tointeger(tonumber(chunk))
        if chunk and not seen[chunk] then seen[chunk], own[#own + 1] = true, chunk end
      end
    end
    if #list > 0 or line:find "%S" then
      lists[#lists + 1], placement[#placement + 1] = list, own
    end
  end
  return function(view)
    if #lists ~= view.ranks then
      refuse(name, "the table has %d rows, and there are %d ranks", #lists, view.ranks)
    end
    return { placement = placement, actions = lists }
  end
end

return schedules
