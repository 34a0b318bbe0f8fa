-- Helpers of the specs of the bindings: a leaf, some training, and a value of every kind.
local ms = require "moonshard"
-- Nothing here may take much memory, whatever numbers it gets.
ms.init { memory_bytes = 1 << 28, threads = 2 }
local core = require "moonshard.core"

local hazards = {}

function hazards.leaf(values) return ms.tensor(values, "f32"):requires_grad_() end

--- Trains a small model; its weights as bytes. hook: on the inputs' gradients.
function hazards.training(steps, hook)
  ms.seed(1)
  local model = ms.nn.Sequential(ms.nn.Linear(4, 8), ms.nn.GELU(), ms.nn.LayerNorm(8),
    ms.nn.Linear(8, 2))
  local optimizer = ms.optim.adamw(model, { lr = 0.01 })
  for _ in ms.steps(steps) do
    local x = ms.randn { 5, 4, requires_grad = true }
    if hook then x:on_grad(hook) end
    local loss = ms.recompute(function(t) return model(t):square() end, x):mean()
    loss:backward()
    model:clip_grad_norm(1)
    optimizer:step()
    ms.metric("bindings.loss"):push(loss)
  end
  local bytes = {}
  for i, p in ipairs(model:parameters()) do bytes[i] = core.bytes(p:detach()) end
  return table.concat(bytes)
end

--- A value of every kind that Lua and the library know.
function hazards.specimens()
  local closed
  do
    local t <close> = ms.ones { 2 }
    closed = t
  end
  local released
  for _ in ms.steps(1) do released = ms.ones { 2 } end
  local self_table = {}
  self_table[1] = self_table
  return {
    ["nil"] = nil,
    yes = true,
    no = false,
    zero = 0,
    minus = -1,
    fraction = 1.5,
    nan = 0 / 0,
    inf = math.huge,
    least = math.mininteger,
    large = 1 << 53,
    text = "x",
    empty = "",
    bytes = "a\0b",
    format = "%s%n",
    dtype = "f32",
    table = {},
    numbers = { 1, 2, 3 },
    keys = { nonsense = 1 },
    nested = { {} },
    itself = self_table,
    f = function() end,
    thread = coroutine.create(function() end),
    file = io.stdout,
    light = debug.upvalueid(function() return core end, 1),
    scalar = ms.ones {},
    float = ms.ones { 2, 3 },
    long = ms.tensor { 1, 2 },
    bool = ms.tensor { true, false },
    half = ms.ones { 2, dtype = "bf16" },
    none = ms.zeros { 0 },
    graph = hazards.leaf { 1, 2 } * 2,
    closed = closed,
    released = released,
    stream = ms.stream(),
    probe = core.probe(ms.ones {}),
    future = ms.all {},
    module = ms.nn.Linear(2, 2),
    optimizer = ms.optim.sgd({ ms.ones { 1 } }),
    tensors = { ms.ones { 2 }, ms.ones { 2 } },
  }
end

return hazards
