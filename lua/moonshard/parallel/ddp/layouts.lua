-- The buckets of ddp models in checkpoints. A loaded model reduces in the saved buckets from the
-- first pass on. Links that treat a bucket as a whole (top_k, one scale for all numbers) then
-- continue bit for bit.
local core = require "moonshard.core"
local ownership = require "moonshard.base.ownership"
local steps = require "moonshard.train.steps"

local layouts = {}

-- States of ddp models (ms.DDPState). Why keys and values are weak: see `live` in ddp.lua.
local live = setmetatable({}, { __mode = "kv" })
local made = 0                                             -- how many models were wrapped so far
-- Loaded buckets for models that are not wrapped yet. They are dropped at the end of the next step:
-- models that are wrapped after it are other models.
local waiting = {}
steps.on_end(function() waiting = {} end)

-- The key of a model: it differs for models with other parameters, dtypes or bucket sizes.
local function key_of(s)
  local lines = {}
  for i, p in ipairs(s.trained) do lines[i] = s.names[i] .. " " .. p:dtype() end
  return ("%016x"):format(core.hash(table.concat(lines, "\n") .. "\n"
    .. table.concat(s.options_bytes or {}, ",") .. "\n" .. s.delayed))
end

local function apply(s, lists)
  if s.plan or not s.reducer then return end               -- a new plan will be made
  s.reducer:assign(lists)
  if not s.options.static_graph then s.reducer:record(false) end
end

--- For ddp: adds a model that was wrapped.
---@param s ms.DDPState
function layouts.add(s)
  live[s], s.made, made = s, made, made + 1
  local lists = waiting[key_of(s)]
  if lists then apply(s, lists) end
end

-- The models that are wrapped now, in the order in which they were.
local function in_order()
  local order = {}
  for s in pairs(live) do if s.reducer then order[#order + 1] = s end end
  table.sort(order, function(a, b) return a.made < b.made end)
  return order
end

--- Raises on this rank, and ends the job, if a ddp model's last backward left a bucket waiting: its
--- gradients were not reduced, and each rank would go on with its own. Called where a step or a run
--- ends, and before a save. is_last: the script is over, so that all models are dropped.
---@param is_last? boolean
function layouts.check(is_last)
  local waits = false
  for s in pairs(live) do waits = waits or s.reducer and s.reducer:waits() end
  if not waits then return end
  if not is_last then core.collect() end                   -- it may be one that was dropped
  for _, s in ipairs(in_order()) do s.reducer:settled() end
end
steps.on_end(function() layouts.check() end)

--- The same for the models of these parameters, before their gradients are read. Raises as well if
--- one of these gradients is still to come from the rest of a backward, whatever the model.
---@param what string the function that reads them
---@param parameters ms.Tensor[]
function layouts.check_of(what, parameters)
  core.check_rest(what, parameters)
  for s in pairs(live) do
    for _, p in ipairs(s.reducer and parameters or {}) do     -- the first is one, as a rule
      if ownership.reduced[p] == s then
        s.reducer:settled()
        break
      end
    end
  end
end

--- Called on all ranks before a save: models whose buckets are due to change change them now. Not
--- inside join, where not all ranks call it.
function layouts.settle()
  layouts.check()
  for _, s in ipairs(in_order()) do if not s.joining then s.reducer:rebuild_due() end end
end

--- Buckets of all models, as values of a checkpoint: lists of positions by key.
---@return table<string, integer[][]>?
function layouts.save()
  local found
  for s in pairs(live) do
    if s.reducer and not s.plan and s.reducer:stats().rebuilt then
      local lists = {}
      for _, b in ipairs(s.reducer:bucket_times()) do
        if b.positions[1] <= #s.names - s.delayed then lists[#lists + 1] = b.positions end
      end
      found = found or {}
      found[key_of(s)] = lists
    end
  end
  return found
end

--- Gives models their saved buckets; models that were not saved keep their buckets.
---@param saved? table<string, integer[][]>
function layouts.load(saved)
  waiting = saved or {}
  for s in pairs(live) do
    local lists = waiting[key_of(s)]
    if lists then apply(s, lists) end
  end
end

return layouts
