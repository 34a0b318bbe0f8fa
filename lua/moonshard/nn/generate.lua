-- Text from a language model: one forward over the prompt, then one position for each new id.
local core = require "moonshard.core"
local key_cache = require "moonshard.nn.key_cache"
local options_of = require "moonshard.base.options"
require "moonshard.parallel.group"

-- Bytes of dropped tensors at which they are collected. A collection costs more than what fewer
-- bytes are worth.
local GARBAGE <const> = 16 << 20

-- Below it logits / temperature may overflow, so that differences are divided. The draws of greater
-- temperatures keep their bits.
local SMALL <const> = 1e-3
-- Below it a temperature is 0 in f32 or nearly so, and the likeliest id is drawn in any case.
local LEAST <const> = 1e-30

-- Draws an id from logits [vocab] whose greatest is `peak`, on the device: the host does not wait.
local function draw(logits, peak, how, position)
  local temperature, ids = how.temperature or 1, nil
  if temperature < LEAST then return logits:argmax():view(1) end
  if temperature < SMALL then logits = logits:to "f32" - peak end
  logits = logits:to "f32" / temperature
  if how.top_k or how.top_p then
    local count = logits:size(1)
    logits, ids = logits:topk(math.min(how.top_k or count, count))
  end
  local chances = logits:softmax()
  local sums = chances:cumsum(1)
  if how.top_p then
    -- Keep the likeliest ids up to a total probability of top_p, including the one that crosses it,
    -- and always the likeliest one.
    local before = sums - chances
    chances = chances:masked_fill(before:ge(math.max(how.top_p, 1e-30)), 0)
    sums = chances:cumsum(1)
  end
  local total = sums:narrow(1, sums:size(1), 1)
  local point = core.rand { 1, seed = how.seed and how.seed + position } * total
  local chosen = sums:le(point):sum():clamp(0, sums:size(1) - 1):view(1)
  return ids and ids:gather(1, chosen) or chosen
end

-------------------------------------------------------------------------------------------- options

local known = {
  count = "any", temperature = "any", top_k = "any", top_p = "any", seed = "any", stop = "any",
  on_token = "function", group = "group",
}

local function check_drawing(how)
  local function number(name, low, high)
    local value = how[name]
    if value ~= nil and (type(value) ~= "number" or not (value >= low and value <= high)) then
      core.raise(("generate: %s must be a number from %g to %g, not %s")
        :format(name, low, high, tostring(value)))
    end
  end
  local function integer(name)
    if math.type(how[name]) ~= "integer" or how[name] < 1 then
      core.raise(("generate: %s must be an integer of 1 or more"):format(name))
    end
  end
  integer "count"
  if how.top_k ~= nil then integer "top_k" end
  number("temperature", 0, math.huge)
  number("top_p", 0, 1)
  if how.seed ~= nil and math.type(how.seed) ~= "integer" then
    core.raise "generate: seed must be an integer"
  end
end

-- The ids that end a text, as a set; nil: none.
local function stops_of(model, given)
  if given == nil then given = model.stop end
  if given == nil or given == false then return nil end
  local list, set = type(given) == "table" and given or { given }, {}
  for _, id in ipairs(list) do
    if math.type(id) ~= "integer" then
      core.raise(("generate: stop is an id, a list of ids, or false, not %s"):format(tostring(id)))
    end
    set[id] = true
  end
  if next(set) == nil and next(list) ~= nil then
    core.raise "generate: stop is an id, a list of ids, or false"
  end
  return next(set) and set
end

local function check_ids(tokens, vocab)
  if not vocab then return end
  local low, high = tokens:min():item(), tokens:max():item()
  local wrong = low < 0 and low or high >= vocab and high or nil
  if wrong then
    core.raise(("generate: the prompt has the id %d, and the model's vocabulary the ids 0 to %d")
      :format(wrong, vocab - 1))
  end
end

-- The ranks whose forwards meet: those that share a sharded model's parameters.
local function group_of(model, given)
  local meta = getmetatable(model)
  local s = given == nil and type(meta) == "table" and meta.fsdp
  if not s then return given end
  return next(s.groups) and s.group or s.shards
end

------------------------------------------------------------------------------------------- the loop

---@class ms.Generating
---@field model ms.LanguageModel
---@field context integer
---@field ids ms.Tensor the prompt, and room for the new ids
---@field length integer ids so far
---@field prompt integer ids of the prompt
---@field cache? ms.KeyCache
---@field peaks ms.Tensor f32 [count]: the greatest logit from which each new id was drawn

