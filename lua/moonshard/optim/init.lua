-- Optimizers: kinds, parameter groups, state by name, clipping; schedules and the loss scaler are
-- files of their own.
local core = require "moonshard.core"
local module = require "moonshard.nn.module"
local options_of = require "moonshard.base.options"
local check, argument = options_of.check, options_of.argument
local averager = require "moonshard.optim.averager"
local copied = require "moonshard.optim.copied"
local join = require "moonshard.parallel.ddp.join"
local log = require "moonshard.base.log"
local joined = require "moonshard.optim.sharded_join"
local sharded_join = require "moonshard.parallel.fsdp.join"
local layouts = require "moonshard.parallel.ddp.layouts"
local overlap = require "moonshard.parallel.overlap"
local scaler = require "moonshard.optim.scaler"
local schedules = require "moonshard.optim.schedules"
local piece = require "moonshard.parallel.shard_piece"
local saved_pieces = require "moonshard.optim.sharded_state"
local shard = require "moonshard.optim.shard"
local written = require "moonshard.optim.overrides"
local unread = require "moonshard.parallel.overlap.unread"
local ownership = require "moonshard.base.ownership"

---@class ms.optim
local optim = {}
for name, f in pairs(schedules) do optim[name] = f end
optim.scaler, optim.averager = scaler.new, averager
optim.in_backward, optim.in_backward_of = overlap.in_backward, overlap.in_backward_of

---@class ms.Optimizer
local Optimizer = {}
-- Fields of an optimizer that may be nil.
local unset = { shard = true, number = true, released = true, scaler = true, idle = true }
function Optimizer.__index(_, name)
  local value = Optimizer[name]
  if value ~= nil or unset[name] then return value end
  return options_of.no_field("an optimizer", name, Optimizer)
end
Optimizer.__name = "ms.Optimizer"

-- Hyper-parameters are of groups, so writing them here would change nothing.
function Optimizer.__newindex(self, name, value)
  if unset[name] then return rawset(self, name, value) end
  local kind = rawget(self, "kind")
  core.raise(("an optimizer has no field '%s' to write%s"):format(tostring(name),
    kind and kind.all_defaults[name] ~= nil
      and (": optimizer:groups()[1].%s = ... sets that of a group"):format(name)
      or "; hyper-parameters are those of its groups(): " .. "lr, weight_decay ..."))
end

local kinds = {}       -- by name
local overlapped = {}  -- kind's name -> the function of register_overlapped

-- Options that every kind has, besides its own hyper-parameters.
local common = { lr = 0.01, weight_decay = 0, maximize = false }
local settings = { params = true, schedule = true, master = true, shard = true, name = true }

