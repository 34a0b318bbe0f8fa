-- Large buckets first, a small one last. The gradients that come at the end of backward are reduced
-- when nothing is left to compute, so their bucket should be small. The others are reduced while
-- backward runs, and large buckets have less latency in total. A bucket plan; options: bytes of a
-- large bucket (4 MiB, or a sixth of the model where that is less), tail, the bytes of the last (a
-- sixteenth of the others), every 50.
local ms = require "moonshard"

return function(options)
  -- Read at once: the recipe reports unread options.
  local large, least = options.bytes, options.tail
  return ms.buckets { name = "small_tail", every = options.every or 50, plan = function(view)
    local total = 0
    for _, parameter in ipairs(view.parameters) do total = total + parameter.bytes end
    local bytes = large or math.min(4 << 20, total // 6)
    local tail = least or bytes // 16
    -- The tail: from the end, as many parameters as fit, at least one.
    local first, left = #view.parameters, tail
    while first > 1 and left >= view.parameters[first].bytes + view.parameters[first - 1].bytes do
      left = left - view.parameters[first].bytes
      first = first - 1
    end
    local plan, size = {}, math.huge
    for position, parameter in ipairs(view.parameters) do    -- in the order in which gradients come
      local last = plan[#plan]
      local is_other = last and view.parameters[last[1]].dtype ~= parameter.dtype
      if size >= bytes or position == first or is_other then
        plan[#plan + 1], size = {}, 0
      end
      table.insert(plan[#plan], position)
      size = size + parameter.bytes
    end
    return plan
  end }
end
