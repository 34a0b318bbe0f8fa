-- When optimizers run: plans (numbers in, table out) that name a moment for each bucket, and the steps that follow them. An optimizer steps on a stream of its
-- own, so that what is stepped early runs beside the rest of backward, and what is stepped late beside the next forward; the engine lets readers and
-- writers of the same memory wait for each other, so every plan gives the same weights.
local core = require "moonshard.core"
local planners = require "moonshard.planner"
local watch = require "moonshard.watch"
local check = require "moonshard.options".check

local overlap = {}

---@class ms.Overlap
local Overlap = planners.kind("ms.Overlap", "overlap plan")

local moments = { "on_reduced", "after_backward", "before_next_use" }
local number_of = { on_reduced = 1, after_backward = 2, before_next_use = 3 }

local function is_ddp(model) return type(getmetatable(model)) == "table" and getmetatable(model).ddp ~= nil end

---------------------------------------------------------------------------------------------------------------------------- planners

--- A planner for the moments at which optimizers step. every: iterations for which a plan holds; each planning waits for the device once.
---@param given { name: string, every?: integer, plan: fun(view: ms.OverlapView): ms.OverlapEntry[] }
---@return ms.Overlap
function overlap.overlap(given) return planners.make(Overlap, "overlap", given) end

local function always(name, moment) return setmetatable({ name = name, every = 1, always = moment }, Overlap) end

-- Steps in backward what is reduced before backward ends; the rest would only delay the next forward.
local function early_where_hidden(view)
  local plan = {}
  for i, b in ipairs(view.buckets) do
    local hidden = b.ready_ms + b.reduce_ms < view.backward_ms and not view.needs_global_norm
    plan[i] = { bucket = b.index, step = hidden and "on_reduced" or "after_backward" }
  end
  return plan
end

local ready_made = {
  classic = always("classic", "after_backward"), in_backward = always("in_backward", "on_reduced"), deferred = always("deferred", "before_next_use"),
  early_where_hidden = overlap.overlap { name = "early_where_hidden", every = 50, plan = early_where_hidden },
}

-- A planner, the name of a ready-made one, or a file that returns one.
local function planner_of(policy) return planners.find(Overlap, policy, ready_made, { what = "overlap", thing = "policy", maker = "ms.overlap" }) end

------------------------------------------------------------------------------------------------------------------------------- views

-- The simulator has no times. These are modelled: a forward of 1 ms a MB of gradients, a backward of 2, a reduction at 1 GB/s behind 10 microseconds.
local function model_times(numbers, buckets, bytes)
  local before = 0
  numbers[1], numbers[2], numbers[3] = bytes / 1e6, 2 * bytes / 1e6, bytes / 1e7
  for i, b in ipairs(buckets) do
    before = before + b.bytes
    numbers[2 * i + 2], numbers[2 * i + 3] = numbers[2] * before / bytes, 0.01 + b.bytes / 1e6
  end
end

-- What a planner sees, or nil while no pass with these buckets was timed.
local function view_of(entry, s)
  core.synchronize()
  local times, bytes, numbers = s.reducer:stats(), 0, {}
  local buckets = s.reducer:bucket_times()
  for _, b in ipairs(buckets) do
    if not b.ready_ms and not (core.is_sim() and entry.timed) then return nil end
    bytes = bytes + b.bytes
  end
  if core.is_sim() then model_times(numbers, buckets, bytes)
  else
    numbers[1], numbers[2], numbers[3] = times.forward_ms, times.backward_ms, times.step_ms
    for i, b in ipairs(buckets) do numbers[2 * i + 2], numbers[2 * i + 3] = b.ready_ms, b.reduce_ms end
  end
  numbers = planners.mean_over_ranks(s, numbers)
  local view = {
    step = entry.pass, world_size = s.group:size(), forward_ms = numbers[1], backward_ms = numbers[2],
    needs_global_norm = (entry.norm or entry.flag or entry.whole) and true or false, buckets = {},
  }
  for i, b in ipairs(buckets) do
    local ready = numbers[2 * i + 2]
    -- Steps take time by their bytes; what is ready early in backward was used late in forward.
    view.buckets[i] = {
      index = b.index, bytes = b.bytes, ready_ms = ready, reduce_ms = numbers[2 * i + 3], step_ms = bytes > 0 and numbers[3] * b.bytes / bytes or 0,
      first_use_ms = view.backward_ms > 0 and view.forward_ms * math.max(0, 1 - ready / view.backward_ms) or 0,
    }
  end
  table.sort(view.buckets, function(a, b)
    if a.ready_ms ~= b.ready_ms then return a.ready_ms < b.ready_ms end
    return a.index < b.index
  end)
  return view
