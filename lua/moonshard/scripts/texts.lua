-- The data sets of a recipe that learns texts: what it trains on, and what it validates on.
local data = require "moonshard.data"
local data_files = require "moonshard.data.files"

--- By the options of a recipe: data, valid (a path, or "") and bytes. Without a path, the
--- validation is the val*.bin of a folder of shards, or else the last twentieth of the data.
---@param cfg { data: string, valid: string, bytes: boolean }
---@return ms.Dataset train
---@return ms.Dataset valid
return function(cfg)
  local read = cfg.bytes and data.bytes or data.tokens
  local train = assert(read(cfg.data))
  if cfg.valid ~= "" then return train, assert(read(cfg.valid)) end
  if not cfg.bytes then
    local valid, message, code = data.tokens(cfg.data, "valid")
    assert(valid or code == "not_found", message)
    -- A folder may have nothing but val*.bin.
    if valid and not data_files.shared(train, valid) then return train, valid end
  end
  return train:split(0.95)
end
