-- Training in 16 bits stays as near to f32 as with PyTorch's autocast: loss curves of 200 steps of
-- three small models, from the same weights and with the same batches (tests/golden/curves).
--
-- The distance of a run is the mean over its steps of |loss - loss in f32|. Its mean over five
-- seeds may be PyTorch's mean plus two standard errors of the difference of the two means: a run
-- that rounds otherwise, as each instruction set does, ends with another distance for each seed. Of
-- llama in bf16 they are 0.0005 to 0.0009 with AVX2 and with bf16 instructions, and the means over
-- 24 seeds 0.00067 and 0.00069, with errors of 0.00002. With MOONSHARD_TEST_FULL=1 all
-- models have five seeds, in bf16 and f16; else gpt2 has, in bf16. The others have one seed, whose
-- distance says little and is not compared; so has each model under a sanitizer. In fp8 the
-- language models end within 1% of bf16, in the mean over seeds.
local ms = require "moonshard"
local command = require "command"
local core = require "moonshard.core"
local nn = ms.nn

local FOLDER <const> = command.source .. "/tests/golden/curves/"
local ONE <const> = (os.getenv "MOONSHARD_SANITIZE" or "") ~= "" or command.short

local manifest = core.json_decode(assert(core.file_read(FOLDER .. "manifest.json")))
local curves = assert(ms.safetensors.load(FOLDER .. "curves.safetensors"))
local STEPS <const>, ALL <const> = manifest.steps, #manifest.seeds
local DTYPES <const> = command.full and not ONE and { "bf16", "f16" } or { "bf16" }

------------------------------------------------------------------------------------------- numbers

-- As in make.py: integers modulo 2^64.
local function mix(n)
  n = (n ~ (n >> 30)) * 0xBF58476D1CE4E5B9
  n = (n ~ (n >> 27)) * 0x94D049BB133111EB
  return n ~ (n >> 31)
end

-- Gives number i, from 0, of a stream.
local function stream(key)
  local first = mix(key)
  return function(i) return mix(first + (i + 1) * 0x9E3779B97F4A7C15) >> 40 end
end

local function initial(case, seed, model)
  local named, state = {}, {}
  for _, item in ipairs(model:named_parameters()) do named[item.name] = item.parameter:shape() end
  local number = 0
  for name, shape in ms.sorted_pairs(named) do
    if #shape == 1 then
      state[name] = name:match "bias$" and ms.zeros(shape) or ms.ones(shape)
    else
      local draw, list, count = stream(seed * 1000 + number), {}, 1
      for _, size in ipairs(shape) do count = count * size end
      for i = 1, count do
        list[i] = (2 * (draw(i - 1) >> 8) - 65535) * 2.0 ^ (-16 - case.init)
      end
      state[name] = ms.tensor(list):view(table.unpack(shape))
    end
    number = number + 1
  end
  model:load_state(state)
end

-- The text of a row: three kinds of tokens.
local function write_text(list, draw, at, length, vocab)
  for t = 0, length - 1 do
    local drawn = draw(at + t)
    local kind, token = drawn % 16, drawn // 16 % vocab
    if t > 0 and kind < 9 then token = (5 * list[at + t] + 7) % vocab
    elseif t >= 8 and kind < 13 then token = list[at + t - 7] end
    list[at + t + 1] = token
  end
end

-- A picture and its class.
local function write_image(list, draw, at, length, classes, shapes)
  local label = draw(at + length - 1) % classes
  for i = 0, length - 2 do
    local noise = draw(at + i) % 64 - 32
    list[at + i + 1] = 32 * (shapes(label * (length - 1) + i) % 2) + noise
  end
  list[at + length] = label
end

local function batches(case, seed)
  local config, draw, list = case.config, stream(seed * 1000 + 999), {}
  local length = (config.context or config.side * config.side) + 1
  local shapes = stream(seed * 1000 + 998)
  for row = 0, STEPS * case.batch - 1 do
    if config.vocab then write_text(list, draw, row * length, length, config.vocab)
    else write_image(list, draw, row * length, length, config.classes, shapes) end
  end
  return ms.tensor(list, "i64"):view(STEPS, case.batch, length)
end

-------------------------------------------------------------------------------------------- models

-- The net of recipes/mnist.lua without dropout, and with gelu for relu.
local DigitNet = nn.class "DigitNet"