end

------------------------------------------------------------------------------------------------------------------------------- plans

-- Moments by bucket index, from a planner's answer; what is wrong with it is raised with the planner's line.
local function check_plan(entry, plan, count)
  local function refuse(format, ...) core.raise(("overlap plan %s: %s"):format(planners.line(entry.planner), format:format(...))) end
  if type(plan) ~= "table" then refuse("it returned %s; a list of { bucket = index, step = moment } is expected", plan == nil and "nothing" or "a " .. type(plan)) end
  local chosen = {}
  for i, item in ipairs(plan) do
    local index = type(item) == "table" and item.bucket
    if math.type(index) ~= "integer" or index < 0 or index >= count then
      refuse("entry %d: there is no bucket %s; they are 0 to %d", i, tostring(index), count - 1)
    end
    if chosen[index] then refuse("entry %d: bucket %d is there twice", i, index) end
    if not number_of[item.step] then
      local near = type(item.step) == "string" and core.nearest(item.step, moments)
      refuse("entry %d: unknown step '%s'%s; it is one of %s", i, tostring(item.step), near and (": did you mean '%s'?"):format(near) or "", table.concat(moments, ", "))
    end
    chosen[index] = item.step
  end
  for index = 0, count - 1 do if not chosen[index] then refuse("bucket %d is missing", index) end end
  return chosen
end

-- Every rank must have planned the same.
local function compare(entry, s, chosen, count)
  if s.group:size() == 1 then return end
  local own = {}
  for index = 0, count - 1 do own[index + 1] = number_of[chosen[index]] end
  local all = s.group:all_gather(core.tensor({ own }, "i64")):sync():to_table()
  if s.reducer:is_fake() then return end
  for rank, row in ipairs(all) do
    for i, number in ipairs(row) do
      if number ~= all[1][i] then
        core.raise(("overlap plan %s: ranks planned differently: bucket %d is to step %s on rank 0 and %s on rank %d: plan from the view alone"):format(
          planners.line(entry.planner), i - 1, moments[all[1][i]], moments[number], rank - 1))
      end
    end
  end
end

-- Early steps cannot wait for what is known only behind backward.
local function check_early(entry, chosen)
  local early
  for index, moment in pairs(chosen) do if moment == "on_reduced" then early = math.min(early or index, index) end end
  if early and entry.whole then
    core.raise(("overlap: policy %s steps bucket %d in backward, before %s: use \"classic\" or \"deferred\""):format(entry.planner.name, early, entry.whole))
  end
  if early and entry.norm then
    core.raise(("overlap: policy %s steps bucket %d in backward, but clip_grad_norm needs all gradients first: use hooks.clip { scope = 'lagged' }, 'classic' or 'deferred'")
      :format(entry.planner.name, early))
  end
  if early and entry.flag then
    core.raise(("overlap: policy %s steps bucket %d in backward, but step's only_if (of a loss scaler) is known only behind it: use 'classic' or 'deferred'")
      :format(entry.planner.name, early))
  end
end

-- Tells each slot its moment, and its turn among those that step late: what forward uses first comes first.
local function apply(entry, s, chosen, buckets)
  entry.chosen = chosen
  for _, b in ipairs(buckets) do
    for _, at in ipairs(b.positions) do
      local slot = entry.optimizer.slots[s.trained[at]]
      if slot then slot.late, slot.turn = chosen[b.index] == "before_next_use", -b.index end
    end
  end
end

local function layout_of(buckets)
  local parts = {}
  for i, b in ipairs(buckets) do parts[i] = table.concat(b.positions, ",") end
  return table.concat(parts, ";")
end

local function plan_now(entry, s, view, count)
  core.hook_enter()
  local ok, plan = pcall(entry.planner.plan, view)
  core.hook_leave()
  if not ok then core.raise(("overlap plan %s: %s"):format(planners.line(entry.planner), tostring(plan))) end
  local chosen = check_plan(entry, plan, count)
  compare(entry, s, chosen, count)
  check_early(entry, chosen)
  return chosen
end

