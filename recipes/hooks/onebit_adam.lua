-- 1-bit Adam: after a warm-up with plain means, Adam's variance is frozen, and only the signs of
-- the momentum are sent, with error feedback in both directions. Tang, Gan, Awan, Rajbhandari, Li,
-- Lian, Liu, Zhang, He: "1-bit Adam: Communication Efficient Large-Scale Training with Adam's
-- Convergence Speed", 2021. A link and its optimizer, for ms.ddp: hook=onebit_adam uses both, with
-- the lr and the schedule of the recipe's optimizer. In a loop of your own: local onebit = dofile
-- "recipes/hooks/onebit_adam.lua" { warmup = 100 } local net = ms.ddp(model, { comm_hook =
-- onebit.link }) local opt = onebit.optimizer(model, { lr = 1e-3 }). Options: warmup 100 steps,
-- beta1 0.9, beta2 0.999, block 256.
local ms, hooks, optim = require "moonshard", require "moonshard.hooks", require "moonshard.optim"

return function(options)
  options = options or {}
  local warmup, beta1, beta2 = options.warmup or 100, options.beta1 or 0.9, options.beta2 or 0.999
  local block = options.block or 256                                 -- numbers that share a scale
  local state, sign = hooks.state "onebit_adam", ms.codec("sign", { block = block })
  local made = {}

  -- The codes of t plus its residual; the residual then gets the part that the codes lose.
  local function compress(t, residual)
    local payload, left = sign:encode(t + residual, { error = true })
    residual:copy_(left)
    return payload
  end

  function made.link(bucket, next)
    local flat, group, ranks = bucket:buffer():to "f32", bucket:group(), bucket:group():size()
    local momentum = state:flat(bucket, "momentum")
    if ms.step() < warmup then
      return next(bucket):and_then(function(mean) momentum:lerp_(mean:to "f32", 1 - beta1) end)
    end
    momentum:lerp_(flat, 1 - beta1)  -- from this rank's gradients; the mean replaces it below
    local padded = momentum:pad_to(ranks * block)
    local chunk = padded:numel() // ranks
    local own = state:of(bucket)
    own.left = own.left or padded:zeros_like()
    own.left_of_mean = own.left_of_mean or ms.zeros { chunk }

    -- Each rank adds up the signs of its part, then sends the signs of the mean.
    return group:all_to_all(compress(padded:view(ranks, chunk), own.left:view(ranks, chunk)))
      :and_then(function(parts)
        local mean = sign:decode_sum(parts, chunk):div_(ranks)
        return group:all_gather(compress(mean, own.left_of_mean):view(1, -1))
      end):and_then(function(all)
        momentum:copy_(sign:decode(all, chunk):view(-1):narrow(1, 1, momentum:numel()))
        return bucket:shard(flat:copy_(momentum)):to(bucket:dtype())
      end)
  end

  -- The optimizer gets the mean gradient during the warm-up, and the mean momentum after it.
  local adam = optim.define {
    name = "onebit_adam", defaults = { lr = 1e-3, eps = 1e-8 },
    step_param = function(p, arrived, own, group, step)
      own.first, own.second = own.first or p:zeros_like(), own.second or p:zeros_like()
      if ms.step() < warmup then
        own.first:lerp_(arrived, 1 - beta1)
        own.second:lerp_(arrived:square(), 1 - beta2)
        own.steps = step + 1
      else
        own.first:copy_(arrived)
      end
      local scale1 = 1 - beta1 ^ (step + 1)
      local scale2 = math.sqrt(1 - beta2 ^ math.max(1, own.steps or 0))
      p:addcdiv_(own.first, own.second:sqrt():div_(scale2):add_(group.eps), -group.lr / scale1)
    end,
  }

  -- given: options, or the optimizer whose parameters it takes over.
  function made.optimizer(model, given)
    if not (given and given.groups) then return adam(model, given) end
    local groups = {}
    for i, group in ipairs(given:groups()) do
      groups[i] = { params = group.params, lr = group.lr, schedule = group.schedule }
    end
    return adam(groups)
  end

  return made
end
