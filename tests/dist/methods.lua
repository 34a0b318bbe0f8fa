-- Run by every rank of methods_spec.lua: a tiny GPT trained with one of the methods of
-- recipes/hooks, or with plain means and the same optimizer. Prints losses, the payload of the last
-- step and of all steps, and the shapes from which the payload follows.
local ms = require "moonshard"
local nn, optim, data = ms.nn, ms.optim, ms.data
local o = ms.config {
  method = "none", optimizer = "adamw", steps = 60, seed = 1, source = ".", width = 32,
  context = 16, batch = 16, shard = "",
}
local rank, size = ms.rank(), ms.world_size()

local function recipe(name) return dofile(o.source .. "/recipes/hooks/" .. name .. ".lua") end

-- link: a link; pieces: of a sharded run; make: its own optimizer; outer: an object whose
-- after_step(step) is called after each step of a model that is not wrapped.
local half = o.steps // 10
local methods = {
  powersgd = function() return { link = recipe "powersgd" { rank = 8, start_step = half } } end,
  dgc = function() return { link = recipe "dgc" { fraction = 0.1 }, momentum = true } end,
  onebit_adam = function()
    local onebit = recipe "onebit_adam" { warmup = 2 * o.steps // 3 }
    return { link = onebit.link, make = onebit.optimizer }
  end,
  int8_all_to_all = function() return { link = recipe "int8_all_to_all" {} } end,
  demo = function() return { link = recipe "demo" { keep = 40, decay = 0.9 } } end,
  loco = function() return { link = recipe "loco" { reset = o.steps // 3 } } end,
  zeropp = function()
    local pieces = recipe "zeropp" {}
    return { link = pieces.link, pieces = pieces }
  end,
  sdp4bit = function()
    local pieces = recipe "sdp4bit" {}
    return { link = pieces.link, pieces = pieces }
  end,
  random_k = function() return { link = recipe "random_k" { fraction = 0.7 } } end,
  diloco = function(model)
    return {
      outer = recipe "diloco" { model = model, period = o.steps // 20, lr = 0.5, momentum = 0.5 },
    }
  end,
  streaming_diloco = function(model)
    local fragments = { { model.wte, model.wpe }, { model.h[1] }, { model.h[2], model.ln_f } }
    return {
      outer = recipe "streaming_diloco" {
        fragments = fragments, period = o.steps // 20, delay = 1, lr = 0.8, momentum = 0.5,
      },
    }
  end,
  local_sgd = function(model)
    return {
      outer = recipe "local_sgd" {
        model = model, periods = { { o.steps // 30, size // 2 }, { o.steps // 15, size } },
      },
    }
  end,
  slowmo = function(model)
    return { outer = recipe "slowmo" { model = model, period = o.steps // 30, momentum = 0.2 } }
  end,
}

ms.seed(o.seed)
local model = nn.gpt2 { vocab = 128, context = o.context, layers = 2, width = o.width, heads = 2 }
local method = o.method == "none" and {} or methods[o.method](model)
local function sharded()
  local pieces = method.pieces or {}
  local options = {
    strategy = o.shard, wrap = { class = "GPT2Block" }, comm_hook = method.link,
    before_gather = pieces.gather and pieces.gather.before_gather,
    after_gather = pieces.gather and pieces.gather.after_gather,
  }
  for name, value in pairs(pieces.shard or {}) do options[name] = value end
  return ms.fsdp(model, options)
end
local net = method.outer and model or o.shard ~= "" and sharded()
  or ms.ddp(model, { comm_hook = method.link or "all_reduce", bucket_bytes = 512 * o.width })
local kinds = {
  adamw = { optim.adamw, 1e-3 }, sgd = { optim.sgd, 0.1 }, momentum = { optim.sgd, 0.1, 0.9 },
}
local kind = kinds[o.optimizer]
local opt = (method.make or kind[1])(model, {
  lr = kind[2],
  momentum = not method.momentum and kind[3] or nil,
  schedule = optim.linear { warmup = o.steps // 10, steps = o.steps, floor = 0.05 },
})
-- A text in which each letter is followed by one of a few letters, mostly the same one. The text is
-- the same on every machine, and its loss falls evenly.
local function make_text()
  local number = 12345
  local function draw(n)
    number = (number * 1103515245 + 12345) % 2147483648
    return number // 65536 % n
  end
  local after, text, at = {}, {}, 0
  for letter = 0, 9 do after[letter] = { draw(10), draw(10), draw(10), draw(10) } end
  for i = 1, 200000 do
    at = after[at][1 + draw(1 + draw(4))]
    if draw(20) == 0 then at = draw(10) end
    text[i] = string.char(97 + at)
  end
  return table.concat(text)
end
if rank == 0 and not io.open "text" then
  local file = assert(io.open("text", "w"))
  file:write(make_text())
  file:close()
end
ms.world():barrier()
local loader = assert(data.bytes "text")
  :loader { batch = o.batch, length = o.context, shuffle = true, seed = o.seed, group = ms.world() }

local function payload()
  local sum = 0
  for _, group in ipairs(require "moonshard.core".comm_groups()) do
    sum = sum + select(2, group:_traffic())
  end
  return sum
end

local losses, begun, last = {}, payload(), 0
for step in ms.steps(o.steps) do
  local before = payload()
  local x, y = loader:next()
  local loss = net(x):cross_entropy(y)
  loss:backward()
  losses[step + 1] = loss:detach():keep()
  opt:step()
  if method.outer then method.outer.after_step(step) end
  last = payload() - before
end
local sent = payload() - begun

local all = ms.world():all_reduce(ms.stack(losses), "avg"):value():to_table()
local sum = 0
for i = #all - 9, #all do sum = sum + all[i] end
if rank == 0 then
  local shapes, buckets = {}, {}
  for i, p in ipairs(model:parameters()) do shapes[i] = table.concat(p:shape(), "x") end
  for i, b in ipairs(not method.outer and net:stats().buckets or {}) do
    buckets[i] = b.bytes // 4
  end
  -- Of a sharded model: numbers of each unit's shard.
  for i, unit in ipairs(o.shard ~= "" and net:units() or {}) do
    buckets[i] = unit.shard_bytes // 4
  end
  print("shapes " .. table.concat(shapes, " "))
  print("buckets " .. table.concat(buckets, " "))
  print(("first %.6f last %.6f step %d sent %d"):format(all[1], sum / 10, last, sent))
end
