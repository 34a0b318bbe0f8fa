-- Handwritten digits: a small convolutional network that reaches 98% within a minute.
--     ./moonshard run recipes/mnist.lua data=FOLDER_WITH_IDX_FILES
local ms = require "moonshard"
local nn, optim, data = ms.nn, ms.optim, ms.data

local cfg = ms.config(ms.scripts.options {
  data   = { "data", help = "folder with an images and a labels file, idx, plain or .gz" },
  steps  = { 1200, help = "optimizer steps" },
  batch  = { 100, help = "digits of a step" },
  channels = { 16, help = "channels of the first convolution; the second has twice as many" },
  hidden = { 128, help = "width of the hidden layer" },
  dropout = { 0.3, help = "share of the hidden layer's inputs and outputs dropped in training" },
  lr     = { 2e-3, help = "learning rate" },
  train  = { 0.9, help = "share of the digits to train on; the rest is held out" },
  ema    = { 0.0, help = "decay of averaged weights, which are validated and saved; 0: none" },
  resume = { "never", help = "never, auto, or a checkpoint" },
  run    = { "", help = "folder of the run" },
  save   = { 0, help = "steps between checkpoints" },
})

-- Two convolutions, each followed by the greatest of 2 x 2 neighbours, and a hidden layer.
local Net = nn.class "DigitNet"

function Net:init(channels, hidden, dropout)
  self.first = nn.Conv2d(1, channels, 3, { padding = 1 })
  self.second = nn.Conv2d(channels, 2 * channels, 3, { padding = 1 })
  self.pool, self.drop = nn.MaxPool2d(2), nn.Dropout(dropout)
  self.hidden = nn.Linear(2 * channels * 7 * 7, hidden)
  self.out = nn.Linear(hidden, 10)
end

function Net:forward(images)                  -- [batch, 28, 28]
  local x = self.pool(self.first(images:unsqueeze(2)):relu())
  x = self.pool(self.second(x):relu())
  x = self.hidden(self.drop(x:flatten(2))):relu()
  return self.out(self.drop(x))
end

local train, valid = assert(data.mnist(cfg.data)):split(cfg.train)
local function make() return Net(cfg.channels, cfg.hidden, cfg.dropout) end
local model, optimizer, clip = ms.scripts.apply(cfg, make, function(net)
  local schedule = optim.cosine { warmup = 50, steps = cfg.steps, floor = 0.02 }
  return optim.adamw(net, { lr = cfg.lr, weight_decay = 0.1, schedule = schedule })
end, { clip = 1.0 })

local result = ms.train {
  model = model, optimizer = optimizer, steps = cfg.steps,
  data = train:loader { batch = cfg.batch, shuffle = true },
  valid = valid:loader { batch = cfg.batch },
  eval = {
    every = 200,
    measure = function(logits, labels)
      return { accuracy = logits:argmax(-1):eq(labels):to "f32":mean() }
    end,
  },
  save = { every = cfg.save, last = 2 }, resume = cfg.resume,
  ema = cfg.ema ~= 0 and cfg.ema or nil,
  run = cfg.run ~= "" and cfg.run or nil, clip = clip, log_every = 100,
}
ms.log("accuracy on held-out digits %.1f%%", 100 * result.valid.accuracy)
