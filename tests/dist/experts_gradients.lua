-- Run by every rank of experts_spec.lua: gradients of recipes/parallel/experts.lua on these ranks
-- against those of plain_experts.lua for the whole batch, which each rank computes.
local ms = require "moonshard"
local folder = debug.getinfo(1, "S").source:match "^@(.*/)"
local plain = dofile(folder .. "plain_experts.lua")
local recipe = folder .. "../../recipes/parallel/experts.lua"
local size = ms.world_size()

-- The options of the recipe, as `ms.config` gives them.
local function values_of(options, given)
  local found = {}
  for name, one in pairs(options) do
    local value = type(one) == "table" and one[1]
    if type(one) == "table" and value == nil then found[name] = values_of(one, given[name] or {})
    elseif given[name] ~= nil then found[name] = given[name]
    elseif type(one) == "table" then found[name] = value
    else found[name] = one end
  end
  return found
end

-- What the recipe gives to ms.train, with these options.
local function caught(given)
  local config, train, options = ms.config, ms.train, nil
  ms.config = function(declared) return values_of(declared, given) end
  ms.train = function(o)
    options = o
    error("caught", 0)
  end
  local ok, why = pcall(dofile, recipe)
  ms.config, ms.train = config, train
  assert(not ok and options, why)
  return options
end

-- Copies of this rank's whole gradients, by name.
local function gradients(model)
  local found = {}
  local function copy(object)
    for _, item in ipairs(object:named_parameters()) do
      found[item.name] = assert(item.parameter:grad(), item.name):clone()
    end
  end
  if getmetatable(model).fsdp then
    model:summon({ grads = true, writeback = false }, function() copy(model.module) end)
  else copy(model.module or model) end
  return found
end

local text = folder .. "experts_gradients.lua"
local cases = 0
local function try(given)
  given.data, given.experts, given.length, given.batch, given.balance = text, 8, 16, 8, 0.1
  given.dtype, given.model = "f32", { layers = 2, width = 24, heads = 2, hidden = 32 }
  ms.seed(7)
  local o = caught(given)
  local x, y = o.data:next()
  o.loss(o.model, x, y):backward()
  if o.after_backward then o.after_backward(0) end
  local own = gradients(o.model)

  given.ranks = size
  ms.seed(7)
  local whole = plain(given)
  local all_x, all_y = ms.world():all_gather(x):value(), ms.world():all_gather(y):value()
  local loss, balance = whole(all_x, all_y)
  loss = loss + given.balance * balance
  loss:backward()
  local seen = 0
  for name, grad in pairs(gradients(whole)) do
    if own[name] then
      local off, norm = (own[name] - grad):norm():item(), grad:norm():item()
      -- Of an expert that no token has chosen both are 0.
      assert(off <= 2e-6 * norm, ("%s, top %d, capacity %g, over %d: %s is %g of %g \z
        off"):format(given.shard, given.top, given.capacity, given.experts_over, name, off, norm))
      seen = seen + 1
    end
  end
  local experts = 8 // (given.experts_over > 0 and given.experts_over or size)
  assert(seen == 4 + 2 * (4 + 8 + 1 + 4 * experts), seen)
  cases = cases + 1
end

for _, shard in ipairs { "", "full_shard", "no_shard" } do
  for top = 1, 2 do
    for _, capacity in ipairs { 0, 8, 0.75 } do
      for _, over in ipairs(size == 4 and { 0, 2, 1 } or { 0 }) do
        try { shard = shard, top = top, capacity = capacity, experts_over = over }
      end
    end
  end
end
print(("rank %d is done, %d cases"):format(ms.rank(), cases))
