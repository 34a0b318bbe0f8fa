-- A backward in two parts against one: the time of both parts, which is to be at most 1.05 of one.
--     ./moonshard run tests/bench/two_parts.lua
-- Each line has the least times of one backward and of its two parts, and the median of ratios of
-- runs that follow each other. `only` chooses lines by a part of their name.
local ms = require "moonshard"
local core = require "moonshard.core"
local nn = ms.nn

local cfg = ms.config { only = "", rounds = 60 }

-- n steps of x = f(x, w), each with a weight of its own.
local Chain = nn.class "Chain"
function Chain:init(n, shape, f)
  self.f = f
  for i = 1, n do self[i] = nn.Parameter(ms.randn { seed = i, table.unpack(shape) }) end
end
function Chain:forward(x)
  for i = 1, #self do x = self.f(x, self[i]) end
  return x
end
local function product(x, w) return x * w end
local function mixed(x, w) return (x * w):tanh() + w end

local function block_of(model) return nn.cut(model, 2, 2) end
local sizes <const> = { vocab = 64, context = 64, layers = 3, width = 256, heads = 4, tie = false }

-- { name, shape of the input, function that makes the module }
local cases <const> = {
  { "linear", { 512, 512 }, function() return nn.Linear(512, 512) end },
  { "layer norm", { 2048, 512 }, function() return nn.LayerNorm(512) end },
  { "RMS norm", { 2048, 512 }, function() return nn.RMSNorm(512) end },
  { "convolution", { 8, 16, 32, 32 }, function() return nn.Conv2d(16, 16, 3) end },
  { "block of gpt2", { 8, 64, 256 }, function() return block_of(nn.gpt2(sizes)) end },
}
local function chain(name, n, shape, f)
  cases[#cases + 1] = { name, shape, function() return Chain(n, shape, f) end }
end
chain("20 products, 256 KiB", 20, { 256, 256 }, product)
chain("20 products, 4 MiB", 20, { 1024, 1024 }, product)
chain("60 mixed, 256 KiB", 20, { 256, 256 }, mixed)
chain("300 products, 32 bytes", 300, { 8 }, product)
chain("900 mixed, 32 bytes", 300, { 8 }, mixed)

local function first(...) return (...) end

for _, case in ipairs(cases) do
  local name, shape, make = table.unpack(case)
  if name:find(cfg.only, 1, true) then
    local module = make()
    local x = ms.randn { seed = 1, table.unpack(shape) }:requires_grad_()
    local function measure(in_parts)
      local y = first(module(x))
      local gradient = ms.ones(y:shape())
      collectgarbage()
      ms.synchronize()
      local from = core.clock_ms()
      y:backward { gradient = gradient, inputs = in_parts and { x } or nil }
      if in_parts then y:backward { rest = true } end
      ms.synchronize()
      local took = core.clock_ms() - from
      x:set_grad(nil)
      for _, p in ipairs(module:parameters()) do p:set_grad(nil) end
      return took
    end
    local one, two, ratios = math.huge, math.huge, {}
    for i = 1, cfg.rounds do
      -- Which comes first shows in times, since memory is laid out by what came before.
      local whole, parts
      if i % 2 == 1 then whole = measure(false) end
      parts = measure(true)
      whole = whole or measure(false)
      one, two, ratios[i] = math.min(one, whole), math.min(two, parts), parts / whole
    end
    table.sort(ratios)
    print(("%-24s %8.3f ms  %8.3f ms  %.2f  median %.2f"):format(name, one, two, two / one,
      ratios[#ratios // 2 + 1]))
  end
end
