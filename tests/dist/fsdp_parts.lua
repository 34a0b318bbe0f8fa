-- A parameter of a sharded model outside of its unit: what takes a rank's piece for the whole
-- parameter is refused, and what is right of a piece is not.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local rank = ms.rank()

local Net = ms.nn.class "Net"
function Net:init()
  self.embed = ms.nn.Embedding(8, 4)
  self.linear = ms.nn.Linear(4, 4)
  self.norm = ms.nn.LayerNorm(4)
  self.kernel = ms.nn.Parameter(ms.ones { 2, 2, 3, 3 })
end
function Net:forward(x) return self.norm(self.linear(self.embed(x))) end

local x = ms.tensor { { 1, 2, 3 } }

-- What needs all of w. Some of it fits a piece by its shape.
local refused = {
  linear = function(w) return ms.ones { 1, 4 }:linear(w) end,
  matmul = function(w) return ms.ones { 4, 4 }:matmul(w) end,
  product = function(w) return w:matmul(ms.ones { 4, 2 }) end,
  transposed = function(w) return w:transpose(1, 2) end,
  permute = function(w) return w:permute(2, 1) end,
  embedding = function(w) return ms.tensor({ 0, 1 }):embedding(w) end,
  lookup = function(w) return w:index_select(1, ms.tensor { 0 }) end,
  gather = function(w) return w:gather(1, ms.zeros { 1, 1 }:to "i64") end,
  layer_norm = function(w) return ms.ones { 2, 4 }:layer_norm(w, w) end,
  rms_norm = function(w) return w:rms_norm(ms.ones { 4 }) end,
  softmax = function(w) return w:softmax() end,
  attention = function(w) return w:attention(w, w) end,
  conv2d = function(_, net) return ms.ones { 1, 2, 5, 5 }:conv2d(net.kernel) end,
  reshape = function(w) return w:reshape(-1) end,
  view = function(w) return w:view(-1) end,
  index = function(w) return w[1] end,
  narrow = function(w) return w:narrow(1, 1, 1) end,
  split = function(w) return w:split(1, 1) end,
  unsqueeze = function(w) return w:unsqueeze(1) end,
  expand = function(w) return w:expand(2, 8, 4) end,
  cat = function(w) return ms.cat { w, w } end,
  stack = function(w) return ms.stack { w, w } end,
  mean = function(w) return w:mean() end,
  norm = function(w) return w:norm() end,
  rows_sum = function(w) return w:sum(1) end,
  argmax = function(w) return w:argmax() end,
  cumsum = function(w) return w:cumsum(1) end,
  broadcast = function(w) return w + ms.ones { 8, 4 } end,
  rows = function(w) return w * ms.ones { 3, 1, 1 } end,
  -- What was made of a piece is one.
  scaled = function(w) return ms.ones { 1, 4 }:linear(w * 2) end,
  cast = function(w) return ms.ones({ 1, 4 }, "bf16"):linear(w:to "bf16") end,
  detached = function(w) return ms.ones { 1, 4 }:linear(w:detach()) end,
  copied = function(w) return w:detach():clone():reshape(-1) end,
  half = function(w)
    return ms.autocast("bf16", function() return ms.ones { 1, 4 }:linear(w) end)
  end,
}

local allowed = {
  function(w) return (w * 2 + 1 - w:square() / 3):abs():sum() end,
  function(w) return w:maximum(0):minimum(w):clamp(0, 1):sum() end,
  function(w) return ms.where(w:gt(0), w, 1):sum() end,
  function(w) return w:lerp(w:detach(), 0.5):sum() end,
  function(w) return w:is_finite():all() end,
  function(w) return w:abs():max() end,
  function(w) return w * ms.full(2, {}) end,
  function(w) return w + w:grad() end,
  function(w) return w:to "bf16":to "f32" end,
  function(w) return w:contiguous():clone():ne(w):any() end,
}

-- Each option of a layout and a unit, in recording, without, and in evaluation.
local layouts = { flat = "flat", rows = "rows" }
for layout in ms.sorted_pairs(layouts) do
  ms.seed(2)
  local net = Net()
  local model = ms.fsdp(net, { layout = layout, wrap = { class = { "Embedding", "Linear" } } })
  model(x):square():sum():backward()
  local w = net.embed.weight
  for name, f in ms.sorted_pairs(refused) do
    local parameter, unit = "embed.weight", "embed"
    if name == "conv2d" then parameter, unit = "kernel", "root" end
    local text = ("'%s' is sharded here: outside of its unit \"%s\""):format(parameter, unit)
    local function check(run)
      local ok, message = pcall(run)
      assert(not ok, ("%s, %s: it is taken"):format(layout, name))
      assert(tostring(message):find(text, 1, true) and tostring(message):find("wrap = { groups", 1,
        true), ("%s, %s: %s"):format(layout, name, tostring(message)))
    end
    check(function() return f(w, net) end)
    check(function() ms.no_grad(function() return f(w, net) end) end)
    model:eval()
    check(function() ms.no_grad(function() return f(w, net) end) end)
    model:train()
  end
  for i, f in ipairs(allowed) do
    local ok, message = pcall(f, w)
    assert(ok, ("%s, allowed %d: %s"):format(layout, i, tostring(message)))
  end
  -- Scripts that step, average or initialize pieces.
  ms.no_grad(function()
    local average = w:detach():clone()
    average:mul_(0.9):add_(w, 0.1)
    w:sub_(w:grad() * 0.1)
    w:copy_(average)
    w:fill_(0.5)
  end)
  -- Whole again: in summon, in its unit, and after unwrap.
  model:summon({}, function() assert(net.embed.weight:reshape(-1):numel() == 32) end)
  model(x):sum():backward()
  model:unwrap()
  assert(net.embed.weight:transpose(1, 2):mean():item())
end

-- Where ranks have all of it, it is whole everywhere.
do
  local net = Net()
  ms.fsdp(net, { strategy = "no_shard", wrap = { class = "Linear" } })
  assert(ms.ones { 1, 4 }:linear(net.linear.weight):shape()[2] == 4)
end

-- Gradients are clipped after backward.
do
  local Clips = ms.nn.class "Clips"
  local model
  function Clips:init() self.inner = ms.nn.Linear(4, 4) end
  function Clips:forward(t, how)
    local out = self.inner(t)
    if how then model[how](model, 1) end
    return out
  end
  model = ms.fsdp(Clips(), { wrap = { class = "Linear" } })
  model(ms.ones { 1, 4 }):sum():backward()
  for _, how in ipairs { "clip_grad_norm", "clip_grad_value" } do
    expect.fails(function()
      ms.no_grad(function() return model(ms.ones { 1, 4 }, how) end)
    end, how .. " inside of a forward of an fsdp model: call it after backward")
  end
end

expect.fails(function() ms.fsdp(Net(), { wrap = { class = "Block", names = { "embd" } } }) end,
  "it asks for class = 'Block', names = { 'embd' }", "Embedding")
print(("rank %d is done"):format(rank))
