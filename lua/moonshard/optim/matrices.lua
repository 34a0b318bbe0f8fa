-- Steps of kinds that need whole matrices (`whole` of optim.define). Of a matrix that fsdp has cut,
-- each rank updates the state of its piece. What `before` returns of all pieces travels to one
-- rank, the owner, which makes the update of the whole matrix and sends its pieces back. Two
-- exchanges carry all matrices of a step.
--
-- The owner's state of a matrix is `slot.owned`. In saved states its keys begin with "owned/".
local core = require "moonshard.core"
local masters = require "moonshard.optim.masters"
local module = require "moonshard.nn.module"
local ownership = require "moonshard.base.ownership"
local undo = require "moonshard.optim.undo"

local matrices = {}

local PREFIX <const> = "owned/"

-- Where the pieces of a cut matrix are: { owner = a rank of its shards, first = {}, count = {} },
-- by its entry of ownership.sharded. Ranks count from 0, as the elements of `first`.
local places = setmetatable({}, { __mode = "k" })

local function name_of(p) return p:name() ~= "" and p:name() or "without a name" end

--- Whether the optimizer steps this parameter as a whole matrix.
---@param self ms.Optimizer
---@param p ms.Parameter
---@return boolean
function matrices.has(self, p)
  return self.kind.whole ~= nil and self.slots[p].group.whole ~= false and #p:full_shape() == 2
end

----------------------------------------------------------------------------------------- owners

-- What an update costs, up to a factor: products of the matrix with the square of its smaller side.
local function cost_of(shape)
  return math.max(shape[1], shape[2]) * math.min(shape[1], shape[2]) ^ 2
end

-- The positions of a sharded model's parameters among its pieces.
local function positions_of(s)
  local by_name, found = {}, {}
  for position, one in ipairs(s.sharded:pieces()) do by_name[one.name] = position end
  for _, saved in ipairs(module.saved(s.wrapped)) do found[saved.tensor] = by_name[saved.name] end
  return found
end

