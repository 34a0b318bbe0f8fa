-- ZeRO-1: one rank of the group owns each parameter: it alone has the parameter's optimizer state,
-- steps it, and sends it to the others. The results are bitwise equal to those of an optimizer that
-- is not sharded.
local core = require "moonshard.core"

local shard = {}

--- Assigns parameters to ranks: the largest first, each to the rank with the fewest elements so
--- far, to the lowest of equal ranks.
---@param params ms.Parameter[]
---@param ranks integer
---@return table<ms.Parameter, integer> owner
function shard.assign(params, ranks)
  local order, load, owner = {}, {}, {}
  for i, p in ipairs(params) do order[i] = { p = p, count = p:numel(), position = i } end
  table.sort(order, function(a, b)
    if a.count ~= b.count then return a.count > b.count end
    return a.position < b.position
  end)
  for rank = 1, ranks do load[rank] = 0 end
  for _, item in ipairs(order) do
    local least = 1
    for rank = 2, ranks do if load[rank] < load[least] then least = rank end end
    load[least] = load[least] + item.count
    owner[item.p] = least - 1
  end
  return owner
end

-- Parameters of one dtype, the part of one rank after another.
local function share_dtype(group, params, owner)
  local parts, counts, own = {}, {}, {}
  for rank = 1, group:size() do parts[rank], counts[rank] = {}, 0 end
  for _, p in ipairs(params) do
    local rank = owner[p] + 1
    table.insert(parts[rank], p)
    counts[rank] = counts[rank] + p:numel()
    if owner[p] == group:rank() then own[#own + 1] = p end
  end
  local mine = #own > 0 and core.pack(own) or core.empty { 0, dtype = params[1]:dtype() }
  local all, at = group:all_gather(mine, counts):value(), 0
  for rank, list in ipairs(parts) do
    for _, p in ipairs(list) do
      if rank ~= group:rank() + 1 then
        p:copy_(all:narrow(1, at + 1, p:numel()):view(table.unpack(p:shape())))
      end
      at = at + p:numel()
    end
  end
end

--- Sends each parameter from its owner to the others; one all_gather for each dtype. The current
--- stream waits for it.
---@param group ms.Group
---@param params ms.Parameter[]
---@param owner table<ms.Parameter, integer>
function shard.share(group, params, owner)
  if group:size() == 1 then return end
  core.no_grad(function()
    local by_dtype, order = {}, {}
    for _, p in ipairs(params) do
      local dtype = p:dtype()
      if not by_dtype[dtype] then
        by_dtype[dtype] = {}
        order[#order + 1] = dtype
      end
      table.insert(by_dtype[dtype], p)
    end
    for _, dtype in ipairs(order) do share_dtype(group, by_dtype[dtype], owner) end
  end)
end

---------------------------------------------------------------------------------------------- state

-- Splits the states into tensors, in order of names, and all other values, as text (JSON).
local function describe(states)
  local names, tensors, text = {}, {}, {}
  for name in pairs(states) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do
    local item, keys = { name = name, tensors = core.json_list {}, values = core.json_list {} }, {}
    for key in pairs(states[name]) do keys[#keys + 1] = key end
    table.sort(keys)
    for _, key in ipairs(keys) do
      local value = states[name][key]
      if core.is_tensor(value) then
        tensors[#tensors + 1] = value
        table.insert(item.tensors,
          { key = key, dtype = value:dtype(), shape = core.json_list(value:shape()) })
      -- JSON has no inf and nan
      elseif math.type(value) == "float" then
        table.insert(item.values,
          { key = key, bits = (string.unpack("i8", string.pack("d", value))) })
      else
        table.insert(item.values, { key = key, value = value })
      end
    end
    text[#text + 1] = item
  end
  return core.json_encode { states = core.json_list(text) }, tensors
end

--- The states of all parameters by name on rank 0 of the group; on other ranks those of their own
--- parameters. All ranks call it. Blocks.
---@param group ms.Group
---@param states table<string, table> by parameter name, of the own parameters
---@return table<string, table>
function shard.gather_states(group, states)
  if group:size() == 1 then return states end
  local text, tensors = describe(states)
  local texts = group:_share_texts(text, "sharded states")
  if core.is_sim() then return states end
  if group:rank() ~= 0 then
    for _, t in ipairs(tensors) do group:send(t:contiguous(), 0):value() end
    return states
  end
  local whole = {}
  for name, state in pairs(states) do whole[name] = state end
  for rank = 1, group:size() - 1 do
    for _, item in ipairs(core.json_decode(texts[rank + 1]).states) do
      local state = {}
      for _, one in ipairs(item.values) do
        state[one.key] = one.value
        if one.bits then state[one.key] = (string.unpack("d", string.pack("i8", one.bits))) end
      end
      for _, one in ipairs(item.tensors) do
        local shape = { dtype = one.dtype, table.unpack(one.shape) }
        state[one.key] = group:recv(core.empty(shape), rank):value()
      end
      whole[item.name] = state
    end
  end
  return whole
end

return shard
