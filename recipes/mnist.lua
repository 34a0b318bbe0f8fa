-- Handwritten digits: a small network that reaches 95% within seconds.
--     ./moonshard run recipes/mnist.lua data=FOLDER_WITH_IDX_FILES
local ms = require "moonshard"
local nn, optim, data = ms.nn, ms.optim, ms.data

local cfg = ms.config {
  data   = { "data", help = "folder with an images and a labels file, idx, plain or .gz" },
  steps  = { 600, help = "optimizer steps" },
  batch  = { 100, help = "digits of a step" },
  hidden = { 256, help = "width of the hidden layer" },
  lr     = { 2e-3, help = "learning rate" },
  train  = { 0.9, help = "share of the digits to train on; the rest is held out" },
  run    = { "", help = "folder of the run" },
}

local Net = nn.class "DigitNet"

function Net:init(inputs, hidden)
  self.hidden = nn.Linear(inputs, hidden)
  self.out = nn.Linear(hidden, 10)
end

function Net:forward(images) return self.out(self.hidden(images:flatten(2)):relu()) end

local train, valid = assert(data.mnist(cfg.data)):split(cfg.train)
local model = Net(28 * 28, cfg.hidden)

local result = ms.train {
  model = model, steps = cfg.steps,
  optimizer = optim.adamw(model, { lr = cfg.lr, schedule = optim.cosine { warmup = 20, steps = cfg.steps, floor = 0.02 } }),
  data = train:loader { batch = cfg.batch, shuffle = true },
  valid = valid:loader { batch = cfg.batch },
  eval = {
    every = 200,
    measure = function(logits, labels) return { accuracy = logits:argmax(-1):eq(labels):to "f32":mean() } end,
  },
  run = cfg.run ~= "" and cfg.run or nil, log_every = 50,
}
ms.log("accuracy on held-out digits %.1f%%", 100 * result.valid.accuracy)
