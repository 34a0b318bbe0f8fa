-- What an optimizer saves and loads: its state by names of parameters, and its groups.
local core = require "moonshard.core"
local named = require "moonshard.base.named"
local module = require "moonshard.nn.module"
local copied = require "moonshard.optim.copied"
local layouts = require "moonshard.parallel.ddp.layouts"
local matrices = require "moonshard.optim.matrices"
local optimizers = require "moonshard.optim.optimizer"
local overlap = require "moonshard.parallel.overlap"
local part_states = require "moonshard.optim.part_states"
local piece = require "moonshard.parallel.shard_piece"
local saved_pieces = require "moonshard.optim.sharded_state"
local shard = require "moonshard.optim.shard"
local written = require "moonshard.optim.overrides"

---@class ms.Optimizer
local Optimizer = optimizers.class
local is_own, name_of, place_of = optimizers.is_own, optimizers.name_of, optimizers.place_of

---@param options? { kind?: "full"|"sharded", live?: boolean }
---@return table
function Optimizer:state(options)
  local wanted, live = module.kind_of_state("optimizer:state", options)
  layouts.check_of("optimizer:state", self.order)
  if self.shard and overlap.joining(self.order) then
    core.raise "optimizer:state: inside join ranks without inputs left would not take part for a \z
      sharded optimizer: save before or after it"
  end
  local models = saved_pieces.models(self, "optimizer:state")
  local taken = self:_finished(true)
  -- For a run that resumes from this state, a step that was taken in backward has ended.
  if self:_has_early(self.order) then
    for _, p in ipairs(self.order) do
      if p:grad() and not self.slots[p].early and overlap.is_planned(p) then
        core.raise(("optimizer:state: parameter '%s' waits for step(), and others were stepped in \z
          backward already: save after step()"):format(p:name()))
      end
    end
    taken = taken + 1
  end
  local saved = {
    kind = self.kind.name, steps = taken, parameters = {},
  }
  saved.groups = written.save(self.list, self.begins)
  for position, p in ipairs(self.order) do
    local slot, own = self.slots[p], {}
    for key, value in pairs(slot.state) do own[key] = value end
    matrices.save(slot, own)
    own["#taken"], own["#draws"] = slot.taken, slot.draws
    if next(own) ~= nil and is_own(self, p) then
      local name = name_of(p, position)
      if saved.parameters[name] then
        core.raise(("optimizer:state: two parameters are called '%s', of different models: make \z
          an optimizer for each model, or put them into one module"):format(name))
      end
      saved.parameters[name] = own
    end
  end
  if self.shard then saved.parameters = shard.gather_states(self.shard, saved.parameters) end
  if part_states.has(self) then
    saved.parameters = part_states.change(self, saved.parameters or {}, wanted)
  elseif #models > 0 then
    saved.parameters = saved_pieces.change(self, models, saved.parameters, wanted)
  end
  if not saved.parameters then return {} end
  if live then
    for _, state in pairs(saved.parameters) do named.table(state) end
    named.table(saved.parameters)
    return named.table(saved)
  end
  local own = {}
  for _, slot in pairs(self.slots) do
    for _, value in pairs(slot.state) do own[value] = true end
    for _, value in pairs(slot.owned or {}) do own[value] = true end
  end
  saved.groups = module.copied(saved.groups)
  saved.parameters = module.copied(saved.parameters, function(t) return own[t] == true end)
  return named.table(saved)
end

-- A text about what of a state does not fit the optimizer; nil if all does. foreign: names of
-- parameters that only other ranks have.
local function problem_of(self, saved, foreign)
  if type(saved) ~= "table" or type(saved.parameters) ~= "table"
      or math.type(saved.steps) ~= "integer" then
    return "this is no state of an optimizer"
  end
  if saved.kind ~= self.kind.name then
    return ("the state is of %s, the optimizer is %s"):format(tostring(saved.kind), self.kind.name)
  end
  local own, unknown, has_parts = {}, {}, part_states.has(self)
  for position, p in ipairs(self.order) do own[name_of(p, position)] = p end
  for name, state in pairs(saved.parameters) do
    if not own[name] and not foreign[name] then unknown[#unknown + 1] = tostring(name) end
    local whole = own[name] and not module.is_part(own[name]) and not has_parts
    for _, value in pairs(whole and state or {}) do
      if piece.is(value) then
        return ("the state has a piece of '%s', which is not sharded here: \z
          ms.checkpoint loads what any ranks have saved"):format(name)
      end
    end
  end
  table.sort(unknown)
  if unknown[1] then return ("parameter '%s' is unknown here"):format(unknown[1]) end
  local fits, why = pcall(written.check, self.list, self.begins, saved.groups)
  if not fits then return why:match "load_state: (.*)" or why end
end

-- A copy of all of what a state gives for a tensor.
local function whole_copy(value)
  return core.no_grad(function()
    if piece.is_source(value) then return assert(value:whole()):keep() end
    if piece.is(value) then
      return value.tensor:view(table.unpack(value.shape)):clone():keep()
    end
    return value:clone():keep()
  end)
end

-- Sets the state of one parameter; item: of a sharded one. shared: keys of states of which each
-- rank has the whole. take: of part_states.lua, where ranks have parts of one model.
local function load_one(self, p, given, item, shared, take)
  local slot, state, owned = self.slots[p], {}, nil
  if item and slot.place == nil then slot.place = place_of(self, p) or false end
  for saved_key, value in pairs(is_own(self, p) and given or {}) do
    local key = saved_key
    if take then key = part_states.key_of(p, saved_key) end
    if key == nil then goto continue end
    local owned_name = matrices.owned_name(key)
    if owned_name then
      owned = owned or {}
      if matrices.is_owner(self, p) then owned[owned_name] = whole_copy(value) end
    elseif core.is_tensor(value) or piece.is(value) or piece.is_source(value) then
      state[key] = item and not shared[key]
        and saved_pieces.take(item, key, value, slot.place or nil)
        or not item and take and take(p, value)
        or whole_copy(value)
    elseif key ~= "#taken" and key ~= "#draws" then
      state[key] = value
    end
    ::continue::
  end
  slot.state, slot.taken, slot.draws, slot.early = state, given["#taken"], given["#draws"], nil
  slot.version, slot.owned, slot.placed = nil, owned, nil
end

-- For checkpoints: f(source, first, count) for what load_state will read of a state of sources.
function Optimizer:_each_source(given, f)
  if part_states.has(self) then return part_states.each_source(self, given, f) end
  saved_pieces.each_source(self, saved_pieces.models(self, "load_state"), given, f)
end

-- Loads a state that fits. items, shared: of the parameters of sharded models, as of
-- sharded_state.lua.
local function load_all(self, saved, items, shared)
  written.load(self.list, self.begins, saved.groups)
  self.storages = {}
  local own, take = {}, part_states.has(self) and part_states.taker(self) or nil
  for position, p in ipairs(self.order) do
    local name = name_of(p, position)
    own[name], self.slots[p].place = p, nil
    local item = module.is_part(p) and items[name] or nil
    load_one(self, p, saved.parameters[name] or {}, item, shared, take)
  end
  -- Older versions saved steps that were prevented and not subtracted yet.
  local skipped = {}
  for i, item in ipairs(saved.behind or {}) do
    local slots = {}
    for _, name in ipairs(item.parameters) do
      local slot = own[name] and self.slots[own[name]]
      if slot then slots[#slots + 1], slot.taken = slot, slot.taken + 1 end
    end
    skipped[i] = { step = item.step, lost = true, slots = slots }
  end
  self.steps, self.lost, self.skipped, self.released = saved.steps + #skipped, 0, skipped, nil
end

---@param saved table
function Optimizer:load_state(saved)
  local models, items, shared = saved_pieces.models(self, "load_state"), {}, {}
  local function judge(given, foreign) return problem_of(self, given, foreign) end
  if part_states.has(self) then saved = part_states.given(self, saved, judge)
  elseif #models > 0 then
    saved, items, shared = saved_pieces.given(self, models, saved, judge)
  else
    saved = copied.given(self, saved, function(given) return judge(given, {}) end)
    local problem = judge(saved, {})
    if problem then core.raise("load_state: " .. problem) end
  end
  load_all(self, saved, items, shared)
end

-- For copied.lua: loads the state of the same optimizer of another rank.
function Optimizer:_load_own(saved) load_all(self, saved, {}, {}) end
