-- What the joins of ddp and fsdp have in common: ranks with different numbers of inputs.
local core = require "moonshard.core"
local options_of = require "moonshard.base.options"

local uneven = {}

--- The options of a join. f: what it runs.
---@param options any
---@param f any
---@return { divisor?: "all"|"live", stop?: boolean }
function uneven.check(options, f)
  local o = options_of.check("join", options, { "divisor", "stop" })
  if o.divisor ~= nil and o.divisor ~= "all" and o.divisor ~= "live" then
    local nearest = core.nearest(tostring(o.divisor), { "all", "live" })
    core.raise(("join: divisor is 'all' or 'live', not '%s'%s")
      :format(tostring(o.divisor), nearest and (": did you mean '%s'?"):format(nearest) or ""))
  end
  if o.stop ~= nil and type(o.stop) ~= "boolean" then
    core.raise("join: stop must be a boolean, not " .. type(o.stop))
  end
  if type(f) ~= "function" then core.raise("join: a function is expected, not " .. type(f)) end
  if core.in_hook() then core.raise "join cannot be used inside a hook" end
  return o
end

--- All ranks see a request to stop before the step of the same number. In a join they have run
--- different numbers of steps, so afterwards they all continue from the highest number. Every rank
--- calls this once, when it leaves the join.
---@param group ms.Group
function uneven.align_steps(group)
  if group:size() == 1 then return end
  for _, count in ipairs(group:_share("all_gather", "i64", { core.comm_steps() }, "join")) do
    core.comm_steps(count)
  end
end

--- A value in a form that JSON can hold: floats as their bits, because JSON has no inf and nan; nil
--- for values of other types.
---@param value any
---@return any
function uneven.coded(value)
  if math.type(value) == "float" then
    return { bits = (string.unpack("i8", string.pack("d", value))) }
  end
  if type(value) == "string" or type(value) == "boolean" or math.type(value) then return value end
  if type(value) ~= "table" then return nil end
  local copy = #value > 0 and core.json_list {} or {}
  for key, item in pairs(value) do copy[key] = uneven.coded(item) end
  return copy
end

---@param value any
---@return any
function uneven.decoded(value)
  if type(value) ~= "table" then return value end
  if value.bits then return (string.unpack("d", string.pack("i8", value.bits))) end
  local copy = {}
  for key, item in pairs(value) do copy[key] = uneven.decoded(item) end
  return copy
end

return uneven
