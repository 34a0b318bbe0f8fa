-- What gpt2 and llama have in common: options, loading and saving with config.json, generating
-- text.
local core = require "moonshard.core"
local module = require "moonshard.nn.module"
local options_of = require "moonshard.options"
local check = options_of.check
local rope = require "moonshard.nn.rope"

---@class ms.LanguageModel: ms.Module
local LanguageModel = module.class "LanguageModel"

-- The options that all models have: name = required (true) or optional (false).
local options = {
  vocab = true, context = true, layers = true, width = true, heads = true,
  hidden = false, tie = false, eps = false, recompute = false,
}

local ranges = {
  dropout = { 1, "of 0 or more and below 1" }, eps = { math.huge, "of 0 or more" },
  rotary_base = { math.huge, "of 0 or more" },
}

--- Checks the options of a model and returns a copy. own: names of the options that only this model
--- has. An option of another model is an unknown option.
---@param name string
---@param given ms.ModelOptions
---@param own string[]
---@return ms.ModelOptions
function LanguageModel.check(name, given, own)
  local checked, known = {}, { table.unpack(own) }
  for key in pairs(options) do known[#known + 1] = key end
  table.sort(known)
  for key, value in pairs(check(name, given, known)) do checked[key] = value end
  for _, key in ipairs(known) do
    local value = checked[key]
    if options[key] and value == nil then
      core.raise(("%s: the option %s is missing"):format(name, key))
    end
    local counts = options[key] or key == "kv_heads" or key == "hidden"
    if counts and value ~= nil and (math.type(value) ~= "integer" or value < 1) then
      core.raise(("%s: %s must be an integer of 1 or more, not %s")
        :format(name, key, tostring(value)))
    end
  end
  for key, range in pairs(ranges) do
    local value = checked[key]
    if value ~= nil and not (type(value) == "number" and value >= 0 and value < range[1]) then
      core.raise(("%s: %s must be a number %s, not %s")
        :format(name, key, range[2], tostring(value)))
    end
  end
  rope.check(name, checked.rotary_scaling)
  if checked.width % checked.heads ~= 0 then
    core.raise(("%s: width %d does not divide by %d heads")
      :format(name, checked.width, checked.heads))
  end
  if checked.kv_heads and checked.heads % checked.kv_heads ~= 0 then
    core.raise(("%s: %d heads do not divide by %d key heads")
      :format(name, checked.heads, checked.kv_heads))
  end
  return checked
end

-- Draws an id from logits [vocab], on the device: the host does not wait.
local function draw(logits, how, seed, position)
  if how.temperature == 0 then return logits:argmax():view(1) end
  logits = logits:to("f32") / (how.temperature or 1)
  local ids
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
  local point = core.rand { 1, seed = seed and seed + position } * total
  local chosen = sums:le(point):sum():clamp(0, sums:size(1) - 1):view(1)
  return ids and ids:gather(1, chosen) or chosen
end

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

--- Continues a text. Returns the new ids, each of which is drawn from the model's logits after the
--- last `context` ids before it.
---@param tokens ms.Tensor ids [length], 1 or more
---@param how ms.GenerateOptions
---@return ms.Tensor i64 [count]
function LanguageModel:generate(tokens, how)
  how = check("generate", how, { "count", "temperature", "top_k", "top_p", "seed" })
  if not core.is_tensor(tokens) or tokens:dim() ~= 1 or tokens:numel() == 0 then
    core.raise("generate: tokens must be a list of one or more ids, not " .. tostring(tokens))
  end
  check_drawing(how)
  local training = self:is_training()
  self:eval()
  local mode <close> = setmetatable({}, { -- luacheck: ignore mode
    __close = function() self:train(training) end,
  })
  local context = self.options.context
  return core.no_grad(function()
    local window, made = tokens:to("i64"), {}
    for i = 1, how.count do
      local length = window:numel()
      if length > context then
        window, length = window:narrow(1, length - context + 1, context), context
      end
      local logits = self:last_logits(window:view(1, length)):view(-1)
      local id = draw(logits, how, how.seed, i)
      made[i] = id
      window = core.cat { window, id }
    end
    return core.cat(made)
  end)
end

options_of.methods(LanguageModel, "a language model", module.is_module, { "generate" })

return LanguageModel
