-- The tasks of one training step of a GPT-2, by name and size, with their times: a profile that
-- needs no tool. Run by first_light.sh; by hand:
--     moonshard run tests/gpu/profile.lua --device cuda config=124m mode=bf16
local core = require "moonshard.core"
local ms = require "moonshard"

local WARM <const>, TRACED <const>, SHOWN <const> = 4, 1, 40   -- steps; rows of the table

-- As in `moonshard bench step`: layers, width, heads, vocabulary, length, batch.
local sizes = {
  micro = { 2, 32, 2, 64, 16, 2 },
  ["124m"] = { 12, 768, 12, 50304, 1024, 64 },
  ["350m"] = { 24, 1024, 16, 50304, 1024, 32 },
  ["1558m"] = { 48, 1600, 25, 50304, 1024, 32 },
}

local cfg = ms.config {
  config = { "124m", choices = { "micro", "124m", "350m", "1558m" }, help = "the model" },
  mode = { "bf16", choices = { "bf16", "autocast" }, help = "bf16: parameters, too" },
  attention = {
    "deterministic", choices = { "deterministic", "fast" }, help = "how its gradients are added up",
  },
  batch = { 0, help = "rows of a step; 0: the model's" },
  layers = { 0, help = "blocks; 0: the model's" },
}

local layers, width, heads, vocab, length, batch = table.unpack(sizes[cfg.config])
if cfg.batch > 0 then batch = cfg.batch end
if cfg.layers > 0 then layers = cfg.layers end
local model = ms.nn.gpt2 {
  vocab = vocab, context = length, layers = layers, width = width, heads = heads,
}
if cfg.mode == "bf16" then model:to "bf16" end
local optimizer = ms.optim.adamw(model, { lr = 1e-4, weight_decay = 0.1 })
local x = ms.randint { batch, length, low = 0, high = vocab, seed = 1 }:keep()
local y = ms.randint { batch, length, low = 0, high = vocab, seed = 2 }:keep()

local function loss_of() return model:loss(x, y) end
local function forward()
  return cfg.mode == "bf16" and loss_of() or ms.autocast("bf16", loss_of)
end

for step in ms.steps(WARM + TRACED) do
  if step == WARM then
    core.synchronize()
    core.trace_start()
  end
  ms.attention(cfg.attention, forward):backward()
  optimizer:step()
end
core.synchronize()

-- Tasks of one name, as many bytes and as many FLOPs are one row.
local rows, tasks, all_ns = {}, 0, 0
for _, record in ipairs(core.trace_stop()) do
  if record.kind ~= "wait" then
    local bytes, flops = record.bytes or 0, record.flops or 0
    local key = ("%s %d %.3g"):format(record.name, bytes, flops)
    local row = rows[key]
    if not row then
      row = { name = record.name, bytes = bytes, flops = flops, count = 0, ns = 0 }
      rows[key], rows[#rows + 1] = row, row
    end
    local ns = record.end_ns - record.start_ns
    row.count, row.ns = row.count + 1, row.ns + ns
    tasks, all_ns = tasks + 1, all_ns + ns
  end
end
table.sort(rows, function(a, b) return a.ns > b.ns end)

-- On the sim device without rates no task takes any time.
local function over(number, seconds) return seconds > 0 and number / seconds or 0.0 end
print(("%s %s %s, %d layers, batch %d: %d tasks, %.2f ms in all, %.0f tokens/s"):format(cfg.config,
  cfg.mode, cfg.attention, layers, batch, tasks, all_ns / 1e6, over(batch * length, all_ns / 1e9)))
for i = 1, math.min(#rows, SHOWN) do
  local row = rows[i]
  local seconds = row.ns / row.count / 1e9
  print(("%8.3f ms %5.1f%% x%-4d %9.1f us  %8.0f GB/s %7.1f TFLOP/s  %9.1f MB  %s")
    :format(row.ns / 1e6, over(100 * row.ns, all_ns), row.count, seconds * 1e6,
      over(row.bytes, seconds) / 1e9, over(row.flops, seconds) / 1e12, row.bytes / 1e6, row.name))
end
