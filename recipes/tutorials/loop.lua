-- Tutorial: a training loop of your own that can be stopped and goes on, bit for bit.
--     ./moonshard run recipes/tutorials/loop.lua run=mine     # Ctrl-C: saves, and ends with 75
--     ./moonshard run recipes/tutorials/loop.lua run=mine     # goes on where it was stopped
local ms = require "moonshard"
local nn, optim, checkpoint = ms.nn, ms.optim, ms.checkpoint

local cfg = ms.config {
  data  = { "README.md", help = "a text file" },
  steps = { 400, help = "optimizer steps" },
  save  = { 100, help = "steps between checkpoints" },
  run   = { "runs/loop", help = "folder of metrics and checkpoints" },
}

local text = assert(ms.data.bytes(cfg.data))
local batches = text:loader { batch = 8, length = 32, shuffle = true }
local model = nn.gpt2 { vocab = 256, context = 32, layers = 2, width = 64, heads = 4 }
local optimizer = optim.adamw(model, { lr = 2e-3 })

-- What the run needs to go on. Each thing has state() and load_state(); the engine's random numbers
-- are added by themselves.
local things = { model = model, optimizer = optimizer, batches = batches, step = 0 }

local newest, message, code = checkpoint.latest(cfg.run)
if code then error(message) end -- there are checkpoints, and none can be read
if newest then
  things.step = assert(checkpoint.load(newest, things)).step
  ms.log("goes on from %s", newest)
end

local function save(step)
  things.step = step -- the next one
  assert(checkpoint.save(cfg.run, things))
end

-- Prints a line for steps, and writes metrics.jsonl. A run that goes on removes the lines of steps
-- that it runs again.
local report = ms.report { run = cfg.run, tokens = 8 * 32, total = cfg.steps }
local last = things.step
for step in ms.steps(cfg.steps, things.step) do
  local x, y = batches:next()
  local loss = model(x):cross_entropy(y)
  loss:backward()
  optimizer:step()
  report:step { loss = loss }
  last = step + 1
  if last % cfg.save == 0 and last < cfg.steps then save(last) end
end
report:close()

-- A request to stop (Ctrl-C, SIGTERM) ends ms.steps after the step that runs. A recipe that ends
-- with a checkpoint then ends with code 75: start it again.
save(last)
assert(checkpoint.wait()) -- checkpoints are written in the background
ms.log("%d of %d steps are done", last, cfg.steps)
