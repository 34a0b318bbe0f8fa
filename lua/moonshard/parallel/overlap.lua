-- When optimizers run. An optimizer steps on a stream of its own: early steps run in parallel with
-- the rest of backward, late steps in parallel with the next forward. The engine makes readers and
-- writers of the same memory wait for each other, so the moment of a step does not change the
-- weights. This file has the functions that ddp models, fsdp models and optimizers call; the parts
-- are in overlap/.
local core = require "moonshard.core"
local options_of = require "moonshard.base.options"
local chain = require "moonshard.parallel.overlap.chain"
local in_backward = require "moonshard.parallel.overlap.in_backward"
local owners = require "moonshard.parallel.overlap.step_owners"
local passes = require "moonshard.parallel.overlap.passes"
local planners = require "moonshard.parallel.planner"
local plans = require "moonshard.parallel.overlap.plans"
local source = require "moonshard.parallel.overlap.gradient_source"
local watch = require "moonshard.train.watch"
local link_state = require "moonshard.parallel.link_state"

local overlap = {
  overlap = plans.overlap, then_optimizer = chain.then_optimizer,
  in_backward = in_backward.in_backward, in_backward_of = in_backward.in_backward_of,
  stream = owners.stream, finish = passes.finish,
}

----------------------------------------------------------------------------- of ddp and fsdp models

--- For models: before the forward of a pass that reduces.
---@param s ms.GradientSource
function overlap.await(s)
  if s.adds_up and s.joining then return end
  for _, entry in ipairs(s.overlap.entries) do if entry.planner then plans.await(entry, s) end end
end

