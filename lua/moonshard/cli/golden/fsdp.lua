-- Golden data of sharded training: losses, gradients, states and weights of what PyTorch's
-- fully_shard computed. Results depend neither on the strategy nor on the layout.
local ms = require "moonshard"
local models = require "moonshard.cli.golden.models"
local parts = require "moonshard.parallel.shard_piece"
local optimizers = require "moonshard.cli.golden.optimizers"
local report = require "moonshard.cli.golden.report"

local fsdp = {}

local entries = {}
for name in ([[case file model ranks strategy reshard_after_forward mesh config precision batch time
    steps micro_batches accumulate clip_grad_norm norm_type optimizer recompute skip route
    divide_factor has hyperparameters frozen wrap inputs losses rank_losses grad_norms tolerance
    noise grad_holds_in differences state_steps of_no_order]]):gmatch "%S+" do
  entries[name] = true
end

---@param case table
---@return string
function fsdp.name(case) return tostring(case.case) end

------------------------------------------------------------------------------------------- models

local Branch = ms.nn.class "GoldenBranch"
function Branch:init(inputs, outputs, branches)
  if branches == 2 then
    self.a, self.b = ms.nn.Linear(inputs, outputs), ms.nn.Linear(inputs, outputs)
  else
    self.weight = ms.nn.Parameter(ms.zeros { outputs, inputs })
    self.bias = ms.nn.Parameter(ms.zeros { outputs })
  end
end
function Branch:forward(x, route)
  if self.a then return (route == 1 and self.b or self.a)(x) end
  return x:linear(self.weight, self.bias)
end

