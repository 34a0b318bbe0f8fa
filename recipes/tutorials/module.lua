-- Tutorial: a module of your own. An attention layer with a learned gate, in a small model that
-- learns to reverse a list.
--     ./moonshard run recipes/tutorials/module.lua
local ms = require "moonshard"
local nn, optim = ms.nn, ms.optim

local cfg = ms.config {
  steps = { 600, help = "optimizer steps" },
  width = { 64, help = "numbers at each position" },
  run   = { "", help = "folder of the run" },
}
local LENGTH <const>, DIGITS <const> = 8, 10

-- A class: init makes the parts, forward uses them. What is assigned to self and is a module or a
-- parameter belongs to the model: optimizers, ddp, fsdp and files find it by its name.
local Gated = nn.class "Gated"

function Gated:init(width, heads)
  self.heads = heads
  self.norm = nn.LayerNorm(width)
  self.inner = nn.Linear(width, 3 * width)
  self.outer = nn.Linear(width, width)
  self.gate = nn.Parameter(ms.zeros { width }) -- a parameter of this module itself
end

-- [rows, length, width] -> the same. Dimensions count from 1.
function Gated:forward(x)
  local rows, length, width = x:size(1), x:size(2), x:size(3)
  local function split(t) -- to [rows, heads, length, width / heads]
    return t:reshape(rows, length, self.heads, width // self.heads):transpose(2, 3)
  end
  local all = self.inner(self.norm(x))
  local q, k, v = split(all:narrow(3, 1, width)), split(all:narrow(3, width + 1, width)),
    split(all:narrow(3, 2 * width + 1, width))
  local mixed = q:attention(k, v, { causal = false }):transpose(2, 3):reshape(rows, length, width)
  return x + self.outer(mixed) * (self.gate + 1):sigmoid()
end

local Reverser = nn.class "Reverser"

function Reverser:init(width)
  self.digits, self.places = nn.Embedding(DIGITS, width), nn.Embedding(LENGTH, width)
  self.layers = nn.List { Gated(width, 4), Gated(width, 4) }
  self.out = nn.Linear(width, DIGITS)
end

function Reverser:forward(ids)
  local x = self.digits(ids) + self.places(ms.arange(0, LENGTH - 1))
  for _, layer in ipairs(self.layers) do x = layer(x) end
  return self.out(x)
end

local model = Reverser(cfg.width)
for _, one in ipairs(model:named_parameters()) do
  if one.name:find "gate" then ms.log("%s: %d numbers", one.name, one.parameter:numel()) end
end

local BACKWARDS <const> = ms.arange(LENGTH - 1, 0, -1)

-- Lists of digits and the same lists backwards.
local function batch()
  local x = ms.randint { 64, LENGTH, high = DIGITS }
  return x, x:index_select(2, BACKWARDS)
end

local result = ms.train {
  model = model, steps = cfg.steps, data = batch,
  optimizer = optim.adamw(model, { lr = 3e-3 }),
  run = cfg.run ~= "" and cfg.run or nil,
}
local x, y = batch()
local right = model(x):argmax(3):eq(y):to("f32"):mean():item()
ms.log("loss %.4f; %.0f%% of the digits are at their place", result.loss, 100 * right)
