-- Tutorial: a Hugging Face model learns a text of yours, by adapters (LoRA). What comes out is a
-- folder that transformers and peft read.
--     ./moonshard run recipes/tutorials/finetune.lua weights=FOLDER data=MY_TEXT
-- Without weights= it first trains a tiny GPT-2 of bytes, and saves it as such a folder, so that it
-- runs anywhere.
local ms = require "moonshard"
local nn, optim = ms.nn, ms.optim

local cfg = ms.config {
  weights  = { "", help = "a folder with config.json and .safetensors, GPT-2 or Llama" },
  data     = { "lua/moonshard/train/init.lua", help = "the text to learn" },
  first    = { "README.md", help = "without weights=: what the stand-in knows" },
  pretrain = { 150, help = "without weights=: optimizer steps of the stand-in" },
  steps    = { 200, help = "optimizer steps" },
  batch    = { 16, help = "sequences of a step" },
  length   = { 64, help = "tokens of a sequence" },
  rank     = { 8, help = "rank of the adapters" },
  lr       = { 5e-3, help = "learning rate" },
  run      = { "runs/finetune", help = "folder of the run" },
}

local function loss_of(model, x, y) return model(x):cross_entropy(y) end

-- The stand-in: a model of bytes that knows a little English.
local function make_weights(folder)
  local bytes = assert(ms.data.bytes(cfg.first))
    :loader { batch = cfg.batch, length = 64, shuffle = true }
  local model = nn.gpt2 { vocab = 256, context = 128, layers = 2, width = 128, heads = 4 }
  local optimizer = optim.adamw(model, { lr = 3e-3 })
  for _ = 1, cfg.pretrain do
    loss_of(model, bytes:next()):backward()
    optimizer:step()
  end
  assert(model:save(folder))
end

local folder = cfg.weights
if folder == "" then
  folder = cfg.run .. "/base"
  if ms.rank() == 0 then make_weights(folder) end
  ms.world():barrier()
end

-- 1. The model, and the text in its tokens. A model without a tokenizer is one of bytes.
local model = assert(nn.pretrained(folder))
local tokenizer = model:tokenizer()
local file = assert(io.open(cfg.data, "rb"))
local text = file:read "a"
file:close()
local ids = tokenizer and tokenizer:encode(text) or ms.tensor { text:byte(1, -1) }
local held_out = ids:numel() // 10

-- 2. The weights stay as they are; small matrices beside them learn.
model = nn.lora(model, { rank = cfg.rank, alpha = 2 * cfg.rank })
local trained, all = 0, 0
for _, parameter in ipairs(model:parameters()) do
  all = all + parameter:numel()
  if parameter:requires_grad() then trained = trained + parameter:numel() end
end
ms.log("%d of %d numbers are trained", trained, all)

-- Sequences that begin anywhere in a part of the text, and what comes after each of their tokens.
local function batch(first, count)
  local starts = ms.randint { cfg.batch, 1, high = count - cfg.length }
  local places = (starts + ms.arange(0, cfg.length) + first):reshape(-1)
  local rows = ids:index_select(1, places):reshape(cfg.batch, cfg.length + 1)
  return rows:narrow(2, 1, cfg.length), rows:narrow(2, 2, cfg.length)
end

local function held_out_loss()
  model:eval()
  local sum = 0
  ms.no_grad(function()
    for _ = 1, 8 do sum = sum + loss_of(model, batch(ids:numel() - held_out, held_out)):item() end
  end)
  model:train()
  return sum / 8
end

-- 3. Training, as with any model: ms.ddp and ms.fsdp take it too.
local before = held_out_loss()
ms.train {
  model = model, steps = cfg.steps, run = cfg.run .. "/train", clip = 1.0,
  optimizer = optim.adamw(model, { lr = cfg.lr }),
  data = function() return batch(0, ids:numel() - held_out) end,
}
ms.log("loss of held-out text %.3f before, %.3f after", before, held_out_loss())

-- 4. The adapters alone, for peft; or folded into the weights, as a model of its own.
assert(model:save_adapters(cfg.run .. "/adapter"))
assert(model:merge_adapters():save(cfg.run .. "/model"))
ms.log("%s/adapter and %s/model are written", cfg.run, cfg.run)
