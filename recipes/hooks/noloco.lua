-- NoLoCo: each rank trains alone. Every H steps ranks meet in pairs that are drawn at random; no
-- call is over all ranks. A momentum follows the pair's mean change, and pulls the two ranks'
-- weights together. Kolehmainen, Blagoev, Donaghy, Ersoy, Nies: "NoLoCo: No-all-reduce Low
-- Communication Training Method for Large Models", 2025. For a model that is not wrapped; call the
-- result's after_step(step) once in each step, after the inner optimizer, and save it with the
-- checkpoint. Options: model, period 50, alpha 0.5 (momentum), beta 0.7 (rate of the change), gamma
-- 0.7 (pull to the pair's mean; the paper proves convergence for gamma above alpha), seed 0, group.
local ms = require "moonshard"

return function(options)
  assert(options and options.model, "noloco: model is missing")
  local period, seed = options.period or 50, options.seed or 0
  assert(math.type(period) == "integer" and period > 0,
    "noloco: period must be a positive integer")
  assert(math.type(seed) == "integer", "noloco: seed must be an integer")
  local rates = { alpha = options.alpha or 0.5, beta = options.beta or 0.7,
    gamma = options.gamma or 0.7 }
  for name, rate in pairs(rates) do
    assert(type(rate) == "number" and rate >= 0, "noloco: " .. name .. " must be 0 or more")
  end
  ms.nn.alone(options.model, { merge = "mean" })                    -- each rank trains its own
  local group, weights = options.group or ms.world(), ms.flat(options.model:parameters())
  local anchor, momentum = weights:clone():keep(), weights:zeros_like():keep()
  local rank, size, n = group:rank(), group:size(), weights:numel()
  local noloco = {}

  -- The rank that this one meets, from an order that all ranks draw alike: SplitMix64, which leaves
  -- math.random as it is. nil: the number of ranks is odd, and this one sits out.
  function noloco.partner(round)
    local order, number = {}, seed * 1000003 + round
    for other = 0, size - 1 do
      number = number + 0x9E3779B97F4A7C15
      local z = (number ~ number >> 30) * 0xBF58476D1CE4E5B9
      z = (z ~ z >> 27) * 0x94D049BB133111EB
      table.insert(order, ((z ~ z >> 31) >> 1) % (other + 1) + 1, other)
    end
    for i = 1, size - 1, 2 do
      if order[i] == rank then return order[i + 1] end
      if order[i + 1] == rank then return order[i] end
    end
  end

  function noloco.after_step(step)
    if (step + 1) % period ~= 0 then return end
    local round = (step + 1) // period
    local partner = noloco.partner(round)
    if not partner then return end
    ms.no_grad(function()
      local own, label = ms.cat { anchor, weights - anchor }, "noloco " .. round
      local sent = group:send(own, partner, { label = label })
      local other = group:recv(own:empty_like(), partner, { label = label }):value()
      sent:value()                                                  -- its memory ends with the step
      local mean = (own + other) / 2
      momentum:mul_(rates.alpha):add_(mean:narrow(1, n + 1, n), rates.beta)
      momentum:add_(mean:narrow(1, 1, n) - anchor, rates.gamma)
      anchor:add_(momentum)
      weights:copy_(anchor)
    end)
  end

  function noloco:state() return { anchor = anchor, momentum = momentum } end

  function noloco:load_state(saved)
    ms.no_grad(function()
      anchor:copy_(saved.anchor)
      momentum:copy_(saved.momentum)
    end)
  end

  return noloco
end
