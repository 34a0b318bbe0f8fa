-- Playing a table of actions: when each action runs, if actions of a kind take so long; how many
-- microbatches are live; and the messages between ranks, in an order in which no transport can lock
-- up.
--
-- Messages. All actions and messages have one order: actions by their begin, messages by the end of
-- the action that makes what they carry. Each rank enqueues what it has of it in this order, a
-- message on both sides. So for every queue that a transport may have, the first message of all
-- that wait has nothing before it on either side that has not run: there is always one that can go.
-- The order is played with equal costs, so measured times never change what is enqueued.
local actions = require "moonshard.parallel.pipeline.actions"
local core = require "moonshard.core"

local play = {}

--- A message: what an action has made goes to another rank.
---@class ms.PipelineMessage
---@field label string the text of the action
---@field from integer
---@field to integer
---@field chunk integer that takes it
---@field micro integer
---@field is_gradient boolean
---@field at number when it can go

--- What a rank does in turn: actions, and its sides of messages.
---@class ms.PipelineStep
---@field action? ms.PipelineAction
---@field send? ms.PipelineMessage
---@field recv? ms.PipelineMessage

---@class ms.PipelinePlay
---@field begins table<string, number> by the text of an action
---@field ends table<string, number>
---@field length number
---@field busy number[] by rank, from 1 on
---@field live integer[] by rank: the most microbatches of chunks that wait for their backward
---@field steps ms.PipelineStep[][] by rank

local EQUAL <const> = { F = 1, B = 2, I = 1, W = 1 }

-- Which rank waits for what, where no rank can go on.
local function stuck(t, at, ends)
  local words = {}
  for r, list in ipairs(t.lists) do
    local action = list[at[r]]
    if action then
      for _, need in ipairs(actions.needs(t, action)) do
        if not ends[need.text] then
          words[#words + 1] = ("rank %d waits at '%s' for '%s' of rank %d"):format(r - 1,
            action.text, need.text, need.rank)
          break
        end
      end
    end
  end
  core.raise(("pipeline: %s: the ranks wait for each other: %s"):format(t.where,
    table.concat(words, ", ")))
end

-- When an action can begin; nil: something that it needs has not run.
local function ready_at(t, action, ends, free)
  local at = free
  for _, need in ipairs(actions.needs(t, action)) do
    if not ends[need.text] then return nil end
    at = math.max(at, ends[need.text])
  end
  return at
end

-- Counts what is live on a rank after each of its actions.
local function most_live(list)
  local live, most = 0, 0
  for _, action in ipairs(list) do
    if action.kind == "F" then live = live + 1
    elseif action.kind ~= "I" then live = live - 1 end
    most = math.max(most, live)
  end
  return most
end

-- Messages of all actions whose results other ranks need, in their order.
local function messages_of(t, ends)
  local list = {}
  local function add(action, to_chunk, is_gradient)
    local to = t.rank_of[to_chunk]
    if to and to ~= action.rank then
      list[#list + 1] = {
        label = action.text, from = action.rank, to = to, chunk = to_chunk, micro = action.micro,
        is_gradient = is_gradient, at = ends[action.text],
      }
    end
  end
  for _, actions_of_rank in ipairs(t.lists) do
    for _, action in ipairs(actions_of_rank) do
      if action.kind == "F" then add(action, action.chunk + 1, false)
      elseif action.kind ~= "W" then add(action, action.chunk - 1, true) end
    end
  end
  table.sort(list, function(a, b)
    if a.at ~= b.at then return a.at < b.at end
    if a.from ~= b.from then return a.from < b.from end
    return a.label < b.label
  end)
  return list
end

-- Puts messages between the actions of each rank: before the first one that begins no earlier.
local function weave(t, begins, messages)
  local steps, at = {}, {}
  for r in ipairs(t.lists) do steps[r], at[r] = {}, 1 end
  local function run_to(r, time)
    local list = t.lists[r]
    while list[at[r]] and begins[list[at[r]].text] < time do
      table.insert(steps[r], { action = list[at[r]] })
      at[r] = at[r] + 1
    end
  end
  for _, message in ipairs(messages) do
    for _, side in ipairs { "from", "to" } do
      local r = message[side] + 1
      run_to(r, message.at)
      table.insert(steps[r], { [side == "from" and "send" or "recv"] = message })
    end
  end
  for r in ipairs(t.lists) do run_to(r, math.huge) end
  return steps
end

--- Plays a table. Raises if the ranks wait for each other in a circle.
---@param t ms.PipelineTable
---@param costs? table<string, number> of each kind of action; F, I and W 1, and B 2 unless given
---@return ms.PipelinePlay
function play.run(t, costs)
  costs = costs or EQUAL
  local at, free, begins, ends, busy, left = {}, {}, {}, {}, {}, 0
  for r, list in ipairs(t.lists) do at[r], free[r], busy[r], left = 1, 0, 0, left + #list end
  while left > 0 do
    local best, when
    for r, list in ipairs(t.lists) do
      local action = list[at[r]]
      local time = action and ready_at(t, action, ends, free[r])
      if time and (not when or time < when) then best, when = r, time end
    end
    if not best then stuck(t, at, ends) end
    local action = t.lists[best][at[best]]
    local cost = costs[action.kind]
    begins[action.text], ends[action.text] = when, when + cost
    free[best], busy[best], at[best] = when + cost, busy[best] + cost, at[best] + 1
    left = left - 1
  end
  local length, live = 0, {}
  for r, list in ipairs(t.lists) do
    length, live[r] = math.max(length, free[r]), most_live(list)
  end
  return {
    begins = begins, ends = ends, length = length, busy = busy, live = live,
    steps = weave(t, begins, messages_of(t, ends)),
  }
end

--- The part of all ranks' time in which they do nothing, 0 to 1.
---@param played ms.PipelinePlay
---@return number
function play.bubble(played)
  local busy = 0
  for _, one in ipairs(played.busy) do busy = busy + one end
  return 1 - busy / (played.length * #played.busy)
end

-- A line of cells, each as wide as its time.
local function row(list, begins, ends, width, shorten)
  local text = ""
  for _, action in ipairs(list) do
    local from = math.tointeger(begins[action.text] * width)
    local to = math.tointeger(ends[action.text] * width)
    local cell = shorten and action.kind .. action.micro or action.text
    text = text .. (" "):rep(from - #text) .. cell .. (" "):rep(to - from - #cell)
  end
  return (text:gsub("%s+$", ""))
end

--- A picture of a table that was played with equal costs: time to the right, a line for each rank.
---@param t ms.PipelineTable
---@param played ms.PipelinePlay
---@return string
function play.show(t, played)
  local shorten, longest = t.shape.chunks == t.shape.ranks, 0
  for _, list in ipairs(t.lists) do
    for _, action in ipairs(list) do
      longest = math.max(longest, #(shorten and action.kind .. action.micro or action.text))
    end
  end
  local lines = { ("%s: bubble %.1f%%, at most %s microbatches held by the ranks"):format(t.where,
    100 * play.bubble(played), table.concat(played.live, ", ")) }
  for r, list in ipairs(t.lists) do
    lines[#lines + 1] =
      ("rank %-3d %s"):format(r - 1, row(list, played.begins, played.ends, longest + 1, shorten))
  end
  return table.concat(lines, "\n")
end

return play
