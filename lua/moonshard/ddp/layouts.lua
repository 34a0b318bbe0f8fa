-- The buckets of ddp models in checkpoints: what was saved is reduced from the first pass on in the
-- buckets that it had, so that links which look at a bucket as a whole (the greatest of its
-- numbers, one scale for all) go on bit for bit.
local core = require "moonshard.core"
local steps = require "moonshard.steps"

local layouts = {}

-- States of ddp models (ms.DDPState). Why values are weak, too: ddp.lua.
local live = setmetatable({}, { __mode = "kv" })
local made = 0                                             -- how many models were wrapped so far
-- What was loaded for models that are not wrapped yet; those of a later step have nothing to do
-- with it.
local waiting = {}
steps.on_end(function() waiting = {} end)

-- Tells models of other parameters, of other dtypes (a bucket has one) or other sizes of buckets
-- apart.
local function key_of(s)
  local lines = {}
  for i, p in ipairs(s.trained) do lines[i] = s.names[i] .. " " .. p:dtype() end
  return ("%016x"):format(core.hash(table.concat(lines, "\n") .. "\n"
    .. table.concat(s.options_bytes or {}, ",") .. "\n" .. s.delayed))
end

local function apply(s, lists)
  if s.plan or not s.reducer then return end               -- plans are made anew
  s.reducer:assign(lists)
  if not s.options.static_graph then s.reducer:record(false) end
end

--- For ddp: a model that was wrapped.
---@param s ms.DDPState
function layouts.add(s)
  live[s], s.made, made = s, made, made + 1
  local lists = waiting[key_of(s)]
  if lists then apply(s, lists) end
end

--- Before save, on all ranks: models that are about to change their buckets do it now; inside join
--- not all ranks come here.
function layouts.settle()
  local order = {}
  for s in pairs(live) do if s.reducer and not s.joining then order[#order + 1] = s end end
  table.sort(order, function(a, b) return a.made < b.made end)
  for _, s in ipairs(order) do s.reducer:rebuild_due() end
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

--- Gives models the buckets that were saved of them; others keep theirs.
---@param saved? table<string, integer[][]>
function layouts.load(saved)
  waiting = saved or {}
  for s in pairs(live) do
    local lists = waiting[key_of(s)]
    if lists then apply(s, lists) end
  end
end

return layouts
