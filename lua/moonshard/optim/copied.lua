-- States of optimizers that come from another rank: of a ddp model all ranks hold the same, so one
-- rank's state represents all.
local core = require "moonshard.core"
local hooks = require "moonshard.hooks"
local ownership = require "moonshard.base.ownership"
local values = require "moonshard.checkpoint.values"
local scalers = require "moonshard.optim.scaler"

local copied = {}

-- A table of one rank, with its tensors, on all ranks of the group. Blocks for the table; the
-- current stream waits for the tensors. label: for messages.
local function share(group, root, value, label)
  local is_root, tensors = group:rank() == root, {}
  local out, told = { names = {}, tensors = {} }, ""
  if is_root then
    local coded, list = values.encode(value, "state", 1, out), core.json_list {}
    for i, t in ipairs(out.tensors) do
      out.tensors[i] = t:contiguous()
      list[i] = { name = out.names[i], dtype = t:dtype(), shape = core.json_list(t:shape()) }
    end
    told = core.json_encode { value = coded, tensors = list }
  end
  told = core.json_decode(group:_share_text(told, root, label))
  for i, one in ipairs(told.tensors) do
    local t = out.tensors[i] or core.empty { dtype = one.dtype, table.unpack(one.shape) }
    tensors[one.name], out.tensors[i] = t, t
  end
  if #out.tensors > 0 then core.ddp_broadcast(group, out.tensors, root) end
  if is_root then return value end
  return values.decode(told.value, function(name) return tensors[name] end)
end

-- The group of the ddp models that reduce the gradients of all trained parameters of an optimizer;
-- nil: there is none, or ranks have states of their own.
local function group_of(optimizer)
  local group
  for _, p in ipairs(optimizer.order) do
    local s = ownership.reduced[p]
    local over = s and s.reducer and not s.joining and hooks._equal_over(s.how.chain or {}, s.group)
    if p:requires_grad() then
      if not over or group and over ~= group then return nil end
      group = over
    end
  end
  return group and group:size() > 1 and group or nil
end

local EMPTY <const>, GIVEN <const>, MISFIT <const> = 0, 1, 2

--- The state that this rank is to load: its own, or rank 0's if it gives an empty table. Raises on
--- all ranks if one gives what does not fit. All ranks of the model call it.
---@param optimizer ms.Optimizer
---@param given table
---@param judge fun(given: table): string? what does not fit
---@return table
function copied.given(optimizer, given, judge)
  local group = not optimizer.shard and group_of(optimizer)
  if not group then return given end
  local is_empty = type(given) == "table" and next(given) == nil
  local problem = not is_empty and judge(given) or nil
  local flags = group:_share("all_gather", "i64",
    { is_empty and EMPTY or problem and MISFIT or GIVEN }, "optimizer:load_state")
  if problem then return given end                             -- the caller says what it is
  local needed = false
  for r, flag in ipairs(flags) do
    needed = needed or flag == EMPTY
    if flag == MISFIT then
      core.raise(("load_state: the state that rank %d gives does not fit its optimizer")
        :format(group:_world_rank(r - 1)))
    end
  end
  if flags[1] == EMPTY then
    core.raise(("load_state: rank %d gives an empty table: it, or every rank, gives the state")
      :format(group:_world_rank(0)))
  end
  if not needed then return given end
  local first = share(group, 0, given, "optimizer:load_state")
  return is_empty and first or given
end

-- The optimizers of a ddp model's parameters, each once, in the order of the parameters.
local function optimizers_of(s)
  local list, seen = {}, {}
  for _, p in ipairs(s.trained) do
    local optimizer = ownership.stepped[p]
    if optimizer and not optimizer.shard and not seen[optimizer] then
      seen[optimizer], list[#list + 1] = true, optimizer
    end
  end
  return list
end

--- The optimizers of a ddp model, and the scalers that they were stepped with, get the states of
--- this rank of its group. All ranks call it.
---@param s ms.DDPState
---@param root integer
function copied.from(s, root)
  local list, own = optimizers_of(s), nil
  if s.group:rank() == root then
    own = {}
    for i, optimizer in ipairs(list) do
      local scaler = optimizer.scaler
      own[i] = {
        kind = optimizer.kind.name, count = #optimizer.order,
        state = optimizer:state { live = true },
        scaler = scaler and { number = scalers.number_of(scaler), state = scaler:state() } or nil,
      }
    end
  end
  own = share(s.group, root, own, "join")
  if s.group:rank() == root then return end
  for i = 1, math.max(#own, #list) do
    local given, optimizer = own[i], list[i]
    if not given or not optimizer or given.kind ~= optimizer.kind.name
        or given.count ~= #optimizer.order then
      core.raise(("join: the optimizers of this model are not those of rank %d: make the same \z
        ones on all ranks"):format(s.group:_world_rank(root)))
    end
    optimizer:_load_own(given.state)
    if given.scaler then scalers.load(given.scaler.number, given.scaler.state) end
  end
end

return copied