local function known_options(kind)
  local names = { "schedule", "master", "shard" }
  for name in pairs(kind.all_defaults) do names[#names + 1] = name end
  table.sort(names)
  return names
end

-- Raises for an option that the kind does not have or that has another type than its default.
local function check_options(kind, options)
  argument(kind.name, "options", options, "table")
  for name, value in pairs(options) do
    if type(name) == "string" then
      local default = kind.all_defaults[name]
      if default == nil and not settings[name] then
        local names = known_options(kind)
        core.raise(("%s: unknown option '%s'%s has %s")
          :format(kind.name, name, core.nearest(name, names)
            and (": did you mean '%s'? It"):format(core.nearest(name, names)) or "; it",
            table.concat(names, ", ")))
      elseif default ~= nil and type(value) ~= type(default)
          and not (name == "lr" and core.is_tensor(value)) then
        core.raise(("%s: option %s must be a %s, not a %s")
          :format(kind.name, name, type(default), type(value)))
      end
    end
  end
  if options.schedule ~= nil and type(rawget(options, "schedule")) ~= "function" then
    core.raise(("%s: schedule must be a function from the step to a factor, not a %s")
      :format(kind.name, type(options.schedule)))
  end
  local ranks = rawget(options, "shard")
  if ranks ~= nil
      and not (type(ranks) == "userdata" and pcall(function() return ranks:size() end)) then
    core.raise(("%s: shard must be a group of ranks (ms.world()), not a %s")
      :format(kind.name, type(ranks)))
  end
  if options.master ~= nil and options.master ~= "f32" and options.master ~= "none" then
    core.raise(("%s: unknown master '%s': known are f32, none")
      :format(kind.name, tostring(options.master)))
  end
  if kind.native then core.optim_check(kind.name, options) end
end

-- Turns a module, a list of parameters or tensors, or a list of groups into a list of groups.
local function groups_of(params)
  if module.is_module(params) then return { { params = params:parameters() } } end
  argument("optimizer", "params", params, "module|list")
  if params.params then core.raise("groups come in a list: { { params = ... }, ... }") end
  local first = params[1]
  if core.is_tensor(first) then return { { params = params } } end
  if first == nil then core.raise("an optimizer needs at least one parameter") end
  return params
end

-- A rank has a piece of a parameter that fsdp has sharded, so a kind whose step needs the whole of
-- it would compute something else.
local function refuse_shards(self, name)
  if self.shard then
    core.raise(("%s: option shard, and parameter '%s' is sharded by fsdp already: leave out \z
      the option"):format(self.kind.name, name))
  end
  if not self.kind.elementwise then
    core.raise(("%s: parameter '%s' is sharded by fsdp, and this kind of optimizer needs whole \z
      parameters: use an elementwise kind (adamw), strategy = \"no_shard\", or ms.ddp; a kind \z
      of optim.define that computes each number by itself says elementwise = true")
      :format(self.kind.name, name))
  end
end

local function check_sharded(self, p, i)
  local entry = ownership.sharded[p]
  if not entry then return end
  if entry.shards:size() == 1 and not (entry.own and self.shard) then return end
  local name = p:name()
  refuse_shards(self, name ~= "" and name or ("#%d"):format(i))
end

local function add_group(self, group)
  check_options(self.kind, group)
  local list = group.params
  if module.is_module(list) then list = list:parameters() end
  if type(list) ~= "table" then core.raise("a group needs params: a list of parameters") end
  local seen = {}
  for i, p in ipairs(list) do
    if not core.is_tensor(p) then
      core.raise(("parameter %d of the group is a %s, not a tensor"):format(i, type(p)))
    end
    check_sharded(self, p, i)
    if p:device() == "meta" then
      core.raise(("parameter '%s' is on \"meta\" and has no values to step: call materialize() of \z
        the model, or wrap it with ms.ddp or ms.fsdp, before its optimizer is made")
        :format(p:name()))
    end
    if self.slots[p] or seen[p] then
      local name = p:name()
      core.raise(("parameter %s is in two groups, or twice in one")
        :format(name ~= "" and "'" .. name .. "'" or i))
    end
    seen[p] = true
  end
  if self.shard then
    for p, rank in pairs(shard.assign(list, self.shard:size())) do self.owner[p] = rank end
  end
  -- Options that the group does not have are looked up in the optimizer's at each use.
  local live = setmetatable(group, { __index = self.defaults, __newindex = function(t, name, value)
    if self.kind.all_defaults[name] == nil and not settings[name] then
      local known = known_options(self.kind)
      core.raise(("%s: a group has no option '%s'%s"):format(self.kind.name, tostring(name),
        core.nearest(tostring(name), known)
          and (": did you mean '%s'?"):format(core.nearest(tostring(name), known))
          or "; it has " .. table.concat(known, ", ")))
    end
    rawset(t, name, value)
  end })
  live.params = list
  self.list[#self.list + 1] = live
  self.begins[live] = written.begin(live, self.kind.all_defaults)
  for _, p in ipairs(list) do
    self.count = self.count + 1
    self.slots[p] = { group = live, state = {}, position = self.count }
    self.order[self.count] = p
    if not core.is_parameter(p) then p:keep() end
    ownership.stepped[p] = self
    local entry = ownership.sharded[p]
    if entry then sharded_join.add_optimizer(entry.model, self) end
  end
end

local function new(kind, params, options)
  options = options or {}
  check_options(kind, options)
  local defaults = setmetatable({}, { __index = kind.all_defaults })
  for name, value in pairs(options) do defaults[name] = value end
  local self = setmetatable({
    kind = kind, defaults = defaults, list = {}, begins = {}, slots = {}, order = {}, count = 0,
    steps = 0, lost = 0, skipped = {}, counted = false, storages = {}, shard = options.shard,
    owner = {},
  }, Optimizer)
  if self.shard then self.number = joined.number(self) end
  for _, group in ipairs(groups_of(params)) do add_group(self, group) end
  return self
end

--- Defines a new kind of optimizer. Groups, schedules and saving work as for the built-in kinds.
---@param kind ms.Kind
---@return fun(params: ms.Params, options?: ms.OptimizerOptions): ms.Optimizer
function optim.define(kind)
  if type(kind) ~= "table" or type(kind.name) ~= "string" then
    core.raise("optim.define: a table with name, defaults and step_param is expected")
  end
  argument("optim.define", "base", kind.base, "string?")
  argument("optim.define", "defaults", kind.defaults, "table?")
  argument("optim.define", "elementwise", kind.elementwise, "boolean?")
  if type(kind.step_param) ~= "function" then
    core.raise(("optim.define: kind '%s' has no function step_param"):format(kind.name))
  end
  local own = {
    all_defaults = {}, name = kind.name, base = kind.base, step_param = kind.step_param,
    native = kind.native, elementwise = kind.native or kind.elementwise == true,
  }
  for name, value in pairs(common) do own.all_defaults[name] = value end
  for name, value in pairs(kind.defaults or {}) do own.all_defaults[name] = value end
  kinds[own.name] = own
  return function(params, options) return new(own, params, options) end
end

-- The kinds in C: their step is one call.
local function native(name, defaults)
  optim[name] = optim.define {
    name = name, defaults = defaults, native = true,
    step_param = function(p, grad, state, group, _, only_if, salt, count, place)
      core.optim_step(name, p, grad, state, group, only_if, salt, count, place)
    end,
  }
end

native("sgd", { momentum = 0, dampening = 0, nesterov = false })
native("adam", { lr = 1e-3, betas = { 0.9, 0.999 }, eps = 1e-8, amsgrad = false })
native("adamw",
  { lr = 1e-3, betas = { 0.9, 0.999 }, eps = 1e-8, amsgrad = false, weight_decay = 0.01 })
native("adagrad", { lr_decay = 0, initial_accumulator_value = 0, eps = 1e-10 })
native("adadelta", { lr = 1, rho = 0.9, eps = 1e-6 })
native("rmsprop", { alpha = 0.99, eps = 1e-8, momentum = 0, centered = false })
native("rprop", { etas = { 0.5, 1.2 }, step_sizes = { 1e-6, 50 } })
native("adamax", { lr = 1e-3, betas = { 0.9, 0.999 }, eps = 1e-8 })

------------------------------------------------------------------------------------------- stepping

-- The learning rate of a group now: its lr times the schedule's factor. exact: **blocks** until it
-- is known whether the step before was taken; otherwise that counts as taken.
local function scheduled(self, group, exact)
  local lr, schedule = group.lr, group.schedule
  if not schedule then return lr end
  return lr * schedule(self:_finished(exact))
end

-- A view of the group whose lr is the scheduled one. Where the device alone knows whether the step
-- before was taken, the view has both rates, and the device chooses.
local function at_this_step(self, group)
  local lr, schedule = group.lr, group.schedule
  local now = setmetatable({ lr = lr }, { __index = group })
  if not schedule then return now end
  local finished = self:_finished(not self.kind.native)
  -- A schedule that was set after that step: nothing has kept its flag.
  if #self.skipped > 0 and not self.skipped[1].kept then finished = self:_finished(true) end
  now.lr = lr * schedule(finished)
  if #self.skipped == 0 then return now end
  local if_lost = lr * schedule(finished - 1)
  if core.is_tensor(lr) then
    now.lr = core.no_grad(function() return core.where(self.counted, now.lr, if_lost) end)
  else
    now.lr_if_lost, now.counted = if_lost, self.counted
  end
  return now
end

-- Keeps the flag of a step for the schedules of the next one, in one tensor for all steps. Returns
-- whether there are schedules.
local function keep_flag(self, only_if)
  local any = false
  for _, group in ipairs(self.list) do any = any or group.schedule ~= nil end
  if not any then return false end
  core.no_grad(function()
    self.counted = self.counted or core.zeros { dtype = "bool" }:keep()
    self.counted:copy_(only_if:reshape())
  end)
  return true
end

-- The names of a state's tensors, sorted: work must not be enqueued in the order of `pairs`, which
-- differs between runs.
local function tensor_names(state)
  local names = {}
  for name, value in pairs(state) do if core.is_tensor(value) then names[#names + 1] = name end end
  table.sort(names, function(a, b) return tostring(a) < tostring(b) end)
  return names
end

-- Kinds in Lua do not handle the flag. If the flag is false, the parameter and its state are
-- restored; a state tensor that this step adds is restored to the value with which it was added.
-- The kind gets a gradient of zeros then, so that no nan of the real gradient stays in its state.
local function step_if(kind, p, grad, slot, group, only_if)
  local state, before, old = slot.state, p:clone(), {}
  for _, name in ipairs(tensor_names(state)) do old[name] = state[name]:clone() end
  setmetatable(state, { __newindex = function(_, name, value)
    rawset(state, name, value)
    if core.is_tensor(value) then old[name] = old[name] or value:clone() end
  end })
  kind.step_param(p, core.where(only_if, grad, grad:zeros_like()), state, group, slot.taken)
  setmetatable(state, nil)
  p:copy_(core.where(only_if, p, before))
  for _, name in ipairs(tensor_names(state)) do
    state[name]:copy_(core.where(only_if, state[name], old[name]))
  end
end

local function name_of(p, position)
  local name = p:name()
  return name ~= "" and name or ("#%d"):format(position)
end

-- Whether this rank steps the parameter.
local function is_own(self, p) return not self.shard or self.owner[p] == self.shard:rank() end

-- A gradient that is still multiplied by the loss scale would give a step, or a norm, of the wrong
-- size.
local function refuse_scaled(self_called, p, position, instead)
  if core.is_marked(p) then
    core.raise(("%s: the gradient of parameter '%s' is still multiplied by the loss scale: %s")
      :format(self_called, name_of(p, position), instead))
  end
end

-- States of a sharded model's parameters that are together are together as well, in one storage for
-- each kind of state: ranks, which have different pieces, then allocate alike. Only an optimizer of
-- all these parameters does so.
local function place_of(self, p)
  local entry = ownership.sharded[p]
  local model = entry and entry.model
  if not model or not model.sharded then return nil end
  for _, other in ipairs(entry.together) do
    if not self.slots[other] then return nil end
  end
  self.storages[entry.together] = self.storages[entry.together] or {}
  local storages = self.storages[entry.together]
  return function(name)
    storages[name] = storages[name] or model.sharded:state(p)
    return model.sharded:state(p, storages[name])
  end
end

-- The f32 copy of a 16-bit parameter takes what others have written to the parameter since this
-- optimizer stepped it: a load, a mask, an average over ranks. An element whose copy rounds to the
-- parameter's value was not changed, and keeps its low bits.
local function follow_writes(slot, p)
  local master = slot.state.master
  if not master or slot.version == core.tensor_version(p) or p:numel() == 0 then return end
  core.no_grad(function()
    master:copy_(core.where(master:to(p:dtype()):eq(p), master, p:to "f32"))
  end)
end

local function step_one(self, p, grad, group, only_if)
  refuse_scaled(self.kind.name, p, self.slots[p].position,
    "step with scaler:step(optimizer), or call scaler:unscale(optimizer) before")
  local kind, slot = self.kind, self.slots[p]
  if not is_own(self, p) then
    if not kind.native then slot.taken = (slot.taken or -1) + 1 end
    return
  end
  if kind.native then
    -- Random numbers for rounding must not depend on the order in which parameters are stepped.
    if group.master == "none" then
      slot.draws, slot.salt = (slot.draws or 0) + 1,
        slot.salt or core.hash(name_of(p, slot.position))
    end
    if slot.place == nil then slot.place = place_of(self, p) or false end
    follow_writes(slot, p)
    kind.step_param(p, grad, slot.state, group, nil, only_if, slot.salt, slot.draws,
      slot.place or nil)
    if slot.state.master then slot.version = core.tensor_version(p) end
    return
  end
  slot.taken = (slot.taken or -1) + 1
  core.no_grad(function()
    if only_if then step_if(kind, p, grad, slot, group, only_if)
    else kind.step_param(p, grad, slot.state, group, slot.taken) end
  end)
  for _, name in ipairs(tensor_names(slot.state)) do slot.state[name]:keep() end
end

-- Whether the flag on the device prevented this step; **blocks** if the device has not reached the
-- step yet.
local function was_lost(item)
  return item.lost or (item.probe and item.probe:value() == 0 and not core.is_sim())
end

--- The number of steps that were taken. Whether a flag on the device prevented a step is known two
--- steps later, or after waiting for it (exact); such a step is then subtracted, so that schedules
--- do not advance. Until then it counts, and is the only one of self.skipped.
---@param exact? boolean
---@return integer
function Optimizer:_finished(exact)
  local pending = {}
  for _, item in ipairs(self.skipped) do
    if not (exact or item.lost) and item.step + 2 > self.steps then pending[#pending + 1] = item
    elseif was_lost(item) then
      self.lost = self.lost + 1
      for _, slot in ipairs(item.slots) do slot.taken = slot.taken - 1 end
    end
  end
  self.skipped = pending
  return self.steps - self.lost
end

-- Sends parameters that were stepped by their owners to all ranks, over a channel that does not
-- wait for reductions.
local function share(self, params) shard.share(self.shard:_parameters(), params, self.owner) end

-- Raises if only_if is given although a parameter was stepped in backward, before the flag was
-- known.
local function refuse_flag(self)
  for _, p in ipairs(self.order) do
    overlap.note_flag(p)
    if self.slots[p].early then
      core.raise(("optimizer:step: only_if, and parameter '%s' was stepped in backward already: \z
        use the policy \"classic\" or \"deferred\" with a loss scaler"):format(p:name()))
    end
  end
end

-- Steps the parameters of the policy "deferred" on the optimizer's stream, in the order in which
-- the next forward uses them. That forward waits for each parameter when it reads it.
local function step_late(self, late, options)
  table.sort(late, function(a, b)
    if a.turn ~= b.turn then return a.turn < b.turn end
    return self.slots[a.p].position < self.slots[b.p].position
  end)
  overlap.stream():run(function()
    local params = {}
    for i, item in ipairs(late) do
      step_one(self, item.p, item.grad, item.group, options.only_if)
      params[i] = item.p
    end
    if self.shard then share(self, params) end
  end)
  if options.keep_grads then return end
  for _, item in ipairs(late) do core.consume_grad(item.p) end
end

-- For fsdp.lua: raises unless the parameter may become a piece now. name: of the parameter.
function Optimizer:_allow_piece(p, name, is_sharded)
  if is_sharded then refuse_shards(self, name) end
  if self.steps > 0 or next(self.slots[p].state) then
    core.raise(("fsdp: parameter '%s' was stepped already by the optimizer of then_optimizer: \z
      wrap the model before the first step"):format(name))
  end
end

-- For overlap.lua: steps one parameter in backward, as a part of a step that step() will end. If
-- backward still reads the parameter's old values, the step waits for the last such read; grad must
-- not change until then.
function Optimizer:_step_early(p, grad)
  local slot = self.slots[p]
  if slot.early then
    core.raise(("optimizer: parameter '%s' is stepped twice in one step"):format(p:name()))
  end
  slot.early = true
  local group = at_this_step(self, slot.group)
  unread.step(self, { p }, function() step_one(self, p, grad, group) end)
end

-- After _step_early of these parameters.
function Optimizer:_share(params)
  if self.shard and #params > 0 then
    unread.step(self, params, function() share(self, params) end)
  end
end

-- The whole step of an optimizer of one parameter.
function Optimizer:_step_alone(p, grad)
  step_one(self, p, grad, at_this_step(self, self.slots[p].group))
  self.steps = self.steps + 1
end

-- Whether some of these parameters were stepped in backward, as a part of a step that has not
-- ended.
function Optimizer:_has_early(params)
  for _, p in ipairs(params) do if self.slots[p] and self.slots[p].early then return true end end
  return false
end

-- Ends a step whose parameters were stepped in backward, for loops that do not call step().
function Optimizer:_end_early()
  local any = false
  for _, p in ipairs(self.order) do
    if self.slots[p].early then
      core.consume_grad(p)
      self.slots[p].early, any = nil, true
    end
  end
  if any then self.steps, self.released = self.steps + 1, nil end
end

-- Called when the ddp model of these parameters is unwrapped. The step that they are a part of
-- stays open; it ends with step(), or when one of them gets a new gradient.
function Optimizer:_release_early()
  for _, p in ipairs(self.order) do
    if self.slots[p].early then
      core.consume_grad(p)
      self.slots[p].early, self.released = "released", true
    end
  end
end

function Optimizer:_end_released()
  if not self.released then return end
  for _, p in ipairs(self.order) do
    if self.slots[p].early and p:grad() then
      for _, other in ipairs(self.order) do self.slots[other].early = nil end
      self.steps, self.released = self.steps + 1, nil
      return
    end
  end
end

--- From now on the policy decides when this optimizer's parameters in this ddp model are stepped.
--- policy: the name of a ready-made one ("classic", "in_backward", "deferred",
--- "early_where_hidden"), a file, or a result of ms.overlap. The loop need not change: step() steps
--- the parameters that were not stepped early.
---@param model ms.DDP|ms.FSDP
---@param policy string|ms.Overlap
function Optimizer:overlap(model, policy)
  local kind, seen = self.kind, {}
  while kind do
    if overlapped[kind.name] then return overlapped[kind.name](self, model, policy) end
    seen[kind.name] = true
    local base = kind.base
    kind = base and kinds[base]
    if base and not kind then
      core.raise(("overlap: kind '%s' is based on '%s', which does not exist")
        :format(self.kind.name, base))
    end
    if kind and seen[kind.name] then
      core.raise(("overlap: kind '%s' is based on itself"):format(kind.name))
    end
  end
  overlap.attach(self, model, policy)
end

--- Registers the function that runs optimizers of this kind, and of kinds based on it, overlapped,
--- in place of optim.overlap_standard. A second registration raises.
---@param kind string
---@param make fun(optimizer: ms.Optimizer, model: ms.Module, policy: string|ms.Overlap)
function optim.register_overlapped(kind, make)
  if type(kind) ~= "string" or not kinds[kind] then
    local names = {}
    for name in pairs(kinds) do names[#names + 1] = name end
    table.sort(names)
    core.raise(("register_overlapped: there is no kind of optimizer '%s'; there are %s")
      :format(tostring(kind), table.concat(names, ", ")))
  end
  if type(make) ~= "function" then
    core.raise("register_overlapped: a function is expected, not a " .. type(make))
  end
  if overlapped[kind] then
    core.raise(("register_overlapped: '%s' is registered already"):format(kind))
  end
  overlapped[kind] = make
end

optim.overlap_standard = overlap.attach

-- Of each group, what its next step uses.
local function settings_of(self)
  local values = {}
  for i, group in ipairs(self.list) do
    values[i] = { master = group.master }
    for name in pairs(self.kind.all_defaults) do values[i][name] = group[name] end
    values[i].lr = scheduled(self, group, true)
  end
  return values
end

-- Sends ranks of this model's join that have no inputs left what they need for their part of the
-- step.
local function tell_absent(self, s, only_if)
  if self.shard ~= s.group then
    core.raise "optimizer:step: inside join an optimizer can be sharded over the model's own \z
      group only"
  end
  local absent, from = join.before_step(s, self.number)
  if #absent == 0 then return end
  if s.group:rank() ~= from then return joined.stand_by(s.group, from) end
  joined.send(self, s.group, absent, settings_of(self), only_if)
end

-- The same in the join of a sharded model: those ranks have the gradients of their shards, and need
-- the settings.
local function tell_followers(self, s, options)
  local first, absent = sharded_join.announce(s, {
    call = "step", number = sharded_join.number_of(s, self), kind = self.kind.name,
    count = #self.order, settings = settings_of(self), flag = options.only_if ~= nil,
    keep_grads = options.keep_grads == true,
  })
  if absent and options.only_if then
    core.no_grad(function() s.group:broadcast(options.only_if:to("u8"):view(1), first) end)
  end
end

-- While this is open, the steps of parameters may be carried out together.
local batch = setmetatable({}, { __close = function() core.batch(false) end })
local function open_batch()
  core.batch(true)
  return batch
end

-- Steps all parameters. sent: for a rank without inputs left in a join, the settings that it
-- received, and the gradients unless it has those of its shards.
local function take_step(self, options, sent)
  -- counted: slots of kinds in Lua that this step counts; a prevented step is subtracted later
  local counted, late, now_stepped, any = {}, {}, {}, sent ~= nil
  if options.only_if then refuse_flag(self) end
  for i, group in ipairs(self.list) do
    local now = sent and setmetatable(sent.settings[i], { __index = group })
      or at_this_step(self, group)
    local together <close> = open_batch() -- luacheck: ignore together
    for _, p in ipairs(group.params) do
      local slot, grad = self.slots[p], p:grad()
      if sent and sent.gradients then grad = sent.gradients[p] end
      if self.shard and p:requires_grad() and not slot.early and not slot.late then
        now_stepped[#now_stepped + 1] = p
      end
      if slot.late and grad then
        late[#late + 1] = { p = p, grad = grad, group = now, turn = slot.turn }
      elseif grad and not slot.early then
        step_one(self, p, grad, now, options.only_if)
      end
      if grad and not self.kind.native then counted[#counted + 1] = slot end
      if grad and not slot.late and not options.keep_grads and not (sent and sent.gradients) then
        core.consume_grad(p)
      end
      any = any or grad ~= nil or slot.early ~= nil
      slot.early = nil
    end
  end
  if not any and not self.idle then
    self.idle = true
    log.warn("%s: a step without any gradient changes nothing: does the loss depend on these \z
      parameters, and does backward come before the step?", self.kind.name)
  end
  if #now_stepped > 0 then share(self, now_stepped) end
  if #late > 0 then step_late(self, late, options) end
  if options.only_if then
    self.skipped[#self.skipped + 1] = {
      step = self.steps, probe = core.probe(options.only_if), slots = counted,
      kept = keep_flag(self, options.only_if),
    }
  end
  self.steps, self.released = self.steps + 1, nil
end

-- For sharded_join.lua: the step of a rank without inputs left.
function Optimizer:_step_joined(sent)
  self:_finished(not self.kind.native)
  take_step(self, { only_if = sent.only_if, keep_grads = sent.keep_grads }, sent)
end

-- The optimizer that a rank with inputs has described.
local function optimizer_of(s, words)
  local optimizer = s.optimizers[words.number]
  if not optimizer or optimizer.kind.name ~= words.kind or #optimizer.order ~= words.count then
    core.raise(("join: rank %d steps %s of %d parameters, which this rank does not have: make the \z
      same optimizers on all ranks"):format(words.first, words.kind, words.count))
  end
  return optimizer
end

sharded_join.define("step", function(s, words)
  local optimizer = optimizer_of(s, words)
  core.no_grad(function()
    if words.flag then
      local flag = s.group:broadcast(core.zeros { 1, dtype = "u8" }, words.first)
      words.only_if = flag:value():to("bool"):view()
    end
    optimizer:_step_joined(words)
  end)
end)

--- Steps all parameters that have a gradient, and frees the gradients unless options.keep_grads is
--- true. Inside ddp:join a sharded optimizer steps on all ranks. options.only_if: one bool on the
--- device; if it is false nothing changes, not even the step count.
---@param options? { only_if?: ms.Tensor, keep_grads?: boolean }
function Optimizer:step(options)
  if core.in_hook() then
    core.raise("optimizer:step cannot be used inside a hook: use step_param")
  end
  options = check("optimizer:step", options, { only_if = "tensor", keep_grads = "boolean" })
  layouts.check_of(self.order)
  self:_end_released()
  self:_finished(not self.kind.native)
  local guard = overlap.guard(self.order)
  if guard then
    local only_if = options.only_if
    options = {
      keep_grads = options.keep_grads,
      only_if = only_if and core.where(only_if, guard, only_if) or guard,
    }
  end
  local s = self.shard and overlap.joining(self.order)
  if s then tell_absent(self, s, options.only_if) end
  s = sharded_join.of("optimizer:step", self.order)
  if s then tell_followers(self, s, options) end
  take_step(self, options)
end

--- Steps one parameter on the current stream; allowed in hooks. A parameter whose values the
--- running backward still reads is stepped after the last such read.
---@param p ms.Tensor
---@param grad? ms.Tensor p:grad() unless given
---@param options? { only_if?: ms.Tensor }
function Optimizer:step_param(p, grad, options)
  check("step_param", options, { only_if = "tensor" })
  argument("step_param", "p", p, "tensor")
  argument("step_param", "grad", grad, "tensor?")
  local slot = self.slots[p]
  if not slot then core.raise("step_param: the parameter is in no group of this optimizer") end
  if not core.in_hook() then layouts.check_of { p } end
  grad = grad or p:grad()
  if not grad then core.raise("step_param: the parameter has no gradient; pass one") end
  if not core.in_hook() and (self.shard and overlap.joining { p }
      or sharded_join.of("step_param", { p })) then
    core.raise "step_param: inside join ranks without inputs left would not take part in it for a \z
      sharded optimizer or model: use step()"
  end
  local group, only_if = at_this_step(self, slot.group), options and options.only_if
  -- The script may write the gradient before a waiting step is taken, so the step gets a copy.
  if core.is_awaited(p) then grad = core.no_grad(function() return grad:clone() end) end
  unread.step(self, { p }, function()
    step_one(self, p, grad, group, only_if)
    if self.shard then share(self, { p }) end
  end)
end

function Optimizer:zero_grad()
  local s = sharded_join.of("zero_grad", self.order)
  if s then
    sharded_join.announce(s, {
      call = "zero_grad", number = sharded_join.number_of(s, self), kind = self.kind.name,
      count = #self.order,
    })
  end
  for _, p in ipairs(self.order) do core.consume_grad(p) end
end

sharded_join.define("zero_grad", function(s, words) optimizer_of(s, words):zero_grad() end)

---@return ms.ParamGroup[]
function Optimizer:groups() return self.list end

---@param group ms.ParamGroup
function Optimizer:add_group(group)
  argument("add_group", "group", group, "table")
  add_group(self, group)
end

--- The learning rate that the next step of the first group uses, schedule included. After a step
--- with only_if it is the rate if that step was taken.
---@return number
function Optimizer:lr() return scheduled(self, self.list[1]) end

--------------------------------------------------------------------------------------------- saving

--- A copy of the state by parameter name, and the count of steps; with live, the tensors
--- themselves. **blocks** after steps with only_if. For a sharded optimizer all ranks call it, and
--- rank 0 of the group gets the states of all parameters.
--- Of parameters of a sharded model, all ranks call it as well. kind "full": rank 0 of the model
--- gets whole tensors, and the others an empty table; "sharded": each rank gets its pieces. The
--- state loads at any number of ranks.
---@param options? { kind?: "full"|"sharded", live?: boolean }
---@return table
function Optimizer:state(options)
  local wanted, live = module.kind_of_state("optimizer:state", options)
  layouts.check_of(self.order)
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
    own["#taken"], own["#draws"] = slot.taken, slot.draws
    if next(own) ~= nil and is_own(self, p) then saved.parameters[name_of(p, position)] = own end
  end
  if self.shard then saved.parameters = shard.gather_states(self.shard, saved.parameters) end
  if #models > 0 then
    saved.parameters = saved_pieces.change(self, models, saved.parameters, wanted)
  end
  if not saved.parameters then return {} end
  if live then return saved end
  local own = {}
  for _, slot in pairs(self.slots) do for _, value in pairs(slot.state) do own[value] = true end end
  saved.groups = module.copied(saved.groups)
  saved.parameters = module.copied(saved.parameters, function(t) return own[t] == true end)
  return saved
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
  local own, unknown = {}, {}
  for position, p in ipairs(self.order) do own[name_of(p, position)] = p end
  for name, state in pairs(saved.parameters) do
    if not own[name] and not foreign[name] then unknown[#unknown + 1] = tostring(name) end
    local whole = own[name] and not module.is_part(own[name])
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

-- Sets the state of one parameter; item: of a sharded one. shared: keys of states of which each
-- rank has the whole.
local function load_one(self, p, given, item, shared)
  local slot, state = self.slots[p], {}
  if item and slot.place == nil then slot.place = place_of(self, p) or false end
  for key, value in pairs(is_own(self, p) and given or {}) do
    if core.is_tensor(value) or piece.is(value) or piece.is_source(value) then
      state[key] = item and not shared[key]
        and saved_pieces.take(item, key, value, slot.place or nil)
        or core.no_grad(function()
          if piece.is_source(value) then return assert(value:whole()):keep() end
          if piece.is(value) then
            return value.tensor:view(table.unpack(value.shape)):clone():keep()
          end
          return value:clone():keep()
        end)
    elseif key ~= "#taken" and key ~= "#draws" then
      state[key] = value
    end
  end
  slot.state, slot.taken, slot.draws, slot.early = state, given["#taken"], given["#draws"], nil
  slot.version = nil
end

-- For checkpoints: f(source, first, count) for what load_state will read of a state of sources.
function Optimizer:_each_source(given, f)
  saved_pieces.each_source(self, saved_pieces.models(self, "load_state"), given, f)
end

-- Loads a state that fits. items, shared: of the parameters of sharded models, as of
-- sharded_state.lua.
local function load_all(self, saved, items, shared)
  written.load(self.list, self.begins, saved.groups)
  self.storages = {}
  local own = {}
  for position, p in ipairs(self.order) do
    local name = name_of(p, position)
    own[name], self.slots[p].place = p, nil
    local item = module.is_part(p) and items[name] or nil
    load_one(self, p, saved.parameters[name] or {}, item, shared)
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

--- Of parameters of a ddp model, each rank gives the state, or rank 0 gives it and others an empty
--- table; all ranks of the model call it. Of parameters of a sharded model, each rank gives at
--- least what it has (whole tensors or its pieces), or rank 0 gives all and the others empty
--- tables; all ranks call it.
---@param saved table
function Optimizer:load_state(saved)
  local models, items, shared = saved_pieces.models(self, "load_state"), {}, {}
  local function judge(given, foreign) return problem_of(self, given, foreign) end
  if #models > 0 then
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

options_of.methods(Optimizer, "an optimizer")

------------------------------------------------------------------------------------------- clipping

local function gradients_of(what, params)
  argument(what, "params", params, "module|list")
  if module.is_module(params) then
    params = params:parameters()
  else
    options_of.items(what, "params", params, "tensor")
  end
  layouts.check_of(params)
  for _, p in ipairs(params) do
    local entry = ownership.sharded[p]
    if entry and entry.model.sharded then
      entry.model.sharded:check_no_forward(what)
      break
    end
  end
  overlap.note_norm(params)
  local list = {}
  for i, p in ipairs(params) do
    local grad = p:grad()
    if grad then refuse_scaled(what, p, i, "call scaler:unscale(optimizer) before clipping") end
    list[#list + 1] = grad
  end
  return list, params
end

-- The gradients of whole parameters, and lists of gradients of which each rank of a group has a
-- part, by group. Of parameters of fewer ranks, all ranks of the model have parts; they take part
-- also without a gradient. The last result is the parameters in the order of these lists.
local function by_group(params)
  local whole, parts, groups, owners, order = {}, {}, {}, {}, {}
  for _, p in ipairs(params) do
    local grad, entry = p:grad(), ownership.sharded[p]
    local group = entry and entry.shards
    if entry and entry.own then group = entry.model.group end
    if group and group:size() > 1 and (grad or entry.own) then
      if not parts[group] then
        parts[group], owners[group] = {}, {}
        groups[#groups + 1] = group
      end
      if grad then
        table.insert(parts[group], grad)
        table.insert(owners[group], p)
      end
    elseif grad then
      whole[#whole + 1], order[#order + 1] = grad, p
    end
  end
  for _, group in ipairs(groups) do
    table.move(owners[group], 1, #owners[group], #order + 1, order)
  end
  return whole, parts, groups, order
end

-- The norm of all, where ranks have parts: powers of the parts' norms add up over the ranks. And
-- the position of this rank's first gradient that is inf or nan, -1 if there is none.
local function norm_of_parts(whole, parts, groups, p)
  local infinite, bad, before = p == math.huge, nil, #whole
  local total = core.zeros {}
  if #whole > 0 then total, bad = core.clip_norm(whole, math.huge, p) end
  if not infinite then total = total ^ p end
  for _, group in ipairs(groups) do
    local norm, position = core.zeros {}, core.full(-1, {})
    if #parts[group] > 0 then norm, position = core.clip_norm(parts[group], math.huge, p) end
    local sum = group:all_reduce(infinite and norm or norm ^ p, infinite and "max" or "sum"):value()
    total = infinite and total:maximum(sum) or total + sum     -- maximum keeps a nan
    local moved = before == 0 and position
      or core.where(position:ge(0), position + before, position)
    bad = bad and core.where(bad:ge(0), bad, moved) or moved
    before = before + #parts[group]
  end
  return infinite and total or total ^ (1 / p), bad
end

local function clip_parts(whole, parts, groups, max, p)
  return core.no_grad(function()
    local norm, bad = norm_of_parts(whole, parts, groups, p)
    if max == math.huge then return norm, bad end
    local factor = (max / (norm + 1e-6)):clamp(0, 1)
    for _, grad in ipairs(whole) do grad:mul_(factor) end
    for _, group in ipairs(groups) do
      for _, grad in ipairs(parts[group]) do grad:mul_(factor) end
    end
    return norm, bad
  end)
end

--- For loops: the norm of all gradients before clipping to max; the parameters that have one; and
--- on the device, the position among these of this rank's first gradient that is inf or nan, or -1.
---@param params ms.Parameter[]
---@param max number
---@return ms.Tensor? norm nil: no parameter has a gradient
---@return ms.Parameter[]
---@return ms.Tensor? bad
function optim._clip(params, max)
  layouts.check_of(params)
  local whole, parts, groups, order = by_group(params)
  if #order == 0 and #groups == 0 then return nil, order end
  local norm, bad
  if #groups > 0 then norm, bad = clip_parts(whole, parts, groups, max, 2)
  else norm, bad = core.clip_norm(whole, max, 2) end
  return norm, order, bad
end

-- In the join of a sharded model, ranks without inputs left clip their shards too.
local function tell_of_clipping(how, params, max, p)
  local s = sharded_join.of(how, params)
  if not s then return end
  sharded_join.announce(s, {
    call = "clip", how = how, names = sharded_join.names_of(s, params), max = max, p = p,
  })
end

sharded_join.define("clip", function(s, words)
  optim[words.how](sharded_join.parameters_of(s, words.names), words.max, words.p)
end)

--- Scales all gradients to a norm of at most max; the norm before is a device scalar.
---@param params ms.Module|ms.Parameter[]
---@param max number
---@param p? number 2 unless given
---@return ms.Tensor
function optim.clip_grad_norm(params, max, p)
  argument("clip_grad_norm", "max", max, "number")
  argument("clip_grad_norm", "p", p, "number?")
  local list, parameters = gradients_of("clip_grad_norm", params)
  tell_of_clipping("clip_grad_norm", parameters, max, p)
  local whole, parts, groups = by_group(parameters)
  if #groups > 0 then return clip_parts(whole, parts, groups, max, p or 2) end
  if #list == 0 then return core.zeros {} end
  return core.clip_norm(list, max, p)
end

---@param params ms.Module|ms.Parameter[]
---@param max number
function optim.clip_grad_value(params, max)
  if type(max) ~= "number" or not (max >= 0) then
    core.raise("clip_grad_value: max must be a number of 0 or more")
  end
  local list, parameters = gradients_of("clip_grad_value", params)
  tell_of_clipping("clip_grad_value", parameters, max)
  core.no_grad(function() for _, grad in ipairs(list) do grad:clamp_(-max, max) end end)
end

ownership.functions.clip_grad_norm = optim.clip_grad_norm
ownership.functions.clip_grad_value = optim.clip_grad_value

return options_of.closed(optim, "ms.optim")
