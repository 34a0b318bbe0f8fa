-- How many different tokens a recipe's model has, where its option vocab is 0: what its data say.
local shards = require "moonshard.tokenizer.shards"
local options_of = require "moonshard.base.options"

---@param cfg { vocab: integer, bytes: boolean }
---@param set ms.Dataset
---@param otherwise integer
---@return integer
return function(cfg, set, otherwise)
  options_of.argument("scripts.vocab", "cfg", cfg, "table")
  options_of.argument("scripts.vocab", "otherwise", otherwise, "integer")
  if cfg.vocab > 0 then return cfg.vocab end
  if cfg.bytes then return 256 end
  local most = 0
  for _, told in ipairs(shards.descriptions(set)) do most = math.max(most, told.vocab_size) end
  return most > 0 and most or otherwise
end
