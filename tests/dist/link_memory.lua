-- Run by each rank of link_memory_spec.lua: trains a small model with each link that is shipped
-- (native ones, their twins in Lua, the methods of recipes/hooks) and with links that leave values
-- of futures to callbacks and to the engine. Prints "NAME GROWTH", the bytes by which live memory
-- is larger after 40 steps than after 20.
local ms = require "moonshard"
local hooks, nn, optim = require "moonshard.hooks", ms.nn, ms.optim
local o = ms.config { source = "." }

local function recipe(name) return dofile(o.source .. "/recipes/hooks/" .. name .. ".lua") end
local function twin(name) return require("moonshard.hooks." .. name) end

-- Makes a link for each test: no link is used for two models.
local links = {
  gathers = function()
    return function(b)
      local count = b:buffer():numel()
      return b:group():all_gather(b:buffer()):and_then(function(all)
        return all:reshape(-1):narrow(1, 1, count) * 1
      end)
    end
  end,
  returns = function()
    return function(b) return b:group():all_reduce(b:buffer() * 0.5) end
  end,
  watches = function()
    return function(b, next)
      local mean = next(b)
      b:group():all_reduce(b:buffer() * 2):and_then(function() end)
      return mean
    end
  end,
  joins = function()
    return function(b, next)
      local mean, other = next(b), b:group():all_reduce(b:buffer() * 2)
      return ms.all { mean, other }:and_then(function(both) return both[1] end)
    end
  end,
  chained = function()
    return hooks.chain {
      hooks.stage {
        name = "doubles", encode = function(t) return t * 2 end,
        decode = function(t) return t / 2 end,
      },
      function(b, next) return next(b):and_then(function(t) return t + 0 end) end,
      "bf16_compress",
    }
  end,
  ["recipes/powersgd"] = function() return recipe "powersgd" { rank = 2, start_step = 5 } end,
  ["recipes/dgc"] = function() return recipe "dgc" { fraction = 0.1 } end,
  ["recipes/onebit_adam"] = function() return recipe "onebit_adam" { warmup = 5 }.link end,
  ["recipes/loco"] = function() return recipe "loco" { reset = 7 } end,
  ["recipes/zeropp"] = function() return recipe "zeropp"().link end,
  ["recipes/int8_all_to_all"] = function() return recipe "int8_all_to_all" {} end,
  ["recipes/demo"] = function() return recipe "demo" { keep = 8 } end,
  ["recipes/random_k"] = function() return recipe "random_k" { fraction = 0.5 } end,
}
-- Options that a kind must have.
local required = {
  cast = { dtype = "bf16" }, top_k = { fraction = 0.1 }, clip = { scope = "bucket", max_norm = 1 },
  post_local_sgd = { start_step = 5 }, powersgd = { rank = 2, start_step = 5 },
}
-- Links after which others must follow.
local open = {
  cast = true, error_feedback = true, clip = true, nan_check = true,
}
for _, name in ipairs(hooks._ready_made) do
  local function shipped(make)
    return function()
      local link = make(required[name])
      return open[name] and hooks.chain { link, hooks.all_reduce() } or link
    end
  end
  if name == "error_feedback" then
    links[name] = function()
      return hooks.chain { hooks.error_feedback(), hooks.top_k { fraction = 0.1 } }
    end
  else links[name] = shipped(hooks[name]) end
  local found = package.searchpath("moonshard.hooks." .. name, package.path)
  if found and name ~= "error_feedback" then
    links["twin of " .. name] = shipped(twin(name))
  elseif found then
    links["twin of " .. name] = function()
      return hooks.chain { twin(name) { name = "ef" }, hooks.top_k { fraction = 0.1 } }
    end
  end
end

local outer = {
  diloco = function(model) return recipe "diloco" { model = model, period = 5 } end,
  streaming_diloco = function(model)
    local fragments = {}
    for i, child in ipairs(model:children()) do fragments[i] = { child } end
    return recipe "streaming_diloco" { fragments = fragments, period = 5, delay = 1 }
  end,
  local_sgd = function(model)
    return recipe "local_sgd" { model = model, periods = { { 5, ms.world_size() } } }
  end,
  slowmo = function(model) return recipe "slowmo" { model = model, period = 5 } end,
  sparta = function(model) return recipe "sparta" { model = model } end,
  noloco = function(model) return recipe "noloco" { model = model, period = 5 } end,
  eager_diloco = function(model) return recipe "eager_diloco" { model = model, period = 5 } end,
  sparseloco = function(model) return recipe "sparseloco" { model = model, period = 5 } end,
  des_loc = function(model)
    return recipe "des_loc" { model = model, period = 5, first = 5, second = 5 }
  end,
}

local function layers() return nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)) end

local function growth(net, after)
  local optimizer = optim.sgd(net, { lr = 0.01, momentum = after and 0.9 or 0 })
  local x, live = ms.randn { 8, 32, seed = 1 }, {}
  for step in ms.steps(40) do
    net(x):mul(1):sum():backward()
    optimizer:step()
    if after then after.after_step(step, optimizer) end
    live[step + 1] = ms.memory().live
  end
  return live[40] - live[20]
end

local names = {}
for name in pairs(links) do names[#names + 1] = name end
table.sort(names)
for _, name in ipairs(names) do
  local net = ms.ddp(layers(), { comm_hook = links[name](), bucket_bytes = 4000 })
  local grew = growth(net)
  if ms.rank() == 0 then print(name, grew) end
  net:unwrap()
end
for _, name in ipairs { "gathers", "returns" } do
  local grew = growth(ms.fsdp(layers(), {
    comm_hook = name == "returns" and function(b)
      return b:group():reduce_scatter(b:buffer() * 0.5)
    end or function(b, next) return next(b):and_then(function(t) return t * 1 end) end,
  }))
  if ms.rank() == 0 then print("fsdp " .. name, grew) end
end
for name in ms.sorted_pairs(outer) do
  local model = layers()
  local grew = growth(model, outer[name](model))
  if ms.rank() == 0 then print("recipes/" .. name, grew) end
end
