-- Clipping of gradients, over the ranks that have parts of them.
local core = require "moonshard.core"
local module = require "moonshard.nn.module"
local options_of = require "moonshard.base.options"
local argument = options_of.argument
local sharded_join = require "moonshard.parallel.fsdp.join"
local layouts = require "moonshard.parallel.ddp.layouts"
local optimizers = require "moonshard.optim.optimizer"
local overlap = require "moonshard.parallel.overlap"
local ownership = require "moonshard.base.ownership"
local parts_of = require "moonshard.nn.parts"

local clip = {}

local function gradients_of(what, params)
  argument(what, "params", params, "module|list")
  if module.is_module(params) then
    params = params:parameters()
  else
    options_of.items(what, "params", params, "tensor")
  end
  layouts.check_of(what, params)
  for _, p in ipairs(params) do
    local entry = ownership.sharded[p]
    if entry and entry.model.sharded then
      entry.model.sharded:check_no_forward(what)
      break
    end
  end
  overlap.note_norm(params)
  parts_of.settle(params)
  local list = {}
  for i, p in ipairs(params) do
    local grad = p:grad()
    if grad then
      optimizers.refuse_scaled(what, p, i, "call scaler:unscale(optimizer) before clipping")
    end
    list[#list + 1] = grad
  end
  return list, params
end

-- The gradients of whole parameters, and lists of gradients of which each rank of a group has a
-- part, by group. Of parameters of fewer ranks, all ranks of the model have parts; they take part
-- also without a gradient. Then the parameters in the order of these lists; the axes over which the
-- ranks' sums are added up; and gradients that other ranks have as well, and that count there.
local function by_group(params)
  local whole, parts, groups, owners, order, others = {}, {}, {}, {}, {}, {}
  local axes = parts_of.axes(params)
  for _, p in ipairs(params) do
    local grad, entry = p:grad(), ownership.sharded[p]
    local group = entry and entry.shards
    if entry and entry.own then group = entry.model.group end
    if not parts_of.counts(p, axes) then others[#others + 1] = grad
    elseif group and group:size() > 1 and (grad or entry.own) then
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
  return whole, parts, groups, order, axes, others
end

-- The norm of all, where ranks have parts: powers of the parts' norms add up over the ranks. And
-- the position of this rank's first gradient that is inf or nan, -1 if there is none.
local function norm_of_parts(whole, parts, groups, axes, p)
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
  for _, axis in ipairs(axes) do
    total = axis:all_reduce(total, infinite and "max" or "sum"):value()
  end
  return infinite and total or total ^ (1 / p), bad or core.full(-1, {})
end

local function clip_parts(whole, parts, groups, axes, others, max, p)
  return core.no_grad(function()
    local norm, bad = norm_of_parts(whole, parts, groups, axes, p)
    if max == math.huge then return norm, bad end
    local factor = (max / (norm + 1e-6)):clamp(0, 1)
    for _, grad in ipairs(whole) do grad:mul_(factor) end
    for _, grad in ipairs(others) do grad:mul_(factor) end
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
function clip.for_loops(params, max)
  layouts.check_of("clipping", params)
  parts_of.settle(params)
  local whole, parts, groups, order, axes, others = by_group(params)
  if #order == 0 and #groups == 0 and #axes == 0 then return nil, order end
  local norm, bad
  if #groups > 0 or #axes > 0 then
    norm, bad = clip_parts(whole, parts, groups, axes, others, max, 2)
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
  clip[words.how](sharded_join.parameters_of(s, words.names), words.max, words.p)
end)

---@param params ms.Module|ms.Parameter[]
---@param max number
---@param p? number 2 unless given
---@return ms.Tensor
function clip.clip_grad_norm(params, max, p)
  argument("clip_grad_norm", "max", max, "number")
  argument("clip_grad_norm", "p", p, "number?")
  local list, parameters = gradients_of("clip_grad_norm", params)
  tell_of_clipping("clip_grad_norm", parameters, max, p)
  local whole, parts, groups, _, axes, others = by_group(parameters)
  if #groups > 0 or #axes > 0 then
    return clip_parts(whole, parts, groups, axes, others, max, p or 2)
  end
  if #list == 0 then return core.zeros {} end
  return core.clip_norm(list, max, p)
end

---@param params ms.Module|ms.Parameter[]
---@param max number
function clip.clip_grad_value(params, max)
  if type(max) ~= "number" or not (max >= 0) then
    core.raise("clip_grad_value: max must be a number of 0 or more")
  end
  local list, parameters = gradients_of("clip_grad_value", params)
  tell_of_clipping("clip_grad_value", parameters, max)
  core.no_grad(function() for _, grad in ipairs(list) do grad:clamp_(-max, max) end end)
end

ownership.functions.clip_grad_norm = clip.clip_grad_norm
ownership.functions.clip_grad_value = clip.clip_grad_value

return clip