function DigitNet:init(o)
  self.first = nn.Conv2d(1, o.channels, 3, { padding = 1 })
  self.second = nn.Conv2d(o.channels, 2 * o.channels, 3, { padding = 1 })
  self.hidden = nn.Linear(2 * o.channels * (o.side // 4) * (o.side // 4), o.hidden)
  self.out = nn.Linear(o.hidden, o.classes)
  self.pool, self.side = nn.MaxPool2d(2), o.side
end

function DigitNet:forward(pixels)
  local x = (pixels:to "f32" / 32):view(-1, 1, self.side, self.side)
  x = self.pool(self.first(x):gelu())
  x = self.pool(self.second(x):gelu())
  return self.out(self.hidden(x:flatten(2)):gelu())
end

local function make(case, seed)
  local classes = { gpt2 = nn.gpt2, llama = nn.llama, digits = DigitNet }
  local model = classes[case.model](case.config)
  initial(case, seed, model)
  return model
end

local function loss_of(case, model, batch)
  local length = batch:size(2) - 1
  local given = batch:narrow(2, 1, length)
  if case.config.vocab then return model(given):cross_entropy(batch:narrow(2, 2, length)) end
  return model(given):cross_entropy(batch:select(2, length + 1))
end

-- The losses of all steps.
local function run(case, seed, dtype, data)
  local model, losses, options = make(case, seed), {}, { lr = case.lr }
  for name, value in pairs(manifest.hyperparameters) do options[name] = value end
  local optimizer = ms.optim.adamw(model, options)
  local scaler = dtype == "f16" and ms.optim.scaler()
  for step in ms.steps(STEPS) do
    local function forward() return loss_of(case, model, data[step + 1]) end
    local loss = dtype == "f32" and forward() or ms.autocast(dtype, forward)
    losses[step + 1] = loss:item()
    optimizer:zero_grad()
    if scaler then
      scaler:scale(loss):backward()
      scaler:step(optimizer)
    else
      loss:backward()
      optimizer:step()
    end
  end
  return losses
end

------------------------------------------------------------------------------------------- results

local function mean(list)
  local sum = 0
  for _, one in ipairs(list) do sum = sum + one end
  return sum / #list
end

local function distance(a, b)
  local list = {}
  for i = 1, STEPS do list[i] = math.abs(a[i] - b[i]) end
  return mean(list)
end

-- Of single steps near the end losses depend on the batch more than on what was learned.
local function last(losses) return mean { table.unpack(losses, STEPS - 19) } end

local function golden(model, seed, dtype)
  return curves[("%s.%d.%s"):format(model, seed, dtype)]:to_table()
end

-- The mean of a list, and its standard error.
local function mean_and_error(list)
  local middle, square = mean(list), 0
  for _, one in ipairs(list) do square = square + (one - middle) ^ 2 end
  return middle, math.sqrt(square / (#list - 1) / #list)
end

-- PyTorch's distances of all seeds, their mean, and its standard error.
local function theirs(model, dtype)
  local list = {}
  for i, seed in ipairs(manifest.seeds) do
    list[i] = distance(golden(model, seed, dtype), golden(model, seed, "f32"))
  end
  return list, mean_and_error(list)
end

local function at_most(bound, found, what)
  assert.is_true(found <= bound, ("%s: %.6f, more than %.6f"):format(what, found, bound))
end

describe("training in 16 bits", function()
  for _, case in ipairs(manifest.models) do
    local name, exact, data = case.model, {}, {}
    local all = not ONE and (command.full or name == "gpt2")

    setup(function()
      for i = 1, all and ALL or 1 do
        data[i] = batches(case, manifest.seeds[i])
        exact[i] = run(case, manifest.seeds[i], "f32", data[i])
      end
    end)

    -- 2e-5 is the tolerance of losses in the golden data; these are within 1e-6. Later a difference
    -- in the last bit has grown: by then it is a tenth of what 16 bits make, at most.
    it("begins as in PyTorch, and learns, in f32: " .. name, function()
      local _, bf16 = theirs(name, "bf16")
      for i, losses in ipairs(exact) do
        local peer = golden(name, manifest.seeds[i], "f32")
        for step = 1, 20 do
          at_most(2e-5, math.abs(losses[step] - peer[step]), "difference of a loss")
        end
        at_most(bf16 / 10, distance(losses, peer), "distance from PyTorch in f32")
        at_most(losses[1] * 2 / 3, last(losses), "loss at the end")
      end
    end)

    for _, dtype in ipairs(DTYPES) do
      local claim = all and "is as near to f32 as in PyTorch" or "learns"
      it(("%s: %s, %s"):format(claim, name, dtype), function()
        local own = {}
        for i = 1, #exact do
          local losses = run(case, manifest.seeds[i], dtype, data[i])
          at_most(losses[1] * 2 / 3, last(losses), "loss at the end")
          own[i] = distance(losses, exact[i])
          assert.is_true(own[i] > 0)       -- 0: nothing was computed in 16 bits
        end
        local _, middle, error = theirs(name, dtype)
        if all then
          for _, one in ipairs(own) do at_most(2 * middle, one, "distance of a seed") end
          local own_middle, own_error = mean_and_error(own)
          at_most(middle + 2 * math.sqrt(error ^ 2 + own_error ^ 2), own_middle, "mean distance")
        end
      end)
    end

    -- PyTorch has no autocast to 8 bits. One seed says little: two runs of bf16 end as far apart.
    if case.config.vocab then
      it("ends in fp8 where it ends in bf16: " .. name, function()
        local ends = { fp8 = {}, bf16 = {} }
        for i = 1, #exact do
          for dtype, list in pairs(ends) do
            local losses = run(case, manifest.seeds[i], dtype, data[i])
            at_most(losses[1] * 2 / 3, last(losses), "loss at the end")
            list[i] = last(losses)
          end
          assert.is_true(ends.fp8[i] ~= ends.bf16[i])
        end
        local far = math.abs(mean(ends.fp8) / mean(ends.bf16) - 1)
        at_most(all and 0.01 or 0.05, far, "difference of the losses at the end")
      end)
    end
  end

  it("is described by the table", function()
    local lines = {}
    for line in io.lines(FOLDER .. "table.tsv") do
      local model, dtype, row, value = line:match "^(%w+)\t(%w+)\t(%w+)\t([%d.]+)\t"
      lines[("%s %s %s"):format(model, dtype, row)] = value
    end
    for _, case in ipairs(manifest.models) do
      for _, dtype in ipairs { "bf16", "f16" } do
        local list, middle, error = theirs(case.model, dtype)
        local expected = { mean = middle, error = error }
        for i, seed in ipairs(manifest.seeds) do expected[tostring(seed)] = list[i] end
        for row, value in pairs(expected) do
          local key = ("%s %s %s"):format(case.model, dtype, row)
          assert.equal(("%.6f"):format(value), lines[key], key)
          lines[key] = nil
        end
      end
    end
    assert.is_nil(next(lines))
  end)
end)
