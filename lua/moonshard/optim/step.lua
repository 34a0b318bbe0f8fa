-- Steps of optimizers: scheduled rates, flags on the device that prevent a step, steps in backward
-- and after it, and steps in a join.
local core = require "moonshard.core"
local options_of = require "moonshard.base.options"
local check, argument = options_of.check, options_of.argument
local join = require "moonshard.parallel.ddp.join"
local log = require "moonshard.base.log"
local module = require "moonshard.nn.module"
local joined = require "moonshard.optim.sharded_join"
local sharded_join = require "moonshard.parallel.fsdp.join"
local layouts = require "moonshard.parallel.ddp.layouts"
local optimizers = require "moonshard.optim.optimizer"
local overlap = require "moonshard.parallel.overlap"
local shard = require "moonshard.optim.shard"
local unread = require "moonshard.parallel.overlap.unread"
local parts = require "moonshard.nn.parts"
local masters = require "moonshard.optim.masters"
local matrices = require "moonshard.optim.matrices"
local undo = require "moonshard.optim.undo"

---@class ms.Optimizer
local Optimizer = optimizers.class
local is_own, name_of = optimizers.is_own, optimizers.name_of
local place_of, refuse_scaled = optimizers.place_of, optimizers.refuse_scaled

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

-- Kinds in Lua do not handle the flag. If the flag is false, the parameter and its state are
-- restored. The kind gets a gradient of zeros then, so that no nan of the real gradient stays in
-- its state.
local function step_if(kind, p, grad, slot, group, only_if)
  local state, before = slot.state, p:clone()
  local restore = undo.begin(state)
  kind.step_param(p, core.where(only_if, grad, grad:zeros_like()), state, group, slot.taken)
  p:copy_(core.where(only_if, p, before))
  restore(only_if)
end

local function check_scaled(self, p)
  refuse_scaled(self.kind.name, p, self.slots[p].position,
    "step with scaler:step(optimizer), or call scaler:unscale(optimizer) before")
end

local function step_one(self, p, grad, group, only_if)
  check_scaled(self, p)
  local kind, slot = self.kind.second or self.kind, self.slots[p]
  if not is_own(self, p) then
    if not kind.native or matrices.has(self, p) then slot.taken = (slot.taken or -1) + 1 end
    return
  end
  if matrices.has(self, p) then
    return matrices.step(self, { { p = p, grad = grad, group = group } }, only_if)
  end
  if kind.native then
    -- Random numbers for rounding must not depend on the order in which parameters are stepped.
    if group.master == "none" then
      slot.draws, slot.salt = (slot.draws or 0) + 1,
        slot.salt or core.hash(name_of(p, slot.position))
    end
    if slot.place == nil then slot.place = place_of(self, p) or false end
    masters.follow(slot, p)
    kind.step_param(p, grad, slot.state, group, nil, only_if, slot.salt, slot.draws,
      slot.place or nil)
    masters.note(slot, p)
    return
  end
  slot.taken = (slot.taken or -1) + 1
  core.no_grad(function()
    if only_if then step_if(kind, p, grad, slot, group, only_if)
    else kind.step_param(p, grad, slot.state, group, slot.taken) end
  end)
  for _, name in ipairs(undo.tensor_names(slot.state)) do slot.state[name]:keep() end
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

-- For overlap.lua: steps one parameter in backward, as a part of a step that step() will end. If
-- backward still reads the parameter's old values, the step waits for the last such read; grad must
-- not change until then.
function Optimizer:_step_early(p, grad)
  local slot = self.slots[p]
  if slot.early then
    core.raise(("optimizer: parameter '%s' is stepped twice in one step"):format(p:name()))
  end
  parts.refuse_early(self.kind.name, p)
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
  parts.refuse_early(self.kind.name, p)
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
  if s.group:rank() ~= from then return joined.wait_for_join(s.group, from) end
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
  -- counted: slots of kinds in Lua that this step counts; a prevented step is subtracted later.
  -- cut: matrices of which ranks have pieces, whose pieces travel together.
  local counted, late, cut, consumed, now_stepped, any = {}, {}, {}, {}, {}, sent ~= nil
  if options.only_if then refuse_flag(self) end
  if not sent then parts.settle(self.order) end
  for i, group in ipairs(self.list) do
    local now = sent and setmetatable(sent.settings[i], { __index = group })
      or at_this_step(self, group)
    local together <close> = open_batch() -- luacheck: ignore together
    for _, p in ipairs(group.params) do
      local slot, grad = self.slots[p], p:grad()
      local is_cut = module.is_part(p) and matrices.has(self, p)
      if sent and sent.gradients then grad = sent.gradients[p] end
      if self.shard and p:requires_grad() and not slot.early and not slot.late then
        now_stepped[#now_stepped + 1] = p
      end
      if slot.late and grad then
        late[#late + 1] = { p = p, grad = grad, group = now, turn = slot.turn }
      elseif grad and not slot.early and is_cut then
        check_scaled(self, p)
        cut[#cut + 1] = { p = p, grad = grad, group = now }
      elseif grad and not slot.early then
        step_one(self, p, grad, now, options.only_if)
      end
      if grad and (matrices.has(self, p) or not (self.kind.second or self.kind).native) then
        counted[#counted + 1] = slot
      end
      if grad and not slot.late and not options.keep_grads and not (sent and sent.gradients) then
        if not is_cut then core.consume_grad(p) else consumed[#consumed + 1] = p end
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
  if #cut > 0 then matrices.step(self, cut, options.only_if) end
  for _, p in ipairs(consumed) do core.consume_grad(p) end
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

---@param options? { only_if?: ms.Tensor, keep_grads?: boolean }
function Optimizer:step(options)
  if core.in_hook() then
    core.raise("optimizer:step cannot be used inside a hook: use step_param")
  end
  options = check("optimizer:step", options, { only_if = "tensor", keep_grads = "boolean" })
  layouts.check_of("optimizer:step", self.order)
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

---@param p ms.Tensor
---@param grad? ms.Tensor p:grad() unless given
---@param options? { only_if?: ms.Tensor }
function Optimizer:step_param(p, grad, options)
  check("step_param", options, { only_if = "tensor" })
  argument("step_param", "p", p, "tensor")
  argument("step_param", "grad", grad, "tensor?")
  local slot = self.slots[p]
  if not slot then core.raise("step_param: the parameter is in no group of this optimizer") end
  if not core.in_hook() then layouts.check_of("step_param", { p }) end
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

---@return number
function Optimizer:lr() return scheduled(self, self.list[1]) end
