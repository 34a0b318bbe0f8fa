-- Steps that a flag on the device may prevent: kinds in Lua do not handle the flag, so what they
-- have written is put back where it is false.
local core = require "moonshard.core"

local undo = {}

--- The names of a state's tensors, sorted: work must not be enqueued in the order of `pairs`, which
--- differs between runs.
---@param state table
---@return any[]
function undo.tensor_names(state)
  local names = {}
  for name, value in pairs(state) do if core.is_tensor(value) then names[#names + 1] = name end end
  table.sort(names, function(a, b) return tostring(a) < tostring(b) end)
  return names
end

--- Remembers a state's tensors. The function that it returns puts them back where only_if is false;
--- a tensor that was added meanwhile gets the value with which it was added.
---@param state table
---@return fun(only_if: ms.Tensor)
function undo.begin(state)
  local old = {}
  for _, name in ipairs(undo.tensor_names(state)) do old[name] = state[name]:clone() end
  setmetatable(state, { __newindex = function(_, name, value)
    rawset(state, name, value)
    if core.is_tensor(value) then old[name] = old[name] or value:clone() end
  end })
  return function(only_if)
    setmetatable(state, nil)
    for _, name in ipairs(undo.tensor_names(state)) do
      state[name]:copy_(core.where(only_if, state[name], old[name]))
    end
  end
end

return undo
