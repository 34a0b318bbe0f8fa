-- For two_engines.c: learns whether the number of ones among some bits is odd, with another
-- optimizer and another seed.
local ms = require "moonshard"
local nn = ms.nn

ms.init { threads = 2, seed = 2 }
local cfg = ms.config { steps = 400, bits = 4, width = 64, lr = 1e-2 }

local rows, labels = {}, {}
for number = 0, (1 << cfg.bits) - 1 do
  local row, ones = {}, 0
  for bit = 1, cfg.bits do
    local one = number >> (bit - 1) & 1
    row[bit] = one * 2.0 - 1
    ones = ones + one
  end
  rows[#rows + 1], labels[#labels + 1] = row, ones % 2
end
local x, y = ms.tensor(rows), ms.tensor(labels)

local model = nn.Sequential(nn.Linear(cfg.bits, cfg.width), nn.ReLU(), nn.Linear(cfg.width, 2))
local optimizer = ms.optim.adam(model, { lr = cfg.lr })
for _ in ms.steps(cfg.steps) do
  model(x):cross_entropy(y):backward()
  optimizer:step()
end
local right = ms.no_grad(function() return model(x):argmax(-1):eq(y):to "f32":mean():item() end)
ms.log("parity: %.0f%% of %d numbers are right", 100 * right, #rows)
assert(right == 1, "parity was not learned")
