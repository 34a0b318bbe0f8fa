-- The edges of a unit's forward: what runs before and after its modules.
local core = require "moonshard.core"
local nested = require "moonshard.base.tensor_tree"
local overlap = require "moonshard.parallel.overlap"
local precision = require "moonshard.parallel.fsdp.precision"
local prefetch = require "moonshard.parallel.fsdp.prefetch"
local structure = require "moonshard.nn.structure"

local edges = {}

--- The function that is around a unit's module: number `part` of its modules.
---@param s ms.FSDPState
---@param index integer of the unit
---@param part integer
---@return function
function edges.around(s, index, part)
  local unit, low = s.units[index + 1], s.precision
  local several = #unit.modules > 1
  return function(object, run, ...)
    local sharded = s.sharded
    if index == 0 then structure.check_fsdp(s) end
    if several then sharded:begin_part(index, part) end
    if low then precision.begin(s) end
    local begins, reduces = sharded:begins_pass(index)
    if begins then prefetch.begin(s, "training")
    elseif index == 0 and not core.is_recording() then prefetch.begin(s, "evaluation") end
    reduces = reduces and not s.partial
    if begins and reduces then overlap.await(s) end
    local full = sharded:before_forward(index, nested.tensors { ... })
    if begins then overlap.begin(s, reduces) end
    local results
    if low then results = table.pack(precision.run(low, unit, full, run, object, ...))
    else results = table.pack(run(object, ...)) end
    sharded:after_forward(index, nested.tensors(results))
    return table.unpack(results, 1, results.n)
  end
end

return edges