-- Gives the matrices that these ranks share, and that have no owner yet, to those with the least
-- work: the most expensive first, to the lowest of equal ranks.
local function assign(self, shards)
  local load, new, positions = {}, {}, {}
  for rank = 0, shards:size() - 1 do load[rank] = 0 end
  for at, p in ipairs(self.order) do
    local entry = module.is_part(p) and matrices.has(self, p) and ownership.sharded[p]
    if entry and entry.shards == shards then
      local place = places[entry]
      if place then load[place.owner] = load[place.owner] + place.cost
      else new[#new + 1] = { p = p, entry = entry, cost = cost_of(entry.shape), at = at } end
    end
  end
  table.sort(new, function(a, b)
    if a.cost ~= b.cost then return a.cost > b.cost end
    return a.at < b.at
  end)
  for _, item in ipairs(new) do
    local s, owner = item.entry.model, 0
    for rank = 1, shards:size() - 1 do if load[rank] < load[owner] then owner = rank end end
    load[owner] = load[owner] + item.cost
    positions[s] = positions[s] or positions_of(s)
    local place = { owner = owner, cost = item.cost, first = {}, count = {} }
    for rank = 0, shards:size() - 1 do
      place.first[rank], place.count[rank] = s.sharded:cut(positions[s][item.p], rank)
    end
    places[item.entry] = place
  end
end

-- The place of a matrix that is cut; nil if this rank has all of it.
local function place_of(self, p)
  if not module.is_part(p) then return nil end
  local entry = ownership.sharded[p]
  if not places[entry] then assign(self, entry.shards) end
  return places[entry]
end

--- Whether this rank makes the update of a matrix, and so has the owner's state.
---@param self ms.Optimizer
---@param p ms.Parameter
---@return boolean
function matrices.is_owner(self, p)
  local place = place_of(self, p)
  return place == nil or place.owner == ownership.sharded[p].shards:rank()
end

------------------------------------------------------------------------------------------ states

--- The name of an owner's state from its key in a saved state; nil if the key is another one.
---@param key any
---@return string?
function matrices.owned_name(key)
  return type(key) == "string" and key:match "^owned/(.+)$" or nil
end

--- Adds the owner's state to what is saved of a parameter.
---@param slot table
---@param saved table
function matrices.save(slot, saved)
  for name, value in pairs(slot.owned or {}) do saved[PREFIX .. name] = value end
end

--- Takes owners' states out of saved ones: those of each parameter that has some, by name.
---@param states table<string, table>
---@return table<string, table>
function matrices.split(states)
  local found = {}
  for name, state in pairs(states) do
    local keys = {}
    for key in pairs(state) do if matrices.owned_name(key) then keys[#keys + 1] = key end end
    for _, key in ipairs(keys) do
      found[name] = found[name] or {}
      found[name][key], state[key] = state[key], nil
    end
  end
  return found
end

-- An owner's state is found by name by any rank that owns the matrix after a load, so it has
-- tensors only.
local function keep(self, p, slot)
  for _, name in ipairs(undo.tensor_names(slot.state)) do slot.state[name]:keep() end
  for name, value in pairs(slot.owned or {}) do
    if type(name) ~= "string" or not core.is_tensor(value) then
      core.raise(("%s: update has put a %s as '%s' into the owner's state of '%s': it has tensors \z
        by names"):format(self.kind.name, type(value), tostring(name), name_of(p)))
    end
    value:keep()
  end
end

------------------------------------------------------------------------------------------- steps

-- An owner's state is that of one sharding.
local function check_place(self, p, slot, place)
  if slot.placed == nil then slot.placed = place or false end
  if slot.placed == (place or false) then return end
  core.raise(("%s: '%s' was sharded in another way when it was stepped before: make a new \z
    optimizer, and load the state that this one had before the change"):format(self.kind.name,
    name_of(p)))
end

-- What travels of this rank's piece, 1-D.
local function begin(self, item, only_if)
  local slot, whole, grad = self.slots[item.p], self.kind.whole, item.grad
  slot.taken = (slot.taken or -1) + 1
  if item.group.maximize then grad = grad:neg() end
  -- So that no nan of a step that is prevented stays in a state.
  if only_if then grad = core.where(only_if, grad, grad:zeros_like()) end
  if not whole.before then return grad end
  local restore = only_if and undo.begin(slot.state)
  local made = whole.before(item.p, grad, slot.state, item.group, slot.taken)
  if not core.is_tensor(made) or made:numel() ~= grad:numel() then
    core.raise(("%s: before must return a tensor of the shape of its piece of '%s'; it returned %s")
      :format(self.kind.name, name_of(item.p), tostring(made)))
  end
  if restore then restore(only_if) end
  return made
end

-- The update of a whole matrix.
local function update_of(self, item, matrix, only_if)
  local slot = self.slots[item.p]
  slot.owned = slot.owned or {}
  local restore = only_if and undo.begin(slot.owned)
  local made = self.kind.whole.update(matrix, slot.owned, item.group, slot.taken)
  if not core.is_tensor(made) or made:numel() ~= matrix:numel()
      or made:size(1) ~= matrix:size(1) then
    core.raise(("%s: update must return a tensor of the shape of the matrix '%s'; it returned %s")
      :format(self.kind.name, name_of(item.p), tostring(made)))
  end
  if restore then restore(only_if) end
  return made
end

-- p = p (1 - lr weight_decay) - lr update, of what this rank has; of 16 bits in an f32 copy.
local function apply(self, item, update, only_if)
  local p, lr, decay, slot = item.p, item.group.lr, item.group.weight_decay, self.slots[item.p]
  local is_short = p:dtype() == "bf16" or p:dtype() == "f16"
  if is_short and item.group.master ~= "none" then
    slot.state.master = slot.state.master or p:to "f32"
    masters.follow(slot, p)
  end
  local target = slot.state.master or p
  local before = only_if and target:clone()
  if decay ~= 0 then target:mul_(1 - lr * decay) end
  target:sub_((update:to(target:dtype()):reshape(table.unpack(p:shape())) * lr))
  if before then target:copy_(core.where(only_if, target, before)) end
  if target ~= p then p:copy_(target) end
  masters.note(slot, p)
  keep(self, p, slot)
end

-- One exchange: `list` has this rank's tensors in the order of ranks that get them, counts what
-- each gets and sends.
local function travel(shards, list, send, receive, dtype)
  local filled = {}
  for _, t in ipairs(list) do
    if t:numel() > 0 then filled[#filled + 1] = t:contiguous():view(-1) end
  end
  local packed = #filled > 0 and core.pack(filled) or core.empty { 0, dtype = dtype }
  return shards:all_to_all(packed, send, receive):value()
end

-- Steps cut matrices whose pieces, of one dtype, travel among these ranks.
local function exchange(self, shards, items, dtype, only_if)
  local ranks, me, of = shards:size(), shards:rank(), {}
  local list, send, receive = {}, {}, {}
  for rank = 0, ranks - 1 do of[rank], send[rank + 1], receive[rank + 1] = {}, 0, 0 end
  for _, item in ipairs(items) do table.insert(of[item.place.owner], item) end
  for rank = 0, ranks - 1 do
    for _, item in ipairs(of[rank]) do
      list[#list + 1] = item.piece
      send[rank + 1] = send[rank + 1] + item.place.count[me]
    end
    for _, item in ipairs(of[me]) do
      receive[rank + 1] = receive[rank + 1] + item.place.count[rank]
    end
  end
  local got, at, back = travel(shards, list, send, receive, dtype), 0, {}
  for _, item in ipairs(of[me]) do
    item.flat = core.empty { item.shape[1] * item.shape[2], dtype = dtype }
  end
  for rank = 0, ranks - 1 do
    for _, item in ipairs(of[me]) do
      local count = item.place.count[rank]
      if count > 0 then
        item.flat:narrow(1, item.place.first[rank] + 1, count):copy_(got:narrow(1, at + 1, count))
      end
      at = at + count
    end
  end
  for _, item in ipairs(of[me]) do
    local update = update_of(self, item, item.flat:view(item.shape[1], item.shape[2]), only_if)
    item.flat:copy_(update:to(dtype):reshape(-1))
  end
  for rank = 0, ranks - 1 do
    for _, item in ipairs(of[me]) do
      local count = item.place.count[rank]
      if count > 0 then
        back[#back + 1] = item.flat:narrow(1, item.place.first[rank] + 1, count)
      end
    end
  end
  got, at = travel(shards, back, receive, send, dtype), 0
  for rank = 0, ranks - 1 do
    for _, item in ipairs(of[rank]) do
      local count = item.place.count[me]
      apply(self, item, got:narrow(1, at + 1, count), only_if)
      at = at + count
    end
  end
end

--- Steps matrices. All ranks that have pieces of them call it with the same ones in one order.
---@param self ms.Optimizer
---@param items { p: ms.Parameter, grad: ms.Tensor, group: ms.ParamGroup }[]
---@param only_if? ms.Tensor
function matrices.step(self, items, only_if)
  core.no_grad(function()
    -- Those that travel together, in the order in which they come.
    local batches, order = {}, {}
    for _, item in ipairs(items) do
      local p, place = item.p, place_of(self, item.p)
      check_place(self, p, self.slots[p], place)
      local piece = begin(self, item, only_if)
      if not place then apply(self, item, update_of(self, item, piece, only_if), only_if)
      else
        local shards, dtype = ownership.sharded[p].shards, piece:dtype()
        batches[shards] = batches[shards] or {}
        local batch = batches[shards][dtype]
        if not batch then
          batch = { shards = shards, dtype = dtype }
          batches[shards][dtype], order[#order + 1] = batch, batch
        end
        item.place, item.piece, item.shape = place, piece, ownership.sharded[p].shape
        batch[#batch + 1] = item
      end
    end
    for _, batch in ipairs(order) do
      exchange(self, batch.shards, batch, batch.dtype, only_if)
    end
  end)
end

return matrices
