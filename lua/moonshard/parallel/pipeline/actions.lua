-- Tables of actions: what each rank of a pipeline does, in order. An action is a text, chunk, kind
-- and microbatch, all counted from 0: "2F0" is the forward of microbatch 0 through chunk 2. Kinds:
--
--   F  forward                        B  backward: gradients of inputs and of weights
--   I  gradients of inputs alone      W  those of weights, after I
--
-- A checked table has every action once, each with what it waits for. Gradients of a chunk are
-- added in the order of microbatches, so its B or W come in this order: results then do not depend
-- on the schedule.
local core = require "moonshard.core"

local actions = {}

---@class ms.PipelineAction
---@field text string
---@field kind "F"|"B"|"I"|"W"
---@field chunk integer
---@field micro integer
---@field rank integer that does it

--- What a schedule is about.
---@class ms.PipelineShape
---@field ranks integer
---@field chunks integer
---@field microbatches integer

--- A checked table.
---@class ms.PipelineTable
---@field shape ms.PipelineShape
---@field rank_of table<integer, integer> the rank of each chunk
---@field lists ms.PipelineAction[][] by rank, from 1 on
---@field by_text table<string, ms.PipelineAction>
---@field where string the schedule's name and line, for messages

-- Raises about an action of a rank.
local function refuse(where, rank, text, ...)
  core.raise(("pipeline: %s: rank %d: %s"):format(where, rank, text:format(...)))
end

-- The rank of each chunk.
local function read_placement(where, shape, placement)
  local rank_of = {}
  if type(placement) ~= "table" or #placement ~= shape.ranks then
    core.raise(("pipeline: %s: placement has a list of chunks for each of the %d ranks"):format(
      where, shape.ranks))
  end
  for r, list in ipairs(placement) do
    for _, chunk in ipairs(type(list) == "table" and list or { list }) do
      if math.type(chunk) ~= "integer" or chunk < 0 or chunk >= shape.chunks then
        refuse(where, r - 1, "placement: '%s' is no chunk: there are 0 to %d", tostring(chunk),
          shape.chunks - 1)
      elseif rank_of[chunk] then
        refuse(where, r - 1, "placement: chunk %d is on rank %d, too", chunk, rank_of[chunk])
      end
      rank_of[chunk] = r - 1
    end
  end
  for chunk = 0, shape.chunks - 1 do
    if not rank_of[chunk] then
      core.raise(("pipeline: %s: placement leaves out chunk %d"):format(where, chunk))
    end
  end
  return rank_of
end

-- One action of a table, as text.
local function read_action(where, shape, rank_of, rank, text)
  local chunk, kind, micro
  if type(text) == "string" then chunk, kind, micro = text:match "^(%d+)([FBIW])(%d+)$" end
  if not chunk then
    refuse(where, rank, "'%s' is no action: \"1F0\" is the forward of microbatch 0 through chunk \z
      1; kinds are F, B, I, W", tostring(text))
  end
  chunk, micro = math.tointeger(tonumber(chunk)), math.tointeger(tonumber(micro))
  if chunk >= shape.chunks then
    refuse(where, rank, "'%s': there are chunks 0 to %d", text, shape.chunks - 1)
  elseif micro >= shape.microbatches then
    refuse(where, rank, "'%s': there are microbatches 0 to %d", text, shape.microbatches - 1)
  elseif rank_of[chunk] ~= rank then
    refuse(where, rank, "'%s': chunk %d is on rank %d", text, chunk, rank_of[chunk])
  end
  return { text = text, kind = kind, chunk = chunk, micro = micro, rank = rank }
end

--- The action of a kind.
---@param t ms.PipelineTable
---@param chunk integer
---@param kind string
---@param micro integer
---@return ms.PipelineAction?
function actions.get(t, chunk, kind, micro)
  return t.by_text[("%d%s%d"):format(chunk, kind, micro)]
end

-- The action that gives the gradients of a chunk's inputs.
local function input_gradient(t, chunk, micro)
  return actions.get(t, chunk, "B", micro) or actions.get(t, chunk, "I", micro)
end
actions.input_gradient = input_gradient

--- What an action waits for besides those before it on its rank.
---@param t ms.PipelineTable
---@param action ms.PipelineAction
---@return ms.PipelineAction[]
function actions.needs(t, action)
  local kind, chunk, micro = action.kind, action.chunk, action.micro
  if kind == "F" then
    return chunk > 0 and { actions.get(t, chunk - 1, "F", micro) } or {}
  elseif kind == "W" then return { actions.get(t, chunk, "I", micro) } end
  local list = { actions.get(t, chunk, "F", micro) }
  if chunk < t.shape.chunks - 1 then list[2] = input_gradient(t, chunk + 1, micro) end
  return list
end

-- Every chunk and microbatch has F, and B or I and W, once; weights come in order of microbatches.
local function check_whole(t)
  for chunk = 0, t.shape.chunks - 1 do
    local rank = t.rank_of[chunk]
    for micro = 0, t.shape.microbatches - 1 do
      local function has(kind) return actions.get(t, chunk, kind, micro) ~= nil end
      local function missing(kind)
        refuse(t.where, rank, "'%d%s%d' is missing", chunk, kind, micro)
      end
      if not has "F" then missing "F" end
      if has "B" and (has "I" or has "W") then
        refuse(t.where, rank, "'%dB%d' and '%d%s%d': B is I and W in one", chunk, micro, chunk,
          has "I" and "I" or "W", micro)
      elseif not has "B" and not has "I" then missing(has "W" and "I" or "B")
      elseif has "I" and not has "W" then missing "W" end
    end
  end
  for r, list in ipairs(t.lists) do
    local next_of = {}
    for _, action in ipairs(list) do
      if action.kind == "B" or action.kind == "W" then
        local due = next_of[action.chunk] or 0
        if action.micro ~= due then
          refuse(t.where, r - 1, "'%s' comes before the gradients of microbatch %d: gradients of \z
            a chunk are added in the order of microbatches", action.text, due)
        end
        next_of[action.chunk] = due + 1
      end
    end
  end
end

--- Reads and checks what a schedule has returned. Raises what is wrong, with the rank and the
--- action. Whether ranks wait for each other in a circle is play.lua's to find.
---@param where string the schedule's name and line, for messages
---@param shape ms.PipelineShape
---@param given ms.PipelineSchedule
---@return ms.PipelineTable
function actions.read(where, shape, given)
  if type(given) ~= "table" then
    core.raise(("pipeline: %s returned a %s: it returns { placement = ..., actions = ... }"):format(
      where, type(given)))
  end
  local t = {
    shape = shape, where = where, lists = {}, by_text = {},
    rank_of = read_placement(where, shape, given.placement),
  }
  if type(given.actions) ~= "table" or #given.actions ~= shape.ranks then
    core.raise(("pipeline: %s: actions has a list for each of the %d ranks"):format(where,
      shape.ranks))
  end
  for r, list in ipairs(given.actions) do
    if type(list) ~= "table" then
      refuse(where, r - 1, "its actions are a %s, not a list", type(list))
    end
    t.lists[r] = {}
    for i = 1, #list do
      local action = read_action(where, shape, t.rank_of, r - 1, list[i])
      if t.by_text[action.text] then refuse(where, r - 1, "'%s' comes twice", action.text) end
      t.by_text[action.text], t.lists[r][i] = action, action
    end
  end
  check_whole(t)
  return t
end

return actions
