-- Event files: the bytes of TensorBoard's own writer, and what TensorBoard's own reader makes of a
-- run, where Python has it.
local command = require "command"
local core = require "moonshard.core"
local tensorboard = require "moonshard.train.report.tensorboard"

local PYTHON = os.getenv "MOONSHARD_PYTHON" or "python3"
local READER = os.execute(PYTHON .. " -c 'import tensorboard' 2>/dev/null")

-- Prints what the reader finds, in lines that are easy to compare.
local READ = [[
import sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
a = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
a.Reload()
tags = a.Tags()
for tag in sorted(tags["scalars"]):
    print("scalar", tag, " ".join("%d:%.6g" % (e.step, e.value) for e in a.Scalars(tag)))
for tag in sorted(tags["tensors"]):
    for e in a.Tensors(tag):
        print("text", tag, e.step, repr(e.tensor_proto.string_val[0].decode()))
for tag in sorted(tags["histograms"]):
    for e in a.Histograms(tag):
        h = e.histogram_value
        print("histogram", tag, e.step, "%g %g %g %g" % (h.min, h.max, h.num, sum(h.bucket)))
]]

-- A model whose gradients are known: loss = sum of w * x with w [4], so that the gradient is x.
local RECIPE = [[
local ms = require "moonshard"
local cfg = ms.config(ms.scripts.options { run = "out", steps = 4, resume = "never" })
local Net = ms.nn.class "Net"
function Net:init() self.w = ms.nn.Parameter(ms.zeros { 4 }) end
function Net:forward(x) return x * self.w end
local function make() return Net() end
local model, optimizer = ms.scripts.apply(cfg, make, function(net)
  return ms.optim.sgd(net, { lr = 0 })
end)
ms.train {
  model = model, optimizer = optimizer, steps = cfg.steps, run = cfg.run, resume = cfg.resume,
  data = function() return ms.tensor { -1.0, 0.0, 1.0, 7.0 }, ms.zeros { 1 } end,
  loss = function(m, x) return m(x):sum() end,
  log = { tensorboard = true, histograms = 2 }, save = { every = 2 },
  sample = { every = 4, run = function() return "a *text*\n\xff" end },
}
]]

describe("event files", function()
  local folder
  before_each(function()
    folder = command.folder()
    command.write(folder .. "/r.lua", RECIPE)
    command.write(folder .. "/read.py", READ)
  end)
  after_each(function() command.remove(folder) end)

  local function files() return core.list(folder .. "/out/tensorboard") or {} end

  it("have the bytes of TensorBoard's own writer", function()
    local file = tensorboard.new(folder .. "/out", function() return 1795500000.25 end)
    file:scalars(300, { loss = 0.1, tok_s = math.huge, step = 300, links = {} })
    file:text(301, "sample", "one\ntw\u{f6} \xff")
    file:histograms(70000, {
      ["gradients/w"] = {
        min = -1.5, max = 2.5, count = 6, sum = 3.25, sum_squares = 11.5,
        limits = { -0.5, 0.5, 2.5 }, counts = { 1, 2, 3 },
      },
    })
    file:close()
    assert.same({ "events.out.tfevents.1795500000.moonshard" }, files())
    assert.equal(command.read(command.source .. "/tests/golden/tensorboard/events"),
      command.read(folder .. "/out/tensorboard/" .. files()[1]))
  end)

  it("are written where they are asked for, one by each start of a run", function()
    command.succeed(folder, "run r.lua steps=2")
    assert.equal(1, #files())
    command.succeed(folder, "run r.lua steps=4 resume=auto")
    assert.equal(2, #files())
    command.succeed(folder, "check r.lua run=none")
    assert.is_false((core.exists(folder .. "/none")))
  end)

  it("need all gradients for histograms", function()
    local code, _, err = command.run(folder, "run r.lua overlap=in_backward")
    assert.equal(1, code)
    assert.matches("log.histograms needs all gradients", err)
    command.write(folder .. "/r.lua", (RECIPE:gsub("tensorboard = true, ", "")))
    code, _, err = command.run(folder, "run r.lua")
    assert.equal(1, code)
    assert.matches("log.histograms needs log.tensorboard = true", err)
  end)

  for name, options in pairs {
    ["one rank"] = "", ["two ranks"] = "-n 2", ["two ranks with shards"] = "-n 2 shard=full_shard",
  } do
    it("are read by TensorBoard: " .. name, function()
      if not READER then
        return pending "no tensorboard in Python: its reader did not read the files \z
          (pip install tensorboard; MOONSHARD_PYTHON names an interpreter)"
      end
      command.succeed(folder, "run r.lua steps=3 " .. options)
      command.succeed(folder, "run r.lua resume=auto " .. options)
      local pipe = io.popen(("cd '%s' && %s read.py out/tensorboard 2>said")
        :format(folder, PYTHON))
      local text = pipe:read "a"
      assert(pipe:close(), command.read(folder .. "/said"))
      local norms = "scalar grad_norm 0:7.14143 1:7.14143 2:7.14143 3:7.14143\n"
      assert.truthy(text:find(norms, 1, true), text)
      assert.truthy(text:find("text sample 3 '    a *text*\\n    \u{fffd}'\n", 1, true), text)
      assert.truthy(text:find("histogram gradients/w 0 -1 7 4 4\n", 1, true), text)
      assert.truthy(text:find("histogram gradients/w 2 -1 7 4 4\n", 1, true), text)
    end)
  end
end)
