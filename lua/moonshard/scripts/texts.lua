-- The data sets of a recipe that learns texts: what it trains on, and what it validates on.
local data = require "moonshard.data"
local data_files = require "moonshard.data.files"

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
