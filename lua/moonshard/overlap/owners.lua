-- Who steps a parameter, where that is not its optimizer's step() alone, and on which stream.
local core = require "moonshard.core"

local owners = {
  -- parameter -> the entry of the optimizer that steps it by a plan
  plan_of = setmetatable({}, { __mode = "k" }),
  -- parameter -> { list of optimizers of its own, keep = whether its gradient stays }
  own_of = setmetatable({}, { __mode = "k" }),
  -- parameter -> the state of the ddp model that reduces or ignores it, while that lives
  wrapped_in = setmetatable({}, { __mode = "kv" }),
  -- optimizer -> that of the model in whose chain it steps
  linked_in = setmetatable({}, { __mode = "kv" }),
}

--- The stream on which optimizers step.
---@return ms.Stream
function owners.stream() return core.stream "optimizer" end

--- Whether a parameter is used in this pass: true or false where it is known whether any rank uses
--- it, nil where only others may; for what all ranks must do alike (by_all) nil, too, where only
--- this rank knows.
---@param s table a ddp model's state
---@param at integer position
---@param by_all? boolean
---@return boolean?
function owners.is_used(s, at, by_all)
  if s.uses_all then return true end
  local used, known = s.reducer:is_used(at)
  if known or used and not by_all then return used end
  return nil
end

return owners
