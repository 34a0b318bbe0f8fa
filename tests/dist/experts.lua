-- Run by experts_spec.lua on one rank: trains plain_experts.lua as the recipe trains its model.
local ms = require "moonshard"
local plain = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "plain_experts.lua")
local cfg = ms.config {
  data = "", experts = 4, top = 2, capacity = 0.0, balance = 0.01, ranks = 1, steps = 5, batch = 8,
  length = 24, lr = 1e-3, warmup = 1, run = "", model = { width = 48, heads = 4, hidden = 64 },
}

local net = plain(cfg)
local optimizer = ms.optim.adamw(net, {
  lr = cfg.lr, betas = { 0.9, 0.99 }, weight_decay = 0.1,
  schedule = ms.optim.cosine { warmup = cfg.warmup, steps = cfg.steps, floor = 0.05 },
})
local train, valid = assert(ms.data.bytes(cfg.data)):split(0.9)
local batches = train:loader { batch = cfg.batch, length = cfg.length, shuffle = true }
local held_out = valid:loader { batch = cfg.batch, length = cfg.length }
local function validation()
  local sum, count = 0, 0
  for x, y in held_out:batches(40) do
    sum, count = sum + ms.no_grad(function() return (net(x, y)) end) * x:size(1), count + x:size(1)
  end
  return (sum / count):item()
end

local report = ms.report { run = cfg.run, every = 1 }
for step in ms.steps(cfg.steps) do
  local loss, balance = net(batches:next())
  loss = loss + cfg.balance * balance
  loss:backward()
  local norm = net:clip_grad_norm(1)
  optimizer:step()
  report:step { loss = loss, grad_norm = norm }
  if (step + 1) % 2 == 0 or step + 1 == cfg.steps then
    report:outside(function() report:add { val_loss = validation() } end)
  end
end
report:close()
print(("validation loss %.4f"):format(validation()))
assert(net:save(cfg.run .. "/model"))
