-- What several ranks agree about: whether one of them has failed.
local core = require "moonshard.core"
require "moonshard.parallel.group"                -- methods of groups

--- The first failure of any rank, the same on all: message, code; nil if none has one. All ranks
--- of the group call it. In a world without the others, this rank's.
---@param group ms.Group
---@param message? string
---@param code? string
---@param label? string the call's name in messages
---@return string? message
---@return string? code
return function(group, message, code, label)
  if group:size() == 1 then return message, code end
  local text = message and core.json_encode { message = message, code = code } or ""
  for _, one in ipairs(group:_share_texts(text, label or "state")) do
    if one ~= "" then
      local told = core.json_decode(one)
      return told.message, told.code
    end
  end
end
