-- Which object steps a parameter, if not only its optimizer's step(), and on which stream.
local core = require "moonshard.core"

local owners = {
  -- parameter -> ms.OverlapEntry of the optimizer that steps it by a plan
  plan_of = setmetatable({}, { __mode = "k" }),
  -- parameter -> { optimizers of in_backward ..., keep = whether its gradient stays }
  own_of = setmetatable({}, { __mode = "k" }),
  -- parameter -> ms.GradientSource of the model that reduces or ignores it; weak
  wrapped_in = setmetatable({}, { __mode = "kv" }),
  -- optimizer -> ms.GradientSource of the model in whose chain it steps
  linked_in = setmetatable({}, { __mode = "kv" }),
}

--- The stream on which optimizers step.
---@return ms.Stream
function owners.stream() return core.stream "optimizer" end

return owners
