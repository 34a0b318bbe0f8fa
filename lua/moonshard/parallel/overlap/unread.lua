-- Delayed steps. A step that writes a parameter while a backward runs is delayed until the last
-- node of that backward that has saved the parameter's values has run (for example after a detached
-- use of a weight). An early step then gives the same bits as a step after backward. The host never
-- waits.
local core = require "moonshard.core"
local owners = require "moonshard.parallel.overlap.step_owners"

local unread = {}

--- Calls f at once, or after the last read of these parameters that the running backward still has
--- to do. In both cases f runs on the stream that is current now. Raises if the rest of another
--- backward is still to give these parameters a gradient.
---@param params ms.Parameter[]
---@param f fun()
function unread.call(params, f)
  core.check_rest("a step in backward", params)
  if not core.is_awaited(params) then return f() end
  local stream = core.stream()
  core.when_unread(params, function() stream:run(f) end)
end

-- Raises for a sharded optimizer, which sends the parameters that it steps. Its collectives cannot
-- be delayed: each rank knows only its own pending reads, and all ranks must enqueue collectives in
-- one order.
local function refuse(p)
  local entry = owners.plan_of[p]
  local who = entry and ("policy %s"):format(entry.planner.name) or "a link or hook"
  core.raise(("overlap: %s steps parameter '%s' of a sharded optimizer in backward, and this \z
    backward still reads the parameter's old values (is it used detached, too?): use \z
    \"classic\" or \"deferred\"")
    :format(who, p:name()))
end

--- The same for a part of an optimizer's step. Raises if the optimizer is sharded and the step
--- would be delayed.
---@param optimizer ms.Optimizer
---@param params ms.Parameter[]
---@param f fun()
function unread.step(optimizer, params, f)
  if not optimizer.shard then return unread.call(params, f) end
  core.check_rest("a step in backward", params)
  for _, p in ipairs(params) do if core.is_awaited(p) then refuse(p) end end
  f()
end

return unread
