-- The memory of a training step of GPT-2 on a GPU, as `moonshard check` predicts it. The bounds are
-- 0.95 of what PyTorch takes compiled, measured on an H200 (tests/bench/results/h200). `less` is
-- that of model:loss: of logits of 6.1 GiB (124M) or 3.1 one chunk is left, beside the gradients
-- that forward makes.
local command = require "command"
local core = require "moonshard.core"

local STEPS <const> = [[
local ms = require "moonshard"
local given = ms.config { layers = 1, width = 64, heads = 1, batch = 1,
  mode = { "autocast", choices = { "autocast", "bf16", "fp8" } }, logits = true }
local model = ms.nn.gpt2 { vocab = 50304, context = 1024, layers = given.layers,
  width = given.width, heads = given.heads }
if given.mode == "bf16" then model:to "bf16" end
local optimizer = ms.optim.adamw(model, { lr = 1e-4, weight_decay = 0.1 })
local x = ms.randint { given.batch, 1024, low = 0, high = 50304, seed = 1 }:keep()
local y = ms.randint { given.batch, 1024, low = 0, high = 50304, seed = 2 }:keep()
local function loss_of()
  if given.logits then return model(x):cross_entropy(y) end
  return model:loss(x, y)
end
for _ in ms.steps(3) do
  local dtype = given.mode == "fp8" and "fp8" or "bf16"
  local loss = given.mode == "bf16" and loss_of() or ms.autocast(dtype, loss_of)
  loss:backward()
  optimizer:step()
end
]]

local SIZES <const> = {
  ["124M"] = { gib = 27, less = 20, "layers=12 width=768 heads=12 batch=64" },
  ["350M"] = { gib = 33, less = 28, "layers=24 width=1024 heads=16 batch=32" },
  ["1558M"] = { gib = 103, less = 89, "layers=48 width=1600 heads=25 batch=32" },
}

describe("the memory of GPT-2 on a GPU", function()
  local folder
  before_each(function()
    folder = command.folder()
    command.write(folder .. "/steps.lua", STEPS)
  end)
  after_each(function() command.remove(folder) end)

  local function peak_of(size, mode, logits)
    local out = command.succeed(folder, ("check steps.lua --json --device cuda %s mode=%s \z
      logits=%s"):format(size[1], mode, logits))
    return core.json_decode(out).peak_bytes[1]
  end

  -- Inputs of products are saved in 8 bits.
  it("is less in fp8", function()
    assert.is_true(peak_of(SIZES["124M"], "fp8", false)
      < 0.98 * peak_of(SIZES["124M"], "autocast", false))
  end)

  for name, size in pairs(SIZES) do
    for _, mode in ipairs { "autocast", "bf16" } do
      for _, logits in ipairs { true, false } do
        local most = logits and size.gib or size.less
        it(("is at most %d GiB with %s, %s%s"):format(most, name, mode,
          logits and "" or ", without logits"), function()
          local peak = peak_of(size, mode, logits)
          assert.is_true(peak <= most * 2 ^ 30, ("%.2f GiB"):format(peak / 2 ^ 30))
        end)
      end
    end
  end
end)
