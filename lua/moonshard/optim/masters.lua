-- The f32 copies of 16-bit parameters, from which these are rounded.
local core = require "moonshard.core"

local masters = {}

--- The copy takes what others have written to the parameter since this optimizer stepped it: a
--- load, a mask, an average over ranks. An element whose copy rounds to the parameter's value was
--- not changed, and keeps its low bits.
---@param slot table of the parameter
---@param p ms.Parameter
function masters.follow(slot, p)
  local master = slot.state.master
  if not master or slot.version == core.tensor_version(p) or p:numel() == 0 then return end
  core.no_grad(function()
    master:copy_(core.where(master:to(p:dtype()):eq(p), master, p:to "f32"))
  end)
end

--- After a step that has changed the copy, or the parameter with it.
---@param slot table
---@param p ms.Parameter
function masters.note(slot, p)
  if slot.state.master then slot.version = core.tensor_version(p) end
end

return masters