--- For models: when the forward of a pass has begun. reduces: whether the backward of this pass
--- reduces, and ends an accumulation.
---@param s ms.GradientSource
---@param reduces boolean
function overlap.begin(s, reduces)
  source.begin_pass(s)
  if s.adds_up and s.joining then return end
  for _, entry in ipairs(s.overlap.entries) do
    entry.optimizer:_end_released()
    if entry.link then entry.optimizer:_end_early()
    elseif reduces then
      if entry.optimizer:_has_early(s.trained) then
        core.raise(("overlap: a second pass that reduces, and %s has stepped in the first: call \z
          its step() before, or use no_sync or accumulate for all but the last")
          :format(entry.optimizer.kind.name))
      end
      plans.begin(entry, s)
    end
  end
end

-- For a chain that needs all gradients before the first step: raises if something would step in
-- backward.
local function refuse_early_links(s, links)
  local whole = s.whole
  for _, p in ipairs(s.trained) do
    if owners.own_of[p] then
      core.raise(("in_backward: parameter '%s' would be stepped before %s"):format(p:name(), whole))
    end
  end
  for _, link in ipairs(links) do
    if type(link) == "table" and link.optimizer then
      core.raise("then_optimizer: it would step a gradient before " .. whole)
    end
  end
end

--- For models, before they are wrapped: raises if the links of the chain cannot step for it.
---@param s ms.GradientSource
---@param links ms.Link[]
function overlap.check_links(s, links)
  if s.whole then refuse_early_links(s, links) end
  for _, link in ipairs(links) do
    local other = type(link) == "table" and link.optimizer and owners.linked_in[link.optimizer]
    if other and other ~= s then
      core.raise "then_optimizer: this optimizer steps in the chain of another model already: \z
        give each model its own"
    end
  end
end

--- For models: once there is a reducer. Fills s.overlap. links: those of the model's chain.
---@param s ms.GradientSource
---@param links ms.Link[]
function overlap.wrap(s, links)
  local held = setmetatable({ s }, { __mode = "v" })
  s.overlap = source.overlap_state(s)
  overlap.check_links(s, links)
  for _, p in ipairs(s.trained) do owners.wrapped_in[p] = s end
  -- Ignored parameters are not stepped in backward; PyTorch does the same.
  for _, p in ipairs(s.left_out) do owners.wrapped_in[p] = s end
  for _, link in ipairs(links) do
    if type(link) == "table" and link.optimizer then
      link.held, owners.linked_in[link.optimizer] = held, s
      table.insert(s.overlap.entries, { optimizer = link.optimizer, link = link, chosen = {} })
      if s.adds_up or not s.uses_all then passes.listen(s) end
    end
  end
  for _, p in ipairs(s.trained) do if owners.own_of[p] then return passes.listen(s) end end
end

--- For fsdp models, after a backward that failed: steps that it has taken stay, as steps of their
--- own.
---@param s ms.GradientSource
function overlap.reset(s)
  source.begin_pass(s)
  for _, entry in ipairs(s.overlap.entries) do entry.optimizer:_end_early() end
end

--- For fsdp models, before a join. A rank without inputs left steps its shards when the others call
--- step(), so nothing may step them without that call; plans step after backward meanwhile.
---@param s ms.GradientSource
function overlap.check_join(s)
  for _, p in ipairs(s.trained) do
    if owners.own_of[p] then
      core.raise(("join: parameter '%s' is stepped by in_backward, of which ranks without inputs \z
        left would not know: use optimizer:overlap(model, \"in_backward\")"):format(p:name()))
    end
  end
  for _, entry in ipairs(s.overlap.entries) do
    if entry.link then
      core.raise "join: then_optimizer steps in the model's chain, of which ranks without inputs \z
        left would not know: use optimizer:overlap(model, \"in_backward\")"
    end
  end
end

--- For models: when they are unwrapped.
---@param s ms.GradientSource
function overlap.unwrap(s)
  for _, p in ipairs(s.trained) do
    local entry = owners.plan_of[p]
    if entry then
      local slot = entry.optimizer.slots[p]
      slot.late, slot.turn = nil, nil
    end
    owners.plan_of[p], owners.wrapped_in[p] = nil, nil
  end
  for _, p in ipairs(s.left_out) do owners.wrapped_in[p] = nil end
  for _, entry in ipairs(s.overlap.entries) do
    entry.optimizer:_release_early()
    if entry.link then owners.linked_in[entry.optimizer] = nil end
    if entry.planner then watch.drop(entry.planner) end
  end
  s.overlap.entries = {}
end

-------------------------------------------------------------------------------------- of optimizers

-- The source that a ddp or fsdp model is; nil for anything else.
local function source_of(model)
  local meta = getmetatable(model)
  return type(meta) == "table" and (meta.ddp or meta.fsdp) or nil
end

---@param optimizer ms.Optimizer
---@param model ms.DDP|ms.FSDP
---@param policy string|ms.Overlap
function overlap.attach(optimizer, model, policy)
  options_of.argument("overlap", "optimizer", optimizer, "optimizer")
  local s = source_of(model)
  if not s then
    core.raise("overlap: a ddp or fsdp model is expected, not a " .. type(model)
      .. ": wrap it with ms.ddp or ms.fsdp")
  end
  local planner, mine = plans.planner_of(policy), {}
  if not s.reducer then core.raise "overlap: this model was unwrapped" end
  for _, entry in ipairs(s.overlap.entries) do
    if entry.optimizer == optimizer then
      core.raise(entry.link and "overlap: this optimizer steps in the model's chain already \z
        (then_optimizer): a plan and then_optimizer are two ways to say the same"
        or "overlap: this optimizer is registered with this model already")
    end
  end
  if owners.linked_in[optimizer] then
    core.raise "overlap: this optimizer steps in the chain of another model already \z
      (then_optimizer): give each model its own"
  end
  for _, p in ipairs(s.trained) do
    if optimizer.slots[p] then
      if owners.plan_of[p] or owners.own_of[p] then
        core.raise(("overlap: parameter '%s' is stepped by another overlapped optimizer already")
          :format(p:name()))
      end
      mine[#mine + 1] = p
    end
  end
  if #mine == 0 then
    core.raise "overlap: none of the optimizer's parameters is trained in this model"
  end
  local entry = {
    optimizer = optimizer, planner = planner, pass = 0, next = 1, chosen = {}, whole = s.whole,
  }
  if planner.always == "on_reduced" then plans.refuse_early(entry, "each bucket") end
  for _, p in ipairs(mine) do owners.plan_of[p] = entry end
  s.overlap.entries[#s.overlap.entries + 1] = entry
  watch.use(planner)
  passes.listen(s)
end

--- For optimizers: notes that a step uses a flag, because a policy must know this before it plans.
---@param p ms.Parameter
function overlap.note_flag(p) if owners.plan_of[p] then owners.plan_of[p].flag = true end end

--- For optimizers: whether a plan says when this parameter is stepped.
---@param p ms.Parameter
---@return boolean
function overlap.is_planned(p) return owners.plan_of[p] ~= nil end

--- For loops: the name, for messages, of what may step some of these parameters in backward, before
--- all gradients are complete; nil if nothing does.
---@param params ms.Parameter[]
---@return string?
function overlap.early(params)
  for _, p in ipairs(params) do
    if owners.own_of[p] then return "in_backward" end
    local s = owners.wrapped_in[p]
    for _, entry in ipairs(s and s.overlap.entries or {}) do
      if entry.link then return "then_optimizer" end
      local always = entry.planner.always
      if entry.optimizer.slots[p] and (always == nil or always == "on_reduced") then
        return "policy " .. planners.called(entry.planner)
      end
    end
  end
end

--- For optimizers: the flag on the device whether the gradients of these parameters are finite, if
--- a link of the chain checks them (hooks.nan_check).
---@param params ms.Parameter[]
---@return ms.Tensor?
function overlap.guard(params)
  local flag, seen = nil, {}
  for _, p in ipairs(params) do
    local s = owners.wrapped_in[p]
    if s and not seen[s] then
      seen[s] = true
      for _, state in ipairs(s.guards or {}) do
        local good = core.no_grad(function()
          return link_state.core(state):shared("bad", 1):eq(0):any()
        end)
        flag = flag and core.where(flag, good, flag) or good
      end
    end
  end
  return flag
end

--- For optimizers with the option shard: the ddp model of these parameters whose join runs.
---@param params ms.Parameter[]
---@return ms.GradientSource?
function overlap.joining(params)
  local found
  for _, p in ipairs(params) do
    local s = owners.wrapped_in[p]
    if s and s.joining and not s.adds_up and s ~= found then
      if found then
        core.raise "optimizer:step: a sharded optimizer steps inside the join of one model, not \z
          of two"
      end
      found = s
    end
  end
  return found
end

--- For clip_grad_norm: raises if some of these gradients were stepped already.
---@param params ms.Parameter[]
function overlap.note_norm(params)
  for _, p in ipairs(params) do
    local s, by = owners.wrapped_in[p], owners.own_of[p] and "in_backward"
    for _, entry in ipairs(s and s.overlap.entries or {}) do
      local slot = entry.optimizer.slots[p]
      if slot then
        entry.norm = true
        local what = entry.link and "then_optimizer" or "policy " .. planners.called(entry.planner)
        by = by or slot.early and what
      end
    end
    if by then
      core.raise(("clip_grad_norm: parameter '%s' was stepped in backward already, by %s: %s")
        :format(p:name(), by, plans.instead_of_norm))
    end
  end
end

return overlap
