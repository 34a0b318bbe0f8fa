-- Models, batches and parts of training loops that several scripts of tests/dist have: they find
-- them as expect.models.
local ms = require "moonshard"
local models = {}
local rank, size = ms.rank(), ms.world_size()

--- The fields of several tables in a new one; those of later tables count.
---@param ... table?
---@return table
function models.merged(...)
  local all = {}
  for i = 1, select("#", ...) do
    for name, value in pairs((select(i, ...)) or {}) do all[name] = value end
  end
  return all
end

local within, across

--- Where there are four ranks, pairs that share a copy, and pairs that have the same part of it;
--- otherwise nil.
---@return ms.Group?
---@return ms.Group?
function models.pairs_of_ranks()
  if size ~= 4 then return nil end
  if not within then within, across = ms.world():levels(2) end
  return within, across
end

--- A sharded model with merged options. Hybrid strategies that name no groups are over pairs of
--- ranks, where there are four.
---@param net ms.Module
---@param ... table?
---@return ms.Module
function models.fsdp(net, ...)
  local o = models.merged(...)
  if o.strategy and o.strategy:find "^hybrid" and not o.shard_group and not o.replica_group then
    o.shard_group, o.replica_group = models.pairs_of_ranks()
  end
  return ms.fsdp(net, o)
end

--- Rows of inputs that all ranks draw alike: those of a rank have a seed of their own.
---@param rows integer
---@param width integer
---@param seed integer
---@return ms.Tensor
function models.input(rows, width, seed)
  return ms.randn { rows, width, seed = seed, per_rank = false }
end

--- A language model with the same values on each call.
---@param options? table
---@param seed? integer
---@return ms.Module
function models.gpt2(options, seed)
  ms.seed(seed or 1)
  local small = { vocab = 16, context = 8, layers = 2, width = 16, heads = 2 }
  return ms.nn.gpt2(models.merged(small, options))
end

--- Inputs and targets for models.gpt2: the rows of a step that rank r takes, nil: all 12, which
--- divide by 1 to 4.
---@param step integer
---@param r? integer
---@return ms.Tensor
---@return ms.Tensor
function models.batch(step, r)
  local rows <const>, length <const> = 12, 8
  local tokens = ms.randint {
    rows, length + 1, low = 0, high = 16, seed = 100 + step, per_rank = false,
  }
  if r then tokens = tokens:narrow(1, r * rows // size + 1, rows // size) end
  return tokens:narrow(2, 1, length), tokens:narrow(2, 2, length)
end

--- This rank's inputs for models.gpt2 { vocab = 17 }, which are their targets, too. part: of a step
--- with several passes.
---@param step integer
---@param part? integer
---@return ms.Tensor
function models.tokens(step, part)
  return ms.randint {
    4, 8, low = 0, high = 17, seed = 60 + 100 * (part or 0) + 8 * step + rank, per_rank = false,
  }
end

--- Three layers, with the same values on each call.
---@return ms.Module
function models.layers()
  local nn = ms.nn
  ms.seed(1)
  return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
end

--- A kind of optimizer that is written in Lua and depends on the number of the step.
---@return function
function models.heavy()
  return ms.optim.define {
    name = "heavy_ball",
    defaults = { momentum = 0.9 },
    step_param = function(p, grad, state, group, step)
      state.velocity = state.velocity or p:zeros_like()
      state.velocity:mul_(group.momentum):add_(grad)
      p:add_(state.velocity, -group.lr / (step + 1))
    end,
  }
end

--- A bucket plan that differs at each planning: buckets of one to three parameters, in reverse
--- order.
---@param view table
---@return integer[][]
function models.changing_plan(view)
  local plan, at = {}, 1
  while at <= #view.parameters do
    local length = math.min(1 + (at + view.step) % 3, #view.parameters - at + 1)
    plan[#plan + 1] = {}
    for i = at, at + length - 1 do table.insert(plan[#plan], 1, i) end
    at = at + length
  end
  return plan
end

--- What follows the backward of a step: unscaling, clipping, the optimizer's step.
---@param model ms.Module
---@param optimizer ms.Optimizer
---@param how { scaler: any, clip: number? }
---@return number? norm before clipping
function models.finish(model, optimizer, how)
  local scaler = how.scaler
  if scaler then scaler:unscale(optimizer) end
  local norm = how.clip and model:clip_grad_norm(how.clip):item() or nil
  if scaler then scaler:step(optimizer) else optimizer:step() end
  optimizer:zero_grad()
  return norm
end

--- Trains a sharded models.gpt2 { vocab = 17 } with AdamW. how: steps; recompute; run(model, pass,
--- step) instead of one pass(part); policy; clip; scale: of a loss scaler.
---@param how table
---@param ... table? options of fsdp
---@return ms.Module
---@return number[] norms before clipping, by step from 0
function models.train(how, ...)
  local model = models.fsdp(models.gpt2 { vocab = 17, recompute = how.recompute }, ...)
  local optimizer, norms = ms.optim.adamw(model, { lr = 1e-2 }), {}
  if how.policy then optimizer:overlap(model, how.policy) end
  local scaler = how.scale and ms.optim.scaler { init_scale = how.scale }
  for step in ms.steps(how.steps) do
    local function pass(part)
      local x = models.tokens(step, part)
      local loss = model(x):to "f32":cross_entropy(x)
      if scaler then loss = scaler:scale(loss) end
      loss:backward()
    end
    if how.run then how.run(model, pass, step) else pass() end
    norms[step] = models.finish(model, optimizer, { scaler = scaler, clip = how.clip })
  end
  return model, norms
end

--- The mean over the ranks of what they send, which is rounded to `sent` once. As the core does it:
--- each rank's numbers times 1 / ranks, added in f32 in order of ranks. Of f16 and three ranks:
--- halves are added, and their sum is divided by 1.5.
---@param of_ranks ms.Tensor[]
---@param sent string
---@return ms.Tensor
function models.mean(of_ranks, sent)
  local split = sent == "f16" and size == 3
  local sum
  for r = 1, size do
    local share = of_ranks[r]:to "f32" * (split and 0.5 or 1 / size)
    sum = sum and sum + share or share
  end
  sum = sum:to(sent)
  return (split and sum / 1.5 or sum):to "f32"
end

return models
