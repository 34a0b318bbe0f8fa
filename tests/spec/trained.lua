-- For specs of recipes whose ranks have parts of one model: runs them in a folder, and compares
-- losses, norms and saved tensors.
local command = require "command"
local ms = require "moonshard"
local trained = {}

--- What a run of 5 steps gave. lines: loss, norm and validation loss of each step, and last the
--- validation loss that was printed. saved: the tensors of its folder model/. own: what the recipe
--- printed.
---@class tests.Trained
---@field lines number[][]
---@field saved table<string, any>
---@field run string
---@field out string
---@field metrics table[]

--- Runs of recipes in a folder of their own.
---@class tests.Runs
---@field folder string
local Runs = {}
Runs.__index = Runs

--- options: of each recipe, by its path below recipes/ without ending; or of a script, by its path
--- below the checkout.
---@param options table<string, string>
---@return tests.Runs
function trained.runs(options)
  return setmetatable({ folder = command.folder(), options = options, count = 0 }, Runs)
end

function Runs:remove() command.remove(self.folder) end

local function path_of(recipe)
  return ("%s/%s%s.lua"):format(command.source, recipe:find "^tests/" and "" or "recipes/", recipe)
end

--- Trains in a folder of its own unless `run` names one.
---@param recipe string
---@param ranks string their number, and other switches: "4 --thread-ranks"
---@param options string
---@param run? string
---@return tests.Trained
function Runs:train(recipe, ranks, options, run)
  self.count = self.count + 1
  run = run or "run" .. self.count
  local folder = self.folder
  local out = command.succeed(folder, ("run '%s' -n %s steps=5 run=%s %s %s"):format(
    path_of(recipe), ranks, run, self.options[recipe], options))
  local lines, metrics = {}, command.metrics(folder .. "/" .. run)
  for i, line in ipairs(metrics) do lines[i] = { line.loss, line.grad_norm, line.val_loss or 0 } end
  assert(#lines == 5, ("%d steps"):format(#lines))
  lines[6] = { tonumber((out:match "validation loss ([%d.]+)")), 0, 0 }
  local saved = assert(ms.safetensors.load(folder .. "/" .. run .. "/model/model.safetensors"))
  return { lines = lines, saved = saved, run = run, out = out, metrics = metrics }
end

--- Goes on from the checkpoint of step 3 in a copy of a run's folder.
---@param recipe string
---@param ranks string
---@param options string
---@param one tests.Trained
---@return tests.Trained
function Runs:resume(recipe, ranks, options, one)
  self.count = self.count + 1
  local copy = "again" .. self.count
  assert(os.execute(("cd '%s' && cp -r %s %s && rm -rf %s/step-00000005 %s/model"):format(
    self.folder, one.run, copy, copy, copy)))
  local own = self:train(recipe, ranks, options, copy)
  assert(own.out:match "step%-00000003", own.out)
  return own
end

--- A run that must end with code 1 and this message.
---@param recipe string
---@param ranks string
---@param options string all of them
---@param message string
function Runs:refuses(recipe, ranks, options, message)
  local code, _, err = command.run(self.folder, ("run '%s' -n %s %s"):format(path_of(recipe), ranks,
    options))
  assert(code == 1 and err:find(message, 1, true), ("%d: %s"):format(code, err))
end

--- The peak memory of each kind of rank that `moonshard check` tells for a run.
---@param recipe string
---@param ranks integer
---@param options string
---@param run string
---@return integer[]
function Runs:predicted(recipe, ranks, options, run)
  local out = command.succeed(self.folder, ("check '%s' -n %d --json steps=5 run=%s %s %s"):format(
    path_of(recipe), ranks, run, self.options[recipe], options))
  return require "moonshard.core".json_decode(out:match "{.*}").peak_bytes
end

--- The losses of both are equal within 1e-5, relative, and tensors within 1e-5.
---@param expected tests.Trained
---@param own tests.Trained
---@param how string for messages
function trained.same(expected, own, how)
  for i, line in ipairs(expected.lines) do
    for k, value in ipairs(line) do
      -- The last line has four digits.
      local most = i == 6 and 1.01e-4 or 1e-5 * math.abs(value)
      assert(math.abs(own.lines[i][k] - value) <= most,
        ("%s: step %d: %.9g, not %.9g"):format(how, i - 1, own.lines[i][k], value))
    end
  end
  for name, t in pairs(expected.saved) do
    local other = assert(own.saved[name], name)
    assert(table.concat(t:shape(), " ") == table.concat(other:shape(), " "), name)
    local off = (t - other):abs():max():item()
    assert(off <= 1e-5, ("%s: %s is off by %g"):format(how, name, off))
  end
  for name in pairs(own.saved) do assert(expected.saved[name], name) end
end

--- Two runs have the same bits.
---@param one tests.Trained
---@param other tests.Trained
function Runs:equal_bits(one, other)
  for i, line in ipairs(one.lines) do
    for k, value in ipairs(line) do
      assert(value == other.lines[i][k], ("step %d: %.17g, not %.17g"):format(i - 1,
        other.lines[i][k], value))
    end
  end
  local file = "/model/model.safetensors"
  assert(command.read(self.folder .. "/" .. one.run .. file)
    == command.read(self.folder .. "/" .. other.run .. file), "weights differ")
end

--- Each step's loss is below that of the step before.
---@param one tests.Trained
function trained.falls(one)
  for i = 2, 5 do assert(one.lines[i][1] < one.lines[i - 1][1], "the loss does not fall") end
end

return trained
