-- DES-LOC: each rank trains alone. Weights and the two moments of Adam are averaged, each with a
-- period of its own. Iacob, Sani, Safaryan, Giampouras, Horvath, Jovanovic, Kurmanji, Aleksandrov,
-- Shen, Qiu, Lane: "DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation
-- Models", 2025. For a model that is not wrapped; call the result's after_step(step, optimizer)
-- once in each step, after the inner optimizer: adam or adamw, or another one with such moments.
-- Options: model, period 256 (of the weights), first 768 and second 1536 (3 and 6 periods unless
-- given), group.
local ms = require "moonshard"

-- The names that moments have in the states of optimizers.
local FIRST <const> = { "exp_avg", "momentum_buffer" }
local SECOND <const> = { "exp_avg_sq", "square_avg" }

return function(options)
  assert(options and options.model, "des_loc: model is missing")
  local period, model = options.period or 256, options.model
  local function positive(name, value)
    assert(math.type(value) == "integer" and value > 0,
      "des_loc: " .. name .. " must be a positive integer")
    return value
  end
  positive("period", period)
  local first = positive("first", options.first or 3 * period)
  local second = positive("second", options.second or 6 * period)
  ms.nn.alone(model, { merge = "mean" })                            -- each rank trains its own
  local group, weights = options.group or ms.world(), ms.flat(model:parameters())

  -- Averages one moment of all parameters, in the order of the model, which all ranks share.
  local function average(optimizer, names)
    local states, moments = optimizer:state({ live = true }).parameters, {}
    for _, p in ipairs(model:parameters()) do
      local own = states[p:name()] or {}
      moments[#moments + 1] = own[names[1]] or own[names[2]]
    end
    if #moments == 0 then return false end
    local all, means = ms.pack(moments)
    group:all_reduce(all, "avg"):value()
    for i, moment in ipairs(moments) do moment:copy_(means[i]) end
    return true
  end

  local des_loc = {}

  function des_loc.after_step(step, optimizer)
    local done = step + 1
    assert(optimizer, "des_loc: after_step(step, optimizer) needs the optimizer")
    ms.no_grad(function()
      if done % period == 0 then group:all_reduce(weights, "avg"):value() end
      if done % first == 0 then
        assert(average(optimizer, FIRST),
          "des_loc: the optimizer has no first moment: adam or adamw is expected")
      end
      if done % second == 0 then average(optimizer, SECOND) end
    end)
  end

  return des_loc
end
