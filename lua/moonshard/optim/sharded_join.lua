-- Steps of a sharded optimizer inside ddp:join. A rank without inputs left has no gradients, but it
-- alone can step the parameters that it owns. A rank that has inputs sends it the gradients of
-- these parameters as the step will use them, and the hyper-parameters and the flag of the step.
local core = require "moonshard.core"
local uneven = require "moonshard.parallel.uneven"

local joined = {}

-- Sharded optimizers, by the name of their group and by their number in it.
local numbered = {}

--- A new number for a sharded optimizer in its group. It is the same on all ranks, because all
--- ranks make their optimizers in the same order.
---@param optimizer ms.Optimizer
---@return integer
function joined.number(optimizer)
  local name = optimizer.shard:name()
  local list = numbered[name] or { count = 0, made = setmetatable({}, { __mode = "v" }) }
  numbered[name], list.count = list, list.count + 1
  list.made[list.count] = optimizer
  return list.count
end

-- The parameters of the list that this rank owns, grouped by dtype in order of first appearance.
local function parts_of(optimizer, list, rank)
  local parts, by_dtype = {}, {}
  for _, p in ipairs(list) do
    if optimizer.owner[p] == rank then
      local dtype = p:dtype()
      if not by_dtype[dtype] then
        by_dtype[dtype] = { dtype = dtype, count = 0 }
        parts[#parts + 1] = by_dtype[dtype]
      end
      table.insert(by_dtype[dtype], p)
      by_dtype[dtype].count = by_dtype[dtype].count + p:numel()
    end
  end
  return parts
end

local function with_gradients(optimizer, positions)
  local list = {}
  for i, position in ipairs(positions) do list[i] = optimizer.order[position] end
  return list
end

--- Sends these ranks what they need for this step.
---@param optimizer ms.Optimizer
---@param group ms.Group
---@param ranks integer[]
---@param settings table[] for each group of the optimizer its hyper-parameters, lr as scheduled
---@param only_if? ms.Tensor
function joined.send(optimizer, group, ranks, settings, only_if)
  local words = {
    kind = optimizer.kind.name, count = #optimizer.order, gradients = core.json_list {},
    settings = core.json_list {}, flag = only_if ~= nil,
  }
  for position, p in ipairs(optimizer.order) do
    if p:grad() and not optimizer.slots[p].early then table.insert(words.gradients, position) end
  end
  for i, own in ipairs(settings) do
    words.settings[i] = {}
    for name, value in pairs(own) do words.settings[i][name] = uneven.coded(value) end
  end
  local text, list = core.json_encode(words), with_gradients(optimizer, words.gradients)
  group:_share_text(text, group:rank(), "join")
  core.no_grad(function()
    for _, rank in ipairs(ranks) do
      if only_if then group:send(only_if:to("u8"):view(1), rank) end
      for _, part in ipairs(parts_of(optimizer, list, rank)) do
        local grads = {}
        for i, p in ipairs(part) do grads[i] = p:grad() end
        group:send(core.pack(grads), rank)
      end
    end
  end)
end

--- For a rank that has inputs but does not send: all ranks of the group must take part in the
--- exchange of the text. Blocks as `follow` does.
---@param group ms.Group
---@param from integer
function joined.wait_for_join(group, from) group:_share_text("", from, "join") end

--- For a rank without inputs left: takes its part of a step of the other ranks. Blocks until the
--- sending rank has made its call.
---@param number integer
---@param group ms.Group
---@param from integer
function joined.follow(number, group, from)
  local known = numbered[group:name()]
  local optimizer = known and known.made[number]
  if not optimizer then
    core.raise(("join: rank %d steps a sharded optimizer that this rank does not have: make the \z
      same ones on all ranks"):format(from))
  end
  local words = core.json_decode(group:_share_text("", from, "join"))
  core.no_grad(function()
    if words.kind ~= optimizer.kind.name or words.count ~= #optimizer.order
        or #words.settings ~= #optimizer.list then
      core.raise(("join: rank %d steps %s of %d parameters in %d groups, which is %s of %d in %d \z
        on this rank: make the same optimizers on all ranks"):format(from, words.kind, words.count,
        #words.settings, optimizer.kind.name, #optimizer.order, #optimizer.list))
    end
    local sent = { settings = {}, gradients = {} }
    for i, own in ipairs(words.settings) do
      sent.settings[i] = {}
      for name, value in pairs(own) do sent.settings[i][name] = uneven.decoded(value) end
    end
    if words.flag then
      sent.only_if = group:recv(core.empty { 1, dtype = "u8" }, from):value():to("bool"):view()
    end
    local list = with_gradients(optimizer, words.gradients)
    for _, p in ipairs(list) do sent.gradients[p] = true end
    for _, part in ipairs(parts_of(optimizer, list, group:rank())) do
      local all, at = group:recv(core.empty { part.count, dtype = part.dtype }, from):value(), 0
      for _, p in ipairs(part) do
        sent.gradients[p] = all:narrow(1, at + 1, p:numel()):view(table.unpack(p:shape()))
        at = at + p:numel()
      end
    end
    optimizer:_step_joined(sent)
  end)
end

return joined
