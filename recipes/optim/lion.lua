-- Lion (Chen et al. 2023) written in Lua: an optimizer of your own, with groups, schedules, saving
-- and all other features of the built-in ones. local lion = require "lion" Or run this file: it
-- trains a small model with Lion and with AdamW.
local ms = require "moonshard"
local optim = ms.optim

local lion = optim.define {
  name = "lion",
  defaults = { lr = 1e-4, betas = { 0.9, 0.99 }, weight_decay = 0.0 },
  --- parameter, gradient: tensors to read and write in place; state: a table for this parameter,
  --- saved in checkpoints; group: the present hyper-parameters; step: the number of steps of this
  --- parameter before.
  step_param = function(parameter, gradient, state, group, _)
    state.momentum = state.momentum or parameter:zeros_like("f32")
    local beta1, beta2 = group.betas[1], group.betas[2]
    local direction = state.momentum:lerp(gradient, 1 - beta1):sign()
    parameter:mul_(1 - group.lr * group.weight_decay)
    parameter:add_(direction, -group.lr)
    state.momentum:lerp_(gradient, 1 - beta2)
  end,
}

-- As a module (`require` passes its name): return the constructor. As a recipe: demonstrate it.
if ... then return lion end

local cfg = ms.config { steps = 200, width = 64 }

local function train(name, make)
  ms.seed(1)
  local nn = ms.nn
  local model = nn.Sequential(nn.Linear(2, cfg.width), nn.GELU(), nn.Linear(cfg.width, 1))
  local optimizer = make(model)
  local loss
  for _ = 1, cfg.steps do
    local x = ms.rand { 256, 2, low = -2, high = 2 }
    local y = x:narrow(2, 1, 1) * x:narrow(2, 2, 1)          -- learn to multiply
    loss = model(x):mse_loss(y)
    loss:backward()
    optimizer:step()
  end
  ms.log("%-6s loss after %d steps: %.4f", name, cfg.steps, loss:item())
end

train("lion", function(model) return lion(model, { lr = 3e-3 }) end)
train("adamw", function(model) return optim.adamw(model, { lr = 3e-3 }) end)
