-- Run by run.sh: trains a GPT-2 on the bytes of a text, and writes its first weights and the loss
-- of each step, for torch_curves.py. Row r of step s begins at byte (s * batch + r) * length of the
-- text, modulo its length.
local ms = require "moonshard"
local core = require "moonshard.core"

local cfg = ms.config {
  text = { "", help = "a file" }, weights = { "", help = "folder for the first weights" },
  out = { "", help = "file for the losses" },
  layers = 4, width = 256, heads = 4, length = 128, batch = 8, steps = 50, decay = 0.1,
  lr = 3e-4, -- with 1e-3 and no warm-up, roundings alone drive two curves apart by 4%
}

local bytes = { assert(core.file_read(cfg.text)):byte(1, -1) }
local model = ms.nn.gpt2 {
  vocab = 256, context = cfg.length, layers = cfg.layers, width = cfg.width, heads = cfg.heads,
}
assert(model:save(cfg.weights, { dtype = "f32" }))
local optimizer = ms.optim.adamw(model, {
  lr = cfg.lr, betas = { 0.9, 0.999 }, eps = 1e-8, weight_decay = cfg.decay,
})

-- The tokens of a step, and those that follow each.
local function batch_of(step)
  local x, y = {}, {}
  for row = 1, cfg.batch do
    local first = (step * cfg.batch + row - 1) * cfg.length % (#bytes - cfg.length) + 1
    x[row] = table.move(bytes, first, first + cfg.length - 1, 1, {})
    y[row] = table.move(bytes, first + 1, first + cfg.length, 1, {})
  end
  return ms.tensor(x), ms.tensor(y)
end

local losses = {}
for step in ms.steps(cfg.steps) do
  local x, y = batch_of(step)
  local loss = ms.autocast("bf16", function() return model(x):cross_entropy(y) end)
  losses[step + 1] = loss:item()
  loss:backward()
  optimizer:step()
  optimizer:zero_grad()
end
assert(core.file_write(cfg.out, core.json_encode {
  batch = cfg.batch, length = cfg.length, lr = cfg.lr, decay = cfg.decay, losses = losses,
}))
ms.log("%d steps, loss %.4f to %.4f", #losses, losses[1], losses[#losses])
