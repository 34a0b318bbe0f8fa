-- For two_engines.c: learns the sine function on one thread, and prints a line when it is done.
local ms = require "moonshard"
local nn = ms.nn

ms.init { threads = 1, seed = 1 }
local cfg = ms.config { steps = 1000, width = 32, lr = 1e-2 }

local model = nn.Sequential(
  nn.Linear(1, cfg.width), nn.GELU(),
  nn.Linear(cfg.width, cfg.width), nn.GELU(),
  nn.Linear(cfg.width, 1))
local optimizer = ms.optim.adamw(model, {
  lr = cfg.lr, schedule = ms.optim.cosine { steps = cfg.steps },
})
-- There is no sine operator, so the targets come from a table of values.
local xs, ys = {}, {}
for i = 1, 256 do
  local x = (i - 128) / 40
  xs[i], ys[i] = { x }, { math.sin(x) }
end
local x, y = ms.tensor(xs), ms.tensor(ys)

for _ in ms.steps(cfg.steps) do
  model(x):mse_loss(y):backward()
  optimizer:step()
end
local reached = ms.no_grad(function() return model(x):mse_loss(y):item() end)
ms.log("sine: mean squared error %.5f after %d steps", reached, cfg.steps)
assert(reached < 0.02, "the sine was not learned")
