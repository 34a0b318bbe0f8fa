-- Handwritten digits: a small network that reaches 95% within seconds.
--     ./moonshard run recipes/mnist.lua data=FOLDER_WITH_IDX_FILES
local ms = require "moonshard"
local nn, optim, data = ms.nn, ms.optim, ms.data

local cfg = ms.config(ms.scripts.options {
  data   = { "data", help = "folder with an images and a labels file, idx, plain or .gz" },
  steps  = { 2500, help = "optimizer steps" },
  batch  = { 100, help = "digits of a step" },
  hidden = { 512, help = "width of the two hidden layers" },
  dropout = { 0.3, help = "share of hidden numbers that are dropped in training" },
  lr     = { 2e-3, help = "learning rate" },
  train  = { 0.9, help = "share of the digits to train on; the rest is held out" },
  resume = { "never", help = "never, auto, or a checkpoint" },
  run    = { "", help = "folder of the run" },
  save   = { 0, help = "steps between checkpoints" },
})

local Net = nn.class "DigitNet"

function Net:init(inputs, hidden, dropout)
  self.first, self.second = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
  self.out = nn.Linear(hidden, 10)
  self.drop_input, self.drop = nn.Dropout(dropout / 2), nn.Dropout(dropout)
end

function Net:forward(images)
  local x = self.drop_input(images:flatten(2))
  x = self.drop(self.first(x):relu())
  x = self.drop(self.second(x):relu())
  return self.out(x)
end

local train, valid = assert(data.mnist(cfg.data)):split(cfg.train)
local function make() return Net(28 * 28, cfg.hidden, cfg.dropout) end
local model, optimizer, clip = ms.scripts.apply(cfg, make, function(net)
  local schedule = optim.cosine { warmup = 50, steps = cfg.steps, floor = 0.02 }
  return optim.adamw(net, { lr = cfg.lr, weight_decay = 0.1, schedule = schedule })
end, { clip = 1.0 })

local result = ms.train {
  model = model, optimizer = optimizer, steps = cfg.steps,
  data = train:loader { batch = cfg.batch, shuffle = true },
  valid = valid:loader { batch = cfg.batch },
  eval = {
    every = 500,
    measure = function(logits, labels)
      return { accuracy = logits:argmax(-1):eq(labels):to "f32":mean() }
    end,
  },
  save = { every = cfg.save, last = 2 }, resume = cfg.resume,
  run = cfg.run ~= "" and cfg.run or nil, clip = clip, log_every = 100,
}
ms.log("accuracy on held-out digits %.1f%%", 100 * result.valid.accuracy)