local MLP = ms.nn.class "GoldenMLP"
function MLP:init(config)
  local sizes, layers = config.sizes, {}
  for i = 1, #sizes - 1 do layers[i] = Branch(sizes[i], sizes[i + 1], config.branches) end
  self.layers = ms.nn.List(layers)
  self.scale = ms.nn.Parameter(ms.ones { 1 })
  self.shift = ms.nn.Parameter(ms.zeros { sizes[#sizes] })
end
function MLP:forward(x, skip, route)
  for i = 1, #self.layers do
    if not skip[i] then
      x = self.layers[i](x, route[i])
      if i < #self.layers then x = x:tanh() end
    end
  end
  return x * self.scale + self.shift
end

local function make(case)
  if case.model ~= "mlp" then return models.make(case, { recompute = case.recompute or nil }) end
  report.known_keys("configuration", case.config, { sizes = 1, branches = 1 })
  return MLP(case.config)
end

-- Which modules are units.
local function wrap_of(case)
  if case.wrap == "model" then return function() return false end end
  if case.wrap ~= "blocks" then error(("unknown wrap '%s'"):format(tostring(case.wrap)), 0) end
  return { class = case.model == "mlp" and "GoldenBranch" or { "GPT2Block", "LlamaBlock" } }
end

local function shard(case, model, how)
  local shards, replicas
  local strategy = how.strategy or case.strategy
  if case.mesh and strategy:match "^hybrid" then
    shards, replicas = ms.world():levels(case.mesh[2])
  end
  local options = {
    strategy = strategy, wrap = wrap_of(case), prefetch = how.prefetch,
    accumulate = case.accumulate,
    shard_group = shards, replica_group = replicas, divide_factor = case.divide_factor,
  }
  -- A number is the size of the group in which shards are kept after forward.
  if math.type(case.reshard_after_forward) == "integer" and strategy == case.strategy then
    options.reshard_after_forward = case.reshard_after_forward
  end
  if how.layout then options.layout = how.layout end
  if case.precision then
    report.known_keys("precision", case.precision,
      { param = 1, reduce = 1, output = 1, cast_inputs = 1, keep = 1 })
    options.precision = case.precision
  end
  return ms.fsdp(model, options)
end

-------------------------------------------------------------------------------------- whole tensors

-- What the ranks have pieces of, as a whole, by name. piece(p, name): this rank's tensor, or nil.
local function whole(model, piece)
  local found, by_name = {}, {}
  for _, item in ipairs(model:named_parameters()) do by_name[item.name] = item.parameter end
  for _, part in ipairs(model:pieces()) do
    local p = by_name[part.name]
    local t = piece(p, part.name)
    if t then
      local elements = 1
      for _, size in ipairs(part.shape) do elements = elements * size end
      if t:numel() == elements and part.count == elements then
        -- Every rank that has all of it has the same.
        found[part.name] = { t = t:reshape(-1), part = part, elements = elements }
      else found[part.name] = { t = t, part = part, elements = elements } end
    end
  end
  local group, result = model:shard_group(), {}
  for name, one in ms.sorted_pairs(found) do
    local full = ms.zeros { one.elements }
    if one.part.count > 0 then
      full:narrow(1, one.part.first + 1, one.part.count):copy_(one.t:reshape(-1))
    end
    if group:size() > 1 then group:all_reduce(full, "sum"):value() end
    result[name] = full:reshape(one.part.shape)
  end
  return result
end

------------------------------------------------------------------------------------------ comparing

local function squares(t) return t:reshape(-1):dot(t:reshape(-1)):item() end

-- Compares tensors by name; the elements of `noise` are compared by a rule of their own. rms: the
-- name of the tolerance for the root mean square over all tensors; start: what golden moved from.
local function compare(case, found, what, ours, golden, options)
  local tolerance = case.tolerance
  local difference, size = 0, 0
  local seen = {}
  for name in pairs(golden) do seen[name] = true end
  for name in pairs(ours) do seen[name] = true end
  for name in ms.sorted_pairs(seen) do
    local a, b, label = ours[name], golden[name], what .. "." .. name
    local noise = case.noise and case.noise[name]
    if a and b and noise then
      local from, count = noise[1], noise[2]
      local x, y = a:narrow(1, from + 1, count), b:narrow(1, from + 1, count)
      options.noise(label, x, y, name)
      local function rest(t)
        return ms.cat { t:narrow(1, 1, from), t:narrow(1, from + count + 1,
          t:numel() - from - count) }
      end
      a, b = rest(a), rest(b)
    end
    options.each(label, a, b)
    if a and b and a:numel() == b:numel() and tolerance[what .. "_rms"] then
      difference = difference + squares(a - b)
      local reference = b
      if options.start then
        local s = options.start[name]
        if noise then
          s = ms.cat { s:narrow(1, 1, noise[1]), s:narrow(1, noise[1] + noise[2] + 1,
            s:numel() - noise[1] - noise[2]) }
        end
        reference = b - s
      end
      size = size + squares(reference)
    end
  end
  if tolerance[what .. "_rms"] then
    found:number(what .. "_rms", math.sqrt(difference / size), 0, tolerance[what .. "_rms"])
  end
end

local function with_prefix(tensors, prefix)
  local list = {}
  for name, t in pairs(tensors) do
    if name:sub(1, #prefix) == prefix then list[name:sub(#prefix + 1)] = t end
  end
  return list
end

------------------------------------------------------------------------------------------ training

-- Consecutive rows: sizes that differ by at most one, larger first.
local function slice(rows)
  local rank, size = ms.rank(), ms.world_size()
  local least, more = rows // size, rows % size
  return rank * least + math.min(rank, more), least + (rank < more and 1 or 0)
end

local function skipped_at(case, step)
  local list = {}
  for _, pair in ipairs(case.skip or {}) do
    if pair[1] == step then list[pair[2] + 1] = true end
  end
  return list
end

-- Losses are computed in f32 from what the model returns, which rank 0 compares at step 0.
local function returned(case, tensors, found, step, part, result)
  if step == 0 and part == 1 and tensors.logits and ms.rank() == 0 then
    if result:dtype() ~= tensors.logits:dtype() then
      found:fail("logits", ("ours are %s, the file's %s"):format(result:dtype(),
        tensors.logits:dtype()))
    end
    found:relative("logits", result:detach():to "f32", tensors.logits:to "f32",
      case.tolerance.logits)
  end
  return result:to "f32"
end

-- One pass forward and backward for each micro-batch; the rank's own loss.
local function pass(model, case, tensors, step, found)
  local rows, own = case.batch // case.micro_batches, 0
  local function run(part, ...) return returned(case, tensors, found, step, part, model(...)) end
  local first, count = slice(rows)
  local weight = count * ms.world_size() / rows
  model:accumulate(case.micro_batches, function(part)
    local at = (part - 1) * rows + first + 1
    local loss
    if case.model == "mlp" then
      local x = tensors.x[step + 1]:narrow(1, at, count)
      local y = tensors.y[step + 1]:narrow(1, at, count)
      local route = case.route and case.route[step + 1][ms.rank() + 1] or {}
      loss = run(part, x, skipped_at(case, step), route):mse_loss(y:to "f32")
    else
      local tokens = tensors.tokens[step + 1]:narrow(1, at, count)
      loss = run(part, tokens:narrow(2, 1, case.time))
        :cross_entropy(tokens:narrow(2, 2, case.time))
    end
    own = own + loss:detach() / case.micro_batches
    loss = loss / case.micro_batches
    if weight ~= 1 then loss = loss * weight end
    loss:backward()
  end)
  return own, weight
end

-- losses of all ranks, in order, as a table
local function gather_losses(own)
  local all = ms.zeros { ms.world_size() }
  all:narrow(1, ms.rank() + 1, 1):copy_(own:reshape(1))
  return ms.world():all_reduce(all, "sum"):value():to_table()
end

local function check_step(case, found, step, model, own, weight, norm)
  local t = case.tolerance
  local each = gather_losses(own)
  for rank, loss in ipairs(each) do
    found:number(("rank_losses[%d][%d]"):format(step, rank - 1), loss,
      case.rank_losses[step + 1][rank], t.rank_losses)
  end
  local mean = ms.world():all_reduce(own * weight, "avg"):value():item()
  found:number(("losses[%d]"):format(step), mean, case.losses[step + 1], t.losses)
  found:number(("grad_norms[%d]"):format(step), norm, case.grad_norms[step + 1], t.grad_norms, true)
end

-- Every element is a number that the dtype holds: the reduction was in this dtype.
local function check_rounded(found, gradients, dtype)
  for name, t in ms.sorted_pairs(gradients) do
    if not t:to(dtype):to "f32":eq(t):all():item() then
      found:fail("grad." .. name, "it has numbers that " .. dtype .. " does not hold")
    end
  end
end

-- PyTorch made these cases with set_reduce_scatter_unused_params, which gives parameters that no
-- rank uses zeros, and momentum moves them.
local function zeros_for_nil(parameters)
  for _, p in ipairs(parameters) do
    if not p:grad() then p:set_grad(p:detach():zeros_like()) end
  end
end

local function train(case, tensors, found, how)
  report.known_keys("entry", case, entries)
  local inner = make(case)
  inner:load_state(with_prefix(tensors, "init."))
  local frozen = {}
  for _, name in ipairs(case.frozen or {}) do frozen[name] = true end
  for _, item in ipairs(inner:named_parameters()) do
    if frozen[item.name] then item.parameter:requires_grad_(false) end
  end
  local model = shard(case, inner, how)
  local trained = model:parameters(function(p) return p:requires_grad() end)
  local optimizer = optimizers.make(case.optimizer, case.hyperparameters, trained)
  local t = case.tolerance
  for step in ms.steps(case.steps) do
    local own, weight = pass(model, case, tensors, step, found)
    if case.route then zeros_for_nil(trained) end
    local p = case.norm_type == "inf" and math.huge or case.norm_type or 2
    local norm = model:clip_grad_norm(case.clip_grad_norm or math.huge, p):item()
    check_step(case, found, step, model, own, weight, norm)
    if step == 0 and t.grad then
      local gradients = whole(model, function(one) return one:grad() end)
      if case.grad_holds_in then check_rounded(found, gradients, case.grad_holds_in) end
      compare(case, found, "grad", gradients, with_prefix(tensors, "grad."), {
        each = function(what, a, b) found:relative(what, a, b, t.grad) end,
        noise = function(what, a) found:absolute(what, a, a:zeros_like(), t.grad_noise) end,
      })
    end
    optimizer:step()
    optimizer:zero_grad()
  end
  local pieces = model:state { kind = "sharded", live = true }
  local weights = whole(model, function(_, name)
    local own = pieces[name]
    return (parts.is(own) and own.tensor or own):detach()
  end)
  compare(case, found, "final", weights, with_prefix(tensors, "final."), {
    start = with_prefix(tensors, "init."),
    each = function(what, a, b) found:absolute(what, a, b, t.final) end,
    noise = function(what, a, b) found:absolute(what, a, b, t.final_noise) end,
  })
  for _, key in ipairs { "exp_avg", "exp_avg_sq", "momentum_buffer" } do
    if t[key] then
      local states = whole(model, function(one)
        local slot = optimizer.slots[one]
        return slot and slot.state and slot.state[key]
      end)
      compare(case, found, key, states, with_prefix(tensors, key .. "."), {
        each = function(what, a, b) found:relative(what, a, b, t[key]) end,
        noise = function() end,
      })
    end
  end
end

--- Trains as the manifest says and compares every step, under both layouts unless `how` names one.
---@param case table
---@param tensors table<string, ms.Tensor>
---@param found ms.GoldenReport
---@param how? { strategy?: string, prefetch?: string, layout?: string } instead of the case's
function fsdp.run(case, tensors, found, how)
  how = how or {}
  for _, layout in ipairs(how.layout and { how.layout } or { "flat", "rows" }) do
    train(case, tensors, found,
      { strategy = how.strategy, prefetch = how.prefetch, layout = layout })
  end
end

return fsdp
