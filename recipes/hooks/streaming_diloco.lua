-- Streaming DiLoCo: DiLoCo with a model that is cut into fragments. The fragments are averaged one
-- after another, each during `delay` further steps. Douillard, Donchev, Rush, Kale, Charles,
-- Garrett, Teston, Lacey, McIlroy, Shen, Rame, Szlam, Ranzato, Barham: "Streaming DiLoCo with
-- overlapping communication: Towards a Distributed Free Lunch", 2025. For a model that is not
-- wrapped; call the result's after_step(step) once in each step, after the inner optimizer, and
-- save it with the checkpoint. Options: fragments (lists of modules, each parameter in one of
-- them), or model, whose parameters are cut into `pieces` 4 fragments of about equal size; period
-- 100, delay 5, mix 0.5 (what a rank keeps of its own), lr 0.7, momentum 0.9, group.
local ms, optim = require "moonshard", require "moonshard.optim"

-- The parameters of each fragment.
local function fragments_of(options)
  local list = {}
  for i, modules in ipairs(options.fragments or {}) do
    list[i] = {}
    for _, module in ipairs(modules) do
      ms.nn.alone(module, { merge = "mean" })                          -- each rank trains its own
      table.move(module:parameters(), 1, #module:parameters(), #list[i] + 1, list[i])
    end
  end
  if options.fragments then return list end
  ms.nn.alone(options.model, { merge = "mean" })
  local all, whole, before = options.model:parameters(), 0, 0
  for _, p in ipairs(all) do whole = whole + p:numel() end
  local pieces = math.min(options.pieces or 4, #all)
  for _, p in ipairs(all) do
    local i = before * pieces // whole + 1
    list[i] = list[i] or {}
    table.insert(list[i], p)
    before = before + p:numel()
  end
  -- A large parameter may leave a fragment without one.
  local filled = {}
  for i = 1, pieces do filled[#filled + 1] = list[i] end
  return filled
end

return function(options)
  assert(options and (options.fragments or options.model),
    "streaming_diloco: fragments or model are missing")
  local period, delay, mix = options.period or 100, options.delay or 5, options.mix or 0.5
  local momentum = options.momentum or 0.9
  local group = options.group or ms.world()
  assert(delay < period,
    "streaming_diloco: delay must be below period: a fragment lands before it is sent again")

  local fragments, cut = {}, fragments_of(options)
  for i, parameters in ipairs(cut) do
    local weights = ms.flat(parameters)
    local anchor = weights:clone():keep()  -- the last common weights
    fragments[i] = {
      weights = weights, anchor = anchor,
      offset = (i - 1) * period // #cut,
      outer = optim.sgd({ anchor }, {
        lr = options.lr or 0.7, momentum = momentum, nesterov = momentum > 0,
      }),
    }
  end

  local function land(f)
    f.outer:step_param(f.anchor, f.pending:value())
    f.weights:lerp_(f.anchor, 1 - mix)
    f.pending = nil
  end

  local outer = {}

  function outer.after_step(step)
    for _, f in ipairs(fragments) do
      local age = step + 1 - period - f.offset
      if age >= 0 and age % period == 0 then
        -- `delay` further steps run during this communication.
        f.pending = group:all_reduce(f.anchor - f.weights, "avg")
      end
      if f.pending and age % period == delay then land(f) end
    end
  end

  function outer:state()
    local saved = {}
    for i, f in ipairs(fragments) do
      saved[i] = {
        anchor = f.anchor, outer = f.outer:state(),
        delta = f.pending and f.pending:value():keep(),              -- it lands in a later step
      }
    end
    return saved
  end

  function outer:load_state(saved)
    for i, f in ipairs(fragments) do
      f.anchor:copy_(saved[i].anchor)
      f.outer:load_state(saved[i].outer)
      f.pending = saved[i].delta
        and ms.all { saved[i].delta }:and_then(function(values) return values[1] end)
    end
  end

  return outer
end