-- Logits [vocab] after the ids so far. The cache has the positions of all ids but the new ones.
-- Past the context each id shifts the positions of all others, so the window is computed again.
local function next_logits(self)
  local count = math.min(self.length, self.context)
  if self.cache and self.length > self.context then self.cache = nil end
  local cache = self.cache
  if cache then count = self.length - cache.length end
  local given = self.ids:narrow(1, self.length - count + 1, count):view(1, count)
  local logits = self.model:last_logits(given, cache):view(-1)
  -- A model of the user's own may not know the cache.
  if cache and cache.used then cache:advance(count) else self.cache = nil end
  return logits
end

-- Gives back what the forwards have dropped, once it is worth it.
local function collector()
  local base
  return function()
    local live = core.memory().live
    if not base then core.collect() base = core.memory().live
    elseif live > base + GARBAGE then core.collect() end
  end
end

-- Whether a rank of the group goes on.
local function any_goes_on(group, goes_on)
  if not group or group:size() == 1 then return goes_on end
  return group:_share("sum", "i64", { goes_on and 1 or 0 }, "generate")[1] > 0
end

-- Raises if the greatest logit of one of these new ids is no finite number: it is nan if any logit
-- is, and what was drawn then is no choice.
local function check_peaks(self, first, count)
  if core.is_sim() then return end
  local wrong = self.peaks:narrow(1, first, count):is_finite():to "f32" - 1
  local position = math.tointeger((-wrong):argmax():item())
  local peak = self.peaks[first + position]:item()
  if peak - peak == 0 then return end
  core.raise(("generate: the logits of position %d (new id %d) are not finite (%s): the model's \z
    weights hold nan or inf, or 16 bits overflow"):format(
    self.prompt + first + position, first + position, peak ~= peak and "nan" or tostring(peak)))
end

-- Draws a new id. Returns whether this rank goes on. The host waits where it must know the id.
local function add_one(self, how, stops)
  local number = self.length - self.prompt + 1
  local id = core.no_grad(function()
    local logits = next_logits(self)
    local peak = logits:to("f32"):max():view(1)
    self.peaks:narrow(1, number, 1):copy_(peak)
    return draw(logits, peak, how, number)
  end)
  self.ids:narrow(1, self.length + 1, 1):copy_(id)
  self.length = self.length + 1
  local goes_on = number < how.count
  if not (stops or how.on_token) then return goes_on end
  check_peaks(self, number, 1)
  local value = math.tointeger(id:item())
  if stops and stops[value] and not core.is_sim() then goes_on = false end
  if how.on_token and how.on_token(value) == false then goes_on = false end
  return goes_on
end

local function run(self, how, stops, group)
  local goes_on, collect = true, collector()
  repeat
    if goes_on then goes_on = add_one(self, how, stops)
    else
      -- The forwards of the other ranks meet this one.
      core.no_grad(function() self.model:last_logits(self.ids:narrow(1, 1, 1):view(1, 1)) end)
    end
    collect()
  until not any_goes_on(group, goes_on)
  check_peaks(self, 1, self.length - self.prompt)
  return self.ids:narrow(1, self.prompt + 1, self.length - self.prompt):clone()
end

---@param model ms.LanguageModel
---@param tokens ms.Tensor ids [length], 1 or more
---@param how ms.GenerateOptions
---@return ms.Tensor i64 [count or fewer]
return function(model, tokens, how)
  how = options_of.check("generate", how, known)
  if not core.is_tensor(tokens) or tokens:dim() ~= 1 or tokens:numel() == 0 then
    core.raise("generate: tokens must be a list of one or more ids, not " .. tostring(tokens))
  end
  check_drawing(how)
  local stops, group = stops_of(model, how.stop), group_of(model, how.group)
  local training, context = model:is_training(), model.options.context
  model:eval()
  local mode <close> = setmetatable({}, { -- luacheck: ignore mode
    __close = function() model:train(training) end,
  })
  return core.no_grad(function()
    check_ids(tokens, model.options.vocab)
    local length = tokens:numel()
    local ids = core.zeros { length + how.count, dtype = "i64" }
    ids:narrow(1, 1, length):copy_(tokens)
    -- No forward takes the last id, so it needs no room.
    local room = math.min(context, length + how.count - 1)
    return run({
      model = model, context = context, ids = ids, length = length, prompt = length,
      cache = room > length and key_cache(room) or nil, peaks = core.zeros { how.count },
    }, how, stops, group)
  end)
end
