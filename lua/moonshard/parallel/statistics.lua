-- Statistics of models whose gradients are reduced bucket by bucket: what stats() of ddp and fsdp
-- models have in common.
local core = require "moonshard.core"
local hooks = require "moonshard.hooks"
local steps = require "moonshard.train.steps"

local statistics = {}

--- What statistics keeps of a source, in its field `counted`.
---@class ms.Counted
---@field calls table<string, integer> calls of all groups by operation, at the last step's end
---@field step? integer the last step that has ended
---@field collectives table<string, integer> calls in that step

-- Sources that are still referenced. Keys and values are weak: with weak keys alone, an entry would
-- remain until the collection after the one that finalizes its reducer.
local live = setmetatable({}, { __mode = "kv" })

-- At a step's end: counts the collectives of the step.
local function close_step(s, step)
  local counted, now, collectives = s.counted, (core.comm_calls()), {}
  for name, count in pairs(now) do
    local own = count - (counted.calls[name] or 0)
    if own > 0 then collectives[name] = own end
  end
  counted.calls, counted.step, counted.collectives = now, step, collectives
  s.reducer:step_end()
end

steps.on_end(function(step) for s in pairs(live) do close_step(s, step) end end)

--- From now on, until drop, the ends of steps are noted for this source.
---@param s ms.GradientSource
function statistics.watch(s)
  s.counted = { calls = (core.comm_calls()), collectives = {} }
  live[s] = s
end

---@param s ms.GradientSource
function statistics.drop(s) live[s] = nil end

-- What each link of the chain costs.
local function links_of(s, times)
  local links, chain = s.reducer:link_stats(), s.how.accounts or {}
  for i, link in ipairs(links) do
    link.name = chain[i] and hooks._name(chain[i]) or "reduce"
    link.group = (type(chain[i]) == "table" and chain[i].group or s.group):name()
  end
  if #links == 0 then
    links[1] = {
      name = s.hook_name, group = s.group:name(), calls = times.calls, ms = times.reduce_ms,
      payload_bytes = times.payload_bytes,
      wire_bytes = times.wire_bytes, between_hosts_bytes = times.between_hosts_bytes,
      exposed_ms = times.exposed_ms,
    }
  end
  for i, link in ipairs(links) do link.compression = chain[i] and hooks._compression(chain[i]) end
  -- If the last link reduces, the added reduction never runs and is removed.
  if links[#links].calls == 0 and #links > #chain then links[#links] = nil end
  return links
end

--- The statistics of a source, without its options.
---@param s ms.GradientSource
---@return ms.Stats
function statistics.of(s)
  local times = s.reducer:stats()
  return {
    step = s.counted.step, forward_ms = times.forward_ms, backward_ms = times.backward_ms,
    reduce_ms = times.reduce_ms, exposed_ms = times.exposed_ms, step_ms = times.step_ms,
    links = links_of(s, times), payload_bytes = times.payload_bytes, wire_bytes = times.wire_bytes,
    between_hosts_bytes = times.between_hosts_bytes,
    collectives = s.counted.collectives, buckets = (s.reducer:buckets()),
    world_size = s.group:size(), hook = s.hook_name, iteration = times.iterations,
    rebuilt = times.rebuilt, options = s.in_force, error = times.error,
  }
end

return statistics