-- The first pass is recorded and runs classic; a plan holds for `every` passes, or until buckets are rebuilt.
local function plan_pass(entry, s)
  local planner, pass = entry.planner, entry.pass
  local buckets = s.reducer:bucket_times()
  local layout = layout_of(buckets)
  -- Ranks without inputs left cannot take part in planning: what was planned before holds on, for its buckets. These passes do not count, as ranks have
  -- different numbers of them.
  if s.joining and not planner.always then
    if entry.layout and entry.layout ~= layout then
      entry.layout = nil
      apply(entry, s, {}, buckets)
    end
    return check_early(entry, entry.chosen)
  end
  entry.pass = pass + 1
  entry.timed, entry.last = entry.last == layout, layout        -- whether a pass with these buckets went before
  if pass == 0 then return end
  local fresh = entry.layout ~= layout or entry.version ~= planner.version
  if not fresh and (planner.always or pass < entry.next) then return check_early(entry, entry.chosen) end
  local chosen = {}
  if planner.always then
    for _, b in ipairs(buckets) do chosen[b.index] = planner.always end
  else
    local view = view_of(entry, s)
    if not view then
      entry.layout, entry.next = nil, pass + 1
      return apply(entry, s, {}, buckets)
    end
    chosen = watch.tried(planner, function() return plan_now(entry, s, view, #buckets) end)
  end
  check_early(entry, chosen)
  entry.layout, entry.next, entry.version = layout, pass + planner.every, planner.version
  apply(entry, s, chosen, buckets)
end

---------------------------------------------------------------------------------------------------------------------- in each iteration

local entry_of = setmetatable({}, { __mode = "k" })             -- parameter -> its entry
local own_of = setmetatable({}, { __mode = "k" })               -- parameter -> { list of optimizers, keep = whether its gradient stays }
local wrapped_in = setmetatable({}, { __mode = "kv" })          -- parameter -> the state of the ddp model that reduces or ignores it, while that lives
local linked_in = setmetatable({}, { __mode = "kv" })           -- optimizer -> that of the model in whose chain it steps

--- The stream on which optimizers step.
---@return ms.Stream
function overlap.stream() return core.stream "optimizer" end

-- Steps the optimizers that a parameter has for itself; its gradient is gone then.
local function step_own(p, own)
  local grad = p:grad()
  if not grad then return end
  for _, optimizer in ipairs(own.list) do optimizer:_step_alone(p, grad) end
  if not own.keep then core.consume_grad(p) end
end

-- Where the chain clips by the norm of all, or steps may be skipped, gradients are complete behind the last bucket only.
local function refuse_whole(s, positions)
  for _, at in ipairs(positions) do
    if own_of[s.trained[at]] then
      core.raise(("in_backward: parameter '%s' would be stepped before %s"):format(s.trained[at]:name(), s.how.whole))
    end
  end
end

-- Whether a parameter is used in this pass: true or false where it is known whether any rank uses it, nil where only others may; for what all ranks must
-- do alike (by_all) nil, too, where only this rank knows.
local function is_used(s, at, by_all)
  if s.uses_all then return true end
  local used, known = s.reducer:is_used(at)
  if known or used and not by_all then return used end
  return nil
end

-- The optimizers that a parameter of the bucket has for itself.
local function step_owns(s, positions)
  for _, at in ipairs(positions) do
    local p = s.trained[at]
    local own = own_of[p]
    local used = own and is_used(s, at)
    if used and s.stepped[p] then
      core.raise(("in_backward: parameter '%s' got another gradient behind the forward whose step it has taken: the first iteration of a static graph cannot know how many "
        .. "backward passes follow; use optimizer:overlap(model, \"in_backward\") and step()"):format(p:name()))
    elseif used and p:grad() then
      step_own(p, own)
      s.stepped[p] = true
    elseif own and used == nil and not s.stepped[p] then s.unstepped[#s.unstepped + 1] = at end
  end
end

local function on_reduced(s, index, positions)
  overlap.stream():run(function()
    if s.how.whole then refuse_whole(s, positions) end
    step_owns(s, positions)
    for _, entry in ipairs(s.overlaps) do
      -- What is not stepped here, step() does: what a sharded optimizer sends must not depend on what this rank has used, and inside join ranks without inputs left
      -- need other ranks' gradients for it.
      local shard = entry.optimizer.shard
      if entry.chosen[index] == "on_reduced" and not (shard and s.joining) then
        local stepped = {}
        for _, at in ipairs(positions) do
          local p = s.trained[at]
          local grad = entry.optimizer.slots[p] and is_used(s, at, shard) and p:grad()
          if grad then
            entry.optimizer:_step_early(p, grad)
            stepped[#stepped + 1] = p
          end
        end
        entry.optimizer:_share(stepped)
      end
    end
  end)
end

--- Behind the last bucket, when it is known which parameters any rank has used: a gradient that only others have brought is this rank's by now.
---@param s table the ddp model's state
function overlap.finish(s)
  local owns, postponed = s.unstepped, s.postponed
  if #owns == 0 and #postponed == 0 then return end
  s.unstepped, s.postponed = {}, {}
  overlap.stream():run(function()
    for _, at in ipairs(owns) do
      local p = s.trained[at]
      if s.reducer:is_used(at) and p:grad() then
        step_own(p, own_of[p])
        s.stepped[p] = true
      end
    end
    for _, part in ipairs(postponed) do
      local stepped = {}
      for _, item in ipairs(part.items) do
        if s.reducer:is_used(item.at) and not part.optimizer.slots[item.p].early then
          part.optimizer:_step_early(item.p, item.grad)
          stepped[#stepped + 1] = item.p
        end
      end
      part.optimizer:_share(stepped)
    end
  end)
end

--- For ddp: behind the reducer's forward. reduces: whether the backward of this pass does.
---@param s table the ddp model's state
---@param reduces boolean
function overlap.begin(s, reduces)
  s.stepped, s.unstepped, s.postponed = {}, {}, {}
  for _, entry in ipairs(s.overlaps) do
    entry.optimizer:_end_released()
    if entry.link then entry.optimizer:_end_early()
    elseif reduces then
      if entry.optimizer:_has_early() then
        core.raise(("overlap: a second pass that reduces, and %s has stepped in the first: call its step() before, or use no_sync or accumulate for all but the last")
          :format(entry.optimizer.kind.name))
      end
      plan_pass(entry, s)
    end
  end
end

-- Lets the reducer tell of each bucket; a model of which nothing steps early pays nothing for it.
local function listen(s)
  if s.listens then return end
  s.listens = true
  -- The reducer must not hold the model that holds it: both would go in one collection, the reducer first.
  local held = setmetatable({ s }, { __mode = "v" })
  s.reducer:on_reduced(function(index, positions) if held[1] then on_reduced(held[1], index, positions) end end,
    function() if held[1] then overlap.finish(held[1]) end end)
end

--- For ddp: once there is a reducer. links: those of its chain.
---@param s table the ddp model's state; trained: its parameters, as the reducer counts them
---@param links ms.Link[]
function overlap.wrap(s, links)
  local held = setmetatable({ s }, { __mode = "v" })
  s.overlaps, s.uses_all, s.position_of = {}, not (s.options.find_unused or s.options.static_graph), {}
  -- Of parameters with optimizers of their own: those stepped behind this forward, and positions of those that wait; what then_optimizer has put off.
  s.stepped, s.unstepped, s.postponed = {}, {}, {}
  for at, p in ipairs(s.trained) do wrapped_in[p], s.position_of[p] = s, at end
  for _, p in ipairs(s.left_out) do wrapped_in[p] = s end       -- as with the peers, what is ignored is not stepped in backward
  for _, link in ipairs(links) do
    if type(link) == "table" and link.optimizer then
      if s.how.whole then core.raise("then_optimizer: it would step a gradient before " .. s.how.whole) end
      local other = linked_in[link.optimizer]
      if other and other ~= s then core.raise "then_optimizer: this optimizer steps in the chain of another model already: give each model its own" end
      link.held, linked_in[link.optimizer] = held, s
      s.overlaps[#s.overlaps + 1] = { optimizer = link.optimizer, link = link, chosen = {} }
      if not s.uses_all then listen(s) end
    end
  end
  for _, p in ipairs(s.trained) do if own_of[p] then return listen(s) end end
end

--- For ddp: when it is unwrapped.
---@param s table the ddp model's state
function overlap.unwrap(s)
  for _, p in ipairs(s.trained) do
    local entry = entry_of[p]
    if entry then
      local slot = entry.optimizer.slots[p]
      slot.late, slot.turn = nil, nil
    end
    entry_of[p], wrapped_in[p] = nil, nil
  end
  for _, p in ipairs(s.left_out) do wrapped_in[p] = nil end
  for _, entry in ipairs(s.overlaps) do
    entry.optimizer:_release_early()
    if entry.link then linked_in[entry.optimizer] = nil end
    if entry.planner then watch.drop(entry.planner) end
  end
  s.overlaps = {}
end

-------------------------------------------------------------------------------------------------------------------------- registering

--- The engine runs this optimizer's steps of the model's parameters by the policy, from the second reduced pass on.
---@param optimizer ms.Optimizer
---@param model ms.DDP
---@param policy string|ms.Overlap
function overlap.attach(optimizer, model, policy)
  if not is_ddp(model) then core.raise("overlap: a ddp model is expected, not a " .. type(model) .. ": wrap it with ms.ddp") end
  local s, planner, mine = getmetatable(model).ddp, planner_of(policy), {}
  if not s.reducer then core.raise "overlap: this model was unwrapped" end
  for _, entry in ipairs(s.overlaps) do
    if entry.optimizer == optimizer then
      core.raise(entry.link and "overlap: this optimizer steps in the model's chain already (then_optimizer): a plan and then_optimizer are two ways to say the same"
        or "overlap: this optimizer is registered with this model already")
    end
  end
  for _, p in ipairs(s.trained) do
    if optimizer.slots[p] then
      if entry_of[p] or own_of[p] then core.raise(("overlap: parameter '%s' is stepped by another overlapped optimizer already"):format(p:name())) end
      mine[#mine + 1] = p
    end
  end
  if #mine == 0 then core.raise "overlap: none of the optimizer's parameters is trained in this model" end
  local entry = { optimizer = optimizer, planner = planner, pass = 0, next = 1, chosen = {}, whole = s.how.whole }
  for _, p in ipairs(mine) do entry_of[p] = entry end
  s.overlaps[#s.overlaps + 1] = entry
  watch.use(planner)
  listen(s)
end

--- For optimizers: what a step needs to be known before plans can be made.
---@param p ms.Parameter
function overlap.note_flag(p) if entry_of[p] then entry_of[p].flag = true end end

--- For optimizers: the device's flag whether these parameters' gradients are as they should be, where links look for that.
---@param params ms.Parameter[]
---@return ms.Tensor?
function overlap.guard(params)
  local flag, seen = nil, {}
  for _, p in ipairs(params) do
    local s = wrapped_in[p]
    if s and not seen[s] then
      seen[s] = true
      for _, state in ipairs(s.how.guards or {}) do
        local good = core.no_grad(function() return require "moonshard.link_state".core(state):shared("bad", 1):eq(0):any() end)
        flag = flag and core.where(flag, good, flag) or good
      end
    end
  end
  return flag
end

--- For sharded optimizers: the ddp model of these parameters whose join runs.
---@param params ms.Parameter[]
---@return table? its state
function overlap.joining(params)
  local found
  for _, p in ipairs(params) do
    local s = wrapped_in[p]
    if s and s.joining and s ~= found then
      if found then core.raise "optimizer:step: a sharded optimizer steps inside the join of one model, not of two" end
      found = s
    end
  end
  return found
end

--- For clip_grad_norm: raises if some of these gradients were stepped already.
---@param params ms.Parameter[]
function overlap.note_norm(params)
  for _, p in ipairs(params) do
    local entry = entry_of[p]
    local early = own_of[p] ~= nil
    if entry then
      entry.norm = true
      early = entry.optimizer.slots[p].early
    elseif wrapped_in[p] then
      for _, other in ipairs(wrapped_in[p].overlaps) do
        local slot = other.link and other.optimizer.slots[p]
        early = early or slot and slot.early
      end
    end
    if early then
      core.raise(("clip_grad_norm: parameter '%s' was stepped in backward already: clip in the chain (hooks.clip { scope = 'lagged' }), or use 'classic'"):format(p:name()))
    end
  end
end

--- An optimizer of its own for each parameter, stepped in backward when the gradient is complete: behind its reduction in a ddp model (wrapped before or
--- behind this call), and in the last pass of accumulate only. The gradient is gone then, unless options.keep_grads.
---@param make fun(params: ms.Params, options?: ms.OptimizerOptions): ms.Optimizer
---@param params ms.Parameter[]
---@param options? ms.OptimizerOptions and keep_grads
---@return ms.Optimizer[] in the order of params, for saving and for changing hyper-parameters
function overlap.in_backward(make, params, options)
  local module = require "moonshard.nn.module"
  if type(make) ~= "function" then core.raise("in_backward: a function that makes an optimizer is expected (optim.adamw), not a " .. type(make)) end
  if core.in_hook() then core.raise "in_backward cannot be used inside a hook" end
  if module.is_module(params) then params = params:parameters() end
  if type(params) ~= "table" or #params == 0 then core.raise "in_backward: a list of parameters is expected" end
  local own_options, keep, made = {}, false, {}
  for name, value in pairs(options or {}) do
    if name == "keep_grads" then keep = value else own_options[name] = value end
  end
  for i, p in ipairs(params) do
    if not core.is_tensor(p) or not p:requires_grad() then core.raise(("in_backward: parameter %d needs no gradient"):format(i)) end
    if entry_of[p] then core.raise(("in_backward: parameter '%s' is stepped by an overlapped optimizer already"):format(p:name())) end
    local given = {}
    for name, value in pairs(own_options) do given[name] = value end
    made[i] = make({ p }, given)
    if made[i].shard then core.raise "in_backward: an optimizer of one parameter cannot be sharded: use optimizer:overlap(model, \"in_backward\")" end
  end
  for i, p in ipairs(params) do
    local own = own_of[p]
    if own then
      own.list[#own.list + 1] = made[i]
      own.keep = own.keep or keep
    else
      own_of[p] = { list = { made[i] }, keep = keep }
      if wrapped_in[p] then listen(wrapped_in[p]) end
      p:on_grad_ready(function(ready)
        -- own_of is asked anew: the hook must not hold the parameter that it belongs to.
        if wrapped_in[ready] or module.is_accumulating() then return end
        overlap.stream():run(function() step_own(ready, own_of[ready]) end)
      end)
    end
  end
  return made
end

--- The optimizers that in_backward gave to the parameters of a module, in order of parameters.
---@param model ms.Module
---@return { parameter: ms.Parameter, optimizers: ms.Optimizer[] }[]
function overlap.in_backward_of(model)
  local list = {}
  for _, p in ipairs(model:parameters()) do
    if own_of[p] then list[#list + 1] = { parameter = p, optimizers = { table.unpack(own_of[p].list) } } end
  end
  return list
end

--------------------------------------------------------------------------------------------------------------------------- as a link

local Then = { __name = "ms.Link" }
Then.__index = Then
Then.__tostring = function() return "then_optimizer" end

function Then.__call(self, bucket, next, _, is_first)
  local parameters, optimizer, s = bucket:parameters(), self.optimizer, self.held and self.held[1]
  if s and s.shadow and not optimizer.shard then return next(bucket) end
  return next(bucket):and_then(function(reduced)
    local at, total = 0, 0
    for _, p in ipairs(parameters) do total = total + p:numel() end
    if not core.is_tensor(reduced) or reduced:numel() ~= total then
      local got = core.is_tensor(reduced) and tostring(reduced) or "a " .. type(reduced)
      error(("then_optimizer: the links behind it gave %s; it needs all %d gradients of the bucket"):format(got, total), 0)
    end
    overlap.stream():run(function()
      local stepped, later = {}, {}
      for _, p in ipairs(parameters) do
        local count = p:numel()
        if optimizer.slots[p] and (not self.chosen or self.chosen[p]) then
          local grad = reduced:narrow(1, at + 1, count):view(table.unpack(p:shape())):to(p:dtype())
          local used = not s or is_used(s, s.position_of[p], optimizer.shard)
          local again = used == nil and optimizer.slots[p].early and is_used(s, s.position_of[p])
          if used or again then
            optimizer:_step_early(p, grad)
            stepped[#stepped + 1] = p
          elseif used == nil then later[#later + 1] = { p = p, at = s.position_of[p], grad = is_first and grad or grad:clone() } end -- links before it may write there
        end
        at = at + count
      end
      optimizer:_share(stepped)
      if #later > 0 then s.postponed[#s.postponed + 1] = { optimizer = optimizer, items = later } end
    end)
  end)
end

--- Steps on what the later links returned, bucket by bucket, all of the optimizer's parameters or `params` only. The optimizer's step(), where it is called,
--- finishes the others; where it is not, a step ends with the next forward.
---@param options { optimizer: ms.Optimizer, params?: ms.Parameter[] }
---@return ms.Link
function overlap.then_optimizer(options)
  options = check("hooks.then_optimizer", options, { "optimizer", "params" })
  local optimizer, chosen = options.optimizer, nil
  if type(optimizer) ~= "table" or not optimizer.slots then core.raise("hooks.then_optimizer: optimizer must be an optimizer, not " .. type(optimizer)) end
  if options.params then
    chosen = {}
    for i, p in ipairs(options.params) do
      if not optimizer.slots[p] then core.raise(("hooks.then_optimizer: params[%d] is in no group of this optimizer"):format(i)) end
      chosen[p] = true
    end
  end
  return setmetatable({ optimizer = optimizer, chosen = chosen }, Then)
end

return overlap
